"""What every transport must do, asked of each in the same words."""

from __future__ import annotations

import asyncio
import ctypes
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import pytest

import kvtransfer.transports.shm as shm_module
from kvtransfer.region import PoolRegion
from kvtransfer.transports.base import Chunk, Exporter, FetchResult, Transport
from kvtransfer.transports.select import make
from kvtransfer.transports.shm import ShmExporter
from kvtransfer.transports.tcp import TcpExporter
from tandem.errors import CorruptBlock, KVTransferError, LayoutMismatch
from tandem.layout import KVLayout
from tandem.types import PeerEndpoint
from tests.support.kv_pools import (
    LAYOUT,
    NUM_BLOCKS,
    SECRET,
    bytes_of,
    chunk_of,
    endpoint,
    flip_a_byte,
    pool,
    unused_shm_name,
)
from tests.support.leaks import nothing_left_behind

CAPABILITY = b"c" * 32
PATIENCE_S = 20.0


def soon() -> float:
    return time.monotonic() + PATIENCE_S


@dataclass
class Midway:
    """Runs `act` in the side thread in the middle of a copy: bytes have been asked for, not all of them are here."""

    act: Callable[[], None] = lambda: None
    reached: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> None:
        self.reached.set()
        self.act()


@dataclass
class Rig:
    """An owner with an exporter, and readers that fetch from it."""

    name: str
    source: PoolRegion
    peer: PeerEndpoint
    exporter: Exporter
    midway: Midway
    stack: AsyncExitStack

    async def reader(self, target: PoolRegion, secret: str = SECRET, connections: int = 2) -> Transport:
        transport = make(self.name, target, secret, connections)
        self.stack.push_async_callback(transport.close)
        await transport.connect(self.peer, soon())
        return transport


@asynccontextmanager
async def rig(name: str, source: PoolRegion, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    midway = Midway()

    def authorize(_capability: bytes, block_ids: Sequence[int], _generations: Sequence[int]) -> bool:
        midway()
        return all(block_id < source.num_blocks for block_id in block_ids)

    def memmove(target: int, origin: int, nbytes: int) -> None:
        midway()
        ctypes_memmove(target, origin, nbytes)

    exporter: Exporter
    if name == "shm":
        ctypes_memmove = ctypes.memmove
        monkeypatch.setattr(shm_module.ctypes, "memmove", memmove)
        exporter = ShmExporter(source, SECRET, unused_shm_name())
        peer = endpoint(shm_name=await exporter.start())
    else:
        exporter = TcpExporter(source, SECRET, "127.0.0.1", authorize)
        peer = endpoint(tcp_address=await exporter.start())
    async with AsyncExitStack() as stack:
        stack.push_async_callback(exporter.close)
        yield Rig(name, source, peer, exporter, midway, stack)


@pytest.fixture(params=["shm", "tcp"])
async def owner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    async with nothing_left_behind():
        with pool(seed=1) as source:
            async with rig(request.param, source, monkeypatch) as made:
                yield made


@pytest.fixture
async def target(owner: Rig) -> AsyncIterator[PoolRegion]:
    """The reader's pool; depends on `owner`, so that the leak check comes after everything."""
    with pool() as region:
        yield region
        await owner.stack.aclose()  # readers before the pool they write


@pytest.mark.parametrize("seed", range(6))
async def test_exactly_the_named_blocks_arrive_where_they_were_wanted(
    owner: Rig, target: PoolRegion, seed: int
) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, NUM_BLOCKS)
    wanted, into = rng.sample(range(NUM_BLOCKS), count), rng.sample(range(NUM_BLOCKS), count)
    if seed % 2:  # consecutive stretches coalesce
        wanted, into = sorted(wanted), sorted(into)
    reader = await owner.reader(target)
    result = await reader.fetch(CAPABILITY, chunk_of(owner.source, wanted, with_checksum=True), into, soon())
    assert result.nbytes == count * LAYOUT.block_nbytes and result.duration_s > 0
    assert bytes_of(target, into) == bytes_of(owner.source, wanted)
    others = [block_id for block_id in range(NUM_BLOCKS) if block_id not in into]
    assert not any(bytes_of(target, others)), "no other block was written"


