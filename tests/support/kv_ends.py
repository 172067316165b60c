"""Both ends of a hand-off over a real gRPC channel and real sockets, and scripted ends that misbehave."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
import pytest

from kvtransfer.receiver import CommitRecord, Receiver
from kvtransfer.region import PoolRegion
from kvtransfer.sender import Sender
from kvtransfer.service import TransferServicer
from kvtransfer.transports.shm import ShmTransport
from kvtransfer.transports.tcp import TcpTransport
from tandem.config import TransferConfig
from tandem.guard import SecretInterceptor
from tandem.types import AttemptKey, PeerEndpoint, RequestKey, new_incarnation
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as rpc
from tandem.wire import attempt_to_wire, secret_metadata
from tests.support.kv_pools import LAYOUT, SECRET

PATIENCE_S = 20.0
HASH = b"h" * 16
NODE = "node"
SIZE = LAYOUT.block_size
SERVER_OPTIONS = (("grpc.so_reuseport", 0), ("grpc.http2.min_ping_interval_without_data_ms", 1_000))

T = TypeVar("T")


def attempt(request: str = "r", number: int = 1, router: int = 1) -> AttemptKey:
    return AttemptKey(router, RequestKey(request, 0, number))


class Record(list[T], Generic[T]):
    """What a callback was called with, in order; `reaches` waits for the n-th call."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Event()

    def note(self, item: T) -> None:
        self.append(item)
        self._changed.set()

    async def reaches(self, count: int) -> list[T]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self) < count:
                self._changed.clear()
                await self._changed.wait()
        return self[:count]


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is asked for has no event
            await asyncio.sleep(0.005)


async def settle() -> None:
    """Let what is under way over loopback arrive; for asserting that something does NOT happen."""
    await asyncio.sleep(0.05)


class PrefillEnd:
    """A Sender behind a gRPC server."""

    def __init__(self, region: PoolRegion, config: TransferConfig, compatibility_hash: bytes) -> None:
        self.region = region
        self.counters: Counter[str] = Counter()
        self.acked: Record[tuple[AttemptKey, int]] = Record()
        self.committed: Record[AttemptKey] = Record()
        self.failed: Record[tuple[AttemptKey, int, str, str]] = Record()
        self.sender = Sender(
            incarnation=new_incarnation(),
            compatibility_hash=compatibility_hash,
            region=region,
            secret=SECRET,
            config=config,
            counters=self.counters,
            on_acked=lambda *call: self.acked.note(call),
            on_committed=self._on_committed,
            on_failed=self._on_failed,
        )
        self.server: grpc.aio.Server | None = None
        self.peer = PeerEndpoint("prefill-1", self.sender.incarnation, "", NODE)

    # as a prefill role does
    def _on_committed(self, attempt: AttemptKey) -> None:
        self.sender.close(attempt)
        self.committed.note(attempt)

    def _on_failed(self, *call: Any) -> None:
        self.sender.close(call[0])
        self.failed.note(call)

    async def start(self) -> None:
        shm_name, tcp_address = await self.sender.start("127.0.0.1")
        address = await self.serve()
        self.peer = PeerEndpoint("prefill-1", self.sender.incarnation, address, NODE, shm_name, tcp_address)

    async def serve(self, address: str = "127.0.0.1:0") -> str:
        self.server = grpc.aio.server(interceptors=(SecretInterceptor(SECRET),), options=SERVER_OPTIONS)
        rpc.add_TransferServiceServicer_to_server(TransferServicer(self.sender), self.server)
        port = self.server.add_insecure_port(address)
        await self.server.start()
        return f"127.0.0.1:{port}"

    async def stop_serving(self) -> None:
        if self.server is not None:
            await self.server.stop(0)
            self.server = None

    async def stop(self) -> None:
        await self.sender.stop()
        await self.stop_serving()

    def offer_all(self, key: AttemptKey, block_ids: Sequence[int], num_tokens: int, blocks_per_chunk: int) -> None:
        """Offer a whole prompt chunk by chunk."""
        for first in range(0, len(block_ids), blocks_per_chunk):
            blocks = block_ids[first : first + blocks_per_chunk]
            first_token = first * SIZE
            tokens = min(len(blocks) * SIZE, num_tokens - first_token)
            self.sender.offer(key, blocks, first_token, tokens, first_token + tokens == num_tokens)


class DecodeEnd:
    """A Receiver that keeps what it is told."""

    def __init__(
        self, region: PoolRegion, config: TransferConfig, compatibility_hash: bytes = HASH, secret: str = SECRET
    ) -> None:
        self.region = region
        self.counters: Counter[str] = Counter()
        self.committed: Record[tuple[AttemptKey, CommitRecord]] = Record()
        self.failed: Record[tuple[AttemptKey, int, str, str]] = Record()
        self.receiver = Receiver(
            worker_id="decode-1",
            incarnation=new_incarnation(),
            node_id=NODE,
            compatibility_hash=compatibility_hash,
            region=region,
            secret=secret,
            config=config,
            counters=self.counters,
            on_committed=lambda *call: self.committed.note(call),
            on_failed=lambda *call: self.failed.note(call),
        )

    async def close(self, key: AttemptKey) -> None:
        """Close the attempt and wait until nothing writes its blocks."""
        closed = asyncio.Event()
        self.receiver.close(key, closed.set)
        async with asyncio.timeout(PATIENCE_S):
            await closed.wait()


