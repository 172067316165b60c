"""The step loop with fake runners: batching, order of events, removal at the boundary, failure."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from engine import step_loop
from engine.fake import FakeRunner
from engine.row import Row
from engine.runner import Runner
from engine.scheduler import Batch
from engine.step_loop import UNKNOWN_STEP_S, RowOutput, StepLoop, StepResult, estimate_step_s
from tandem.config import EngineConfig
from tandem.layout import KVLayout
from tandem.types import AttemptKey, FinishReason, Sampling
from tests.support.engine_runs import attempt_key

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype="float32")
NUM_BLOCKS = 512
PATIENCE_S = 20.0


class GatedRunner:
    """Each step waits for `gate`; always samples token 7."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.threads: set[int] = set()

    def execute(self, batch: Batch) -> list[int | None]:
        self.threads.add(threading.get_ident())
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        return [7 if s.samples else None for s in batch.rows]


class BrokenRunner(GatedRunner):
    def execute(self, batch: Batch) -> list[int | None]:
        super().execute(batch)
        raise FloatingPointError("the device is gone")


def fake_runner() -> FakeRunner:
    return FakeRunner(memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_nbytes)), NUM_BLOCKS, LAYOUT)


class Stage:
    """A loop, what it published, and a way to wait for it."""

    def __init__(self, runner: Runner, **config: int) -> None:
        self.results: list[StepResult] = []
        self.published = asyncio.Event()
        self.loop = StepLoop(runner, EngineConfig(**config), self._publish)
        self._next_block = 0

    def _publish(self, result: StepResult) -> None:
        self.results.append(result)
        self.published.set()

    def row(self, number: int, num_prompt_tokens: int, max_tokens: int, **changes: bool) -> Row:
        num_blocks = LAYOUT.num_blocks_for(num_prompt_tokens + max_tokens)
        table = list(range(self._next_block, self._next_block + num_blocks))
        self._next_block += num_blocks
        prompt = [(number * 31 + i) % 250 for i in range(num_prompt_tokens)]
        return Row(attempt_key(number), prompt, num_prompt_tokens, Sampling(max_tokens), table, **changes)

    def outputs(self, number: int) -> list[RowOutput]:
        return [o for r in self.results for o in r.outputs if o.key == attempt_key(number)]

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.published.clear()
                await self.published.wait()

    async def wait_until_empty(self) -> None:
        await self.wait_for(lambda: self.loop.num_running + self.loop.num_waiting == 0)


@contextlib.asynccontextmanager
async def running(loop: StepLoop) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(loop.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, FloatingPointError):
            await task


async def entered(runner: GatedRunner) -> None:
    assert await asyncio.to_thread(runner.entered.wait, PATIENCE_S)


async def test_rows_are_batched_as_they_come_and_leave_as_they_end() -> None:
    stage = Stage(fake_runner(), chunk_size=16)
    rows = [stage.row(n, 3 + n, 4 + 2 * n) for n in range(3)]
    async with running(stage.loop):
        stage.loop.add(rows[0])
        await stage.wait_for(lambda: len(stage.outputs(0)) >= 2)
        for row in rows[1:]:
            stage.loop.add(row)
        await stage.wait_until_empty()
    assert any(len(r.outputs) > 1 for r in stage.results)
    for n, row in enumerate(rows):
        outputs = stage.outputs(n)
        assert [o.token_id for o in outputs] == row.token_ids[row.num_prompt_tokens :]
        assert [o.index for o in outputs] == list(range(4 + 2 * n))
        assert [o.finish for o in outputs] == [None] * (3 + 2 * n) + [FinishReason.LENGTH]
        assert [o.started for o in outputs] == [True] + [False] * (3 + 2 * n)
        alone = Stage(fake_runner(), chunk_size=16)
        again = alone.row(n, 3 + n, 4 + 2 * n)
        async with running(alone.loop):
            alone.loop.add(again)
            await alone.wait_until_empty()
        assert again.token_ids == row.token_ids


async def test_a_long_prompt_is_computed_in_chunks_and_decoding_goes_on_beside_it() -> None:
    stage = Stage(fake_runner(), chunk_size=8)
    async with running(stage.loop):
        stage.loop.add(stage.row(0, 4, 12))
        await stage.wait_for(lambda: len(stage.outputs(0)) >= 2)
        stage.loop.add(stage.row(1, 30, 1))
        assert stage.loop.queued_prefill_tokens == 30
        await stage.wait_until_empty()
    chunks = stage.outputs(1)
    assert [o.num_computed_tokens for o in chunks] == [7, 14, 21, 28, 30]
    assert [o.token_id is None for o in chunks] == [True] * 4 + [False]
    assert [o.index for o in chunks] == [None] * 4 + [0]
    with_chunk = [r for r in stage.results if any(o.key == attempt_key(1) for o in r.outputs)]
    assert all(len(r.outputs) == 2 for r in with_chunk)
    assert stage.loop.num_prefill_tokens == 34
    assert stage.loop.num_decode_tokens == 11
    assert stage.loop.queued_prefill_tokens == 0


