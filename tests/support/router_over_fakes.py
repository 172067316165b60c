"""The router's heart (fleet, sessions, line, lifecycles) over fake workers, on a virtual-time loop.

async with RouterOverFakes(seed=1) as cluster:
    run = cluster.start("r0", prompt_of(20), max_tokens=6)
    await run.ended()
    await cluster.assert_baseline()
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random
from types import TracebackType
from typing import Any, Self

from router.admission import Line
from router.answer import Answer
from router.client_stream import ClientStream
from router.directory import StaticDirectory
from router.fleet import Fleet
from router.lifecycle import Lifecycle
from router.request import ResolvedRequest
from tandem.config import TimingConfig
from tandem.states import RequestState
from tandem.stream_checker import StreamChecker
from tandem.types import AttemptKey, Directory, RequestKey, Sampling
from tests.support.fake_network import Network
from tests.support.fake_workers import EOS_ID, FIT, FakeDecode, FakePrefill, FakeWorker, dialler, next_token

ROUTER = 4711
# everything that may hold something lets go within a lease, the sweep's period and a redial
QUIESCE_S = 15.0
SLOW_READER_TOKENS = 1024


def prompt_of(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    rng = Random(f"{seed}/{num_tokens}")
    return tuple(rng.randrange(1, 200) for _ in range(num_tokens))


def answer_to(prompt: tuple[int, ...], max_tokens: int, stop_token_ids: tuple[int, ...] = ()) -> list[int]:
    """What an undisturbed run answers."""
    answer: list[int] = []
    while len(answer) < max_tokens and not (answer and answer[-1] in stop_token_ids):
        answer.append(next_token((*prompt, *answer)))
    return answer


class ObservedLifecycle(Lifecycle):
    """Tells a test of each state as it is entered."""

    on_state: Callable[[RequestState], None] = staticmethod(lambda state: None)  # type: ignore[assignment]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.changed = asyncio.Event()

    def _advance(self, state: RequestState) -> None:
        super()._advance(state)
        self.changed.set()
        self.on_state(state)


class Run:
    """One request with a client that reads everything and checks it."""

    def __init__(self, request: ResolvedRequest, life: ObservedLifecycle, stream: ClientStream) -> None:
        self.request = request
        self.life = life
        self.stream = stream
        self.error: Exception | None = None
        sampling = request.sampling
        expected = answer_to(request.prompt_token_ids, sampling.max_tokens, sampling.stop_token_ids)
        self.checker = StreamChecker(
            max_tokens=request.sampling.max_tokens,
            num_prompt_tokens=len(request.prompt_token_ids),
            references={0: expected},
        )
        self.task = asyncio.create_task(life.run(), name=f"life of {request.request_id}")
        self.client = asyncio.create_task(self._read(), name=f"client of {request.request_id}")

    async def _read(self) -> None:
        try:
            async for response in self.stream.responses():
                self.checker.accept(response)
        except AssertionError:
            raise
        except Exception as exc:
            self.error = exc
            self.checker.fail(str(exc))
        self.checker.close()

    async def enters(self, *states: RequestState) -> None:
        """Wait until the request is in one of these states."""
        while self.life.state not in states:
            assert self.life.state.live, f"it is {self.life.state.value}: {self.stream.error}"
            self.life.changed.clear()
            await self.life.changed.wait()

    async def ended(self) -> None:
        """Wait for the terminal event, then for the lifecycle's own end."""
        await self.client
        await asyncio.gather(self.task, return_exceptions=True)
        assert not self.life.state.live


