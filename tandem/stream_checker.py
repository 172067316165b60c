"""Asserts the stream invariants of PROMISES section 1. Used by every end-to-end test and by the bench client alike.

    checker = StreamChecker(max_tokens=64)
    try:
        async for response in stream:
            checker.accept(response)
    except grpc.aio.AioRpcError as exc:
        checker.fail(exc.details())
    checker.close()

I1 to I4 are checked per stream by `StreamChecker`, I5 over the workers' counters by `check_baseline`. I6 cannot be seen
in a stream by itself: tests fill granted blocks with NaN (`engine.nan_fill`), so that KV which was never committed
breaks I4 or is counted in `non_finite_logits`, which `check_baseline` does not allow either.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.v1 import generation_pb2 as generation
from tandem.v1 import worker_pb2 as worker


class StreamViolation(AssertionError):
    """A stream or a worker broke a promise; the message begins with its number (I1 ... I6)."""


@dataclass(slots=True)
class ChoiceStream:
    """What a client holds of one choice so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    seed: int | None = None
    finish: generation.Finish | None = None


class StreamChecker:
    """Follows one stream of GenerateResponse, of `num_choices` choices.

    max_tokens: the request's limit. num_prompt_tokens: checked against usage. references: choice -> the ids of an
    undisturbed run, to be equalled (by an aborted stream: begun). decode: ids to text, if at any time the text so far
    must be that of the ids so far (not for requests with stop strings, nor with stop tokens that have text). Every
    argument may be left out.
    """

    def __init__(
        self,
        *,
        max_tokens: int | None = None,
        num_choices: int = 1,
        num_prompt_tokens: int | None = None,
        references: Mapping[int, Sequence[int]] | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.choices = [ChoiceStream() for _ in range(num_choices)]
        self.error: str | None = None
        self._max_tokens = max_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._references = references or {}
        self._decode = decode

    @property
    def token_ids(self) -> list[int]:
        """Ids of choice 0."""
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        """Text of choice 0."""
        return self.choices[0].text

    @property
    def finish(self) -> generation.Finish | None:
        """The finish of choice 0."""
        return self.choices[0].finish

    def accept(self, response: generation.GenerateResponse) -> None:
        """Check one response. Raises StreamViolation."""
        _require(self.error is None, "I2", f"a response after the error {self.error!r}")
        kind = response.WhichOneof("event")
        if kind == "chunk":
            self._extend(response.chunk)
            choice = self.choices[response.chunk.choice]
            if response.chunk.HasField("seed"):
                _require(choice.seed in (None, response.chunk.seed), "I4", "the seed changed")
                choice.seed = response.chunk.seed
        elif kind == "finish":
            self._extend(response.finish)
            self._end(response.finish)
        else:
            raise StreamViolation("I2: a response without an event")

    def fail(self, error: str) -> None:
        """Note that the stream ended in a typed error, which is a terminal event too."""
        _require(self.error is None, "I2", f"a second error: {error!r} after {self.error!r}")
        _require(any(c.finish is None for c in self.choices), "I2", f"the error {error!r} after every choice finished")
        self.error = error

    def close(self) -> None:
        """Check that the stream has ended as it must. Call it when the stream is over. Raises StreamViolation."""
        for number, choice in enumerate(self.choices):
            ended = choice.finish is not None or self.error is not None
            _require(ended, "I2", f"choice {number} ended silently after {len(choice.token_ids)} tokens")
            if number in self._references and choice.finish is not None:
                count, expected = len(choice.token_ids), len(self._references[number])
                _require(count == expected, "I4", f"choice {number}: {count} tokens, {expected} in the undisturbed run")

    def _extend(self, event: generation.Chunk | generation.Finish) -> None:
        _require(event.choice < len(self.choices), "I2", f"choice {event.choice} was not asked for")
        choice = self.choices[event.choice]
        _require(choice.finish is None, "I2", f"an event of choice {event.choice} after its finish")
        if event.token_ids or isinstance(event, generation.Chunk):
            wanted = len(choice.token_ids)
            _require(event.index == wanted, "I1", f"choice {event.choice}: index {event.index}, expected {wanted}")
        self._check_reference(event)
        choice.token_ids.extend(event.token_ids)
        choice.text += event.text
        count = len(choice.token_ids)
        if self._max_tokens is not None:
            _require(count <= self._max_tokens, "I3", f"{count} tokens delivered, max_tokens is {self._max_tokens}")
        if self._decode is not None:
            expected = self._decode(choice.token_ids)
            _require(choice.text == expected, "I4", f"the text is {choice.text!r}, that of the ids {expected!r}")

    def _check_reference(self, event: generation.Chunk | generation.Finish) -> None:
        if event.choice not in self._references:
            return
        begin = len(self.choices[event.choice].token_ids)
        found = list(event.token_ids)
        expected = list(self._references[event.choice][begin : begin + len(found)])
        _require(
            found == expected,
            "I4",
            f"choice {event.choice} differs from the undisturbed run from token {begin} on: {found}, not {expected}",
        )

    def _end(self, finish: generation.Finish) -> None:
        choice = self.choices[finish.choice]
        count = len(choice.token_ids)
        _require(finish.reason != generation.FINISH_REASON_UNSPECIFIED, "I2", "a finish without a reason")
        _require(finish.HasField("usage"), "I3", "a finish without usage")
        usage = finish.usage
        _require(usage.completion_tokens == count, "I3", f"usage says {usage.completion_tokens} tokens, {count} came")
        if self._num_prompt_tokens is not None:
            told, known = usage.prompt_tokens, self._num_prompt_tokens
            _require(told == known, "I3", f"usage says {told} prompt tokens, the prompt has {known}")
        if finish.reason == generation.FINISH_REASON_LENGTH and self._max_tokens is not None:
            _require(count == self._max_tokens, "I3", f"finished by length after {count} of {self._max_tokens} tokens")
        choice.finish = finish


@dataclass(frozen=True, slots=True)
class Baseline:
    """A worker's levels when nothing runs, to come back to: what I5 compares with."""

    worker_id: str
    num_memfds: int
    num_fds: int
    num_tasks: int

    @classmethod
    def of(cls, stats: worker.GetStatsResponse) -> Baseline:
        """Take the levels of an idle worker. Raises StreamViolation if it is not idle."""
        problems = _busy(stats)
        _require(not problems, "I5", f"{stats.worker_id} is not idle: {'; '.join(problems)}")
        return cls(stats.worker_id, stats.num_memfds, stats.num_fds, stats.num_tasks)


def check_baseline(baseline: Baseline, stats: worker.GetStatsResponse, *, new_fds: int = 0, new_tasks: int = 0) -> None:
    """Check that a worker holds no more than `baseline`; raises StreamViolation (I5) that lists everything left over.

    It does not allow rows without finite logits either (I6): in tests they have read KV that was never committed.
    new_fds, new_tasks: allowance for what may stay by design, such as the connection to a peer first met in between.
    """
    num_not_finite = stats.counters.get("non_finite_logits", 0)
    _require(num_not_finite == 0, "I6", f"{stats.worker_id}: {num_not_finite} rows without finite logits")
    problems = _busy(stats)
    for name, before, after in (
        ("memfds", baseline.num_memfds, stats.num_memfds),
        ("descriptors", baseline.num_fds + new_fds, stats.num_fds),
        ("tasks", baseline.num_tasks + new_tasks, stats.num_tasks),
    ):
        if after > before:
            problems.append(f"{after} {name}, {before} at most")
    _require(not problems, "I5", f"{stats.worker_id}: {'; '.join(problems)}")


async def wait_for_baseline(
    baseline: Baseline,
    get_stats: Callable[[], Awaitable[worker.GetStatsResponse]],
    *,
    timeout_s: float = 15.0,
    poll_s: float = 0.05,
    new_fds: int = 0,
    new_tasks: int = 0,
) -> None:
    """Ask until `check_baseline` passes; raises its StreamViolation if it still fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        stats = await get_stats()
        try:
            return check_baseline(baseline, stats, new_fds=new_fds, new_tasks=new_tasks)
        except StreamViolation:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(poll_s)


def _busy(stats: worker.GetStatsResponse) -> list[str]:
    load = stats.load
    problems = []
    if load.num_free_blocks != load.num_total_blocks:
        problems.append(f"{load.num_total_blocks - load.num_free_blocks} of {load.num_total_blocks} blocks not free")
    levels = {
        "attempts": stats.num_attempts,
        "leases": stats.num_leases,
        "copies in flight": stats.num_copies_in_flight,
        "running rows": load.num_running,
        "waiting rows": load.num_waiting,
        "queued prefill tokens": load.queued_prefill_tokens,
    }
    return problems + [f"{level} {name}" for name, level in levels.items() if level]


def _require(holds: bool, invariant: str, message: str) -> None:
    if not holds:
        raise StreamViolation(f"{invariant}: {message}")
