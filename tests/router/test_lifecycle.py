"""What the fault tables do not say: who is asked next, how long is waited, in which order, what the client is told."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from tandem.errors import DeadlineExceeded, InvalidRequest, KVTransferError, Overloaded, Unavailable, WorkerLost
from tandem.messages import Committed
from tandem.states import RequestState
from tandem.types import RequestKey
from tandem.v1 import generation_pb2 as pb
from tests.support.fake_workers import BLOCK_SIZE, FakeDecode
from tests.support.router_over_fakes import RouterOverFakes, Run, answer_to, prompt_of
from tests.support.virtual_time import jump, run_virtually

S = RequestState
PROMPT = prompt_of(20)


def virtually(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run a coroutine test on virtual time."""

    def run() -> None:
        run_virtually(test())  # type: ignore[arg-type]

    run.__name__ = test.__name__
    return run


def now() -> float:
    return asyncio.get_running_loop().time()


def history(run: Run) -> list[tuple[str, str, str]]:
    """(prefill worker, decode worker, what went wrong) of each attempt."""
    assert run.checker.finish is not None, run.error
    return [(a.prefill_worker_id, a.decode_worker_id, a.error) for a in run.checker.finish.timeline.history]


# ---- losses


@virtually
async def test_streams_of_a_worker_that_hangs_go_on_elsewhere_within_seconds() -> None:
    async with RouterOverFakes(1, decode=2) as cluster:
        run = cluster.start("r0", PROMPT, 400)
        await run.enters(S.DECODING)
        (hung,) = [w for w in cluster.workers.values() if isinstance(w, FakeDecode) and w.held]
        hung.pause()
        paused_at = now()
        await run.enters(S.QUEUED)
        assert now() - paused_at < cluster.timing.hang_min_s + 2 * cluster.timing.heartbeat_s
        await run.ended()
        (_, first, error), (_, second, no_error) = history(run)
        assert first == hung.info.worker_id != second
        assert "no progress" in error and not no_error


@virtually
async def test_a_wedged_worker_gets_no_work_before_its_step_loop_has_moved() -> None:
    async with RouterOverFakes(1) as cluster:
        run = cluster.start("r0", PROMPT, 400)
        await run.enters(S.DECODING)
        cluster.decode.wedge()
        await asyncio.sleep(30)  # it answers every new session, and says each time that it stands still
        assert run.life.state is S.QUEUED
        assert not cluster.decode.held
        cluster.decode.unwedge()
        await run.ended()
        assert len(history(run)) == 2


@virtually
async def test_a_pause_of_the_router_is_not_taken_for_one_of_its_workers() -> None:
    async with RouterOverFakes(1) as cluster:
        run = cluster.start("r0", PROMPT, 100)
        await run.enters(S.DECODING)
        jump(5.0)
        await run.ended()
        assert len(history(run)) == 1


@virtually
async def test_a_router_that_was_silent_for_too_long_gives_its_leases_up_before_the_workers_do() -> None:
    async with RouterOverFakes(1) as cluster:
        run = cluster.start("r0", PROMPT, 100)
        await run.enters(S.DECODING)
        jump(cluster.timing.lease_s - cluster.timing.lease_margin_s + 0.1)
        await run.ended()
        (_, _, error), _ = history(run)
        assert "was sent nothing for" in error
        await cluster.assert_baseline()


@virtually
async def test_a_pair_whose_transfer_failed_is_avoided_and_the_other_worker_taken() -> None:
    async with RouterOverFakes(1, decode=2) as cluster:

        def stall(state: RequestState) -> None:
            if state is S.PREFILLING and run.life._num_attempts == 1:
                for worker in cluster.workers.values():
                    for pair in list(worker.pairs.values()) if isinstance(worker, FakeDecode) else []:
                        pair.stall()

        run = cluster.start("r0", PROMPT, 6, on_state=stall)
        await run.ended()
        (_, first, error), (_, second, _) = history(run)
        assert first != second
        assert "has not committed in time" in error


@virtually
async def test_the_only_pair_meets_again_after_its_back_off() -> None:
    async with RouterOverFakes(1) as cluster:
        failed_at, met_at = [], []

        def stall(state: RequestState) -> None:
            if state is S.PREFILLING:
                met_at.append(now())
                if len(met_at) == 1:
                    for pair in list(cluster.decode.pairs.values()):
                        pair.stall()
            elif state is S.QUEUED:
                failed_at.append(now())

        run = cluster.start("r0", PROMPT, 6, on_state=stall)
        await run.ended()
        assert len(met_at) == 2 and len(failed_at) == 1
        waited_s = met_at[1] - failed_at[0]
        assert cluster.timing.pair_backoff_s <= waited_s < cluster.timing.pair_backoff_s + 0.2


