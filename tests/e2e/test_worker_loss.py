"""A worker goes in the middle of things: streams go on elsewhere with the same tokens, nothing is lost or left over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.stream_checker import StreamChecker
from tandem.types import Role
from tests.support.fake_cluster import CHUNK, cluster, prompt_of, references
from tests.support.inprocess import InProcessCluster

MAX_TOKENS = 40


class Moment:
    """An event at a number of tokens of one stream."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.reached = asyncio.Event()

    def on_tokens(self, num_tokens: int) -> None:
        if num_tokens >= self._num_tokens:
            self.reached.set()


async def run_all(
    split: InProcessCluster,
    prompts: list[list[int]],
    expected: list[list[int]],
    on_tokens: Callable[[int], None],
    disturb: Callable[[], object],
    reached: asyncio.Event,
) -> list[StreamChecker]:
    """All requests at once; `disturb` when the first one has come so far."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                split.generate(
                    prompt,
                    max_tokens=MAX_TOKENS,
                    ignore_eos=True,
                    references={0: tokens},
                    on_tokens=on_tokens if number == 0 else lambda _: None,
                )
            )
            for number, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True))
        ]
        async with asyncio.timeout(30):
            await reached.wait()
        await disturb()  # type: ignore[misc]
    return [task.result() for task in tasks]


@pytest.mark.parametrize("prefill", [0, 1])
async def test_streams_go_on_when_their_decode_worker_is_lost(tmp_path: Path, prefill: int) -> None:
    prompts = [prompt_of(CHUNK + seed, seed) for seed in range(8)]
    expected = await references(tmp_path, prompts, max_tokens=MAX_TOKENS)
    moment = Moment(5)
    async with cluster(tmp_path, prefill=prefill, decode=2, step_s=0.01) as split:
        lost = prefill  # the first decode worker
        streams = await run_all(split, prompts, expected, moment.on_tokens, lambda: split.lose(lost), moment.reached)
        attempts = [s.finish.timeline.attempts for s in streams if s.finish is not None]
        assert len(attempts) == 8 and max(attempts) > 1, "the lost worker had nothing to do"
        survivor = split.workers[lost + 1].worker_id
        assert {s.finish.timeline.decode_worker.worker_id for s in streams if s.finish is not None} == {survivor}


async def test_a_prompt_is_computed_anew_when_its_prefill_worker_is_lost(tmp_path: Path) -> None:
    prompt = prompt_of(12 * CHUNK)
    expected = await references(tmp_path, [prompt], max_tokens=MAX_TOKENS)
    async with cluster(tmp_path, prefill=2, step_s=0.03) as split:
        before = [stats.num_prefill_tokens for stats in split.stats(Role.PREFILL)]

        async def lose_whoever_prefills() -> None:
            async with asyncio.timeout(30):
                while True:
                    now = [stats.num_prefill_tokens for stats in split.stats(Role.PREFILL)]
                    busy = [n for n in range(2) if now[n] - before[n] >= 3 * CHUNK]
                    if busy:
                        return await split.lose(busy[0])
                    await asyncio.sleep(0.01)

        started = asyncio.Event()
        started.set()
        (stream,) = await run_all(split, [prompt], expected, lambda _: None, lose_whoever_prefills, started)
        assert stream.finish is not None and stream.finish.timeline.attempts == 2


async def test_a_stream_does_not_notice_the_loss_of_its_prefill_worker_after_the_commit(tmp_path: Path) -> None:
    prompt = prompt_of(2 * CHUNK)
    expected = await references(tmp_path, [prompt], max_tokens=MAX_TOKENS)
    moment = Moment(4)
    async with cluster(tmp_path, step_s=0.01) as split:
        (stream,) = await run_all(split, [prompt], expected, moment.on_tokens, lambda: split.lose(0), moment.reached)
        assert stream.finish is not None and stream.finish.timeline.attempts == 1


async def test_draining_a_decode_worker_under_load_costs_no_stream(tmp_path: Path) -> None:
    prompts = [prompt_of(CHUNK + seed, seed) for seed in range(8)]
    expected = await references(tmp_path, prompts, max_tokens=MAX_TOKENS)
    moment = Moment(5)
    async with cluster(tmp_path, decode=2, step_s=0.01) as split:
        drained: list[bool] = []

        async def drain() -> None:
            drained.append(await split.hosts[1].drain(30.0))
            late = await split.generate(prompts[0], max_tokens=4, ignore_eos=True)
            assert late.finish is not None
            assert late.finish.timeline.decode_worker.worker_id == split.workers[2].worker_id

        streams = await run_all(split, prompts, expected, moment.on_tokens, drain, moment.reached)
        assert drained == [True]
        assert all(s.finish is not None and s.finish.timeline.attempts == 1 for s in streams)
