"""Blocks granted to attempts under leases, all or nothing (④). Asking (`refusal`) is apart from doing (`grant`).

A grant ends in two moves: `end_lease` when the attempt is over, `free` when neither a running step nor a copy in
flight uses its blocks any more. A router that was refused for want of room hears of the next blocks that come back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from engine.block_pool import BlockPool
from kvtransfer.leases import LeaseTable
from tandem.messages import RefusalReason
from tandem.types import AttemptKey
from worker.ports import Outlet


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a grant is refused."""

    reason: RefusalReason
    detail: str


class Grants:
    """Who holds which blocks of this worker's pool, and under whose lease."""

    def __init__(self, pool: BlockPool, leases: LeaseTable, outlet: Outlet, counters: Counter[str]) -> None:
        self._pool = pool
        self._leases = leases
        self._outlet = outlet
        self._counters = counters
        self._blocks: dict[AttemptKey, list[int]] = {}
        self._routers_waiting: set[int] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False

    def __contains__(self, attempt: AttemptKey) -> bool:
        return attempt in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    async def wait_empty(self) -> None:
        """Return as soon as nothing is granted."""
        await self._empty.wait()

    @property
    def num_leases(self) -> int:
        """Attempts with a lease; those that are merely waiting for a step or a copy have none."""
        return len(self._leases)

    def refusal(self, router_incarnation: int, num_blocks: int) -> Refusal | None:
        """Why `num_blocks` cannot be granted now, or None. Remembers a router that has to wait for room."""
        if self.draining:
            refusal = Refusal(RefusalReason.DRAINING, "the worker is draining")
        elif num_blocks > self._pool.num_total:
            refusal = Refusal(
                RefusalReason.TOO_LARGE, f"needs {num_blocks} blocks, the whole pool has {self._pool.num_total}"
            )
        elif not self._pool.can_allocate(num_blocks):
            refusal = Refusal(RefusalReason.NO_ROOM, f"needs {num_blocks} blocks, {self._pool.num_free} are free")
            self._routers_waiting.add(router_incarnation)
        else:
            return None
        self._counters[f"refused_{refusal.reason.name.lower()}"] += 1
        return refusal

    def grant(self, attempt: AttemptKey, num_blocks: int) -> list[int]:
        """Allocate the blocks and start the lease; only after `refusal` said None."""
        assert attempt not in self._blocks, f"{attempt} is granted twice"
        block_ids = self._pool.allocate(num_blocks)
        self._blocks[attempt] = block_ids
        self._empty.clear()
        self._leases.grant(attempt)
        return block_ids

    def lease_holds(self, attempt: AttemptKey) -> bool:
        """Whether the attempt's lease has not run out, swept or not."""
        return self._leases.holds(attempt)

    def renew_all(self, router_incarnation: int) -> None:
        """A message of this router came in."""
        self._leases.renew_all(router_incarnation)

    def expired(self) -> list[AttemptKey]:
        """Attempts whose lease has run out; each is reported until `end_lease`."""
        return self._leases.expired()

    def end_lease(self, attempt: AttemptKey) -> None:
        """The attempt is over; its blocks may still be in use."""
        self._leases.end(attempt)

    def free(self, attempt: AttemptKey) -> None:
        """Give the blocks back. Raises KeyError when that has happened before: exactly once is the caller's duty."""
        self._pool.free(self._blocks.pop(attempt))
        if not self._blocks:
            self._empty.set()
        waiting, self._routers_waiting = self._routers_waiting, set()
        for router_incarnation in waiting:
            self._outlet.send_load(router_incarnation)
