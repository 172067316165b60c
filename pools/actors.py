"""The Ray actors of this package: plain classes, so that tests can run them without Ray.

`ControllerActor` is the controller's process, `WorkerActor` a worker's. Heavy imports (torch) happen in `start`, inside
the actor's own process.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import ray

from pools.actor_base import ActorBase, explain, start_logging
from pools.controller import Controller
from pools.pool import DECODE, PREFILL, ROUTER, Pool
from pools.ray_runtime import RayRuntime
from pools.runtime import ActorInfo, ActorSpec
from pools.service import ClusterServicer, serve
from tandem.config import ClusterConfig
from tandem.model_files import ModelFiles
from tandem.types import LoadReport, Role
from tandem.wire import load_from_wire

log = logging.getLogger(__name__)


class ControllerActor:
    """Runs the Controller and its gRPC listener. Ray restarts it for ever; it then finds the actors again by name."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it, also after a restart
        self, config: ClusterConfig, secret: str, specs: dict[str, ActorSpec], model: str, dtype: str
    ) -> None:
        start_logging()
        self._runtime = RayRuntime(config.name)
        targets = {PREFILL: config.pools.prefill, DECODE: config.pools.decode, ROUTER: 1}
        pools = {kind: Pool(kind, spec, targets[kind]) for kind, spec in specs.items()}
        controller = Controller(
            self._runtime,
            pools,
            start_timeout_s=config.pools.start_timeout_s,
            drain_timeout_s=config.timing.drain_timeout_s,
        )
        await controller.recover()
        servicer = ClusterServicer(
            controller, cluster_name=config.name, model=model, dtype=dtype, on_shutdown=self._shut_down
        )
        self._server, self._address = await serve(servicer, secret, config.control.host, config.control.port)
        self._run = asyncio.create_task(controller.run(), name="controller")
        self._run.add_done_callback(_end_process_on_error)
        self._ending: asyncio.Task[None] | None = None

    async def ready(self) -> str:
        """The listener's host:port, once it listens."""
        return self._address

    def _shut_down(self) -> None:
        self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        await self._server.stop(1.0)  # lets the answer to Shutdown out
        await self._runtime.forget()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _end_process_on_error(task: asyncio.Task[None]) -> None:
    """A controller whose loop has died must not look alive: end the process, Ray starts it again."""
    if not task.cancelled() and (exc := task.exception()) is not None:
        log.critical("the controller's loop died; this process ends and is restarted", exc_info=exc)
        logging.shutdown()
        os._exit(1)


class WorkerActor(ActorBase):
    """A ManagedActor around `worker.host.WorkerHost`."""

    def __init__(self, actor_id: str, *, role: Role, config: ClusterConfig, files: ModelFiles, secret: str) -> None:
        super().__init__(actor_id)
        self._args = (role, actor_id, config, files, secret)
        self._host: Any = None

    async def _begin(self) -> ActorInfo:
        from worker.host import WorkerHost  # torch: in the actor's own process only

        node_id = ray.get_runtime_context().get_node_id()
        self._host = WorkerHost(*self._args, host=node_ip(), node_id=node_id)
        info = await self._host.start()
        return ActorInfo(info.pid, info.endpoint.address, info)

    async def watch(self) -> str:
        """See ManagedActor. Ends when the step loop does: nothing is computed here any more."""
        try:
            await self._host.wait_failed()
        except Exception as exc:
            log.exception("%s failed", self._actor_id)
            return f"its step loop died: {explain(exc)}"
        return "its step loop ended"

    async def load(self) -> LoadReport | None:
        """See ManagedActor."""
        return load_from_wire(self._host.stats().load) if self._host is not None else None

    async def _drain(self, timeout_s: float) -> None:
        await self._host.drain(timeout_s)

    async def _end(self) -> None:
        await self._host.stop()


def node_ip() -> str:
    """The address of this Ray node, as other nodes reach it; loopback in the embedded default."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