@virtually
async def test_losses_beyond_the_retry_budget_end_the_stream_with_the_last_one() -> None:
    async with RouterOverFakes(1) as cluster:

        def kill(state: RequestState) -> None:
            if state is S.PREFILLING:
                asyncio.get_running_loop().call_soon(cluster.kill, cluster.decode)

        run = cluster.start("r0", PROMPT, 6, on_state=kill)
        await run.ended()
        assert isinstance(run.error, WorkerLost)
        assert run.life.state is S.FAILED
        assert run.life._num_failures == cluster.timing.retry_budget + 1
        await cluster.assert_baseline()


@virtually
async def test_transfers_that_keep_failing_end_the_stream_too() -> None:
    async with RouterOverFakes(1) as cluster:

        def corrupt(state: RequestState) -> None:
            if state is S.PREFILLING:
                cluster.decode.corrupts = "r0"

        run = cluster.start("r0", PROMPT, 6, on_state=corrupt)
        await run.ended()
        assert isinstance(run.error, KVTransferError)
        await cluster.assert_baseline()


@virtually
async def test_preemptions_cost_nothing_of_the_retry_budget() -> None:
    async with RouterOverFakes(1) as cluster:
        num_preempted = itertools.count()

        def preempt(state: RequestState) -> None:
            if state is S.DECODING and next(num_preempted) < 2 * cluster.timing.retry_budget:
                asyncio.get_running_loop().call_later(0.015, cluster.decode.preempt, cluster.attempt_key(run))

        run = cluster.start("r0", PROMPT, 40, on_state=preempt)
        await run.ended()
        assert run.error is None
        assert next(num_preempted) > cluster.timing.retry_budget + 1


@virtually
async def test_a_commit_that_overtakes_the_first_token_is_enough_even_if_the_prefill_worker_dies_then() -> None:
    async with RouterOverFakes(1) as cluster:

        def commit_early(state: RequestState) -> None:
            if state is S.PREFILLING:
                asyncio.get_running_loop().call_later(0.01, overtake)

        def overtake() -> None:
            key = RequestKey("r0", 0, 1)
            (decode_link,) = cluster.fleet.decode_workers
            decode_link._deliver(key, Committed(key))
            cluster.kill(cluster.prefill, restart_s=None)

        run = cluster.start("r0", PROMPT, 6, deadline_s=3.0, on_state=commit_early)
        await run.ended()
        # the loss of P made no re-run; the deadline ended it, as D never said more
        assert isinstance(run.error, DeadlineExceeded)
        assert "while the request was decoding" in str(run.error)


@virtually
async def test_a_worker_that_left_the_directory_keeps_its_streams_and_gets_no_new_ones() -> None:
    async with RouterOverFakes(1) as cluster:
        old = cluster.start("r0", PROMPT, 300)
        await old.enters(S.DECODING)
        cluster.publish(unlisted={"decode-0"})
        new = cluster.start("r1", PROMPT, 4)
        await old.ended()
        assert len(history(old)) == 1
        assert new.life.state is S.QUEUED
        cluster.publish(unlisted=set())
        await new.ended()
        assert new.error is None


# ---- waiting


@virtually
async def test_a_dead_prefill_pool_means_waiting_then_unavailable_never_aggregated_serving() -> None:
    async with RouterOverFakes(1, queue_ttl_s=30.0) as cluster:
        cluster.kill(cluster.prefill, restart_s=None)
        await asyncio.sleep(1)
        began_at = now()
        runs = [cluster.start(f"r{i}", PROMPT, 6) for i in range(3)]
        for run in runs:
            await run.ended()
            assert isinstance(run.error, Unavailable)
            assert "no prefill worker is up, for 30 s" in str(run.error)
        assert 30.0 <= now() - began_at < 31.0, "those behind the first in line wait no longer than it"
        assert not cluster.network.sent["rd Reserve"]


@virtually
async def test_service_resumes_by_itself_when_the_pool_is_back_and_the_wait_is_forgotten() -> None:
    async with RouterOverFakes(1, queue_ttl_s=30.0) as cluster:
        cluster.kill(cluster.decode, restart_s=20.0)
        await asyncio.sleep(1)
        runs = [cluster.start(f"r{i}", PROMPT, 6) for i in range(3)]
        for run in runs:
            await run.ended()
            assert run.error is None


@virtually
async def test_a_deadline_in_the_queue_says_what_was_waited_for() -> None:
    async with RouterOverFakes(1) as cluster:
        cluster.kill(cluster.decode, restart_s=None)
        await asyncio.sleep(1)
        run = cluster.start("r0", PROMPT, 6, deadline_s=5.0)
        await run.ended()
        assert isinstance(run.error, DeadlineExceeded)
        assert "queued, waiting because no decode worker is up; 0 tokens" in str(run.error)


@virtually
async def test_workers_that_do_not_fit_each_other_are_never_paired_and_the_reason_is_told() -> None:
    async with RouterOverFakes(1, queue_ttl_s=5.0, decode_hash=b"other") as cluster:
        run = cluster.start("r0", PROMPT, 6)
        await run.ended()
        assert isinstance(run.error, Unavailable)
        assert "same model, dtype, block layout and wire version" in str(run.error)
        assert not cluster.network.sent["rp Credit"]


