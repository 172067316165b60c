"""Ctrl-C, SIGTERM and a closed terminal: each ends a command in order, once, wherever it is."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: the command ends, whatever a Ctrl-C would mean to it."""


def raise_on_signals() -> None:
    """From now on SIGTERM and SIGHUP raise Terminated in plain (not async) code, as Ctrl-C raises KeyboardInterrupt."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise _interruption(number)

    for number in SIGNALS:
        signal.signal(number, interrupt)


def run(work: Coroutine[Any, Any, T], on_repeat: Callable[[], None] = lambda: None) -> T:
    """Run `work`; the first of SIGNALS cancels it, so that its `finally` blocks run to their end.

    Later ones only call `on_repeat`: nobody's patience may leave processes behind.
    Raises KeyboardInterrupt or Terminated when it was interrupted.
    """
    interrupted: int | None = None

    async def guarded() -> T:
        nonlocal interrupted
        task = asyncio.ensure_future(work)

        def interrupt(number: int) -> None:
            nonlocal interrupted
            if interrupted is not None:
                on_repeat()
            else:
                interrupted = number
                task.cancel()

        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, interrupt, number)
        return await task

    raise_on_signals()
    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        if interrupted is not None:
            raise _interruption(interrupted) from None
        raise
    finally:
        raise_on_signals()  # the loop has put the defaults back, and SIGTERM's would end us without our `finally`s


def _interruption(number: int) -> KeyboardInterrupt:
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated()
