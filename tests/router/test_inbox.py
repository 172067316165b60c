"""Messages of an attempt between a session's reader, which never waits, and its lifecycle."""

from __future__ import annotations

import asyncio

from router import inbox as module
from router.inbox import Event, Inbox, Lost, Tokens
from tandem.messages import Committed, Finished
from tandem.types import FinishReason, RequestKey

KEY = RequestKey("r", 0, 1)
D = "decode-0"


async def drained(inbox: Inbox) -> list[tuple[str, Event]]:
    return [await inbox.next() for _ in range(len(inbox))]


async def test_tokens_that_nobody_has_taken_join() -> None:
    inbox = Inbox()
    for index in range(1000):
        assert inbox.put(D, Tokens(index, (index,)))
    assert len(inbox) == 1
    assert await drained(inbox) == [(D, Tokens(0, tuple(range(1000))))]


async def test_order_is_kept_around_control_events() -> None:
    inbox = Inbox()
    committed, finished = Committed(KEY), Finished(KEY, FinishReason.STOP, 3)
    for event in (committed, Tokens(0, (7,)), Tokens(1, (8, 9)), finished, Tokens(3, (1,))):
        assert inbox.put(D, event)
    assert await drained(inbox) == [(D, committed), (D, Tokens(0, (7, 8, 9))), (D, finished), (D, Tokens(3, (1,)))]


async def test_tokens_of_another_worker_or_with_a_hole_stay_apart() -> None:
    inbox = Inbox()
    for source, tokens in ((D, Tokens(0, (1,))), (D, Tokens(2, (3,))), ("decode-1", Tokens(3, (4,)))):
        assert inbox.put(source, tokens)
    assert len(inbox) == 3


async def test_what_comes_after_a_take_is_a_new_event() -> None:
    inbox = Inbox()
    inbox.put(D, Tokens(0, (1,)))
    assert await inbox.next() == (D, Tokens(0, (1,)))
    inbox.put(D, Tokens(1, (2,)))
    inbox.put(D, Tokens(2, (3,)))
    assert await inbox.next() == (D, Tokens(1, (2, 3)))


async def test_a_flood_is_refused_but_a_loss_always_has_room(monkeypatch: object) -> None:
    inbox = Inbox()
    for _ in range(module.MAX_EVENTS):
        assert inbox.put(D, Committed(KEY))
    assert not inbox.put(D, Committed(KEY))
    assert not inbox.put(D, Tokens(0, (1,)))
    assert inbox.put(D, Lost("reset"))


async def test_tokens_without_end_are_refused() -> None:
    inbox = Inbox()
    half = tuple([1] * (module.MAX_TOKENS // 2))
    assert inbox.put(D, Tokens(0, half))
    assert inbox.put(D, Tokens(len(half), half))
    assert not inbox.put(D, Tokens(2 * len(half), (1,)))


async def test_a_wait_that_is_cancelled_loses_nothing() -> None:
    inbox = Inbox()
    wait = asyncio.create_task(inbox.next())
    await asyncio.sleep(0)
    wait.cancel()
    await asyncio.gather(wait, return_exceptions=True)
    inbox.put(D, Lost("reset"))
    assert await inbox.next() == (D, Lost("reset"))