@virtually
async def test_what_no_worker_can_ever_hold_is_refused_with_the_numbers() -> None:
    async with RouterOverFakes(1, decode_blocks=8) as cluster:
        run = cluster.start("r0", PROMPT, 13)
        await run.ended()
        assert isinstance(run.error, InvalidRequest)
        assert "33 tokens" in str(run.error) and str(8 * BLOCK_SIZE) in str(run.error)


@virtually
async def test_whoever_came_first_gets_the_room_first_however_large_he_is() -> None:
    async with RouterOverFakes(1, decode_blocks=10) as cluster:
        ended: list[str] = []

        async def noted(run: Run) -> None:
            await run.ended()
            assert run.error is None
            ended.append(run.request.request_id)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(noted(cluster.start("holder", PROMPT, 8)))
            await asyncio.sleep(0.05)
            tasks.create_task(noted(cluster.start("large", PROMPT, 16)))
            await asyncio.sleep(0.05)
            for number in range(6):
                tasks.create_task(noted(cluster.start(f"small {number}", prompt_of(4, number), 4)))
        assert ended[:2] == ["holder", "large"]
        await cluster.assert_baseline()


@virtually
async def test_many_requests_for_a_pool_of_two_all_finish() -> None:
    async with RouterOverFakes(1, prefill_blocks=12, decode_blocks=14) as cluster:
        runs = [cluster.start(f"r{i}", prompt_of(20, i), 8) for i in range(12)]
        for run in runs:
            await run.ended()
            assert run.error is None
            assert len(history(run)) == 1, "a refusal is no attempt in the timeline"
        await cluster.assert_baseline()


@virtually
async def test_a_refused_request_does_not_ask_again_before_there_is_room() -> None:
    async with RouterOverFakes(1, decode_blocks=8) as cluster:
        cluster.decode.occupy(8, 20.0)
        run = cluster.start("r0", PROMPT, 6)
        await run.ended()
        assert run.error is None
        assert cluster.network.sent["rd Reserve"] == 2


# ---- the end of an answer


@virtually
async def test_a_stop_token_in_the_middle_ends_the_stream_and_frees_both_workers() -> None:
    stop_id = answer_to(PROMPT, 3)[2]
    async with RouterOverFakes(1) as cluster:
        run = cluster.start("r0", PROMPT, 50, stop_token_ids=(stop_id,))
        await run.ended()
        finish = run.checker.finish
        assert finish is not None and finish.reason == pb.FINISH_REASON_STOP
        assert finish.stop_token_id == stop_id and finish.usage.completion_tokens == 3
        await cluster.assert_baseline()


@virtually
async def test_a_first_token_that_stops_ends_the_stream_before_the_commit() -> None:
    async with RouterOverFakes(1) as cluster:
        run = cluster.start("r0", PROMPT, 50, stop_token_ids=(answer_to(PROMPT, 1)[0],))
        await run.ended()
        assert run.checker.finish is not None and run.checker.finish.usage.completion_tokens == 1
        await cluster.assert_baseline()


@virtually
async def test_a_client_that_does_not_read_is_ended_and_its_blocks_come_back_at_once() -> None:
    async with RouterOverFakes(1) as cluster:
        run = cluster.start("r0", PROMPT, 200, slow_reader_tokens=16)
        run.client.cancel()
        await asyncio.gather(run.task, return_exceptions=True)
        assert isinstance(run.stream.error, Overloaded)
        assert run.life.state is S.FAILED
        await asyncio.sleep(0.1)
        for worker in cluster.workers.values():
            worker.assert_baseline()


@virtually
async def test_the_timeline_adds_up() -> None:
    async with RouterOverFakes(1) as cluster:
        run = cluster.start("r0", PROMPT, 6)
        await run.ended()
        assert run.checker.finish is not None
        t = run.checker.finish.timeline
        assert t.mode == pb.SERVING_MODE_DISAGGREGATED and t.attempts == 1
        assert (t.prefill_worker.worker_id, t.decode_worker.worker_id) == ("prefill-0", "decode-0")
        assert 0 < t.queue_s + t.reserve_s + t.prefill_s <= t.ttft_s + 0.05 < t.total_s + 0.05
        assert t.ttft_s + t.first_decode_s <= t.total_s
        assert t.ttft_s + 5 * t.itl_mean_s == pytest.approx(t.total_s)
        assert t.commit_s > 0 and t.transfer_nbytes == 1024 and t.num_chunks == 3 and t.transport == "fake"


@virtually
async def test_the_timeline_of_an_aggregated_run_names_the_decode_worker_only() -> None:
    async with RouterOverFakes(1, prefill_target=0) as cluster:
        run = cluster.start("r0", PROMPT, 6)
        await run.ended()
        assert run.checker.finish is not None
        t = run.checker.finish.timeline
        assert t.mode == pb.SERVING_MODE_AGGREGATED and not t.HasField("prefill_worker")
        assert t.decode_worker.worker_id == "decode-0"
        assert 0 < t.prefill_s < t.ttft_s and not t.transfer_nbytes