async def test_many_fetches_at_once_and_one_after_another_on_one_reader(owner: Rig, target: PoolRegion) -> None:
    reader = await owner.reader(target)
    for _ in range(3):
        target.buffer[:] = bytes(len(target.buffer))
        async with asyncio.TaskGroup() as group:
            for i in range(0, NUM_BLOCKS, 4):
                blocks = [i, i + 1, i + 3, i + 2]
                chunk = chunk_of(owner.source, blocks, with_checksum=True, index=i)
                group.create_task(reader.fetch(CAPABILITY, chunk, blocks, soon()))
        assert bytes(target.buffer) == bytes(owner.source.buffer)


async def test_several_readers_share_an_owner(owner: Rig, target: PoolRegion) -> None:
    one, two = await owner.reader(target), await owner.reader(target)
    await one.fetch(CAPABILITY, chunk_of(owner.source, [1]), [1], soon())
    await one.close()
    await two.fetch(CAPABILITY, chunk_of(owner.source, [2]), [2], soon())
    assert bytes_of(target, [1, 2]) == bytes_of(owner.source, [1, 2])


async def test_what_the_owner_writes_later_is_what_a_later_fetch_brings(owner: Rig, target: PoolRegion) -> None:
    reader = await owner.reader(target)
    await reader.fetch(CAPABILITY, chunk_of(owner.source, [5]), [0], soon())
    owner.source.block(5)[:] = b"\x5a" * LAYOUT.block_nbytes
    await reader.fetch(CAPABILITY, chunk_of(owner.source, [5]), [0], soon())
    assert bytes_of(target, [0]) == b"\x5a" * LAYOUT.block_nbytes


# ---- integrity


@pytest.mark.parametrize("which", [0, 1, 2])
async def test_a_block_that_was_reused_before_the_copy_is_corrupt(owner: Rig, target: PoolRegion, which: int) -> None:
    reader = await owner.reader(target)
    chunk = chunk_of(owner.source, [3, 4, 9])
    owner.source.generations[chunk.block_ids[which]] += 1
    with pytest.raises(CorruptBlock, match="reused"):
        await reader.fetch(CAPABILITY, chunk, [0, 1, 2], soon())
    await reader.fetch(CAPABILITY, chunk_of(owner.source, [3, 4, 9]), [0, 1, 2], soon())


async def test_a_block_that_is_reused_during_the_copy_is_corrupt(owner: Rig, target: PoolRegion) -> None:
    reader = await owner.reader(target)

    def reuse() -> None:
        owner.source.generations[4] += 1

    owner.midway.act = reuse
    with pytest.raises(CorruptBlock, match="during the copy"):
        await reader.fetch(CAPABILITY, chunk_of(owner.source, [3, 4, 9]), [0, 1, 2], soon())
    assert owner.midway.reached.is_set()


async def test_a_byte_flipped_after_the_offer_is_noticed_with_a_checksum(owner: Rig, target: PoolRegion) -> None:
    reader = await owner.reader(target)
    chunk = chunk_of(owner.source, [7, 8], with_checksum=True)
    flip_a_byte(owner.source, 8)
    with pytest.raises(CorruptBlock, match="checksum"):
        await reader.fetch(CAPABILITY, chunk, [0, 1], soon())


async def test_a_byte_flipped_after_the_offer_goes_through_without_a_checksum(owner: Rig, target: PoolRegion) -> None:
    reader = await owner.reader(target)
    chunk, original = chunk_of(owner.source, [7, 8]), bytes_of(owner.source, [7, 8])
    flip_a_byte(owner.source, 8)
    await reader.fetch(CAPABILITY, chunk, [0, 1], soon())
    arrived = bytes_of(target, [0, 1])
    assert arrived == bytes_of(owner.source, [7, 8])
    assert sum(a != b for a, b in zip(arrived, original, strict=True)) == 1


