"""One worker process: model, block pool, step loop, role, transfer side, listener (⑤ to ⑧); start, drain, stop.

`pools/` wraps this in a Ray actor; tests and `bench/` run it as it is. Everything lives on the caller's event loop but
the forward pass (the step loop's thread) and the copies of KV (kvtransfer's threads). The roles live in packages above
this one, so they are found by name: each has a `build.py` with `assemble`.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import socket
import time
from collections import Counter
from typing import cast

import grpc

from engine.block_pool import BlockPool
from engine.step_loop import StepLoop, StepResult
from kvtransfer.leases import LeaseTable
from kvtransfer.region import PoolRegion
from tandem.config import ClusterConfig
from tandem.errors import ConfigError, WorkerLost
from tandem.grpc_options import EXCLUSIVE_PORT, keepalive, tolerate_pings
from tandem.guard import SecretInterceptor
from tandem.layout import compatibility_hash
from tandem.model_files import ModelFiles
from tandem.types import PeerEndpoint, Role, WorkerInfo, new_incarnation
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as rpc
from tandem.wire import load_to_wire
from worker.assembly import Assembler, Assembly, HostContext
from worker.process_stats import read_process_stats
from worker.role_base import RoleParts
from worker.served_model import RunnerFactory, load_for_cpu, num_pool_blocks, poison_on_grant
from worker.session import Sessions, WorkerServicer

log = logging.getLogger(__name__)

_BUILD_MODULES = {Role.PREFILL: "prefill_worker.build", Role.DECODE: "decode_worker.build"}
_SERVER_OPTIONS = (*EXCLUSIVE_PORT, *keepalive(5, 5), *tolerate_pings(1))
_SERVER_GRACE_S = 0.5
_SWEEPS_PER_LEASE = 10


class WorkerHost:
    """A worker of either role.

    host: the interface of all its listeners. node_id: equal for workers that may share memory (default: this machine's
    name). runner_factory: what computes (default: the CPU backend over the model's weights).
    """

    def __init__(
        self,
        role: Role,
        worker_id: str,
        config: ClusterConfig,
        files: ModelFiles,
        secret: str,
        host: str = "127.0.0.1",
        node_id: str = "",
        runner_factory: RunnerFactory | None = None,
    ) -> None:
        self._role = role
        self._worker_id = worker_id
        self._config = config
        self._files = files
        self._secret = secret
        self._host = host
        self._node_id = node_id or socket.gethostname()
        self._runner_factory = runner_factory or load_for_cpu
        self._incarnation = new_incarnation()
        self._counters: Counter[str] = Counter()
        timing = config.timing
        self._sessions = Sessions(self._incarnation, timing.heartbeat_s, timing.lease_s, self._counters)
        self._region: PoolRegion | None = None
        self._step_loop: StepLoop | None = None
        self._assembly: Assembly | None = None
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._over: asyncio.Future[None] | None = None
        self._stopping = False
        self._stop_lock = asyncio.Lock()

    # ---- life

    async def start(self) -> WorkerInfo:
        """Load the model, start everything; return the directory entry. Raises ModelError, ConfigError."""
        try:
            return await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> WorkerInfo:
        config, engine = self._config, self._config.engine
        self._over = asyncio.get_running_loop().create_future()
        model = await asyncio.to_thread(self._runner_factory, config, self._files)
        num_blocks = num_pool_blocks(config, model.layout)
        region = self._region = await asyncio.to_thread(PoolRegion.create, model.layout, num_blocks)
        step_loop = self._step_loop = StepLoop(model.make_runner(region.buffer, num_blocks), engine, self._publish)
        max_model_len = min(config.model.max_model_len or model.max_model_len, model.max_model_len)
        on_grant = poison_on_grant(region, model.layout, self._counters) if engine.nan_fill else None
        parts = RoleParts(
            engine=step_loop,
            pool=BlockPool(num_blocks, generations=region.generations, on_grant=on_grant),
            leases=LeaseTable(config.timing.lease_s, time.monotonic),
            outlet=self._sessions,
            layout=model.layout,
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            lease_s=config.timing.lease_s,
            clock=time.monotonic,
            counters=self._counters,
        )
        compatibility = compatibility_hash(model.layout, model.identity)
        context = HostContext(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            node_id=self._node_id,
            host=self._host,
            secret=self._secret,
            config=config,
            compatibility_hash=compatibility,
            region=region,
            parts=parts,
        )
        assemble = cast(Assembler, importlib.import_module(_BUILD_MODULES[self._role]).assemble)
        assembly = self._assembly = assemble(context)
        server = self._server = grpc.aio.server(
            interceptors=(SecretInterceptor(self._secret),), options=_SERVER_OPTIONS
        )
        servicer = WorkerServicer(self._sessions, assembly.role, self.stats)
        rpc.add_WorkerServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        shm_name, tcp_address = await assembly.start(server)
        try:
            port = server.add_insecure_port(f"{self._host}:0")
        except RuntimeError as exc:
            raise ConfigError(f"cannot listen on {self._host}: {exc}") from exc
        await server.start()
        self._tasks = [
            asyncio.create_task(step_loop.run(), name=f"{self._worker_id} step loop"),
            asyncio.create_task(self._sweep(assembly), name=f"{self._worker_id} lease sweeper"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_done)
        return WorkerInfo(
            role=self._role,
            endpoint=PeerEndpoint(
                worker_id=self._worker_id,
                incarnation=self._incarnation,
                address=f"{self._host}:{port}",
                node_id=self._node_id,
                shm_name=shm_name,
                tcp_address=tcp_address,
            ),
            pid=os.getpid(),
            compatibility_hash=compatibility,
            num_blocks=num_blocks,
            block_size=engine.block_size,
            max_model_len=max_model_len,
        )

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new grants and wait until nothing is held; False if that took longer than drain_timeout_s."""
        if self._assembly is None:
            return True
        role = self._assembly.role
        role.start_draining()
        try:
            async with asyncio.timeout(self._config.timing.drain_timeout_s if timeout_s is None else timeout_s):
                await self.wait_empty()
        except TimeoutError:
            log.warning("%s: %d attempts are still held, they will be re-run elsewhere", self._worker_id, role.num_held)
            return False
        return True

    async def wait_empty(self) -> None:
        """Return as soon as no attempt holds blocks here; leases bound how long a lost router can delay that."""
        if self._assembly is not None:
            await self._assembly.role.wait_empty()

    async def stop(self) -> None:
        """End sessions, transfers, step loop and listeners, and unmap the pool; idempotent."""
        self._stopping = True
        async with self._stop_lock:
            await self._stop()

    async def _stop(self) -> None:
        self._sessions.close_all()
        if self._server is not None:
            await self._server.stop(_SERVER_GRACE_S)
            self._server = None
        if self._assembly is not None:
            await self._assembly.stop()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._over is not None and not self._over.done():
            self._over.set_result(None)
        # the runner's views keep the pool mapped, and they hang on cycles of role, callbacks and step loop
        self._assembly = self._step_loop = None
        if self._region is not None:
            gc.collect()
            self._region.close()
            self._region = None

    async def wait_failed(self) -> None:
        """Return once the worker has been stopped. Raises WorkerLost as soon as it cannot go on."""
        if self._over is not None:
            await asyncio.shield(self._over)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Whatever ended the step loop or the sweeper ended the worker: its sessions break, the routers re-run."""
        if self._stopping or self._over is None or self._over.done():
            return
        cause = None if task.cancelled() else task.exception()
        log.error("%s: the %s ended", self._worker_id, task.get_name(), exc_info=cause)
        lost = WorkerLost(self._worker_id, f"{task.get_name()} ended: {cause!r}")
        lost.__cause__ = cause
        self._over.set_exception(lost)
        self._over.exception()  # retrieved: nobody has to wait for it
        self._sessions.close_all()

    # ---- work

    def _publish(self, result: StepResult) -> None:
        assert self._assembly is not None
        self._assembly.role.publish(result)

    async def _sweep(self, assembly: Assembly) -> None:
        while True:
            await asyncio.sleep(self._config.timing.lease_s / _SWEEPS_PER_LEASE)
            assembly.role.sweep()

    def stats(self) -> pb.GetStatsResponse:
        """Counters and levels now, with what a leak would show in."""
        assert self._assembly is not None and self._step_loop is not None, "the worker is not up"
        role, loop, process = self._assembly.role, self._step_loop, read_process_stats()
        return pb.GetStatsResponse(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            pid=os.getpid(),
            load=load_to_wire(role.load()),
            num_leases=role.num_leases,
            num_attempts=role.num_held,
            num_copies_in_flight=self._assembly.num_copies_in_flight,
            num_prefill_tokens=loop.num_prefill_tokens,
            num_decode_tokens=loop.num_decode_tokens,
            num_forward_calls=loop.num_forward_calls,
            num_decode_calls=loop.num_decode_calls,
            counters=dict(self._counters),
            num_memfds=process.num_memfds,
            num_fds=process.num_fds,
            num_tasks=process.num_tasks,
        )
