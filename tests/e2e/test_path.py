"""The whole path ① to ⑨ with a fake engine whose tokens depend on every KV byte, over both transports."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc
import pytest

from tandem.types import Role
from tandem.v1 import generation_pb2 as pb
from tests.support.fake_cluster import BLOCK, CHUNK, cluster, prompt_of, references
from tests.support.inprocess import SECRET

LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("decode_workers", [1, 2])
async def test_disaggregated_equals_aggregated_for_every_length_alone_and_together(
    tmp_path: Path, transport: str, decode_workers: int
) -> None:
    prompts = [prompt_of(n) for n in LENGTHS]
    expected = await references(tmp_path, prompts, max_tokens=12)
    async with cluster(tmp_path, decode=decode_workers, transfer__transport=transport) as split:
        for prompt, tokens in zip(prompts, expected, strict=True):
            stream = await split.generate(prompt, max_tokens=12, ignore_eos=True, references={0: tokens})
            assert stream.finish is not None and stream.finish.reason == pb.FINISH_REASON_LENGTH
            assert stream.finish.timeline.mode == pb.SERVING_MODE_DISAGGREGATED
            assert stream.finish.timeline.transport == transport
            assert stream.finish.timeline.attempts == 1
        async with asyncio.TaskGroup() as group:
            for prompt, tokens in zip(prompts, expected, strict=True):
                group.create_task(split.generate(prompt, max_tokens=12, ignore_eos=True, references={0: tokens}))
        assert all(stats.num_prefill_tokens == 0 for stats in split.stats(Role.DECODE))
        assert all(stats.num_decode_tokens == 0 for stats in split.stats(Role.PREFILL))
        assert all(stats.counters["poisoned_blocks"] > 0 for stats in split.stats(Role.DECODE)[:1])


async def test_a_seeded_sampled_request_gives_the_same_tokens_alone_in_a_batch_and_aggregated(tmp_path: Path) -> None:
    sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 1234, "max_tokens": 16}
    prompts = [prompt_of(21, seed) for seed in range(4)]
    expected = await references(tmp_path, prompts, **sampling)
    async with cluster(tmp_path) as split:
        await split.generate(prompts[0], ignore_eos=True, references={0: expected[0]}, **sampling)
        async with asyncio.TaskGroup() as group:
            for prompt, tokens in zip(prompts, expected, strict=True):
                group.create_task(split.generate(prompt, ignore_eos=True, references={0: tokens}, **sampling))


async def test_one_token_never_asks_the_decode_side(tmp_path: Path) -> None:
    prompt = prompt_of(2 * CHUNK + 3)
    (expected,) = await references(tmp_path, [prompt], max_tokens=1)
    async with cluster(tmp_path) as split:
        before = split.stats(Role.DECODE)[0]
        stream = await split.generate(prompt, max_tokens=1, ignore_eos=True, references={0: expected})
        after = split.stats(Role.DECODE)[0]
        assert len(stream.token_ids) == 1
        assert after.num_forward_calls == before.num_forward_calls
        assert after.counters["poisoned_blocks"] == before.counters["poisoned_blocks"]


async def test_batching_is_real(tmp_path: Path) -> None:
    prompts = [prompt_of(9, seed) for seed in range(8)]
    async with cluster(tmp_path, step_s=0.01) as split:
        before = split.stats(Role.DECODE)[0].num_decode_calls
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(split.generate(prompt, max_tokens=64, ignore_eos=True))
        assert split.stats(Role.DECODE)[0].num_decode_calls - before <= 80


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_chunks_move_while_the_next_one_computes(tmp_path: Path, transport: str) -> None:
    async with cluster(tmp_path, step_s=0.05, transfer__transport=transport) as split:
        stream = await split.generate(prompt_of(6 * CHUNK), max_tokens=2, ignore_eos=True)
        assert stream.finish is not None
        timeline = stream.finish.timeline
        assert timeline.num_chunks == 6
        assert timeline.num_overlapped_chunks >= 3
        assert timeline.transfer_nbytes > 0


@pytest.mark.parametrize("prefill", [0, 1])
async def test_a_first_token_that_stops_ends_the_stream_at_once(tmp_path: Path, prefill: int) -> None:
    prompt = prompt_of(CHUNK + 3)
    (expected,) = await references(tmp_path, [prompt], max_tokens=2)
    async with cluster(tmp_path, prefill=prefill) as split:
        stream = await split.generate(prompt, max_tokens=20, stop_token_ids=[expected[0]])
        assert stream.token_ids == expected[:1]
        assert stream.finish is not None and stream.finish.reason == pb.FINISH_REASON_STOP
        assert stream.finish.stop_token_id == expected[0]


async def test_a_stop_token_in_the_middle_is_delivered_and_ends_the_stream(tmp_path: Path) -> None:
    prompt = prompt_of(CHUNK + 3)
    (expected,) = await references(tmp_path, [prompt], max_tokens=12)
    stop = expected[5]
    first = expected.index(stop)
    async with cluster(tmp_path) as split:
        stream = await split.generate(prompt, max_tokens=20, stop_token_ids=[stop])
        assert stream.token_ids == expected[: first + 1]
        assert stream.finish is not None and stream.finish.reason == pb.FINISH_REASON_STOP


async def test_what_never_fits_is_refused_with_the_numbers_before_any_chunk(tmp_path: Path) -> None:
    async with cluster(tmp_path, engine__num_blocks=16) as split:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await split.generate(prompt_of(40), max_tokens=40)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "80" in (error.value.details() or "") or "20" in (error.value.details() or "")
        await split.generate(prompt_of(40), max_tokens=24, ignore_eos=True)


async def test_more_requests_than_the_pool_holds_wait_and_all_finish(tmp_path: Path) -> None:
    prompts = [prompt_of(20, seed) for seed in range(8)]
    expected = await references(tmp_path, prompts, max_tokens=20)
    async with cluster(tmp_path, engine__num_blocks=24) as split:
        async with asyncio.TaskGroup() as group:
            for prompt, tokens in zip(prompts, expected, strict=True):
                group.create_task(split.generate(prompt, max_tokens=20, ignore_eos=True, references={0: tokens}))
        refused = split.stats(Role.DECODE)[0].counters["refused_no_room"]
        assert refused + split.stats(Role.PREFILL)[0].counters["refused_no_room"] > 0


async def test_a_cancel_frees_both_sides_within_a_second_or_the_running_step(tmp_path: Path) -> None:
    async with cluster(tmp_path, step_s=0.01) as split:
        for cancel_after in (1, 2, 10):
            await split.generate(prompt_of(3 * CHUNK), max_tokens=150, ignore_eos=True, cancel_after=cancel_after)
            await split.assert_baseline()


async def test_half_of_twenty_clients_cancel_at_random_moments_and_nothing_is_left(tmp_path: Path) -> None:
    rng = random.Random(5)
    prompts = [prompt_of(5 + 3 * seed, seed) for seed in range(20)]
    expected = await references(tmp_path, prompts, max_tokens=24)
    async with cluster(tmp_path, prefill=2, decode=2, step_s=0.002) as split:
        for _ in range(5):
            async with asyncio.TaskGroup() as group:
                for number, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
                    cancel_after = rng.randrange(0, 24) if number % 2 else None
                    group.create_task(
                        split.generate(
                            prompt, max_tokens=24, ignore_eos=True, references={0: tokens}, cancel_after=cancel_after
                        )
                    )
            await split.assert_baseline()


async def test_deadlines_end_a_stream_and_free_both_sides(tmp_path: Path) -> None:
    async with cluster(tmp_path, step_s=0.05) as split:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await split.generate(prompt_of(CHUNK), max_tokens=500, ignore_eos=True, timeout_s=0.5)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_workers_refuse_whoever_lacks_the_cluster_secret(tmp_path: Path) -> None:
    async with cluster(tmp_path) as split:
        for worker in split.workers:
            stats = await split.stats_over_grpc(worker)
            assert stats.worker_id == worker.worker_id and stats.num_attempts == 0
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await split.stats_over_grpc(worker, secret=SECRET + "!")


async def test_a_prompt_longer_than_a_frame_travels_in_segments(tmp_path: Path) -> None:
    prompt = prompt_of(120_000)
    settings = {"engine__block_size": 64, "engine__num_blocks": 2000, "engine__chunk_size": 30_000}
    async with cluster(tmp_path, prefill=0, **settings) as aggregated:
        expected = (await aggregated.generate(prompt, max_tokens=4, ignore_eos=True)).token_ids
    async with cluster(tmp_path, **settings) as split:
        await split.generate(prompt, max_tokens=4, ignore_eos=True, references={0: expected})
