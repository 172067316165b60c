"""Prompts longer than a frame come in segments ahead of the Reserve or Prefill that uses them (④).

What is put together here is bounded: by the tokens of one prompt, by the number of unfinished prompts, and in time, for
a router may die between two segments. Whatever breaks a bound or leaves a hole is dropped, and the message that wanted
the prompt then fails for its length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from tandem.messages import PromptSegment
from tandem.types import AttemptKey, RequestKey

MAX_UNFINISHED_PROMPTS = 256


@dataclass(slots=True)
class _Unfinished:
    token_ids: list[int]
    touched_at: float


class PromptAssembler:
    """Segments by attempt until they are taken.

    max_tokens: of one prompt. max_age_s: after which a prompt without a new segment is dropped.
    """

    def __init__(self, max_tokens: int, max_age_s: float, clock: Callable[[], float], counters: Counter[str]) -> None:
        self._max_tokens = max_tokens
        self._max_age_s = max_age_s
        self._clock = clock
        self._counters = counters
        self._unfinished: dict[AttemptKey, _Unfinished] = {}

    def __len__(self) -> int:
        return len(self._unfinished)

    def add(self, router_incarnation: int, segment: PromptSegment) -> None:
        """Append a segment, or drop the whole prompt and count it."""
        attempt = AttemptKey(router_incarnation, segment.key)
        if attempt not in self._unfinished and segment.offset == 0:
            if len(self._unfinished) >= MAX_UNFINISHED_PROMPTS:
                self._counters["dropped_segments"] += 1
                return
            self._unfinished[attempt] = _Unfinished([], self._clock())
        prompt = self._unfinished.get(attempt)
        if (
            prompt is None
            or segment.offset != len(prompt.token_ids)
            or segment.offset + len(segment.token_ids) > self._max_tokens
        ):
            self._unfinished.pop(attempt, None)
            self._counters["dropped_segments"] += 1
            return
        prompt.token_ids.extend(segment.token_ids)
        prompt.touched_at = self._clock()

    def take(self, attempt: AttemptKey, last_token_ids: tuple[int, ...]) -> list[int]:
        """The segments of `attempt` and `last_token_ids` after them; forgets the segments."""
        prompt = self._unfinished.pop(attempt, None)
        return [*(prompt.token_ids if prompt else ()), *last_token_ids]

    def drop(self, attempt: AttemptKey) -> None:
        """Forget what has come of `attempt`; idempotent."""
        self._unfinished.pop(attempt, None)

    def keep_only(self, router_incarnation: int, live: Collection[RequestKey]) -> None:
        """Forget this router's prompts that are not among its `live` keys."""
        for attempt in list(self._unfinished):
            if attempt.router_incarnation == router_incarnation and attempt.key not in live:
                del self._unfinished[attempt]

    def sweep(self) -> None:
        """Forget prompts that have not grown for max_age_s."""
        now = self._clock()
        for attempt, prompt in list(self._unfinished.items()):
            if now - prompt.touched_at > self._max_age_s:
                del self._unfinished[attempt]
                self._counters["dropped_segments"] += 1
