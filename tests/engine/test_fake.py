"""The fake runner must notice every byte that is wrong: tests of the transfer rely on it."""

from __future__ import annotations

import random

import pytest

from engine.block_pool import BlockPool
from engine.fake import FakeRunner
from engine.row import Row
from tandem.layout import KVLayout
from tandem.types import Sampling
from tests.support.engine_runs import attempt_key, make_row, run_to_end

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
NUM_BLOCKS = 16
MAX_TOKENS = 6


def answer(prompts: list[list[int]], chunk_size: int = 8) -> list[list[int]]:
    kv = bytearray(b"\xff" * (NUM_BLOCKS * LAYOUT.block_nbytes))
    pool = BlockPool(NUM_BLOCKS)
    rows = [
        make_row(n, p, pool.allocate(LAYOUT.num_blocks_for(len(p) + MAX_TOKENS)), Sampling(MAX_TOKENS))
        for n, p in enumerate(prompts)
    ]
    run_to_end(FakeRunner(memoryview(kv), NUM_BLOCKS, LAYOUT), rows, chunk_size=chunk_size)
    return [row.token_ids[row.num_prompt_tokens :] for row in rows]


def test_tokens_do_not_depend_on_chunks_and_neighbours() -> None:
    prompts = [[1, 2, 3], [5] * 13, [9]]
    together = answer(prompts)
    assert together == [answer([p])[0] for p in prompts]
    assert together == answer(prompts, chunk_size=2)
    assert len({tuple(a) for a in together}) == 3


def test_every_token_of_the_prompt_counts_and_so_does_their_order() -> None:
    prompt = list(range(10, 21))
    usual = answer([prompt])
    for position in range(len(prompt)):
        changed = list(prompt)
        changed[position] += 1
        assert answer([changed]) != usual
    assert answer([prompt[::-1]]) != usual


def decode_from(kv: bytearray, prompt: list[int], first_token: int, block_table: list[int]) -> list[int]:
    """What a decode worker does with blocks that were copied to it."""
    row = Row(
        attempt_key(0), [*prompt, first_token], len(prompt), Sampling(MAX_TOKENS), block_table, len(prompt), False
    )
    run_to_end(FakeRunner(memoryview(kv), NUM_BLOCKS, LAYOUT), [row])
    return row.token_ids[len(prompt) :]


@pytest.fixture
def prefilled() -> tuple[bytearray, list[int], int, list[int]]:
    prompt, block_table = list(range(30, 41)), [3, 7, 1, 12, 5]
    kv = bytearray(b"\xff" * (NUM_BLOCKS * LAYOUT.block_nbytes))
    row = Row(attempt_key(0), list(prompt), len(prompt), Sampling(1), block_table, prefill_only=True)
    run_to_end(FakeRunner(memoryview(kv), NUM_BLOCKS, LAYOUT), [row])
    return kv, prompt, row.token_ids[-1], block_table


def test_a_flip_of_any_bit_of_the_context_changes_the_tokens(
    prefilled: tuple[bytearray, list[int], int, list[int]],
) -> None:
    kv, prompt, first_token, block_table = prefilled
    usual = decode_from(bytearray(kv), prompt, first_token, block_table)
    assert usual[0] == first_token
    per_token = LAYOUT.block_nbytes // LAYOUT.block_size
    chance = random.Random(0)
    for position in range(len(prompt)):
        start = block_table[position // 4] * LAYOUT.block_nbytes + position % 4 * per_token
        for offset in range(per_token):
            flipped = bytearray(kv)
            flipped[start + offset] ^= 1 << chance.randrange(8)
            assert decode_from(flipped, prompt, first_token, block_table) != usual, f"token {position}, byte {offset}"


def test_blocks_that_were_never_copied_or_are_in_the_wrong_order_change_the_tokens(
    prefilled: tuple[bytearray, list[int], int, list[int]],
) -> None:
    kv, prompt, first_token, block_table = prefilled
    usual = decode_from(bytearray(kv), prompt, first_token, block_table)
    for wrong in ([7, 3, 1, 12, 5], [3, 7, 12, 1, 5], [0, 7, 1, 12, 5]):
        assert decode_from(bytearray(kv), prompt, first_token, wrong) != usual


def test_tokens_spread_over_the_vocabulary() -> None:
    seen = {token_id for n in range(60) for token_id in answer([[n]])[0]}
    assert len(seen) > 150
    assert max(seen) < 256
