"""The step loop, once for both roles: schedule -> execute -> book -> publish (⑤ and ⑧).

A coroutine on the worker's event loop. Only `runner.execute` leaves it, for one dedicated thread; so rows are added
and removed by plain calls, and a row in a running batch is let go when the step has returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine.row import Row
from engine.runner import Runner
from engine.scheduler import Batch, schedule
from tandem.config import EngineConfig
from tandem.types import AttemptKey, FinishReason

IDLE_TICK_S = 0.5
# before any step has been timed: the first one also warms the allocator up
UNKNOWN_STEP_S = 10.0


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What a step did for one row.

    token_id and index (in the answer, over all attempts) are None for a chunk that did not end the prompt.
    finish: why the answer ended with this token. started: this was the row's first step. failed: a token was due, but
    the row's logits are not finite; it has left the loop.
    """

    key: AttemptKey
    index: int | None
    token_id: int | None
    num_computed_tokens: int
    finish: FinishReason | None
    started: bool
    failed: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step's outputs in batch order, and how long it took."""

    outputs: list[RowOutput]
    duration_s: float


def estimate_step_s(slowest_s: Mapping[int, float], num_tokens: int) -> float:
    """How long a step of `num_tokens` may take, from the slowest recent steps by size class, `num_tokens.bit_length()`.

    A class that was never timed is judged by the next smaller one, for a step costs at most in proportion to its
    tokens; without one by the next larger; without any it is UNKNOWN_STEP_S. Too low an estimate would have the router
    take the first long chunk after short prompts for a hang.
    """
    size = num_tokens.bit_length()
    smaller = [s for s in slowest_s if s <= size]
    if smaller:
        return slowest_s[max(smaller)] * 2.0 ** (size - max(smaller))
    return slowest_s[min(slowest_s)] if slowest_s else UNKNOWN_STEP_S


class StepLoop:
    """Continuous batching over whatever rows are added. `publish` is called on the event loop after every step."""

    def __init__(self, runner: Runner, config: EngineConfig, publish: Callable[[StepResult], None]) -> None:
        self._runner = runner
        self._config = config
        self._publish = publish
        self._rows: dict[AttemptKey, Row] = {}  # in order of arrival
        self._started: set[AttemptKey] = set()
        self._running: frozenset[AttemptKey] = frozenset()
        self._after_step: list[Callable[[], None]] = []
        self._wake = asyncio.Event()
        self._slowest_s: dict[int, float] = {}  # recent slowest step by size class
        self.progress = 0
        self.announced_step_s = 0.0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.num_forward_calls = 0
        self.num_decode_calls = 0

    def add(self, row: Row) -> None:
        """Have `row` computed from the next step on."""
        assert row.key not in self._rows, f"{row.key} is in the loop already"
        self._rows[row.key] = row
        self._wake.set()

    def remove(self, key: AttemptKey, then: Callable[[], None]) -> None:
        """Compute nothing more for `key`; call `then` once no running step uses its blocks. Idempotent."""
        self._rows.pop(key, None)
        self._started.discard(key)
        if key in self._running:
            self._after_step.append(then)
        else:
            then()

    @property
    def num_running(self) -> int:
        """Rows that have had a step."""
        return len(self._started)

    @property
    def num_waiting(self) -> int:
        """Rows that have not."""
        return len(self._rows) - len(self._started)

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens that are in the loop and not yet computed."""
        return sum(row.num_uncomputed_tokens for row in self._rows.values() if not row.decoding)

    async def run(self) -> None:
        """Step until cancelled. Raises what the runner raises."""
        loop = asyncio.get_running_loop()
        executor = ThreadPoolExecutor(1, thread_name_prefix="step")
        try:
            while True:
                batch = schedule(
                    self._rows.values(), chunk_size=self._config.chunk_size, max_num_seqs=self._config.max_num_seqs
                )
                if batch is None:
                    await self._idle()
                    continue
                self._running = frozenset(s.row.key for s in batch.rows)
                self.announced_step_s = estimate_step_s(self._slowest_s, batch.num_tokens)
                started = time.monotonic()
                token_ids = await loop.run_in_executor(executor, self._runner.execute, batch)
                duration_s = time.monotonic() - started
                self._learn(batch.num_tokens, duration_s)
                result = self._book(batch, token_ids, duration_s)
                self._running = frozenset()
                self._publish(result)
                self._let_go()
        finally:
            # a step that is still running must return before anyone may free the blocks it writes
            await asyncio.shield(loop.run_in_executor(None, executor.shutdown))
            self._running = frozenset()
            self._let_go()

    async def _idle(self) -> None:
        self.announced_step_s = 0.0
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IDLE_TICK_S):
                await self._wake.wait()
        self.progress += 1

    def _book(self, batch: Batch, token_ids: list[int | None], duration_s: float) -> StepResult:
        """Advance the rows by what was computed; rows that ended leave the loop."""
        self.progress += 1
        self.num_forward_calls += 1
        self.num_decode_calls += batch.num_decode_rows > 0
        outputs: list[RowOutput] = []
        for i, (scheduled, token_id) in enumerate(zip(batch.rows, token_ids, strict=True)):
            row = scheduled.row
            if i < batch.num_decode_rows:
                self.num_decode_tokens += 1
            else:
                self.num_prefill_tokens += scheduled.num_tokens
            if self._rows.get(row.key) is not row:
                continue  # removed while the step ran
            row.num_computed_tokens = scheduled.end
            failed = scheduled.samples and token_id is None
            index = finish = None
            if token_id is not None:
                index = row.num_output_tokens
                row.token_ids.append(token_id)
                finish = row.finish_reason()
            started = row.key not in self._started
            self._started.add(row.key)
            if failed or finish is not None or (token_id is not None and row.prefill_only):
                del self._rows[row.key]
                self._started.discard(row.key)
            outputs.append(RowOutput(row.key, index, token_id, row.num_computed_tokens, finish, started, failed))
        return StepResult(outputs, duration_s)

    def _let_go(self) -> None:
        waiting, self._after_step = self._after_step, []
        for then in waiting:
            then()

    def _learn(self, num_tokens: int, duration_s: float) -> None:
        """Remember the slowest recent step of the size class; an old peak fades by a twentieth a step."""
        size = num_tokens.bit_length()
        self._slowest_s[size] = max(duration_s, self._slowest_s.get(size, 0.0) * 0.95)
