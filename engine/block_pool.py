"""Which blocks of a worker's KV pool are free, and who counts on the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np


class BlockPool:
    """Block ids 0 .. num_blocks - 1 with reference counts.

    generations: `[num_blocks]` uint64 in the exported region, bumped before a block is granted anew, so that a peer
    that reads it late sees that it is no longer what was offered. on_grant: called with every list of granted ids.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        generations: np.ndarray | None = None,
        on_grant: Callable[[list[int]], None] | None = None,
    ) -> None:
        assert generations is None or len(generations) == num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._generations = generations
        self._on_grant = on_grant

    @property
    def num_total(self) -> int:
        """Blocks of the pool."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks that can be granted now."""
        return len(self._free)

    def can_allocate(self, num_blocks: int) -> bool:
        """Whether `num_blocks` can be granted now."""
        return num_blocks <= len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Grant blocks with one reference each, longest free first. Only after `can_allocate` said yes."""
        assert self.can_allocate(num_blocks), f"{num_blocks} blocks asked, {len(self._free)} free"
        block_ids = [self._free.popleft() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._references[block_id] = 1
        if self._generations is not None and block_ids:
            self._generations[block_ids] += np.uint64(1)
        if self._on_grant is not None and block_ids:
            self._on_grant(block_ids)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Take one more reference on blocks that are granted already."""
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} is free"
            self._references[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Give one reference of each block back; the last one frees it."""
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} is freed twice"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free.append(block_id)
