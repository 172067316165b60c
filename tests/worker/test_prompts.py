from __future__ import annotations

from collections import Counter

from tandem.messages import PromptSegment
from tandem.types import AttemptKey
from tests.support.fake_parts import FakeClock, request_key
from worker.prompts import MAX_UNFINISHED_PROMPTS, PromptAssembler

ROUTER = 11
KEY = request_key()
ATTEMPT = AttemptKey(ROUTER, KEY)


def assembler(max_tokens: int = 100) -> tuple[PromptAssembler, FakeClock, Counter[str]]:
    clock, counters = FakeClock(), Counter[str]()
    return PromptAssembler(max_tokens, 10.0, clock, counters), clock, counters


def test_segments_and_the_last_piece_make_the_prompt_once() -> None:
    prompts, _, _ = assembler()
    prompts.add(ROUTER, PromptSegment(KEY, 0, (1, 2)))
    prompts.add(ROUTER, PromptSegment(KEY, 2, (3,)))
    assert prompts.take(ATTEMPT, (4,)) == [1, 2, 3, 4]
    assert prompts.take(ATTEMPT, (4,)) == [4]


def test_a_hole_a_repetition_and_too_much_drop_the_prompt_and_are_counted() -> None:
    prompts, _, counters = assembler(max_tokens=4)
    for second in (PromptSegment(KEY, 3, (9,)), PromptSegment(KEY, 0, (1, 2)), PromptSegment(KEY, 2, (3, 4, 5))):
        prompts.add(ROUTER, PromptSegment(KEY, 0, (1, 2)))
        prompts.add(ROUTER, second)
        assert len(prompts) == 0
    assert counters["dropped_segments"] == 3


def test_the_number_of_unfinished_prompts_is_bounded() -> None:
    prompts, _, counters = assembler()
    for i in range(MAX_UNFINISHED_PROMPTS + 5):
        prompts.add(ROUTER, PromptSegment(request_key(f"r{i}"), 0, (1,)))
    assert len(prompts) == MAX_UNFINISHED_PROMPTS and counters["dropped_segments"] == 5


def test_a_prompt_that_nobody_finishes_is_swept() -> None:
    prompts, clock, _ = assembler()
    prompts.add(ROUTER, PromptSegment(KEY, 0, (1,)))
    clock.now += 9
    prompts.add(ROUTER, PromptSegment(KEY, 1, (2,)))
    clock.now += 9
    prompts.sweep()
    assert len(prompts) == 1
    clock.now += 2
    prompts.sweep()
    assert len(prompts) == 0


def test_resync_keeps_only_live_keys_of_that_router() -> None:
    prompts, _, _ = assembler()
    for router, name in ((ROUTER, "live"), (ROUTER, "gone"), (99, "gone")):
        prompts.add(router, PromptSegment(request_key(name), 0, (1,)))
    prompts.keep_only(ROUTER, {request_key("live")})
    assert len(prompts) == 2
