"""The two ends of a hand-off without engine or router: a Sender behind a real gRPC server, and a Receiver."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from kvtransfer.receiver import CommitRecord, Receiver
from kvtransfer.region import PoolRegion
from kvtransfer.sender import Sender
from kvtransfer.service import TransferServicer
from tandem.config import TransferConfig
from tandem.guard import SecretInterceptor
from tandem.layout import KVLayout, compatibility_hash
from tandem.messages import FailureReason
from tandem.types import AttemptKey, PeerEndpoint, RequestKey, new_incarnation
from tandem.v1 import worker_pb2_grpc as rpc
from tests.support.kv_pools import LAYOUT, NUM_BLOCKS, SECRET, fill

TIMEOUT_S = 20.0
NODE = "node"
_numbers = itertools.count(1)


def new_attempt(name: str = "request") -> AttemptKey:
    return AttemptKey(5, RequestKey(name, 0, next(_numbers)))


class Events:
    """What callbacks said, in order; tests wait for the one they expect."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self._changed = asyncio.Event()

    def note(self, *event: Any) -> None:
        self.seen.append(event)
        self._changed.set()

    async def wait(self, what: str, attempt: AttemptKey, count: int = 1) -> tuple[Any, ...]:
        """The `count`-th event of that name for that attempt."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(found := self.of(what, attempt)) < count:
                self._changed.clear()
                await self._changed.wait()
        return found[count - 1]

    def of(self, what: str, attempt: AttemptKey) -> list[tuple[Any, ...]]:
        return [event for event in self.seen if event[:2] == (what, attempt)]


class PrefillEnd:
    """A pool, a Sender and its gRPC server. An attempt's blocks are `blocks`, filled by `seed`."""

    def __init__(
        self,
        config: TransferConfig,
        *,
        worker_id: str = "prefill-1",
        layout: KVLayout = LAYOUT,
        secret: str = SECRET,
        servicer: Callable[[Sender], rpc.TransferServiceServicer] = TransferServicer,
    ) -> None:
        self.config, self.worker_id, self.secret = config, worker_id, secret
        self.incarnation = new_incarnation()
        self.region = PoolRegion.create(layout, NUM_BLOCKS)
        self.counters: Counter[str] = Counter()
        self.events = Events()
        self.sender = Sender(
            incarnation=self.incarnation,
            compatibility_hash=compatibility_hash(layout, "weights"),
            region=self.region,
            secret=secret,
            config=config,
            counters=self.counters,
            on_acked=lambda attempt, chunk: self.events.note("acked", attempt, chunk),
            on_committed=lambda attempt: self.events.note("committed", attempt),
            on_failed=lambda attempt, *rest: self.events.note("failed", attempt, *rest),
        )
        self._servicer = servicer(self.sender)
        self._server: grpc.aio.Server | None = None
        self.endpoint: PeerEndpoint

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(
            interceptors=(SecretInterceptor(self.secret),),
            options=(("grpc.so_reuseport", 0), ("grpc.http2.min_ping_interval_without_data_ms", 1_000)),
        )
        rpc.add_TransferServiceServicer_to_server(self._servicer, self._server)
        shm_name, tcp_address = await self.sender.start("127.0.0.1")
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        assert bound
        await self._server.start()
        self.endpoint = PeerEndpoint(
            self.worker_id, self.incarnation, f"127.0.0.1:{bound}", NODE, shm_name, tcp_address
        )

    @property
    def port(self) -> int:
        return int(self.endpoint.address.rpartition(":")[2])

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
        await self.sender.stop()
        self.region.close()

    def prefill(self, attempt: AttemptKey, block_ids: Sequence[int], num_tokens: int, seed: int = 1) -> None:
        """Write the blocks and offer them two at a time, then commit: token 42 at index 0."""
        fill(self.region, block_ids, seed)
        size = self.region.layout.block_size
        for first in range(0, len(block_ids), 2):
            last = first + 2 >= len(block_ids)
            tokens = num_tokens - first * size if last else 2 * size
            self.sender.offer(attempt, block_ids[first : first + 2], first * size, tokens, last)
        self.sender.commit(attempt, num_tokens, 42, 0)


class DecodeEnd:
    """A pool and a Receiver."""

    def __init__(self, config: TransferConfig, *, layout: KVLayout = LAYOUT, secret: str = SECRET) -> None:
        self.region = PoolRegion.create(layout, NUM_BLOCKS)
        self.counters: Counter[str] = Counter()
        self.events = Events()
        self.receiver = Receiver(
            worker_id="decode-1",
            incarnation=new_incarnation(),
            node_id=NODE,
            compatibility_hash=compatibility_hash(layout, "weights"),
            region=self.region,
            secret=secret,
            config=config,
            counters=self.counters,
            on_committed=lambda attempt, record: self.events.note("committed", attempt, record),
            on_failed=lambda attempt, *rest: self.events.note("failed", attempt, *rest),
        )

    async def committed(self, attempt: AttemptKey) -> CommitRecord:
        record = (await self.events.wait("committed", attempt))[2]
        assert isinstance(record, CommitRecord)
        return record

    async def failed(self, attempt: AttemptKey) -> tuple[FailureReason, str, str]:
        """(reason, detail, peer worker id)."""
        _, _, reason, detail, peer = await self.events.wait("failed", attempt)
        return FailureReason(reason), detail, peer

    async def close(self, attempt: AttemptKey) -> None:
        """Close the attempt; return once its blocks are free."""
        free = asyncio.Event()
        self.receiver.close(attempt, free.set)
        async with asyncio.timeout(TIMEOUT_S):
            await free.wait()

    async def stop(self) -> None:
        await self.receiver.stop()
        self.region.close()


@asynccontextmanager
async def prefill_end(port: int = 0, **settings: Any) -> AsyncIterator[PrefillEnd]:
    end = PrefillEnd(settings.pop("config", TransferConfig()), **settings)
    try:
        await end.start(port)
        yield end
    finally:
        await end.stop()


@asynccontextmanager
async def decode_end(**settings: Any) -> AsyncIterator[DecodeEnd]:
    end = DecodeEnd(settings.pop("config", TransferConfig()), **settings)
    try:
        yield end
    finally:
        await end.stop()
