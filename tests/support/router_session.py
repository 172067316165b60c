"""A router's end of a worker's session, by hand: tests say what is sent and what must come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio

from tandem.messages import Resync, RouterMessage, WorkerMessage
from tandem.session_wire import fill_request, read_response
from tandem.types import LoadReport, Role, WorkerInfo
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as rpc
from tandem.wire import secret_metadata
from tests.support.fake_model import fake_files, fake_runner_factory
from tests.support.inprocess import SECRET, test_config
from worker.host import WorkerHost
from worker.served_model import RunnerFactory

TIMEOUT_S = 20.0
ROUTER = 11
MessageT = TypeVar("MessageT", bound=WorkerMessage)


class RouterSession:
    """A router's end of a real session over gRPC."""

    def __init__(self, worker: WorkerInfo, stub: rpc.WorkerServiceStub, router: int, session: int) -> None:
        self._envelope = {
            "router_incarnation": router,
            "worker_incarnation": worker.endpoint.incarnation,
            "session": session,
        }
        self.call = stub.Session(metadata=secret_metadata(SECRET))
        self._seq = 0

    async def send(self, message: RouterMessage) -> None:
        request = pb.SessionRequest(**self._envelope, seq=self._seq)
        fill_request(request, message)
        self._seq += 1
        await self.call.write(request)

    async def receive(self, wanted: type[MessageT], skipping: tuple[type, ...] = ()) -> MessageT:
        """The next message of the wanted kind; load reports and what may be skipped in between are."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                response = await self.call.read()
                assert response is not grpc.aio.EOF, "the session ended"
                message = read_response(response)
                if isinstance(message, wanted):
                    return message
                assert isinstance(message, (LoadReport, *skipping)), f"{wanted.__name__} was due, {message} came"

    async def ended(self) -> grpc.StatusCode:
        """The status that the session ends with; what still comes is dropped."""
        async with asyncio.timeout(TIMEOUT_S):
            try:
                while await self.call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError as exc:
                return exc.code()
            return await self.call.code()


@asynccontextmanager
async def worker(
    folder: Path, role: Role, runner_factory: RunnerFactory | None = None, **settings: object
) -> AsyncIterator[tuple[WorkerHost, WorkerInfo]]:
    host = WorkerHost(
        role,
        f"{role.value}-0",
        test_config(**settings),
        fake_files(folder),
        SECRET,
        runner_factory=runner_factory or fake_runner_factory(),
    )
    info = await host.start()
    try:
        yield host, info
    finally:
        await host.stop()


@asynccontextmanager
async def session(info: WorkerInfo, router: int = ROUTER, number: int = 1) -> AsyncIterator[RouterSession]:
    async with grpc.aio.insecure_channel(info.endpoint.address) as channel:
        opened = RouterSession(info, rpc.WorkerServiceStub(channel), router, number)
        try:
            await opened.send(Resync(()))
            await opened.receive(LoadReport)
            yield opened
        finally:
            opened.call.cancel()