# ---- refusals


@pytest.mark.parametrize(
    "blocks, into",
    [([], []), ([1, 2], [1]), ([1], [1, 2]), ([1], [NUM_BLOCKS]), ([1], [-1])],
    ids=["no blocks", "too few to land in", "too many to land in", "beyond our pool", "before our pool"],
)
async def test_a_fetch_that_would_not_land_in_our_pool_is_refused(
    owner: Rig, target: PoolRegion, blocks: list[int], into: list[int]
) -> None:
    reader = await owner.reader(target)
    with pytest.raises(KVTransferError):
        await reader.fetch(CAPABILITY, chunk_of(owner.source, blocks), into, soon())
    assert not any(target.buffer)


@pytest.mark.parametrize("block_id", [NUM_BLOCKS, 1 << 32, (1 << 64) - 1])
async def test_a_block_that_the_owner_does_not_have_is_refused(owner: Rig, target: PoolRegion, block_id: int) -> None:
    reader = await owner.reader(target)
    chunk = replace(chunk_of(owner.source, [1]), block_ids=(block_id,))
    with pytest.raises(KVTransferError):
        await reader.fetch(CAPABILITY, chunk, [0], soon())
    await reader.fetch(CAPABILITY, chunk_of(owner.source, [1]), [0], soon())


async def test_generations_that_do_not_match_the_blocks_in_number_are_refused(owner: Rig, target: PoolRegion) -> None:
    reader = await owner.reader(target)
    chunk = replace(chunk_of(owner.source, [1, 2]), generations=(101,))
    with pytest.raises(KVTransferError, match="generations"):
        await reader.fetch(CAPABILITY, chunk, [0, 1], soon())


async def test_a_reader_without_the_secret_gets_nothing_and_harms_nobody(owner: Rig, target: PoolRegion) -> None:
    with pytest.raises(KVTransferError, match="secret"):
        await owner.reader(target, secret="a guess")
    reader = await owner.reader(target)
    await reader.fetch(CAPABILITY, chunk_of(owner.source, [1]), [1], soon())


async def test_blocks_of_another_size_are_a_layout_mismatch(owner: Rig, target: PoolRegion) -> None:
    other = KVLayout(num_layers=1, num_kv_heads=2, head_dim=16, block_size=4, dtype="float32")
    with pool(layout=other) as smaller:
        with pytest.raises(LayoutMismatch):
            reader = await owner.reader(smaller)
            await reader.fetch(CAPABILITY, chunk_of(owner.source, [1]), [1], soon())
        await owner.stack.aclose()


async def test_an_owner_that_is_not_there_fails_the_connect(owner: Rig, target: PoolRegion) -> None:
    await owner.exporter.close()
    await owner.exporter.close()  # idempotent
    with pytest.raises(KVTransferError, match=owner.peer.worker_id):
        await owner.reader(target)


