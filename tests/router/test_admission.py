"""The line of those who wait, and how many requests may live."""

from __future__ import annotations

import asyncio

import pytest

from router.admission import Admission, Line
from tandem.errors import DuplicateRequest, Overloaded
from tests.support.virtual_time import run_virtually


def test_whoever_comes_while_nobody_waits_may_ask() -> None:
    line = Line()
    assert line.may_ask(3) and line.may_ask(4)


def test_only_the_first_in_line_may_ask_and_an_older_one_goes_before_it() -> None:
    async def play() -> None:
        line = Line()
        waits = [asyncio.create_task(line.wait(arrival)) for arrival in (5, 3, 9)]
        await asyncio.sleep(0)
        assert [line.may_ask(arrival) for arrival in (2, 3, 4, 5, 9)] == [True, True, False, False, False]
        line.leave(3)
        await asyncio.sleep(0)
        assert line.may_ask(5) and not line.may_ask(9)
        assert [wait.done() for wait in waits] == [True, False, False]
        line.leave(3)
        assert len(line) == 2
        for wait in waits:
            wait.cancel()

    run_virtually(play())


def test_news_of_load_wake_the_first_and_news_of_workers_wake_everyone() -> None:
    async def play() -> None:
        line = Line()

        def stand(arrival: int) -> asyncio.Task[None]:
            return asyncio.create_task(line.wait(arrival))

        first, second = stand(1), stand(2)
        await asyncio.sleep(0)
        line.wake(everyone=False)
        await asyncio.sleep(0.01)
        assert first.done() and not second.done()
        again = stand(1)
        await asyncio.sleep(0.01)
        assert not again.done(), "a wake-up counts once"
        line.wake(everyone=True)
        await asyncio.sleep(0.01)
        assert again.done() and second.done()
        assert len(line) == 2, "they stay until they leave"

    run_virtually(play())


def test_a_wait_ends_at_its_time() -> None:
    async def play() -> float:
        await Line().wait(1, until=7.5)
        return asyncio.get_running_loop().time()

    assert run_virtually(play()) == pytest.approx(7.5)


def test_a_cancelled_wait_keeps_its_place_until_it_leaves() -> None:
    async def play() -> None:
        line = Line()
        wait = asyncio.create_task(line.wait(1))
        await asyncio.sleep(0)
        wait.cancel()
        await asyncio.gather(wait, return_exceptions=True)
        assert not line.may_ask(2)
        line.leave(1)
        assert line.may_ask(2)

    run_virtually(play())


async def test_live_requests_are_bounded_and_their_ids_are_their_own() -> None:
    admission = Admission(Line(), max_queue=10, max_streams=2)
    with admission.admit("a") as first, admission.admit("b") as second:
        assert first < second
        with pytest.raises(DuplicateRequest, match="'a'"), admission.admit("a"):
            pass
        with pytest.raises(Overloaded, match="limit is 2") as refused, admission.admit("c"):
            pass
        assert refused.value.retry_after_s > 0
    with admission.admit("a") as third:
        assert third > second
    async with asyncio.timeout(10):
        await admission.wait_empty()


async def test_a_full_queue_refuses_newcomers() -> None:
    line = Line()
    waits = [asyncio.create_task(line.wait(arrival)) for arrival in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 requests wait"), Admission(line, max_queue=2, max_streams=9).admit("a"):
        pass
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


async def test_an_error_inside_ends_the_admission_too() -> None:
    admission = Admission(Line(), 1, 1)
    with pytest.raises(KeyError), admission.admit("a"):
        raise KeyError
    assert admission.num_live == 0
