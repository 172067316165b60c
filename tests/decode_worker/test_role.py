from __future__ import annotations

import math
from dataclasses import replace

import pytest

from decode_worker.role import DecodeRole
from kvtransfer.receiver import CommitRecord
from tandem.messages import (
    Committed,
    Credit,
    Failed,
    FailureReason,
    Finished,
    Heartbeat,
    Prefill,
    PromptSegment,
    RefusalReason,
    Refused,
    Release,
    ReservationGranted,
    Reserve,
    Resync,
    Step,
    StepRow,
)
from tandem.types import AttemptKey, FinishReason, PeerEndpoint, RequestKey, Sampling
from tests.support.fake_parts import LEASE_S, FakeReceiver, greedy, output, request_key, step, surroundings

ROUTER, OTHER_ROUTER = 11, 12
PROMPT = tuple(range(1, 11))
PEER = PeerEndpoint("prefill-0", 77, "127.0.0.1:1", "node")


def reserve(key: RequestKey, sampling: Sampling | None = None, **changes: object) -> Reserve:
    fields: dict[str, object] = {
        "token_ids": PROMPT,
        "num_tokens": len(PROMPT),
        "num_prompt_tokens": len(PROMPT),
        "peer": PEER,
        "capability": b"cap",
    }
    return Reserve(key=key, sampling=sampling or greedy(), **{**fields, **changes})  # type: ignore[arg-type]


def local(key: RequestKey, sampling: Sampling | None = None) -> Reserve:
    return reserve(key, sampling, peer=None, capability=b"", local_prefill=True)


def record(num_tokens: int = len(PROMPT), token_id: int = 42, index: int = 0) -> CommitRecord:
    return CommitRecord(
        num_tokens=num_tokens,
        first_token_id=token_id,
        first_token_index=index,
        transfer_s=0.5,
        exposed_transfer_s=0.25,
        nbytes=3,
        num_chunks=2,
        transport="shm",
    )


class Decoder:
    """A decode role with fakes around it."""

    def __init__(self, num_blocks: int = 12) -> None:
        self.around = surroundings(num_blocks)
        self.receiver = FakeReceiver()
        self.role = DecodeRole(self.around.parts, self.receiver)
        self.key = request_key()
        self.attempt = AttemptKey(ROUTER, self.key)

    def committed(self, sampling: Sampling | None = None) -> None:
        self.role.receive(ROUTER, reserve(self.key, sampling))
        self.role.on_committed(self.attempt, record())
        self.around.outlet.take()


@pytest.fixture
def d() -> Decoder:
    return Decoder()


def test_a_reservation_covers_prompt_and_max_tokens_and_opens_the_receiver_for_the_prompt(d: Decoder) -> None:
    d.role.receive(ROUTER, reserve(d.key, greedy(max_tokens=8)))
    assert d.around.outlet.take() == [ReservationGranted(d.key, LEASE_S)]
    assert d.around.pool.num_free == 12 - 5  # 18 tokens in blocks of 4
    peer, capability, block_ids, first_wanted = d.receiver.opened[d.attempt]
    assert (peer, capability, len(block_ids), first_wanted) == (PEER, b"cap", 3, 0)
    assert not d.around.engine.rows


def test_a_rerun_reserves_for_what_remains_of_max_tokens(d: Decoder) -> None:
    d.role.receive(ROUTER, reserve(d.key, greedy(max_tokens=8), num_prompt_tokens=4))
    assert d.around.pool.num_free == 12 - 3  # 4 + 8 tokens