async def test_an_owner_that_says_nothing_fails_the_connect_at_the_deadline(owner: Rig, target: PoolRegion) -> None:
    gone = asyncio.Event()

    async def be_silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gone.wait()
        writer.close()

    if owner.name == "shm":
        name = unused_shm_name()
        server = await asyncio.start_unix_server(be_silent, path=f"\0{name}")
        silent = endpoint(shm_name=name)
    else:
        server = await asyncio.start_server(be_silent, "127.0.0.1", 0)
        silent = endpoint(tcp_address=f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server:
        transport = make(owner.name, target, SECRET, 1)
        with pytest.raises(KVTransferError, match="timed out"):
            await transport.connect(silent, time.monotonic() + 0.1)
        await transport.close()
        gone.set()


# ---- deadlines, abort, cancel, close


async def test_a_deadline_that_has_passed_fails_the_fetch(owner: Rig, target: PoolRegion) -> None:
    reader = await owner.reader(target)
    with pytest.raises(KVTransferError):
        await reader.fetch(CAPABILITY, chunk_of(owner.source, [1]), [0], time.monotonic() - 1)
    await reader.fetch(CAPABILITY, chunk_of(owner.source, [1]), [0], soon())


async def start_and_hold(
    owner: Rig, reader: Transport, chunk: Chunk, into: list[int]
) -> tuple[asyncio.Task[FetchResult], threading.Event]:
    """A fetch that stands in the middle of its copy until the event is set."""
    resume = threading.Event()
    owner.midway.act = lambda: resume.wait(PATIENCE_S) and None
    fetch = asyncio.create_task(reader.fetch(CAPABILITY, chunk, into, soon()))
    assert await asyncio.to_thread(owner.midway.reached.wait, PATIENCE_S)
    return fetch, resume


async def test_abort_fails_what_runs_and_what_comes_later(owner: Rig, target: PoolRegion) -> None:
    reader = await owner.reader(target)
    scattered = list(range(0, NUM_BLOCKS, 2))  # several moves
    fetch, resume = await start_and_hold(owner, reader, chunk_of(owner.source, scattered), scattered)
    reader.abort()
    resume.set()
    with pytest.raises(KVTransferError):
        await fetch
    owner.midway.act = lambda: None
    with pytest.raises(KVTransferError):
        await reader.fetch(CAPABILITY, chunk_of(owner.source, [1]), [1], soon())


async def test_a_cancelled_fetch_returns_only_when_nothing_writes_our_blocks_any_more(
    owner: Rig, target: PoolRegion
) -> None:
    reader = await owner.reader(target)
    scattered = list(range(0, NUM_BLOCKS, 2))
    fetch, resume = await start_and_hold(owner, reader, chunk_of(owner.source, scattered), scattered)
    for _ in range(3):  # however often
        fetch.cancel()
        await asyncio.sleep(0)
    resume.set()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    owner.midway.act = lambda: None
    target.buffer[:] = bytes(len(target.buffer))  # the blocks are somebody else's now
    await reader.fetch(CAPABILITY, chunk_of(owner.source, [1]), [1], soon())
    assert not any(bytes_of(target, scattered)), "a late write landed"


async def test_a_held_copy_keeps_a_cancelled_fetch_until_it_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """shm only: a memmove cannot be interrupted (tcp's receive can, and is)."""
    async with nothing_left_behind():
        with pool(seed=1) as source, pool() as target:
            async with rig("shm", source, monkeypatch) as owner:
                reader = await owner.reader(target)
                fetch, resume = await start_and_hold(owner, reader, chunk_of(source, [1]), [1])
                fetch.cancel()
                done, _ = await asyncio.wait([fetch], timeout=0.05)
                assert not done, "the fetch returned while its copy was running"
                resume.set()
                with suppress(asyncio.CancelledError):
                    await fetch
                assert fetch.cancelled()


async def test_close_waits_for_the_copies_and_is_idempotent(owner: Rig, target: PoolRegion) -> None:
    reader = await owner.reader(target)
    scattered = list(range(0, NUM_BLOCKS, 2))
    fetch, resume = await start_and_hold(owner, reader, chunk_of(owner.source, scattered), scattered)
    closing = asyncio.create_task(reader.close())
    await asyncio.sleep(0)
    resume.set()
    await closing
    await reader.close()
    with pytest.raises(KVTransferError):
        await fetch
    with pytest.raises(KVTransferError):
        await reader.fetch(CAPABILITY, chunk_of(owner.source, [1]), [1], soon())


async def test_a_reader_that_was_never_connected_fetches_nothing_and_closes(owner: Rig, target: PoolRegion) -> None:
    reader = make(owner.name, target, SECRET, 1)
    with pytest.raises(KVTransferError, match="not connected"):
        await reader.fetch(CAPABILITY, chunk_of(owner.source, [1]), [1], soon())
    await reader.close()
