"""Block ids are granted once, come back once, and are recognizably new each time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.block_pool import BlockPool

NUM_BLOCKS = 12


def test_a_block_is_granted_to_one_owner_until_it_is_freed() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert not pool.can_allocate(1)
    pool.free(first)
    assert pool.num_free == 3
    assert sorted(pool.allocate(3)) == sorted(first)


def test_a_shared_block_is_freed_by_its_last_owner() -> None:
    pool = BlockPool(2)
    [block_id] = pool.allocate(1)
    pool.share([block_id])
    pool.free([block_id])
    assert pool.num_free == 1
    pool.free([block_id])
    assert pool.num_free == 2


def test_the_block_that_has_been_free_longest_is_granted_first() -> None:
    pool = BlockPool(3)
    [a], [b] = pool.allocate(1), pool.allocate(1)
    pool.free([b])
    pool.free([a])
    assert pool.allocate(3)[1:] == [b, a]


def test_a_generation_rises_with_every_grant_before_its_owner_hears_of_it() -> None:
    generations = np.zeros(3, dtype=np.uint64)
    seen: list[list[int]] = []

    def on_grant(block_ids: list[int]) -> None:
        seen.append(block_ids)
        assert all(generations[b] > 0 for b in block_ids)

    pool = BlockPool(3, generations=generations, on_grant=on_grant)
    for expected in range(1, 4):
        block_ids = pool.allocate(3)
        assert generations.tolist() == [expected] * 3
        pool.free(block_ids)
        assert generations.tolist() == [expected] * 3
    assert pool.allocate(0) == []
    assert len(seen) == 3


def test_misuse_is_noticed() -> None:
    pool = BlockPool(2)
    block_ids = pool.allocate(2)
    with pytest.raises(AssertionError, match="1 blocks asked, 0 free"):
        pool.allocate(1)
    pool.free(block_ids)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(block_ids)
    with pytest.raises(AssertionError, match="is free"):
        pool.share(block_ids)


class PoolMachine(RuleBasedStateMachine):
    """Any order of grants, shares and frees, against a plain count."""

    def __init__(self) -> None:
        super().__init__()
        self.generations = np.zeros(NUM_BLOCKS, dtype=np.uint64)
        self.pool = BlockPool(NUM_BLOCKS, generations=self.generations)
        self.references = [0] * NUM_BLOCKS
        self.grants = [0] * NUM_BLOCKS

    @rule(num_blocks=st.integers(0, NUM_BLOCKS))
    def allocate(self, num_blocks: int) -> None:
        free = self.references.count(0)
        assert self.pool.can_allocate(num_blocks) == (num_blocks <= free)
        if num_blocks <= free:
            for block_id in self.pool.allocate(num_blocks):
                assert self.references[block_id] == 0
                self.references[block_id] = 1
                self.grants[block_id] += 1

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1), share=st.booleans())
    def change(self, block_id: int, share: bool) -> None:
        if self.references[block_id]:
            (self.pool.share if share else self.pool.free)([block_id])
            self.references[block_id] += 1 if share else -1

    @invariant()
    def the_counts_agree(self) -> None:
        assert self.pool.num_free == self.references.count(0)
        assert self.pool.num_total == NUM_BLOCKS
        assert self.generations.tolist() == self.grants


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
