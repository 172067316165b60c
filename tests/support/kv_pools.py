"""Small pools with recognizable bytes, and the pieces around them that tests of kvtransfer share."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvtransfer.region import PoolRegion
from kvtransfer.transports.base import Chunk, checksum
from tandem.layout import KVLayout
from tandem.types import PeerEndpoint

SECRET = "a cluster secret"
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=4, dtype="float32")  # 2 KiB a block
NUM_BLOCKS = 40


@contextmanager
def pool(num_blocks: int = NUM_BLOCKS, layout: KVLayout = LAYOUT, seed: int | None = None) -> Iterator[PoolRegion]:
    """A pool of zeros, or of bytes drawn by `seed`, with distinct generations."""
    region = PoolRegion.create(layout, num_blocks)
    try:
        if seed is not None:
            fill(region, range(num_blocks), seed)
            region.generations[:] = np.arange(100, 100 + num_blocks)
        yield region
    finally:
        region.close()


def fill(region: PoolRegion, block_ids: Sequence[int], seed: int) -> None:
    """Write bytes that differ in every block."""
    for block_id in block_ids:
        rng = np.random.default_rng([seed, block_id])
        region.block(block_id)[:] = rng.bytes(region.layout.block_nbytes)


def bytes_of(region: PoolRegion, block_ids: Sequence[int]) -> bytes:
    return b"".join(bytes(region.block(block_id)) for block_id in block_ids)


def flip_a_byte(region: PoolRegion, block_id: int, offset: int = 77) -> None:
    region.block(block_id)[offset] ^= 0x01


def chunk_of(region: PoolRegion, block_ids: Sequence[int], *, with_checksum: bool = False, index: int = 0) -> Chunk:
    """The offer of these blocks as they are now."""
    return Chunk(
        index=index,
        block_ids=tuple(block_ids),
        generations=tuple(region.generations[list(block_ids)].tolist()),
        first_token=0,
        num_tokens=len(block_ids) * region.layout.block_size,
        checksum=checksum(region, block_ids) if with_checksum else None,
        last=True,
    )


def endpoint(shm_name: str = "", tcp_address: str = "", node_id: str = "node") -> PeerEndpoint:
    return PeerEndpoint("prefill-1", 7, "127.0.0.1:1", node_id, shm_name, tcp_address)


def unused_shm_name() -> str:
    return f"tandem-test-{secrets.token_hex(8)}"
