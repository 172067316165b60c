"""The checker itself: a good stream passes, and each broken promise is found and named."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.stream_checker import Baseline, StreamChecker, StreamViolation, check_baseline, wait_for_baseline
from tandem.v1 import generation_pb2 as generation
from tandem.v1 import worker_pb2 as worker


def chunk(index: int, ids: list[int], text: str = "", **fields: Any) -> generation.GenerateResponse:
    return generation.GenerateResponse(chunk=generation.Chunk(index=index, token_ids=ids, text=text, **fields))


def finish(index: int, ids: list[int], text: str = "", completion_tokens: int = 0, **fields: Any) -> Any:
    usage = generation.Usage(prompt_tokens=5, completion_tokens=completion_tokens)
    fields = {"reason": generation.FINISH_REASON_LENGTH, "usage": usage, **fields}
    return generation.GenerateResponse(finish=generation.Finish(index=index, token_ids=ids, text=text, **fields))


GOOD = [chunk(0, [10, 11], "ab", seed=3), chunk(2, [12], "c"), finish(3, [13], "d", 4)]


def check(responses: list[generation.GenerateResponse], error: str = "", **arguments: Any) -> StreamChecker:
    checker = StreamChecker(**arguments)
    for response in responses:
        checker.accept(response)
    if error:
        checker.fail(error)
    checker.close()
    return checker


def test_a_good_stream_passes_every_check() -> None:
    checker = check(
        GOOD,
        max_tokens=4,
        num_prompt_tokens=5,
        references={0: [10, 11, 12, 13]},
        decode=lambda ids: "".join(chr(i + 87) for i in ids),
    )
    assert (checker.token_ids, checker.text) == ([10, 11, 12, 13], "abcd")
    assert checker.finish is not None
    assert checker.choices[0].seed == 3


def test_an_answer_may_end_in_a_typed_error_after_some_tokens() -> None:
    check(GOOD[:2], error="UNAVAILABLE", references={0: [10, 11, 12, 13]})


@pytest.mark.parametrize(
    ("responses", "error", "arguments", "broken"),
    [
        ([chunk(1, [10])], "", {}, "I1"),
        ([chunk(0, [10]), chunk(0, [10])], "", {}, "I1"),
        ([chunk(0, [10]), chunk(2, [11])], "", {}, "I1"),
        ([chunk(0, [10]), finish(0, [10], "", 2)], "", {}, "I1"),
        (GOOD[:2], "", {}, "I2: choice 0 ended silently"),
        ([], "", {}, "I2: choice 0 ended silently"),
        ([*GOOD, chunk(4, [14])], "", {}, "I2"),
        ([*GOOD, GOOD[-1]], "", {}, "I2"),
        (GOOD, "UNAVAILABLE", {}, "I2"),
        ([generation.GenerateResponse()], "", {}, "I2"),
        ([chunk(0, [10], choice=1)], "", {}, "I2"),
        ([finish(0, [10], "", 1, reason=0)], "", {}, "I2"),
        ([finish(0, [10], "", 2)], "", {}, "I3: usage says 2 tokens, 1 came"),
        (GOOD, "", {"max_tokens": 3}, "I3: 4 tokens delivered, max_tokens is 3"),
        (GOOD, "", {"max_tokens": 5}, "I3: finished by length after 4 of 5"),
        (GOOD, "", {"num_prompt_tokens": 6}, "I3: usage says 5 prompt tokens"),
        ([generation.GenerateResponse(finish=generation.Finish(reason=1))], "", {}, "I3: a finish without usage"),
        (GOOD, "", {"references": {0: [10, 11, 99, 13]}}, "I4: choice 0 differs .* from token 2"),
        (GOOD, "", {"references": {0: [10, 11, 12]}}, "I4"),
        (GOOD, "", {"references": {0: [10, 11, 12, 13, 14]}}, "I4: choice 0: 4 tokens, 5"),
        (GOOD, "", {"decode": lambda ids: "?" * len(ids)}, "I4: the text is 'ab'"),
        ([chunk(0, [10], seed=3), chunk(1, [11], seed=4)], "", {}, "I4: the seed changed"),
    ],
)
def test_each_broken_promise_is_found(
    responses: list[generation.GenerateResponse], error: str, arguments: dict[str, Any], broken: str
) -> None:
    with pytest.raises(StreamViolation, match=broken):
        check(responses, error, **arguments)


def test_nothing_may_follow_an_error() -> None:
    checker = StreamChecker()
    checker.fail("UNAVAILABLE")
    with pytest.raises(StreamViolation, match="I2"):
        checker.accept(chunk(0, [1]))
    with pytest.raises(StreamViolation, match="I2"):
        checker.fail("again")


# ---- I5


def stats(**changes: int) -> worker.GetStatsResponse:
    load_fields = {"num_total_blocks": 8, "num_free_blocks": 8}
    fields: dict[str, Any] = {"worker_id": "decode-1", "num_memfds": 1, "num_fds": 20, "num_tasks": 4}
    for name, value in changes.items():
        (load_fields if name in worker.LoadReport.DESCRIPTOR.fields_by_name else fields)[name] = value
    return worker.GetStatsResponse(load=worker.LoadReport(**load_fields), **fields)


LEFT_OVER = [
    ({"num_free_blocks": 7}, "1 of 8 blocks not free"),
    ({"num_attempts": 2}, "2 attempts"),
    ({"num_leases": 1}, "1 leases"),
    ({"num_copies_in_flight": 1}, "1 copies in flight"),
    ({"num_running": 1}, "1 running rows"),
    ({"num_waiting": 1}, "1 waiting rows"),
    ({"queued_prefill_tokens": 9}, "9 queued prefill tokens"),
]


@pytest.mark.parametrize(
    ("changes", "found"),
    [*LEFT_OVER, ({"num_memfds": 2}, "2 memfds"), ({"num_fds": 21}, "21 descriptors"), ({"num_tasks": 5}, "5 tasks")],
)
def test_each_left_over_is_found_and_named(changes: dict[str, int], found: str) -> None:
    baseline = Baseline.of(stats())
    check_baseline(baseline, stats())
    with pytest.raises(StreamViolation, match=f"I5: decode-1: {found}"):
        check_baseline(baseline, stats(**changes))


def test_what_may_stay_by_design_can_be_allowed() -> None:
    check_baseline(Baseline.of(stats()), stats(num_fds=22, num_tasks=5), new_fds=2, new_tasks=1)


@pytest.mark.parametrize(("changes", "found"), LEFT_OVER)
def test_a_busy_worker_is_no_baseline(changes: dict[str, int], found: str) -> None:
    with pytest.raises(StreamViolation, match=found):
        Baseline.of(stats(**changes))


async def test_waiting_ends_as_soon_as_the_worker_is_back() -> None:
    answers = [stats(num_attempts=1), stats(num_free_blocks=3), stats(), stats(num_attempts=1)]

    async def get_stats() -> worker.GetStatsResponse:
        return answers.pop(0)

    await wait_for_baseline(Baseline.of(stats()), get_stats, poll_s=0)
    assert len(answers) == 1


async def test_waiting_for_a_worker_that_never_comes_back_ends_with_what_is_left_over() -> None:
    async def get_stats() -> worker.GetStatsResponse:
        return stats(num_leases=1)

    with pytest.raises(StreamViolation, match="1 leases"):
        await wait_for_baseline(Baseline.of(stats()), get_stats, timeout_s=0, poll_s=0)
