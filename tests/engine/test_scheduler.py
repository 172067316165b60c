"""What goes into a step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.row import Row
from engine.scheduler import Batch, schedule
from tandem.types import FinishReason, Sampling
from tests.support.engine_runs import attempt_key, make_row


def prompt_row(number: int, num_tokens: int, num_computed: int = 0) -> Row:
    row = make_row(number, [7] * num_tokens, [], Sampling(100))
    row.num_computed_tokens = num_computed
    return row


def decoding_row(number: int, num_tokens: int = 5) -> Row:
    row = prompt_row(number, num_tokens, num_tokens)
    row.token_ids.append(9)
    return row


def spans(batch: Batch | None) -> list[tuple[str, int, int]]:
    assert batch is not None
    return [(s.row.key.key.request_id, s.start, s.end) for s in batch.rows]


def test_nothing_to_do_is_none() -> None:
    assert schedule([], chunk_size=8, max_num_seqs=4) is None


def test_decoding_rows_come_first_and_prompts_share_the_rest_in_order_of_arrival() -> None:
    rows = [prompt_row(0, 6), decoding_row(1), prompt_row(2, 9), decoding_row(3), prompt_row(4, 3)]
    batch = schedule(rows, chunk_size=10, max_num_seqs=8)
    assert spans(batch) == [("r1", 5, 6), ("r3", 5, 6), ("r0", 0, 6), ("r2", 0, 2)]
    assert batch is not None
    assert batch.num_decode_rows == 2
    assert batch.num_tokens == 10
    assert [s.samples for s in batch.rows] == [True, True, True, False]


def test_a_long_prompt_goes_on_where_its_last_chunk_ended() -> None:
    row, seen = prompt_row(0, 20), []
    while row.num_uncomputed_tokens:
        batch = schedule([row], chunk_size=8, max_num_seqs=4)
        seen += spans(batch)
        row.num_computed_tokens = seen[-1][2]
    assert seen == [("r0", 0, 8), ("r0", 8, 16), ("r0", 16, 20)]


def test_prompts_move_by_one_token_when_decoding_rows_use_up_the_budget() -> None:
    rows = [*(decoding_row(n) for n in range(4)), prompt_row(9, 6)]
    assert spans(schedule(rows, chunk_size=4, max_num_seqs=8))[-1] == ("r9", 0, 1)


def test_no_more_rows_than_max_num_seqs() -> None:
    rows = [prompt_row(9, 6), *(decoding_row(n) for n in range(4))]
    assert spans(schedule(rows, chunk_size=64, max_num_seqs=3)) == [(f"r{n}", 5, 6) for n in range(3)]
    assert len(spans(schedule(rows, chunk_size=64, max_num_seqs=5))) == 5


def test_a_row_that_only_prefills_is_never_a_decoding_row() -> None:
    row = Row(attempt_key(0), [7, 7, 7, 9], 3, Sampling(5), [], num_computed_tokens=3, prefill_only=True)
    batch = schedule([row], chunk_size=8, max_num_seqs=4)
    assert batch is not None
    assert batch.num_decode_rows == 0


def test_a_committed_row_decodes_at_once() -> None:
    row = Row(attempt_key(0), [7, 7, 7, 9], 3, Sampling(5), [], num_computed_tokens=3)
    assert row.decoding
    batch = schedule([row], chunk_size=8, max_num_seqs=4)
    assert batch is not None
    assert batch.num_decode_rows == 1
    assert batch.rows[0].samples


def test_a_re_run_computes_delivered_tokens_like_a_prompt() -> None:
    row = Row(attempt_key(0), [7, 7, 7, 9, 9, 9], 3, Sampling(5), [])
    assert not row.decoding
    assert spans(schedule([row], chunk_size=8, max_num_seqs=4)) == [("r0", 0, 6)]
    assert row.num_output_tokens == 3


def test_a_row_ends_by_its_stop_ids_and_by_its_limit_counted_over_all_attempts() -> None:
    row = Row(attempt_key(0), [7, 7, 7], 3, Sampling(3, stop_token_ids=(2, 5)), [])
    assert row.finish_reason() is None
    for token_id, finish in ((9, None), (9, None), (8, FinishReason.LENGTH)):
        row.token_ids.append(token_id)
        assert row.finish_reason() is finish
    row.token_ids[-1] = 5
    assert row.finish_reason() is FinishReason.STOP
    prompt_with_stop_id = Row(attempt_key(1), [7, 2], 2, Sampling(3, stop_token_ids=(2,)), [])
    assert prompt_with_stop_id.finish_reason() is None


@given(
    kinds=st.lists(st.tuples(st.booleans(), st.integers(1, 50)), max_size=20),
    chunk_size=st.integers(1, 40),
    max_num_seqs=st.integers(1, 12),
)
def test_a_batch_keeps_its_limits_and_never_starves(
    kinds: list[tuple[bool, int]], chunk_size: int, max_num_seqs: int
) -> None:
    rows = [decoding_row(n, size) if decode else prompt_row(n, size) for n, (decode, size) in enumerate(kinds)]
    batch = schedule(rows, chunk_size=chunk_size, max_num_seqs=max_num_seqs)
    if batch is None:
        assert not rows
        return
    num_decoding = sum(decode for decode, _ in kinds)
    assert len(batch.rows) <= max_num_seqs
    assert batch.num_decode_rows == min(num_decoding, max_num_seqs)
    assert batch.num_tokens - batch.num_decode_rows <= max(chunk_size - batch.num_decode_rows, 1)
    assert all(s.start == s.row.num_computed_tokens < s.end <= len(s.row.token_ids) for s in batch.rows)
    if num_decoding < min(max_num_seqs, len(rows)):
        assert len(batch.rows) > batch.num_decode_rows, "a prompt waits although there is room"
