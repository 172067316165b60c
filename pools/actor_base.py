"""What every ManagedActor does alike: start once, say in one line why it could not, remember that it drains."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from pools.runtime import ActorInfo, StartFailed
from tandem.errors import TandemError
from tandem.types import LoadReport

log = logging.getLogger(__name__)


class ActorBase:
    """Subclasses implement `_begin`, `_drain`, `_end`, and `watch` and `load` where there is something to say."""

    def __init__(self, actor_id: str) -> None:
        start_logging()
        self._actor_id = actor_id
        self._started: asyncio.Task[ActorInfo | StartFailed] | None = None
        self._draining = False

    async def start(self) -> ActorInfo | StartFailed:
        """See ManagedActor. What goes wrong comes back as one line; the traceback is in the actor's log."""
        if self._started is None:
            self._started = asyncio.create_task(self._start(), name="start")
        answer = await asyncio.shield(self._started)
        return replace(answer, draining=self._draining) if isinstance(answer, ActorInfo) else answer

    async def watch(self) -> str:
        """See ManagedActor. Ends with the process only, unless a subclass knows better."""
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")

    async def drain(self, timeout_s: float) -> None:
        """See ManagedActor."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._drain(timeout_s)
        except TimeoutError:
            log.warning("%s: still busy after %g s of draining; its streams end here", self._actor_id, timeout_s)

    async def stop(self) -> None:
        """See ManagedActor."""
        if self._started is not None and self._started.done():
            await self._end()

    async def load(self) -> LoadReport | None:
        """See ManagedActor."""
        return None

    async def _begin(self) -> ActorInfo:
        """Start serving, once. May raise anything."""
        raise NotImplementedError

    async def _drain(self, timeout_s: float) -> None:
        """Take no new work and wait for what runs."""
        raise NotImplementedError

    async def _end(self) -> None:
        """Stop serving."""
        raise NotImplementedError

    async def _start(self) -> ActorInfo | StartFailed:
        try:
            return await self._begin()
        except Exception as exc:
            log.exception("%s did not start", self._actor_id)
            return StartFailed(explain(exc))


def explain(exc: Exception) -> str:
    """One line for the user."""
    if isinstance(exc, TandemError):
        return str(exc)
    if isinstance(exc, MemoryError) or "allocate memory" in str(exc):
        return f"out of memory ({exc}): try a smaller engine.kv_cache_mib, fewer workers or dtype bfloat16"
    lines = str(exc).splitlines()
    return f"{type(exc).__name__}: {lines[0] if lines else 'no message'}"


def start_logging() -> None:
    """Log lines of an actor go to its stderr, which Ray writes to the session's log folder. Never prompts or keys."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    logging.Formatter.converter = time.gmtime