@pytest.mark.parametrize(
    ("changes", "sampling", "reason"),
    [
        ({}, greedy(max_tokens=39), RefusalReason.TOO_LARGE),
        ({}, greedy(max_tokens=55), RefusalReason.TOO_LARGE),
        ({"num_tokens": 11}, greedy(), RefusalReason.INVALID),
        ({"num_prompt_tokens": 0}, greedy(), RefusalReason.INVALID),
        ({"num_prompt_tokens": 2}, greedy(max_tokens=8), RefusalReason.INVALID),
        ({"peer": None}, greedy(), RefusalReason.INVALID),
        ({"local_prefill": True}, greedy(), RefusalReason.INVALID),
        ({"token_ids": (*PROMPT[:9], 100)}, greedy(), RefusalReason.INVALID),
        ({}, replace(greedy(), temperature=math.nan), RefusalReason.INVALID),
        ({}, replace(greedy(), temperature=-1.0), RefusalReason.INVALID),
        ({}, replace(greedy(), top_p=math.nan), RefusalReason.INVALID),
        ({}, replace(greedy(), top_p=0.0), RefusalReason.INVALID),
        ({}, replace(greedy(), min_p=1.5), RefusalReason.INVALID),
    ],
)
def test_a_reservation_that_can_never_be_granted_is_refused_with_the_reason(
    d: Decoder, changes: dict[str, object], sampling: Sampling, reason: RefusalReason
) -> None:
    d.role.receive(ROUTER, reserve(d.key, sampling, **changes))
    (refused,) = d.around.outlet.take()
    assert isinstance(refused, Refused) and refused.reason is reason and refused.detail
    assert not d.receiver.opened
    d.around.assert_baseline(d.role)


def test_a_reservation_without_room_is_refused_and_the_router_hears_when_blocks_come_back(d: Decoder) -> None:
    d.role.receive(ROUTER, reserve(d.key, greedy(max_tokens=30)))
    d.around.outlet.take()
    d.role.receive(OTHER_ROUTER, reserve(request_key("other"), greedy()))
    (refused,) = d.around.outlet.take()
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.NO_ROOM
    d.role.receive(ROUTER, Release(d.key))
    assert d.around.outlet.loads == [OTHER_ROUTER]


def test_a_draining_worker_refuses_and_its_running_rows_go_on(d: Decoder) -> None:
    d.committed()
    d.role.start_draining()
    d.role.receive(ROUTER, reserve(request_key("late")))
    d.role.publish(step(output(d.attempt, 11, 1, 43)))
    refused, tokens = d.around.outlet.take()
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.DRAINING
    assert tokens == Step((StepRow(d.key, 0, (42, 43)),))


def test_a_committed_row_joins_the_batch_with_the_first_token_and_nothing_to_compute_but_it(d: Decoder) -> None:
    d.role.receive(ROUTER, reserve(d.key))
    d.around.outlet.take()
    d.role.on_committed(d.attempt, record())
    assert d.around.outlet.take() == [Committed(d.key, 0.5, 0.25, 3, 2, "shm")]
    row = d.around.engine.rows[d.attempt]
    assert row.token_ids == [*PROMPT, 42] and row.num_computed_tokens == 10 and not row.prefill_only


def test_the_first_step_repeats_the_first_token(d: Decoder) -> None:
    d.committed()
    d.role.publish(step(output(d.attempt, 11, 1, 43)))
    d.role.publish(step(output(d.attempt, 12, 2, 44)))
    assert d.around.outlet.take() == [Step((StepRow(d.key, 0, (42, 43)),)), Step((StepRow(d.key, 2, (44,)),))]


def test_one_step_is_one_message_per_router(d: Decoder) -> None:
    attempts = []
    for router, name in ((ROUTER, "a"), (ROUTER, "b"), (OTHER_ROUTER, "c")):
        attempt = AttemptKey(router, request_key(name))
        attempts.append(attempt)
        d.role.receive(router, reserve(attempt.key, greedy(max_tokens=3)))
        d.role.on_committed(attempt, record())
    d.around.outlet.take()
    d.role.publish(step(*(output(a, 11, 1, 43) for a in attempts)))
    sent = d.around.outlet.sent
    assert [(router, len(message.rows)) for router, message in sent if isinstance(message, Step)] == [
        (ROUTER, 2),
        (OTHER_ROUTER, 1),
    ]


def test_a_finished_row_is_reported_after_its_tokens_and_held_until_release(d: Decoder) -> None:
    d.committed(greedy(max_tokens=2))
    d.around.engine.rows.pop(d.attempt)
    d.role.publish(step(output(d.attempt, 11, 1, 43, FinishReason.LENGTH)))
    assert d.around.outlet.take() == [
        Step((StepRow(d.key, 0, (42, 43)),)),
        Finished(d.key, FinishReason.LENGTH, 2),
    ]
    assert d.role.num_held == 1
    d.role.receive(ROUTER, Release(d.key))
    d.around.assert_baseline(d.role)


