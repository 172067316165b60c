"""③ How many requests may live, and the line of those who wait for workers. Neighbours: service, lifecycle.

Order: whoever had to wait stays in the line until workers are found, and only the first in line may ask; those who come
while nobody waits ask at once. A request keeps its arrival number over refusals, losses and preemptions, so that it
comes back before those who arrived later.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.errors import DuplicateRequest, Overloaded

RETRY_AFTER_S = 1.0


class Line:
    """Who waits for workers, by arrival number."""

    def __init__(self) -> None:
        self._arrivals: list[int] = []
        self._wakes: dict[int, asyncio.Event] = {}

    def __len__(self) -> int:
        return len(self._arrivals)

    def may_ask(self, arrival: int) -> bool:
        """Whether nobody who came earlier is waiting."""
        return not self._arrivals or arrival <= self._arrivals[0]

    async def wait(self, arrival: int, until: float = math.inf) -> None:
        """Stand in line until something may have changed for this one, or until a loop time.

        The caller then looks again; it is in the line until `leave`.
        """
        if arrival not in self._wakes:
            insort(self._arrivals, arrival)
            self._wakes[arrival] = asyncio.Event()
        wake = self._wakes[arrival]
        try:
            async with asyncio.timeout_at(None if until == math.inf else until):
                await wake.wait()
        except TimeoutError:
            return
        finally:
            wake.clear()

    def leave(self, arrival: int) -> None:
        """Workers are found, or it is over; idempotent. The next in line is woken."""
        if self._wakes.pop(arrival, None) is not None:
            self._arrivals.remove(arrival)
            self.wake(everyone=False)

    def wake(self, everyone: bool) -> None:
        """Something changed: load (for the first in line) or the workers themselves (for everyone)."""
        for arrival in self._arrivals if everyone else self._arrivals[:1]:
            self._wakes[arrival].set()


class Admission:
    """Live requests by id, bounded; hands out arrival numbers."""

    def __init__(self, line: Line, max_queue: int, max_streams: int) -> None:
        self._line = line
        self._max_queue = max_queue
        self._max_streams = max_streams
        self._live: set[str] = set()
        self._arrivals = itertools.count()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_live(self) -> int:
        return len(self._live)

    @contextmanager
    def admit(self, request_id: str) -> Iterator[int]:
        """A live request within the block; gives its arrival number.

        Raises DuplicateRequest, Overloaded.
        """
        if request_id in self._live:
            raise DuplicateRequest(f"request_id: {request_id!r} is live already")
        if len(self._live) >= self._max_streams:
            raise Overloaded(f"{len(self._live)} requests are live, the limit is {self._max_streams}", RETRY_AFTER_S)
        if len(self._line) >= self._max_queue:
            raise Overloaded(
                f"{len(self._line)} requests wait for a worker, the limit is {self._max_queue}", RETRY_AFTER_S
            )
        self._live.add(request_id)
        self._empty.clear()
        try:
            yield next(self._arrivals)
        finally:
            self._live.discard(request_id)
            if not self._live:
                self._empty.set()

    async def wait_empty(self) -> None:
        """Return as soon as no request is live."""
        await self._empty.wait()
