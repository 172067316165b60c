"""④ All workers of the directory, each behind a WorkerLink, and the pairs to avoid. Neighbours: directory, lifecycle.

A worker that leaves the directory gets no new work, but what runs on it goes on: only its session says that it is lost
(a restarted controller begins with an empty directory). Links are known by incarnation.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable

from router.directory import DirectorySource
from router.session import Dial, WorkerLink
from tandem.config import TimingConfig
from tandem.types import Role


class Fleet:
    """The lifecycles' Cluster.

    on_change(topology): workers came or went, or (False) load reports did.
    """

    def __init__(
        self,
        source: DirectorySource,
        timing: TimingConfig,
        incarnation: int,
        dial: Dial,
        counters: Counter[str],
        on_change: Callable[[bool], None],
    ) -> None:
        self._source = source
        self._timing = timing
        self._incarnation = incarnation
        self._dial = dial
        self._counters = counters
        self._on_change = on_change
        self._session_numbers = itertools.count(1)
        self._links: dict[int, WorkerLink] = {}
        self._avoided_until: dict[tuple[str, str], float] = {}

    # ---- Cluster

    @property
    def prefill_target(self) -> int:
        return self._source.current.prefill_target

    @property
    def prefill_workers(self) -> list[WorkerLink]:
        return [link for link in self._links.values() if link.info.role is Role.PREFILL]

    @property
    def decode_workers(self) -> list[WorkerLink]:
        return [link for link in self._links.values() if link.info.role is Role.DECODE]

    def avoid(self, prefill_worker_id: str, decode_worker_id: str) -> None:
        until = asyncio.get_running_loop().time() + self._timing.pair_backoff_s
        self._avoided_until[prefill_worker_id, decode_worker_id] = until
        self._counters["pairs_avoided"] += 1

    @property
    def avoided_pairs(self) -> frozenset[tuple[str, str]]:
        return frozenset(self._still_avoided())

    @property
    def next_reunion_at(self) -> float:
        return min(self._still_avoided().values(), default=math.inf)

    def _still_avoided(self) -> dict[tuple[str, str], float]:
        now = asyncio.get_running_loop().time()
        self._avoided_until = {pair: until for pair, until in self._avoided_until.items() if until > now}
        return self._avoided_until

    # ---- life

    async def run(self) -> None:
        """Follow the directory until cancelled; owns all sessions."""
        async with asyncio.TaskGroup() as tasks:
            directory = self._source.current
            while True:
                listed = {worker.endpoint.incarnation: worker for worker in directory.workers}
                for incarnation, link in list(self._links.items()):
                    if incarnation not in listed:
                        link.leave()
                for incarnation, worker in listed.items():
                    if (known := self._links.get(incarnation)) is not None:
                        known.update(worker)
                        continue
                    link = self._links[incarnation] = WorkerLink(
                        worker,
                        self._incarnation,
                        self._timing,
                        self._dial,
                        self._session_numbers,
                        self._counters,
                        self._on_change,
                    )
                    tasks.create_task(self._run_link(link), name=f"link to {worker.worker_id}")
                self._on_change(True)
                directory = await self._source.wait_changed(directory)

    async def _run_link(self, link: WorkerLink) -> None:
        try:
            await link.run()
        finally:
            del self._links[link.info.endpoint.incarnation]
            self._on_change(True)

    async def flush(self, timeout_s: float) -> None:
        """Wait until all links have written what is queued, but not for long."""
        links = list(self._links.values())
        if links:
            waits = [asyncio.ensure_future(link.wait_flushed()) for link in links]
            _, pending = await asyncio.wait(waits, timeout=timeout_s)
            for wait in pending:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
