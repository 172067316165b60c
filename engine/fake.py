"""A deterministic runner without a model: tests of everything around the engine need no weights, but real KV.

For every token it writes a value into the token's slot of its block, and it makes the next token out of the values it
reads back through the block table; so a block that is wrong, stale or was never copied changes the tokens.
"""

from __future__ import annotations

import time

import numpy as np
import xxhash

from engine.scheduler import Batch, ScheduledRow
from tandem.layout import KVLayout

_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class FakeRunner:
    """Next token = a hash of all bytes of the row's context, modulo vocab_size. See engine.runner.Runner."""

    def __init__(
        self, kv: memoryview, num_blocks: int, layout: KVLayout, *, vocab_size: int = 256, delay_s: float = 0.0
    ) -> None:
        """`delay_s`: slept in every step, in the thread that computes. Blocks must hold 8 bytes per token."""
        per_token = layout.block_nbytes // layout.block_size
        assert per_token % 8 == 0, f"{per_token} bytes per token are no multiple of 8"
        self._values = np.frombuffer(kv, dtype=np.uint64, count=num_blocks * layout.block_nbytes // 8)
        self._values = self._values.reshape(num_blocks, layout.block_size, per_token // 8)
        self._layout = layout
        self._vocab_size = vocab_size
        self.delay_s = delay_s

    def execute(self, batch: Batch) -> list[int | None]:
        """Write, read back, hash."""
        if self.delay_s:
            time.sleep(self.delay_s)
        return [self._compute(s) for s in batch.rows]

    def _compute(self, s: ScheduledRow) -> int | None:
        size = self._layout.block_size
        for position in range(s.start, s.end):
            value = ((s.row.token_ids[position] + 1) * _MIX + position) & _MASK
            # every number of the slot, so that a flip anywhere in the block is seen
            self._values[s.row.block_table[position // size], position % size] = value
        if not s.samples:
            return None
        context = xxhash.xxh3_64()
        for index, block_id in enumerate(s.row.block_table[: self._layout.num_blocks_for(s.end)]):
            context.update(self._values[block_id, : s.end - index * size].tobytes())
        return context.intdigest() % self._vocab_size
