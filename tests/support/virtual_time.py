"""An event loop whose clock jumps to the next timer whenever nothing is ready: hours of timeouts run in milliseconds.

Only for code that waits for timers and other tasks, not for sockets or threads. When nothing is scheduled at all, the
loop would sleep for ever: it raises `Deadlock` instead.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Nothing can ever happen again."""


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise Deadlock("no task is ready and no timer is set")
            self.now += max(timeout, 0.0)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """asyncio with a virtual `time()`."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(main: Coroutine[Any, Any, T], limit_s: float = 3600.0) -> T:
    """Run `main` on a virtual-time loop of its own. Raises TimeoutError after limit_s of its time."""

    async def bounded() -> T:
        async with asyncio.timeout(limit_s):
            return await main

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(bounded())


def jump(duration_s: float) -> None:
    """Let time pass without anything happening in it, as when the process was stopped."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop._jumping.now += duration_s