async def test_eight_rows_of_64_tokens_take_at_most_80_decode_calls() -> None:
    stage = Stage(fake_runner())
    async with running(stage.loop):
        for n in range(8):
            stage.loop.add(stage.row(n, 5 + 9 * n, 64))
        await stage.wait_until_empty()
    assert all(len(stage.outputs(n)) == 64 for n in range(8))
    assert stage.loop.num_decode_calls <= 80
    assert stage.loop.num_decode_calls <= stage.loop.num_forward_calls == len(stage.results)


async def test_a_row_that_only_prefills_leaves_with_its_first_token() -> None:
    stage = Stage(fake_runner(), chunk_size=8)
    row = stage.row(0, 20, 50, prefill_only=True)
    async with running(stage.loop):
        stage.loop.add(row)
        await stage.wait_until_empty()
    assert len(row.token_ids) == 21
    assert [o.finish for o in stage.outputs(0)] == [None] * 3
    assert stage.loop.num_decode_tokens == stage.loop.num_decode_calls == 0


async def test_a_row_without_finite_logits_fails_alone() -> None:
    class PoisonedRunner(FakeRunner):
        def execute(self, batch: Batch) -> list[int | None]:
            tokens = super().execute(batch)
            return [None if s.row.key == attempt_key(0) else t for s, t in zip(batch.rows, tokens, strict=True)]

    runner = PoisonedRunner(memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_nbytes)), NUM_BLOCKS, LAYOUT)
    stage = Stage(runner, chunk_size=8)
    async with running(stage.loop):
        for number in range(2):
            stage.loop.add(stage.row(number, 12, 4))
        await stage.wait_until_empty()
    assert [o.failed for o in stage.outputs(0)] == [False, True]
    assert [o.token_id is None for o in stage.outputs(0)] == [True, True]
    assert not any(o.failed for o in stage.outputs(1)) and stage.outputs(1)[-1].finish is FinishReason.LENGTH


async def test_a_committed_row_costs_no_prefill() -> None:
    stage = Stage(fake_runner())
    row = stage.row(0, 6, 8)
    row.token_ids.append(9)
    row.num_computed_tokens = 6
    async with running(stage.loop):
        stage.loop.add(row)
        await stage.wait_until_empty()
    assert stage.loop.num_prefill_tokens == 0
    assert [o.index for o in stage.outputs(0)] == list(range(1, 8))


async def test_a_stop_id_ends_a_row() -> None:
    stage = Stage(GatedRunner())
    assert isinstance(stage.loop._runner, GatedRunner)
    stage.loop._runner.gate.set()
    row = stage.row(0, 3, 9)
    row.sampling = Sampling(9, stop_token_ids=(7,))
    async with running(stage.loop):
        stage.loop.add(row)
        await stage.wait_until_empty()
    assert [(o.token_id, o.finish) for o in stage.outputs(0)] == [(7, FinishReason.STOP)]


async def test_removing_a_row_of_a_running_step_calls_back_after_the_step() -> None:
    runner = GatedRunner()
    stage = Stage(runner)
    calls: list[str] = []
    async with running(stage.loop):
        stage.loop.add(stage.row(0, 3, 9))
        stage.loop.add(stage.row(1, 3, 2))
        await entered(runner)
        stage.loop.add(stage.row(2, 3, 2))
        stage.loop.remove(attempt_key(0), lambda: calls.append("in the step"))
        stage.loop.remove(attempt_key(0), lambda: calls.append("once more"))
        stage.loop.remove(attempt_key(2), lambda: calls.append("waiting"))
        stage.loop.remove(attempt_key(99), lambda: calls.append("unknown"))
        assert calls == ["waiting", "unknown"]
        runner.gate.set()
        await stage.wait_until_empty()
        assert calls == ["waiting", "unknown", "in the step", "once more"]
        stage.loop.remove(attempt_key(0), lambda: calls.append("late"))
        assert calls[-1] == "late"
    assert stage.outputs(0) == stage.outputs(2) == []
    assert len(stage.outputs(1)) == 2


async def test_a_key_may_come_back_while_its_old_step_still_runs() -> None:
    runner = GatedRunner()
    stage = Stage(runner)
    async with running(stage.loop):
        old = stage.row(0, 3, 9)
        stage.loop.add(old)
        await entered(runner)
        stage.loop.remove(attempt_key(0), lambda: None)
        stage.loop.add(stage.row(0, 5, 2))
        runner.gate.set()
        await stage.wait_until_empty()
    assert len(old.token_ids) == 3
    assert [o.num_computed_tokens for o in stage.outputs(0)] == [5, 6]
    assert [o.started for o in stage.outputs(0)] == [True, False]


async def test_rows_may_be_removed_from_within_publish() -> None:
    stage = Stage(fake_runner())
    freed: list[AttemptKey] = []

    def publish(result: StepResult) -> None:
        for output in result.outputs:
            if output.index == 2:
                stage.loop.remove(output.key, lambda key=output.key: freed.append(key))  # type: ignore[misc]
        stage._publish(result)

    stage.loop._publish = publish
    async with running(stage.loop):
        for n in range(2):
            stage.loop.add(stage.row(n, 3, 50))
        await stage.wait_until_empty()
    assert sorted(map(str, freed)) == sorted(str(attempt_key(n)) for n in range(2))
    assert [len(stage.outputs(n)) for n in range(2)] == [3, 3]


