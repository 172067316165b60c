"""A worker's KV pool as one sealed memfd: only its owner can write it, whoever is handed it can read it (⑥ and ⑦).

`[num_blocks * block_nbytes]` of blocks, then `[num_blocks]` uint64 generations. The order of map and seal matters: the
owner's writable map exists before F_SEAL_FUTURE_WRITE forbids any further one. Never fork after `create`: a forked
child would keep the writable map.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Sequence

import numpy as np

from tandem.layout import KVLayout

log = logging.getLogger(__name__)

F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
_GENERATION_NBYTES = 8


def region_nbytes(num_blocks: int, block_nbytes: int) -> int:
    """Size of a whole region; the blocks' part is padded so that the generations are aligned."""
    return generations_offset(num_blocks, block_nbytes) + num_blocks * _GENERATION_NBYTES


def generations_offset(num_blocks: int, block_nbytes: int) -> int:
    """Where the generations start."""
    return -(-num_blocks * block_nbytes // _GENERATION_NBYTES) * _GENERATION_NBYTES


class PoolRegion:
    """The owner's side: `buffer` (the blocks' bytes, writable) and `generations` (uint64, writable)."""

    def __init__(self, layout: KVLayout, num_blocks: int, fd: int, mapped: mmap.mmap) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._fd = fd
        self._map = mapped
        blocks_nbytes = num_blocks * layout.block_nbytes
        self.buffer = memoryview(mapped)[:blocks_nbytes]
        self.generations = np.frombuffer(
            mapped, dtype=np.uint64, count=num_blocks, offset=generations_offset(num_blocks, layout.block_nbytes)
        )

    @classmethod
    def create(cls, layout: KVLayout, num_blocks: int) -> PoolRegion:
        """Make, map, seal and fault in a pool; blocks for as long as the kernel needs to zero it.

        Raises OSError when the machine lacks the memory or the kernel the seals (Linux 5.1 has them).
        """
        nbytes = region_nbytes(num_blocks, layout.block_nbytes)
        fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, nbytes)  # ENOMEM or ENOSPC here, not SIGBUS in a later step
            mapped = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)
            np.frombuffer(mapped, dtype=np.uint8)[:: mmap.PAGESIZE] = 0  # first touch now, not in the first request
            return cls(layout, num_blocks, fd, mapped)
        except BaseException:
            os.close(fd)
            raise

    def open_read_only(self) -> int:
        """Return a new descriptor for a peer, opened for reading only; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def block(self, block_id: int) -> memoryview:
        """Bytes of one block, writable."""
        nbytes = self.layout.block_nbytes
        return self.buffer[block_id * nbytes : (block_id + 1) * nbytes]

    def runs(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Bytes of the blocks in order, consecutive ids joined into one view."""
        nbytes = self.layout.block_nbytes
        return [self.buffer[first * nbytes : (first + count) * nbytes] for first, count in coalesce(block_ids)]

    def close(self) -> None:
        """Close the descriptor and the map; idempotent. A view that somebody still holds keeps the map until then."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        del self.generations
        try:
            self.buffer.release()
            self._map.close()
        except BufferError:
            log.debug("views of the pool are still held; it is unmapped with the last of them")


def coalesce(block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Join consecutive ids: [3, 4, 5, 9] -> [(3, 3), (9, 1)]."""
    runs: list[tuple[int, int]] = []
    for block_id in block_ids:
        if runs and runs[-1][0] + runs[-1][1] == block_id:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block_id, 1))
    return runs
