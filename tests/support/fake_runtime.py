"""A Runtime without Ray: actors are objects in this process that tests can kill, hang and let fail."""

from __future__ import annotations

import asyncio
from typing import Any

from pools.controller import Controller
from pools.pool import DECODE, PREFILL, ROUTER, Pool
from pools.runtime import ActorDied, ActorHandle, ActorInfo, ActorSpec, StartFailed
from tandem.types import LoadReport, PeerEndpoint, Role, WorkerInfo


class FakeActor:
    """A ManagedActor that serves nothing; `deaths` and `drained` are the test's levers."""

    def __init__(self, actor_id: str, *, kind: str, start_error: str = "", start_gate: asyncio.Event | None = None):
        self.actor_id = actor_id
        self.kind = kind
        self.start_error = start_error
        self.start_gate = start_gate
        self.dead = asyncio.Event()
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.drained = asyncio.Event()
        self.calls: list[str] = []

    async def start(self) -> ActorInfo | StartFailed:
        if self.start_gate is not None:
            await self.start_gate.wait()
        if self.start_error:
            return StartFailed(self.start_error)
        worker = None
        if self.kind != ROUTER:
            endpoint = PeerEndpoint(self.actor_id, 7, f"{self.actor_id}:1", "node")
            worker = WorkerInfo(Role(self.kind), endpoint, 1234, b"h", 8, 16, 128)
        return ActorInfo(1234, f"{self.actor_id}:1", worker)

    async def watch(self) -> str:
        return await asyncio.shield(self.broken)

    async def drain(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            await self.drained.wait()

    async def stop(self) -> None:
        pass

    async def load(self) -> LoadReport:
        return LoadReport(num_total_blocks=8, num_free_blocks=8)


class FakeHandle:
    def __init__(self, runtime: FakeRuntime, actor: FakeActor) -> None:
        self.actor = actor
        self._runtime = runtime

    async def call(self, method: str, *args: Any, timeout_s: float | None) -> Any:
        self.actor.calls.append(method)
        call = asyncio.ensure_future(getattr(self.actor, method)(*args))
        death = asyncio.ensure_future(self.actor.dead.wait())
        try:
            await asyncio.wait({call, death}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self.actor.dead.is_set():
                raise ActorDied("its process died")
            if not call.done():
                raise TimeoutError
            return call.result()
        finally:
            for task in (call, death):
                task.cancel()
            await asyncio.gather(call, death, return_exceptions=True)

    def kill(self) -> None:
        self.actor.dead.set()
        self._runtime.live.pop(self.actor.actor_id, None)


class FakeRuntime:
    def __init__(self) -> None:
        self.live: dict[str, FakeActor] = {}
        self.created: list[str] = []
        self.saved: bytes | None = None

    def create(self, actor_id: str, spec: ActorSpec) -> ActorHandle:
        assert actor_id not in self.created, "a name is used once"
        self.created.append(actor_id)
        self.live[actor_id] = spec.actor_class(actor_id, **spec.kwargs)
        return FakeHandle(self, self.live[actor_id])

    async def find(self) -> dict[str, ActorHandle]:
        return {name: FakeHandle(self, actor) for name, actor in self.live.items()}

    async def save(self, state: bytes) -> None:
        self.saved = state

    async def load(self) -> bytes | None:
        return self.saved

    def kill(self, actor_id: str) -> None:
        """What kill -9 does."""
        self.live.pop(actor_id).dead.set()


def make_controller(
    runtime: FakeRuntime,
    *,
    prefill: int = 1,
    decode: int = 1,
    routers: int = 1,
    drain_timeout_s: float = 5.0,
    **kwargs: Any,
) -> Controller:
    """A controller over fake actors; `kwargs` go to every FakeActor."""
    targets = {PREFILL: prefill, DECODE: decode, ROUTER: routers}
    pools = {k: Pool(k, ActorSpec(FakeActor, {"kind": k, **kwargs}), target) for k, target in targets.items()}
    return Controller(runtime, pools, start_timeout_s=5.0, drain_timeout_s=drain_timeout_s)


async def until(controller: Controller, condition: Any, timeout_s: float = 10.0) -> None:
    """Wait until `condition()` holds, looking again at each change of the controller."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            seen = controller.revision.sequence
            if condition():
                return
            await controller.revision.changed(seen)
