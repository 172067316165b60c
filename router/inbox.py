"""One attempt's messages, between the readers of its sessions and its lifecycle (④).

A reader puts and never waits. Tokens that nobody has taken yet join into one event; control events are few in any
honest conversation, and a worker that sends more is treated as lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from tandem.messages import (
    Committed,
    CreditGranted,
    Failed,
    Finished,
    FirstToken,
    Preempted,
    Refused,
    ReservationGranted,
)

MAX_EVENTS = 64
MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of the attempt; `index` is the first one's."""

    index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker's session has ended, for whatever reason: the worker counts as lost."""

    detail: str


Event = (
    CreditGranted
    | ReservationGranted
    | Refused
    | FirstToken
    | Committed
    | Tokens
    | Finished
    | Failed
    | Preempted
    | Lost
)


class Inbox:
    """Events with the ids of the workers they come from, in order of arrival."""

    def __init__(self) -> None:
        self._events: deque[tuple[str, Event]] = deque()
        # ids of the newest event while it is a Tokens event: others may still join it
        self._joined: list[int] = []
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events)

    def put(self, worker_id: str, event: Event) -> bool:
        """Add an event; False if there is no room for it: the sender must be cut off. A Lost always has room."""
        if isinstance(event, Tokens):
            if self._join(worker_id, event):
                return len(self._joined) <= MAX_TOKENS
            self._seal()
            self._joined = list(event.token_ids)
        else:
            self._seal()
        if len(self._events) >= MAX_EVENTS and not isinstance(event, Lost):
            return False
        self._events.append((worker_id, event))
        self._arrived.set()
        return True

    async def next(self) -> tuple[str, Event]:
        """The oldest event, as soon as there is one. Cancelling the wait loses nothing."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        if len(self._events) == 1:
            self._seal()
        return self._events.popleft()

    def _join(self, worker_id: str, event: Tokens) -> bool:
        """Whether the event could join the newest one: the same worker's next tokens."""
        if not self._events:
            return False
        source, last = self._events[-1]
        if source != worker_id or not isinstance(last, Tokens) or last.index + len(self._joined) != event.index:
            return False
        self._joined.extend(event.token_ids)
        return True

    def _seal(self) -> None:
        """Give the newest Tokens event the ids that joined it."""
        if not self._events:
            return
        source, last = self._events[-1]
        if isinstance(last, Tokens) and len(last.token_ids) != len(self._joined):
            self._events[-1] = (source, Tokens(last.index, tuple(self._joined)))
