from __future__ import annotations

import math
from dataclasses import replace

import pytest

from prefill_worker.role import PrefillRole, num_tokens_to_offer
from tandem.messages import (
    Credit,
    CreditGranted,
    Failed,
    FailureReason,
    FirstToken,
    Heartbeat,
    Prefill,
    PromptSegment,
    RefusalReason,
    Refused,
    Release,
    Reserve,
    Resync,
)
from tandem.types import AttemptKey
from tests.support.fake_parts import (
    LEASE_S,
    MAX_MODEL_LEN,
    FakeSender,
    Surroundings,
    greedy,
    output,
    request_key,
    step,
    surroundings,
)

ROUTER, OTHER_ROUTER = 11, 12
PROMPT = tuple(range(1, 11))  # 10 tokens: blocks of 4, 4 and 2


class Prefiller:
    """A prefill role with fakes around it."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.around: Surroundings = surroundings(num_blocks)
        self.sender = FakeSender()
        self.role = PrefillRole(self.around.parts, self.sender)
        self.key = request_key()
        self.attempt = AttemptKey(ROUTER, self.key)

    def credit(self, num_tokens: int = len(PROMPT), solo: bool = False) -> None:
        self.role.receive(ROUTER, Credit(self.key, num_tokens, solo))

    def prefill(self, max_tokens: int = 8, **more: object) -> None:
        self.role.receive(
            ROUTER,
            Prefill(self.key, PROMPT, len(PROMPT), len(PROMPT), greedy(max_tokens, **more)),  # type: ignore[arg-type]
        )

    def running(self, **more: object) -> None:
        self.credit()
        self.prefill(**more)  # type: ignore[arg-type]
        self.around.outlet.take()

    def finish_prompt(self, token_id: int = 42) -> None:
        self.around.engine.rows.pop(self.attempt)
        self.role.publish(step(output(self.attempt, len(PROMPT), 0, token_id, started=True)))


@pytest.fixture
def p() -> Prefiller:
    return Prefiller()


def test_credit_holds_all_blocks_of_the_prompt_and_names_lease_and_capability(p: Prefiller) -> None:
    p.credit()
    assert p.around.outlet.take() == [CreditGranted(p.key, LEASE_S, b"capability of 1")]
    assert p.around.pool.num_free == 8 - 3
    assert p.role.load().queued_prefill_tokens == len(PROMPT)


def test_credit_that_does_not_fit_now_is_refused_and_the_router_hears_when_blocks_come_back(p: Prefiller) -> None:
    p.credit(num_tokens=24)
    p.around.outlet.take()
    other = request_key("other")
    p.role.receive(OTHER_ROUTER, Credit(other, 12))
    (refused,) = p.around.outlet.take()
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.NO_ROOM
    assert p.around.outlet.loads == []
    p.role.receive(ROUTER, Release(p.key))
    assert p.around.outlet.loads == [OTHER_ROUTER]
    p.around.assert_baseline(p.role)


@pytest.mark.parametrize(
    ("num_tokens", "reason"),
    [
        (0, RefusalReason.INVALID),
        (33, RefusalReason.TOO_LARGE),
        (MAX_MODEL_LEN + 1, RefusalReason.TOO_LARGE),
    ],
)
def test_credit_that_can_never_be_granted_is_refused_with_the_reason(
    p: Prefiller, num_tokens: int, reason: RefusalReason
) -> None:
    p.credit(num_tokens)
    (refused,) = p.around.outlet.take()
    assert isinstance(refused, Refused) and refused.reason is reason
    p.around.assert_baseline(p.role)


def test_a_draining_worker_refuses_and_says_so_in_its_load_report(p: Prefiller) -> None:
    p.role.start_draining()
    assert p.around.outlet.loads == [None] and p.role.load().draining
    p.credit()
    (refused,) = p.around.outlet.take()
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.DRAINING


def test_chunks_are_offered_in_whole_blocks_and_the_last_may_be_partial(p: Prefiller) -> None:
    p.running()
    blocks = p.around.engine.rows[p.attempt].block_table
    p.role.publish(step(output(p.attempt, 3, started=True)))
    assert p.sender.offers == []
    p.role.publish(step(output(p.attempt, 6)))
    p.role.publish(step(output(p.attempt, 9)))
    p.finish_prompt()
    assert p.sender.offers == [
        (p.attempt, (blocks[0],), 0, 4, False),
        (p.attempt, (blocks[1],), 4, 4, False),
        (p.attempt, (blocks[2],), 8, 2, True),
    ]
    assert p.sender.commits == [(p.attempt, len(PROMPT), 42, 0)]


@pytest.mark.parametrize(("computed", "last", "expected"), [(3, False, 0), (4, False, 4), (7, False, 4), (7, True, 7)])
def test_num_tokens_to_offer(computed: int, last: bool, expected: int) -> None:
    assert num_tokens_to_offer(computed, 4, last) == expected


def test_the_first_token_goes_to_the_router_with_its_timeline(p: Prefiller) -> None:
    p.running()
    p.around.clock.now += 2.0
    p.role.publish(step(output(p.attempt, 4, started=True), duration_s=0.5))
    p.around.clock.now += 1.0
    p.role.on_acked(p.attempt, 0)
    p.finish_prompt_after = None  # type: ignore[attr-defined]
    p.around.engine.rows.pop(p.attempt)
    p.role.publish(step(output(p.attempt, 10, 0, 42), duration_s=1.0))
    (first,) = p.around.outlet.take()
    assert first == FirstToken(
        p.key, 0, 42, queue_s=1.5, prefill_s=1.5, num_computed_tokens=10, num_chunks=2, num_overlapped_chunks=1
    )


def test_a_chunk_acknowledged_too_late_does_not_count_as_overlapped(p: Prefiller) -> None:
    p.running()
    p.role.publish(step(output(p.attempt, 4, started=True)))
    p.role.publish(step(output(p.attempt, 8)))
    p.role.on_acked(p.attempt, 0)
    p.finish_prompt()
    (first,) = p.around.outlet.take()
    assert isinstance(first, FirstToken) and first.num_overlapped_chunks == 0


def test_the_commit_ack_frees_everything_and_a_late_release_changes_nothing(p: Prefiller) -> None:
    p.running()
    p.finish_prompt()
    p.role.on_committed(p.attempt)
    assert p.sender.closed == [p.attempt]
    p.around.assert_baseline(p.role)
    p.role.receive(ROUTER, Release(p.key))
    p.around.assert_baseline(p.role)


def test_an_attempt_that_waits_for_acks_keeps_its_blocks(p: Prefiller) -> None:
    p.running()
    p.finish_prompt()
    assert p.around.pool.num_free == 8 - 3 and p.role.num_held == 1


@pytest.mark.parametrize(("max_tokens", "stop"), [(1, ()), (8, (42,))])
def test_a_first_token_that_ends_the_answer_is_never_committed(
    p: Prefiller, max_tokens: int, stop: tuple[int, ...]
) -> None:
    p.running(max_tokens=max_tokens, stop_token_ids=stop)
    p.finish_prompt(42)
    (first,) = p.around.outlet.take()
    assert isinstance(first, FirstToken) and first.token_id == 42
    assert p.sender.commits == []
    p.role.receive(ROUTER, Release(p.key))
    p.around.assert_baseline(p.role)


def test_a_solo_credit_never_touches_the_sender(p: Prefiller) -> None:
    p.credit(solo=True)
    assert p.around.outlet.take() == [CreditGranted(p.key, LEASE_S, b"")]
    p.prefill(max_tokens=1)
    p.role.publish(step(output(p.attempt, 4, started=True)))
    p.finish_prompt()
    p.role.receive(ROUTER, Release(p.key))
    assert (p.sender.opened, p.sender.offers, p.sender.commits, p.sender.closed) == ([], [], [], [])
    p.around.assert_baseline(p.role)


def test_blocks_are_freed_only_after_the_step_that_uses_them(p: Prefiller) -> None:
    p.running()
    p.around.engine.in_step.add(p.attempt)
    p.role.receive(ROUTER, Release(p.key))
    assert p.around.pool.num_free == 8 - 3 and p.role.num_held == 1 and p.role.num_leases == 0
    p.role.publish(step(output(p.attempt, 4, started=True)))
    assert p.sender.offers == []
    p.around.engine.end_step()
    p.around.assert_baseline(p.role)


def test_a_lease_that_is_renewed_by_any_message_holds(p: Prefiller) -> None:
    p.running()
    for _ in range(5):
        p.around.clock.now += 0.9 * LEASE_S
        p.role.sweep()
        p.role.receive(ROUTER, Heartbeat())
    assert p.role.num_leases == 1


def test_a_lease_that_runs_out_fails_the_attempt_frees_and_counts(p: Prefiller) -> None:
    p.running()
    p.around.clock.now += LEASE_S + 0.1
    p.role.receive(OTHER_ROUTER, Heartbeat())
    (failed,) = p.around.outlet.take()
    assert isinstance(failed, Failed) and failed.reason is FailureReason.LEASE_EXPIRED
    assert p.around.counters["expired_leases"] == 1
    p.around.assert_baseline(p.role)


def test_a_message_that_comes_after_the_lease_ran_out_does_not_revive_it(p: Prefiller) -> None:
    p.credit()
    p.around.clock.now += LEASE_S + 0.1
    p.prefill()
    assert p.around.counters["expired_leases"] == 1
    assert p.around.counters["fenced_prefill"] == 1
    p.around.assert_baseline(p.role)


def test_resync_frees_what_the_router_no_longer_has_and_nothing_of_others(p: Prefiller) -> None:
    p.credit()
    kept, foreign = request_key("kept"), request_key("foreign")
    p.role.receive(ROUTER, Credit(kept, 4))
    p.role.receive(OTHER_ROUTER, Credit(foreign, 4))
    p.role.receive(ROUTER, Resync((kept,)))
    assert p.role.num_held == 2 and p.around.counters["freed_by_resync"] == 1
    p.role.receive(ROUTER, Resync(()))
    p.role.receive(OTHER_ROUTER, Resync(()))
    p.around.assert_baseline(p.role)


def test_a_failed_transfer_is_reported_with_its_peer_and_freed(p: Prefiller) -> None:
    p.running()
    p.role.on_failed(p.attempt, int(FailureReason.TRANSFER), "no ack for 10 s", "decode-3")
    assert p.around.outlet.take() == [Failed(p.key, FailureReason.TRANSFER, "no ack for 10 s", "decode-3")]
    p.around.assert_baseline(p.role)


def test_a_prompt_may_come_in_segments(p: Prefiller) -> None:
    p.credit()
    p.role.receive(ROUTER, PromptSegment(p.key, 0, PROMPT[:4]))
    p.role.receive(ROUTER, PromptSegment(p.key, 4, PROMPT[4:8]))
    p.role.receive(ROUTER, Prefill(p.key, PROMPT[8:], len(PROMPT), len(PROMPT), greedy()))
    assert p.around.engine.rows[p.attempt].token_ids == list(PROMPT)


@pytest.mark.parametrize(
    "message",
    [
        Prefill(request_key(), PROMPT[:9], 10, 10, greedy()),
        Prefill(request_key(), PROMPT[:9], 9, 9, greedy()),
        Prefill(request_key(), PROMPT, 10, 0, greedy()),
        Prefill(request_key(), PROMPT, 10, 4, greedy(max_tokens=6)),
        Prefill(request_key(), (*PROMPT[:9], 100), 10, 10, greedy()),
        Prefill(request_key(), PROMPT, 10, 10, replace(greedy(), temperature=math.inf)),
    ],
    ids=["too few ids", "not what credit was for", "no prompt", "all delivered", "outside the vocabulary", "sampling"],
)
def test_a_prefill_that_contradicts_itself_fails_the_attempt(p: Prefiller, message: Prefill) -> None:
    p.credit()
    p.around.outlet.take()
    p.role.receive(ROUTER, message)
    (failed,) = p.around.outlet.take()
    assert isinstance(failed, Failed) and failed.reason is FailureReason.INTERNAL and failed.detail
    p.around.assert_baseline(p.role)


def test_messages_that_match_nothing_are_counted_and_dropped(p: Prefiller) -> None:
    p.prefill()
    p.credit()
    p.credit()
    p.prefill()
    p.prefill()
    assert p.around.counters["fenced_messages"] == 3
    assert p.role.num_held == 1


def test_a_reservation_on_a_prefill_worker_is_refused(p: Prefiller) -> None:
    p.role.receive(ROUTER, Reserve(p.key, PROMPT, 10, 10, greedy(), local_prefill=True))
    (refused,) = p.around.outlet.take()
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.INVALID


def test_a_rerun_counts_its_tokens_from_the_original_prompt(p: Prefiller) -> None:
    p.credit()
    p.role.receive(ROUTER, Prefill(p.key, PROMPT, 10, 7, greedy(max_tokens=4)))
    p.around.outlet.take()
    p.around.engine.rows.pop(p.attempt)
    p.role.publish(step(output(p.attempt, 10, 3, 42, started=True)))
    (first,) = p.around.outlet.take()
    assert isinstance(first, FirstToken) and first.index == 3
    assert p.sender.commits == []  # the fourth of four tokens
