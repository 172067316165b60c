"""Following the controller's WatchDirectory over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import grpc.aio

from router.directory import WatchedDirectory
from tandem.guard import SecretInterceptor
from tandem.types import Directory, PeerEndpoint, Role, WorkerInfo
from tandem.v1 import cluster_pb2 as pb
from tandem.v1 import cluster_pb2_grpc as rpc
from tandem.wire import worker_info_to_wire

TIMEOUT_S = 30.0
SECRET = "secret of the tests"


def response(sequence: int, *names: str, incarnation: int = 1, prefill_target: int = 1) -> pb.WatchDirectoryResponse:
    workers = [WorkerInfo(Role.DECODE, PeerEndpoint(name, 7, "", ""), 1, b"", 1, 1, 1) for name in names]
    return pb.WatchDirectoryResponse(
        controller_incarnation=incarnation,
        sequence=sequence,
        workers=[worker_info_to_wire(worker) for worker in workers],
        prefill_target=prefill_target,
    )


class Controller(rpc.ClusterServiceServicer):
    """Says what it is told to say, to whoever watches."""

    def __init__(self) -> None:
        self.says: asyncio.Queue[pb.WatchDirectoryResponse] = asyncio.Queue()

    async def WatchDirectory(
        self, request: pb.WatchDirectoryRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchDirectoryResponse]:
        while True:
            yield await self.says.get()


@asynccontextmanager
async def controller(port: int = 0) -> AsyncIterator[tuple[Controller, int]]:
    servicer = Controller()
    server = grpc.aio.server(interceptors=[SecretInterceptor(SECRET)])
    rpc.add_ClusterServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield servicer, port
    finally:
        await server.stop(0)


@asynccontextmanager
async def watching(port: int, secret: str = SECRET) -> AsyncIterator[WatchedDirectory]:
    directory = WatchedDirectory(f"127.0.0.1:{port}", secret)
    task = asyncio.create_task(directory.run())
    try:
        yield directory
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def becomes(directory: WatchedDirectory, wanted: Callable[[Directory], bool]) -> Directory:
    async with asyncio.timeout(TIMEOUT_S):
        while not wanted(directory.current):
            await directory.wait_changed(directory.current)
    return directory.current


async def test_the_snapshot_and_each_change_are_taken() -> None:
    async with controller() as (servicer, port), watching(port) as directory:
        assert directory.current.workers == ()
        servicer.says.put_nowait(response(1, "decode-0", prefill_target=2))
        first = await becomes(directory, lambda d: d.sequence == 1)
        assert list(first.by_id) == ["decode-0"] and first.prefill_target == 2
        servicer.says.put_nowait(response(2, "decode-0", "decode-1", prefill_target=0))
        second = await becomes(directory, lambda d: d.sequence == 2)
        assert len(second.workers) == 2 and second.prefill_target == 0


async def test_while_the_controller_is_away_the_last_directory_stays_then_a_new_one_counts_from_the_beginning() -> None:
    async with AsyncExitStack() as first:
        servicer, port = await first.enter_async_context(controller())
        async with watching(port) as directory:
            servicer.says.put_nowait(response(9, "decode-0"))
            before = await becomes(directory, lambda d: d.sequence == 9)
            await first.aclose()  # the controller dies
            await asyncio.sleep(0.3)
            assert directory.current is before
            async with controller(port) as (servicer, _):
                servicer.says.put_nowait(response(1, "decode-1", incarnation=2))
                after = await becomes(directory, lambda d: d is not before)
                assert list(after.by_id) == ["decode-1"]


async def test_a_directory_that_came_late_does_not_replace_a_newer_one() -> None:
    directory = WatchedDirectory("127.0.0.1:1", SECRET)
    directory.take(response(5, "decode-0"))
    directory.take(response(4))
    assert directory.current.sequence == 5


async def test_without_the_secret_nothing_is_learned() -> None:
    async with controller() as (servicer, port), watching(port, secret="wrong") as directory:
        servicer.says.put_nowait(response(1, "decode-0"))
        await asyncio.sleep(0.5)
        assert directory.current.sequence == 0