def test_local_prefill_starts_at_the_grant_and_reports_its_times(d: Decoder) -> None:
    d.role.receive(ROUTER, local(d.key, greedy(max_tokens=2)))
    assert d.around.outlet.take() == [ReservationGranted(d.key, LEASE_S)]
    assert d.around.engine.rows[d.attempt].num_computed_tokens == 0 and not d.receiver.opened
    assert d.role.load().queued_prefill_tokens == 10
    d.around.clock.now += 2.0
    d.role.publish(step(output(d.attempt, 6, started=True), duration_s=0.5))
    assert d.role.load().queued_prefill_tokens == 4
    d.around.clock.now += 1.0
    d.role.publish(step(output(d.attempt, 10, 0, 42)))
    d.around.clock.now += 1.0
    d.around.engine.rows.pop(d.attempt)
    d.role.publish(step(output(d.attempt, 11, 1, 43, FinishReason.LENGTH)))
    assert d.around.outlet.take() == [
        Step((StepRow(d.key, 0, (42,)),)),
        Step((StepRow(d.key, 1, (43,)),)),
        Finished(d.key, FinishReason.LENGTH, 2, queue_s=1.5, prefill_s=1.5),
    ]
    d.role.receive(ROUTER, Release(d.key))
    d.around.assert_baseline(d.role)


def test_a_row_without_finite_logits_fails_its_attempt_and_gives_its_blocks_back(d: Decoder) -> None:
    d.committed()
    d.role.publish(step(output(d.attempt, 11, failed=True)))
    (failed,) = d.around.outlet.take()
    assert isinstance(failed, Failed) and failed.reason is FailureReason.INTERNAL and "finite" in failed.detail
    assert d.role.counters["non_finite_logits"] == 1
    d.around.engine.end_step()
    d.around.assert_baseline(d.role)


def test_a_commit_after_the_lease_ran_out_is_refused(d: Decoder) -> None:
    d.role.receive(ROUTER, reserve(d.key))
    d.around.clock.now += LEASE_S + 0.1
    d.role.on_committed(d.attempt, record())
    assert d.around.counters["refused_commits"] == 1 and not d.around.engine.rows
    d.role.sweep()
    failed = d.around.outlet.take()[-1]
    assert isinstance(failed, Failed) and failed.reason is FailureReason.LEASE_EXPIRED
    assert d.around.counters["expired_leases"] == 1
    d.around.assert_baseline(d.role)


def test_a_commit_for_a_released_attempt_is_refused(d: Decoder) -> None:
    d.role.receive(ROUTER, reserve(d.key))
    d.role.receive(ROUTER, Release(d.key))
    d.role.on_committed(d.attempt, record())
    assert d.around.counters["refused_commits"] == 1
    d.around.assert_baseline(d.role)


@pytest.mark.parametrize("bad", [record(num_tokens=9), record(index=1)], ids=["tokens", "index"])
def test_a_commit_of_something_else_fails_the_attempt(d: Decoder, bad: CommitRecord) -> None:
    d.role.receive(ROUTER, reserve(d.key))
    d.around.outlet.take()
    d.role.on_committed(d.attempt, bad)
    (failed,) = d.around.outlet.take()
    assert isinstance(failed, Failed) and failed.reason is FailureReason.INTERNAL
    assert failed.peer_worker_id == "prefill-0"
    d.around.assert_baseline(d.role)


def test_blocks_are_freed_only_when_copies_and_step_have_returned(d: Decoder) -> None:
    d.committed()
    d.receiver.copying.add(d.attempt)
    d.around.engine.in_step.add(d.attempt)
    d.role.receive(ROUTER, Release(d.key))
    assert d.around.pool.num_free == 12 - 5 and d.role.num_held == 1 and d.role.num_leases == 0
    d.receiver.end_copies()
    assert d.around.pool.num_free == 12 - 5
    d.around.engine.end_step()
    d.around.assert_baseline(d.role)


