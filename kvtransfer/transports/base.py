"""The transport protocol, driven by the receiver: it alone writes, into its own pool (⑦).

Order of calls: `connect` once, any number of `fetch` (also at the same time), `abort` from anywhere, `close` last.
Control messages (offers, acks, commits) never travel here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import xxhash

from kvtransfer.region import PoolRegion
from tandem.errors import KVTransferError
from tandem.types import PeerEndpoint

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chunk:
    """An offered chunk: the source's block ids and their generations, and which tokens they hold.

    Only the last block of a prompt may be partial. checksum: xxh3-64 over the blocks' bytes in order, or None.
    """

    index: int
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    first_token: int
    num_tokens: int
    checksum: int | None = None
    last: bool = False


@dataclass(frozen=True, slots=True)
class FetchResult:
    """What a fetch moved and how long it took."""

    nbytes: int
    duration_s: float


Authorize = Callable[[bytes, Sequence[int], Sequence[int]], bool]
"""(capability, block_ids, generations) -> whether exactly these were offered under it."""


class Exporter(Protocol):
    """The owner's side of a transport."""

    async def start(self) -> str:
        """Begin to serve; return the address that peers need."""
        ...

    async def close(self) -> None:
        """Stop serving and drop every connection; idempotent."""
        ...


class Transport(Protocol):
    """The reader's side, for one peer."""

    name: str

    async def connect(self, peer: PeerEndpoint, deadline: float) -> None:
        """Reach the peer before `deadline` (monotonic).

        Raises KVTransferError; LayoutMismatch when its pool differs (tcp learns of that at the first fetch only).
        """
        ...

    async def fetch(
        self, capability: bytes, chunk: Chunk, into_block_ids: Sequence[int], deadline: float
    ) -> FetchResult:
        """Copy the chunk's blocks into own blocks, in a side thread; return only when nothing writes them any more.

        Raises CorruptBlock when a generation or the checksum is not what was offered, KVTransferError when the peer
        refuses, is gone, or the deadline (monotonic) passes. A cancel ends the copy soon, and waits for that, too.
        """
        ...

    def abort(self) -> None:
        """Make every running fetch fail soon; callable from any thread."""
        ...

    async def close(self) -> None:
        """Abort, wait for the copies, let go of everything; idempotent."""
        ...


def check_fits(peer: str, region: PoolRegion, chunk: Chunk, into_block_ids: Sequence[int]) -> None:
    """Raise KVTransferError unless the chunk is well-formed and lands inside our own pool.

    What follows computes addresses from these numbers.
    """
    num_blocks = len(chunk.block_ids)
    if not 0 < num_blocks == len(into_block_ids) == len(chunk.generations):
        raise KVTransferError(
            peer,
            f"chunk {chunk.index} has {num_blocks} blocks, {len(chunk.generations)} generations and "
            f"{len(into_block_ids)} blocks to land in",
        )
    if min(into_block_ids) < 0 or max(into_block_ids) >= region.num_blocks:
        raise KVTransferError(peer, f"chunk {chunk.index} would land outside of our own pool")


async def join_copy(copy: asyncio.Future[T], stop: Callable[[], None]) -> T:
    """Await a side thread that uses blocks or a socket. A cancel calls `stop`, but returns only when the thread has."""
    try:
        return await asyncio.shield(copy)
    except asyncio.CancelledError:
        stop()
        while not copy.done():
            with contextlib.suppress(asyncio.CancelledError):  # one cancel or several: raised below
                await asyncio.wait([copy])
        if not copy.cancelled():
            copy.exception()  # the cancel says it all
        raise


def checksum(region: PoolRegion, block_ids: Sequence[int]) -> int:
    """xxh3-64 over the blocks' bytes in order."""
    digest = xxhash.xxh3_64()
    for run in region.runs(block_ids):
        digest.update(run)
    return digest.intdigest()