async def test_what_the_runner_raises_comes_out_of_run_and_removed_rows_are_let_go() -> None:
    runner = BrokenRunner()
    stage = Stage(runner)
    calls: list[str] = []
    async with running(stage.loop) as task:
        stage.loop.add(stage.row(0, 3, 9))
        await entered(runner)
        stage.loop.remove(attempt_key(0), lambda: calls.append("freed"))
        runner.gate.set()
        with pytest.raises(FloatingPointError, match="the device is gone"):
            await asyncio.wait_for(asyncio.shield(task), PATIENCE_S)
    assert calls == ["freed"]
    assert stage.results == []


async def test_stopping_waits_for_the_running_step_before_anything_is_freed() -> None:
    runner = GatedRunner()
    stage = Stage(runner)
    calls: list[str] = []
    async with running(stage.loop) as task:
        stage.loop.add(stage.row(0, 3, 9))
        await entered(runner)
        stage.loop.remove(attempt_key(0), lambda: calls.append("freed"))
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()
        assert calls == []
        runner.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(task), PATIENCE_S)
        assert calls == ["freed"]


async def test_steps_run_in_one_thread_that_is_not_the_event_loop() -> None:
    runner = GatedRunner()
    runner.gate.set()
    stage = Stage(runner)
    async with running(stage.loop):
        stage.loop.add(stage.row(0, 3, 9))
        await stage.wait_until_empty()
    assert len(runner.threads) == 1
    assert threading.get_ident() not in runner.threads


async def test_progress_rises_while_idle_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop, "IDLE_TICK_S", 0.001)
    stage = Stage(fake_runner())
    async with running(stage.loop):
        async with asyncio.timeout(PATIENCE_S):
            while stage.loop.progress < 5:  # noqa: ASYNC110 - nothing announces an idle tick
                await asyncio.sleep(0.002)
        before = stage.loop.progress
        stage.loop.add(stage.row(0, 3, 6))
        await stage.wait_until_empty()
        assert stage.loop.progress >= before + 6
    assert stage.loop.num_forward_calls == 6


async def test_progress_stands_still_while_a_step_hangs_and_the_step_is_announced() -> None:
    runner = GatedRunner()
    stage = Stage(runner)
    async with running(stage.loop):
        assert stage.loop.announced_step_s == 0.0
        stage.loop.add(stage.row(0, 3, 3))
        await entered(runner)
        assert stage.loop.announced_step_s == UNKNOWN_STEP_S
        assert stage.loop.progress <= 1  # the tick that woke it
        assert stage.loop.num_running == 0
        assert stage.loop.num_waiting == 1
        runner.gate.set()
        await stage.wait_until_empty()
        runner.gate.clear()
        runner.entered.clear()
        stage.loop.add(stage.row(1, 3, 3))
        await entered(runner)
        # a step of this kind has been timed: an estimate takes the place of the bound
        slowest = max(r.duration_s for r in stage.results)
        assert 0 < stage.loop.announced_step_s <= slowest * 1.05 + 0.1
        runner.gate.set()
        await stage.wait_until_empty()


@pytest.mark.parametrize(
    ("slowest_s", "num_tokens", "expected_s"),
    [
        ({}, 512, UNKNOWN_STEP_S),
        ({10: 3.0}, 512, 3.0),
        ({10: 3.0}, 1023, 3.0),
        ({6: 0.25, 1: 0.05}, 512, 4.0),  # 16 times the tokens of the nearest smaller class
        ({10: 3.0, 1: 0.05}, 1, 0.05),  # a slow chunk does not hide a decode step that hangs
        ({10: 3.0, 8: 1.0}, 1, 1.0),
    ],
)
def test_a_step_is_announced_by_its_size(slowest_s: dict[int, float], num_tokens: int, expected_s: float) -> None:
    assert estimate_step_s(slowest_s, num_tokens) == expected_s


async def test_the_first_long_chunk_after_short_ones_is_announced_as_long() -> None:
    runner = GatedRunner()
    stage = Stage(runner, chunk_size=512)
    async with running(stage.loop):
        runner.gate.set()
        stage.loop.add(stage.row(0, 4, 1))
        await stage.wait_until_empty()
        short_s = stage.results[0].duration_s
        runner.gate.clear()
        runner.entered.clear()
        stage.loop.add(stage.row(1, 512, 1))
        await entered(runner)
        assert stage.loop.announced_step_s == pytest.approx(128 * short_s)
        runner.gate.set()
        await stage.wait_until_empty()


async def test_no_more_rows_in_a_step_than_max_num_seqs() -> None:
    stage = Stage(fake_runner(), max_num_seqs=2)
    async with running(stage.loop):
        for n in range(5):
            stage.loop.add(stage.row(n, 3, 4))
        await stage.wait_until_empty()
    assert max(len(r.outputs) for r in stage.results) == 2
    assert all(len(stage.outputs(n)) == 4 for n in range(5))