class RouterOverFakes:
    """One router over fake workers. Whoever is killed comes back under its name as a new incarnation."""

    def __init__(
        self,
        seed: int,
        *,
        prefill: int = 1,
        decode: int = 1,
        prefill_blocks: int = 256,
        decode_blocks: int = 256,
        prefill_target: int | None = None,
        decode_hash: bytes = FIT,
        queue_ttl_s: float = 120.0,
        timing: TimingConfig | None = None,
    ) -> None:
        self.network = Network(seed)
        self.rng = self.network.rng_for("test")
        self.timing = timing or TimingConfig()
        self.workers: dict[str, FakeWorker] = {}
        self.counters: Counter[str] = Counter()
        self.line = Line()
        self.runs: list[Run] = []
        self._blocks = {"p": prefill_blocks, "d": decode_blocks}
        self._prefill_target = prefill if prefill_target is None else prefill_target
        self._queue_ttl_s = queue_ttl_s
        self._gone: list[FakeWorker] = []
        self._unlisted: set[str] = set()
        for number in range(prefill):
            FakePrefill(self.network, number, prefill_blocks, self.workers)
        for number in range(decode):
            FakeDecode(self.network, number, decode_blocks, self.workers, decode_hash)
        self.directory = StaticDirectory(self._directory())
        self.fleet = Fleet(self.directory, self.timing, ROUTER, dialler(self.workers), self.counters, self._on_change)
        self._changed = asyncio.Event()
        self._fleet_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._fleet_task = asyncio.create_task(self.fleet.run(), name="fleet")
        await self.all_up()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for run in self.runs:
            run.task.cancel()
            run.client.cancel()
        await asyncio.gather(*(task for run in self.runs for task in (run.task, run.client)), return_exceptions=True)
        await self.stop_router()
        for worker in [*self.workers.values(), *self._gone]:
            await worker.stop()

    # ---- workers and directory

    async def all_up(self) -> None:
        """Wait until there is a session with every worker."""
        async with asyncio.timeout(10):
            while len(self.links()) < len(self.workers) or not all(link.up for link in self.links()):
                self._changed.clear()
                await self._changed.wait()

    def _on_change(self, topology: bool) -> None:
        self.line.wake(topology)
        self._changed.set()

    def _directory(self) -> Directory:
        listed = tuple(w.info for name, w in self.workers.items() if w.alive and name not in self._unlisted)
        return Directory(listed, prefill_target=self._prefill_target, decode_target=1)

    def publish(self, *, prefill_target: int | None = None, unlisted: set[str] | None = None) -> None:
        """Make the directory what the workers are now."""
        if prefill_target is not None:
            self._prefill_target = prefill_target
        if unlisted is not None:
            self._unlisted = unlisted
        self.directory.replace(self._directory())

    @property
    def prefill(self) -> FakePrefill:
        worker = self.workers["prefill-0"]
        assert isinstance(worker, FakePrefill)
        return worker

    @property
    def decode(self) -> FakeDecode:
        worker = self.workers["decode-0"]
        assert isinstance(worker, FakeDecode)
        return worker

    def kill(self, worker: FakeWorker, restart_s: float | None = 0.3) -> None:
        """kill -9; a new incarnation follows, unless restart_s is None."""
        if not worker.alive:
            return
        worker.die()
        self._gone.append(worker)
        if restart_s is not None:
            asyncio.get_running_loop().call_later(restart_s, self.restart, worker)

    def restart(self, dead: FakeWorker) -> None:
        number = int(dead.info.worker_id.rpartition("-")[2])
        type(dead)(self.network, number, self._blocks[dead.letter], self.workers)
        self.publish()

    # ---- the router

    def links(self) -> list[Any]:
        return [*self.fleet.prefill_workers, *self.fleet.decode_workers]

    async def stop_router(self) -> None:
        """The router's process ends; its sessions with it."""
        task, self._fleet_task = self._fleet_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def kill_router(self) -> None:
        """kill -9 of the router: nothing that it would still say is heard."""
        for worker in self.workers.values():
            worker.break_sessions()
        self.network.loses = lambda name, message: name.startswith("r")
        for run in self.runs:
            run.task.cancel()
            run.client.cancel()
        await self.stop_router()

    def start(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        max_tokens: int,
        deadline_s: float = 600.0,
        on_state: Callable[[RequestState], None] | None = None,
        slow_reader_tokens: int = SLOW_READER_TOKENS,
        stop_token_ids: tuple[int, ...] = (EOS_ID,),
    ) -> Run:
        """A request arrives."""
        now = asyncio.get_running_loop().time()
        request = ResolvedRequest(
            request_id=request_id,
            arrival=len(self.runs),
            prompt_token_ids=prompt,
            sampling=Sampling(max_tokens=max_tokens, temperature=0.0, seed=7, stop_token_ids=stop_token_ids),
            stop=(),
            arrived_at=now,
            deadline=now + deadline_s,
        )
        stream = ClientStream(1, 7, slow_reader_tokens)
        life = ObservedLifecycle(
            request,
            0,
            Answer(request, 0, None, stream),
            stream,
            self.fleet,
            self.line,
            self.timing,
            self._queue_ttl_s,
            self.rng,
        )
        if on_state is not None:
            life.on_state = on_state  # type: ignore[method-assign]
        run = Run(request, life, stream)
        self.runs.append(run)
        return run

    def attempt_key(self, run: Run) -> AttemptKey:
        """The key of the run's newest attempt."""
        return AttemptKey(ROUTER, RequestKey(run.request.request_id, 0, run.life._num_attempts))

    async def assert_baseline(self) -> None:
        """Nothing is held anywhere once everybody had the time to let go (I5)."""
        await asyncio.sleep(QUIESCE_S)
        for worker in self.workers.values():
            worker.assert_baseline()
        assert len(self.line) == 0, "somebody stands in line for ever"
        for link in self.links():
            assert not link._inboxes, f"{link.worker_id} has inboxes of requests that are over"