def test_what_a_step_made_of_a_released_row_is_not_sent(d: Decoder) -> None:
    d.committed()
    d.around.engine.in_step.add(d.attempt)
    d.role.receive(ROUTER, Release(d.key))
    d.role.publish(step(output(d.attempt, 11, 1, 43)))
    assert d.around.outlet.take() == []


@pytest.mark.parametrize("reason", [FailureReason.TRANSFER, FailureReason.CORRUPT, FailureReason.LAYOUT_MISMATCH])
def test_a_failed_transfer_names_reason_and_peer_and_frees(d: Decoder, reason: FailureReason) -> None:
    d.role.receive(ROUTER, reserve(d.key))
    d.around.outlet.take()
    d.role.on_failed(d.attempt, int(reason), "what happened", "prefill-0")
    d.role.on_failed(d.attempt, int(reason), "again", "prefill-0")
    assert d.around.outlet.take() == [Failed(d.key, reason, "what happened", "prefill-0")]
    assert d.receiver.closed == [d.attempt]
    d.around.assert_baseline(d.role)


def test_resync_frees_running_rows_that_the_router_no_longer_has(d: Decoder) -> None:
    d.committed()
    d.role.receive(OTHER_ROUTER, Resync(()))
    assert d.role.num_held == 1
    d.role.receive(ROUTER, Resync((d.key,)))
    assert d.role.num_held == 1
    d.role.receive(ROUTER, Resync(()))
    d.around.assert_baseline(d.role)


def test_release_is_idempotent_and_a_repeated_reserve_is_dropped(d: Decoder) -> None:
    d.role.receive(ROUTER, reserve(d.key))
    d.role.receive(ROUTER, reserve(d.key))
    assert d.around.counters["fenced_reserve"] == 1
    for _ in range(3):
        d.role.receive(ROUTER, Release(d.key))
    d.around.assert_baseline(d.role)


def test_the_next_attempt_is_another_one(d: Decoder) -> None:
    d.role.receive(ROUTER, reserve(d.key, greedy(max_tokens=2)))
    later = request_key(attempt=2)
    d.role.receive(ROUTER, reserve(later, greedy(max_tokens=2)))
    d.role.receive(ROUTER, Release(d.key))
    d.role.on_committed(AttemptKey(ROUTER, later), record())
    assert list(d.around.engine.rows) == [AttemptKey(ROUTER, later)]


def test_a_prompt_may_come_in_segments_and_a_hole_is_refused(d: Decoder) -> None:
    d.role.receive(ROUTER, PromptSegment(d.key, 0, PROMPT[:6]))
    d.role.receive(ROUTER, reserve(d.key, token_ids=PROMPT[6:]))
    assert isinstance(d.around.outlet.take()[0], ReservationGranted)
    holed = request_key("holed")
    d.role.receive(ROUTER, PromptSegment(holed, 0, PROMPT[:3]))
    d.role.receive(ROUTER, PromptSegment(holed, 4, PROMPT[4:6]))
    d.role.receive(ROUTER, reserve(holed, token_ids=PROMPT[6:]))
    (refused,) = d.around.outlet.take()
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.INVALID


def test_prefill_messages_do_not_belong_here(d: Decoder) -> None:
    d.role.receive(ROUTER, Credit(d.key, 10))
    (refused,) = d.around.outlet.take()
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.INVALID
    d.role.receive(ROUTER, Prefill(d.key, PROMPT, 10, 10, greedy()))
    assert d.around.counters["fenced_prefill"] == 1


def test_a_heartbeat_renews_every_lease_of_its_router_only(d: Decoder) -> None:
    d.role.receive(ROUTER, reserve(d.key, greedy(max_tokens=2)))
    d.role.receive(OTHER_ROUTER, reserve(request_key("other"), greedy(max_tokens=2)))
    d.around.clock.now += 0.6 * LEASE_S
    d.role.receive(ROUTER, Heartbeat())
    d.around.clock.now += 0.6 * LEASE_S
    d.role.sweep()
    assert d.role.num_held == 1 and d.around.counters["expired_leases"] == 1
    assert d.around.outlet.sent[-1][0] == OTHER_ROUTER
