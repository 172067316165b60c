"""④ The gRPC stream under a session. Foreign errors are translated here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from router.session import Dial, SessionBroken, SessionStream
from tandem.grpc_options import internal_channel
from tandem.types import WorkerInfo
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as rpc
from tandem.wire import secret_metadata

_CHANNEL_OPTIONS = internal_channel(interval_s=5, patience_s=5)


def grpc_dial(secret: str) -> Dial:
    """Return what opens a Session call to a worker."""

    def dial(info: WorkerInfo) -> AbstractAsyncContextManager[SessionStream]:
        return _session(info.endpoint.address, secret)

    return dial


@asynccontextmanager
async def _session(address: str, secret: str) -> AsyncIterator[SessionStream]:
    async with grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS) as channel:
        call = rpc.WorkerServiceStub(channel).Session(metadata=secret_metadata(secret))  # type: ignore[no-untyped-call]
        try:
            yield _GrpcStream(call)
        finally:
            call.cancel()


class _GrpcStream:
    def __init__(self, call: Any) -> None:
        self._call = call

    async def read(self) -> pb.SessionResponse | None:
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as exc:
            raise _broken(exc) from exc
        return None if response is grpc.aio.EOF else response

    async def write(self, request: pb.SessionRequest) -> None:
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as exc:
            raise _broken(exc) from exc
        except grpc.aio.InternalError as exc:
            raise SessionBroken(f"its session is gone: {exc}") from exc
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as exc:  # the worker has ended it without an error
            raise SessionBroken(f"its session is over: {exc}") from exc


def _broken(exc: grpc.aio.AioRpcError) -> SessionBroken:
    return SessionBroken(f"its session was reset ({exc.code().name}: {exc.details()})")
