from __future__ import annotations

import pytest

from tandem.messages import CreditGranted, Failed, FailureReason, Finished, RefusalReason, Refused, Step, StepRow
from tandem.types import FinishReason, LoadReport
from tests.support.fake_parts import request_key
from worker.outbox import MAX_CONTROL_MESSAGES, MAX_STEP_ROWS, MAX_STEP_TOKENS, Outbox

A, B = request_key("a"), request_key("b")
LOAD = LoadReport(num_total_blocks=3)


def take(box: Outbox) -> list[object]:
    return list(box.take(lambda: LOAD))


def test_a_session_opens_with_the_load_report_and_later_ones_follow_control() -> None:
    box = Outbox()
    box.put(Step((StepRow(A, 0, (1,)),)))
    box.put(CreditGranted(B, 10.0))
    box.want_load()
    box.want_load()
    assert take(box) == [LOAD, CreditGranted(B, 10.0), Step((StepRow(A, 0, (1,)),))]
    assert not box and take(box) == []
    refused = Refused(A, RefusalReason.NO_ROOM)
    box.want_load()
    box.put(refused)
    assert take(box) == [refused, LOAD]


def test_steps_that_were_not_written_become_one_message() -> None:
    box = Outbox()
    box.put(Step((StepRow(A, 0, (1, 2)), StepRow(B, 5, (7,)))))
    box.put(Step((StepRow(A, 2, (3,)),)))
    assert take(box) == [Step((StepRow(A, 0, (1, 2, 3)), StepRow(B, 5, (7,))))]


@pytest.mark.parametrize("end", [Finished(A, FinishReason.STOP, 1), Failed(A, FailureReason.LEASE_EXPIRED)])
def test_the_end_of_a_request_never_overtakes_its_tokens(end: Finished | Failed) -> None:
    box = Outbox()
    box.put(Step((StepRow(A, 0, (1,)),)))
    box.put(end)
    box.put(CreditGranted(B, 10.0))
    assert take(box) == [CreditGranted(B, 10.0), Step((StepRow(A, 0, (1,)),)), end]


def test_a_hole_in_the_indices_is_a_bug_and_says_so() -> None:
    box = Outbox()
    box.put(Step((StepRow(A, 0, (1,)),)))
    with pytest.raises(AssertionError, match="hole before 2"):
        box.put(Step((StepRow(A, 2, (1,)),)))


def test_a_long_wait_is_cut_into_frames_without_losing_a_token() -> None:
    box = Outbox()
    long = tuple(range(MAX_STEP_TOKENS + 5))
    box.put(Step((StepRow(A, 3, long),)))
    many = [StepRow(request_key(f"r{i}"), 0, (i,)) for i in range(MAX_STEP_ROWS + 1)]
    box.put(Step(tuple(many)))
    steps = take(box)
    rows = [row for step in steps for row in step.rows]  # type: ignore[attr-defined]
    assert all(len(step.rows) <= MAX_STEP_ROWS for step in steps)  # type: ignore[attr-defined]
    assert all(sum(len(r.token_ids) for r in step.rows) <= MAX_STEP_TOKENS for step in steps)  # type: ignore[attr-defined]
    assert [(r.index, r.token_ids) for r in rows if r.key == A] == [
        (3, long[:MAX_STEP_TOKENS]),
        (3 + MAX_STEP_TOKENS, long[MAX_STEP_TOKENS:]),
    ]
    assert rows[2:] == many


def test_a_router_that_does_not_read_overflows_the_box_and_it_stays_bounded() -> None:
    box = Outbox()
    for i in range(MAX_CONTROL_MESSAGES):
        box.put(CreditGranted(request_key(attempt=i), 1.0))
    assert not box.overflowed
    box.put(CreditGranted(A, 1.0))
    assert box.overflowed and len(take(box)) == MAX_CONTROL_MESSAGES
