"""ClusterService: the operator's and the routers' side of the controller, on a listener of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pools.controller import Controller
from pools.status import directory_to_wire, pool_to_wire, status_to_wire
from tandem.errors import InvalidRequest, TandemError, Unavailable, Unimplemented
from tandem.grpc_options import EXCLUSIVE_PORT, tolerate_pings
from tandem.guard import SecretInterceptor
from tandem.v1 import cluster_pb2 as pb
from tandem.v1 import cluster_pb2_grpc as rpc
from tandem.wire import role_from_wire

# How often WatchStatus looks at the loads, which change without the controller's knowledge.
LOAD_INTERVAL_S = 1.0
BIND_PATIENCE_S = 30.0
# routers ping while nothing changes; by default that would end their streams
_SERVER_OPTIONS = (*EXCLUSIVE_PORT, *tolerate_pings(1))


class ClusterServicer(rpc.ClusterServiceServicer):
    """Every method is a few lines over the Controller. `on_shutdown` ends the controller's own process."""

    def __init__(
        self, controller: Controller, *, cluster_name: str, model: str, dtype: str, on_shutdown: Callable[[], None]
    ) -> None:
        self._controller = controller
        self._names = (cluster_name, model, dtype)
        self._on_shutdown = on_shutdown

    async def GetStatus(self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext) -> pb.GetStatusResponse:
        return await self._status()

    async def WatchStatus(
        self, request: pb.WatchStatusRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchStatusResponse]:
        last = pb.GetStatusResponse()
        while True:
            seen = self._controller.revision.sequence
            status = await self._status()
            comparable = pb.GetStatusResponse()
            comparable.CopyFrom(status)
            comparable.uptime_s = 0
            for load in comparable.loads.values():
                load.progress = 0  # ticks even when nothing happens
            if comparable != last:
                last = comparable
                yield pb.WatchStatusResponse(status=status)
            try:
                async with asyncio.timeout(LOAD_INTERVAL_S):
                    await self._controller.revision.changed(seen)
            except TimeoutError:
                continue

    async def WatchDirectory(
        self, request: pb.WatchDirectoryRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchDirectoryResponse]:
        sequence = -1
        while True:  # ends when the router hangs up, or with the server
            sequence, directory = await self._controller.directory.changed(sequence)
            yield directory_to_wire(sequence, directory)

    async def ScalePool(self, request: pb.ScalePoolRequest, context: grpc.aio.ServicerContext) -> pb.ScalePoolResponse:
        try:
            if request.role not in (pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE):
                raise InvalidRequest("role", "prefill or decode")
            pool = self._controller.scale(role_from_wire(request.role).value, request.target)
        except TandemError as exc:
            await _abort(context, exc)
        return pb.ScalePoolResponse(pool=pool_to_wire(pool, self._controller.now()))

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainWorkerResponse:
        try:
            self._controller.drain(request.worker_id)
        except TandemError as exc:
            await _abort(context, exc)
        return pb.DrainWorkerResponse()

    async def SetAutoscale(
        self, request: pb.SetAutoscaleRequest, context: grpc.aio.ServicerContext
    ) -> pb.SetAutoscaleResponse:
        await _abort(context, Unimplemented("SetAutoscale", "not built; this build scales by `tandem scale`"))

    async def Shutdown(self, request: pb.ShutdownRequest, context: grpc.aio.ServicerContext) -> pb.ShutdownResponse:
        await self._controller.shut_down()
        self._on_shutdown()
        return pb.ShutdownResponse()

    async def _status(self) -> pb.GetStatusResponse:
        loads = await self._controller.loads()
        return status_to_wire(self._controller, *self._names, loads)


async def serve(servicer: ClusterServicer, secret: str, host: str, port: int) -> tuple[grpc.aio.Server, str]:
    """Start the listener; returns the server and its host:port. Raises Unavailable when the port stays taken.

    After a restart of the controller the old process may hold the port for a moment: hence the patience.
    """
    for waited_s in range(int(BIND_PATIENCE_S) + 1):
        server = grpc.aio.server(interceptors=[SecretInterceptor(secret)], options=_SERVER_OPTIONS)
        rpc.add_ClusterServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        status = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(status, server)
        await status.set("", health_pb2.HealthCheckResponse.SERVING)
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
            await server.start()
            return server, f"{host}:{bound}"
        except RuntimeError as exc:
            await server.stop(None)
            if waited_s >= BIND_PATIENCE_S:
                raise Unavailable(f"cannot listen on {host}:{port}: {exc}") from exc
            await asyncio.sleep(1.0)
    raise AssertionError("unreachable")


async def _abort(context: grpc.aio.ServicerContext, exc: TandemError) -> NoReturn:
    await context.abort(exc.grpc_status, str(exc))
    raise AssertionError("abort raises")
