"""The operator's client of the controller. Errors come as Tandem's own, in one line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from tandem.errors import InvalidRequest, TandemError, Unauthenticated, Unavailable, Unimplemented
from tandem.types import Role
from tandem.v1 import cluster_pb2 as pb
from tandem.v1 import cluster_pb2_grpc as rpc
from tandem.wire import role_to_wire, secret_metadata

CALL_TIMEOUT_S = 10.0


class ClusterClient:
    """`async with ClusterClient(address, secret) as client`. Raises TandemError from every method."""

    def __init__(self, address: str, secret: str) -> None:
        self.address = address
        self._metadata = secret_metadata(secret)
        self._channel = grpc.aio.insecure_channel(address)
        self._stub: Any = rpc.ClusterServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Hang up. Idempotent."""
        await self._channel.close()

    async def status(self, timeout_s: float = CALL_TIMEOUT_S) -> pb.GetStatusResponse:
        """Return pools, workers, routers and loads."""
        answer: pb.GetStatusResponse = await self._call(self._stub.GetStatus, pb.GetStatusRequest(), timeout_s)
        return answer

    async def watch(self) -> AsyncIterator[pb.GetStatusResponse]:
        """Yield the status now and whenever it changes. The caller bounds the wait."""
        stream = self._stub.WatchStatus(pb.WatchStatusRequest(), metadata=self._metadata)
        try:
            async for response in stream:
                yield response.status
        except grpc.aio.AioRpcError as exc:
            raise self._translated(exc) from exc
        finally:
            stream.cancel()

    async def scale(self, role: Role, target: int, timeout_s: float = CALL_TIMEOUT_S) -> pb.PoolStatus:
        """Set a pool's target; returns the pool as it is now."""
        request = pb.ScalePoolRequest(role=role_to_wire(role), target=target)
        answer: pb.ScalePoolResponse = await self._call(self._stub.ScalePool, request, timeout_s)
        return answer.pool

    async def drain(self, worker_id: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Drain one worker; returns at once."""
        await self._call(self._stub.DrainWorker, pb.DrainWorkerRequest(worker_id=worker_id), timeout_s)

    async def shutdown(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Stop every actor of the cluster, and the controller."""
        await self._call(self._stub.Shutdown, pb.ShutdownRequest(), timeout_s)

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            return await method(request, metadata=self._metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise self._translated(exc) from exc

    def _translated(self, exc: grpc.aio.AioRpcError) -> TandemError:
        code, details = exc.code(), exc.details() or ""
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            field, _, message = details.partition(": ")
            return InvalidRequest(field, message)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            field, _, message = details.partition(": ")
            return Unimplemented(field, message)
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(details)
        return Unavailable(f"the controller at {self.address} does not answer ({code.name}: {details})")
