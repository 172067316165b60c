"""A value with a rising sequence number that many readers can wait on: the directory, the status."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Versioned(Generic[T]):
    """Readers see the newest value; values in between may be skipped, so no reader can slow the writer."""

    def __init__(self, value: T) -> None:
        self.value = value
        self.sequence = 0
        self._changed = asyncio.Event()

    def set(self, value: T) -> None:
        """Publish a value; one that is equal to the last is not a change."""
        if value == self.value:
            return
        self.value = value
        self.sequence += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, after: int) -> tuple[int, T]:
        """Wait for a sequence number above `after`. The caller bounds the wait."""
        while self.sequence <= after:
            await self._changed.wait()
        return self.sequence, self.value