@asynccontextmanager
async def prefill_end(
    region: PoolRegion, config: TransferConfig, compatibility_hash: bytes = HASH
) -> AsyncIterator[PrefillEnd]:
    end = PrefillEnd(region, config, compatibility_hash)
    try:
        await end.start()
        yield end
    finally:
        await end.stop()


@asynccontextmanager
async def decode_end(region: PoolRegion, config: TransferConfig, **changes: Any) -> AsyncIterator[DecodeEnd]:
    end = DecodeEnd(region, config, **changes)
    try:
        yield end
    finally:
        await end.receiver.stop()
        assert end.receiver.num_copies_in_flight == 0


class ScriptedPrefill(rpc.TransferServiceServicer):
    """The prefill end as far as the wire goes: a test reads `requests` and says what it likes by `say`."""

    def __init__(self) -> None:
        self.incarnation = new_incarnation()
        self.requests: Record[pb.ChannelRequest] = Record()
        self.num_channels = 0
        self.answers_pings = True
        self._context: Any = None
        self._turn = asyncio.Lock()  # one write at a time on a call

    async def Channel(self, request_iterator: Any, context: Any) -> None:
        self.num_channels += 1
        self._context = context
        await context.send_initial_metadata(())
        try:
            async for request in request_iterator:
                if request.HasField("ping"):
                    if self.answers_pings:
                        await self.say(request.decode_incarnation, None, pong=pb.Pong())
                else:
                    self.requests.note(request)
        finally:
            if self._context is context:
                self._context = None

    async def say(
        self, decode_incarnation: int, key: AttemptKey | None, *, incarnation: int | None = None, **body: Any
    ) -> None:
        response = pb.ChannelResponse(
            decode_incarnation=decode_incarnation,
            prefill_incarnation=self.incarnation if incarnation is None else incarnation,
            attempt=None if key is None else attempt_to_wire(key),
            **body,
        )
        async with self._turn:
            await self._context.write(response)


@asynccontextmanager
async def scripted_prefill(**transports: str) -> AsyncIterator[tuple[ScriptedPrefill, PeerEndpoint]]:
    servicer = ScriptedPrefill()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    rpc.add_TransferServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, PeerEndpoint("prefill-1", servicer.incarnation, f"127.0.0.1:{port}", NODE, **transports)
    finally:
        await server.stop(0)


class ScriptedDecode:
    """The decode end as far as the wire goes."""

    def __init__(self, call: Any, prefill_incarnation: int) -> None:
        self.call = call
        self.incarnation = new_incarnation()
        self._prefill_incarnation = prefill_incarnation

    async def say(
        self, key: AttemptKey | None = None, *, to: int | None = None, by: int | None = None, **body: Any
    ) -> None:
        await self.call.write(
            pb.ChannelRequest(
                decode_incarnation=self.incarnation if by is None else by,
                prefill_incarnation=self._prefill_incarnation if to is None else to,
                attempt=None if key is None else attempt_to_wire(key),
                **body,
            )
        )

    async def hear(self) -> pb.ChannelResponse:
        async with asyncio.timeout(PATIENCE_S):
            return await self.call.read()

    async def code(self) -> grpc.StatusCode:
        async with asyncio.timeout(PATIENCE_S):
            return await self.call.code()


@asynccontextmanager
async def scripted_decode(peer: PeerEndpoint, *, hello: bool = True) -> AsyncIterator[ScriptedDecode]:
    async with grpc.aio.insecure_channel(peer.address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        call = rpc.TransferServiceStub(channel).Channel(metadata=secret_metadata(SECRET))
        end = ScriptedDecode(call, peer.incarnation)
        if hello:
            await end.say(hello=pb.ChannelHello(compatibility_hash=HASH, decode_worker_id="decode-9"))
        try:
            yield end
        finally:
            call.cancel()


class Gate:
    """Holds every copy in its side thread, before it moves a byte, until opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self._open.wait(PATIENCE_S)

    async def is_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, PATIENCE_S)

    def open(self) -> None:
        self._open.set()


@contextmanager
def held_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    for transport, method in ((ShmTransport, "_copy"), (TcpTransport, "_receive")):
        original = getattr(transport, method)

        def held(self: Any, *args: Any, original: Any = original) -> Any:
            gate.pass_through()
            return original(self, *args)

        monkeypatch.setattr(transport, method, held)
    try:
        yield gate
    finally:
        gate.open()
