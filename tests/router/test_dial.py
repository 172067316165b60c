"""The gRPC stream to a worker: however it ends, its users see SessionBroken or the end, never an error of grpc."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from router.dial import grpc_dial
from router.session import SessionBroken
from tandem.types import PeerEndpoint, Role, WorkerInfo
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as rpc

TIMEOUT_S = 20.0


class Ends(rpc.WorkerServiceServicer):
    """Ends every session at once, without an error or with one."""

    def __init__(self, error: bool) -> None:
        self.error = error

    async def Session(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        if self.error:
            await context.abort(grpc.StatusCode.ABORTED, "no")


@pytest.mark.parametrize("error", [False, True], ids=["well", "with an error"])
async def test_a_write_to_a_session_that_the_worker_has_ended_breaks_it(error: bool) -> None:
    server = grpc.aio.server()
    rpc.add_WorkerServiceServicer_to_server(Ends(error), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    endpoint = PeerEndpoint("decode-0", 1, f"127.0.0.1:{port}", "node")
    info = WorkerInfo(Role.DECODE, endpoint, 1, b"", 1, 1, 1)
    try:
        async with asyncio.timeout(TIMEOUT_S), grpc_dial("secret")(info) as stream:
            try:
                assert await stream.read() is None
            except SessionBroken:
                assert error
            with pytest.raises(SessionBroken):
                await stream.write(pb.SessionRequest())
    finally:
        await server.stop(None)
