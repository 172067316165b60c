"""Leases: durations counted on one process's monotonic clock; clocks of two processes are never compared (④)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tandem.types import AttemptKey


class LeaseTable:
    """Which attempts hold a lease here, and which of these have run out.

    All leases of a router incarnation are renewed together, whenever a message of that router arrives.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._granted_at: dict[AttemptKey, float] = {}
        self._renewed_at: dict[int, float] = {}
        self._num_of: Counter[int] = Counter()  # leases per router

    def __len__(self) -> int:
        return len(self._granted_at)

    def grant(self, attempt: AttemptKey) -> None:
        """Start the attempt's lease now."""
        if attempt not in self._granted_at:
            self._num_of[attempt.router_incarnation] += 1
        self._granted_at[attempt] = self._clock()

    def renew_all(self, router_incarnation: int) -> None:
        """A message of this router arrived: all of its leases start anew."""
        if router_incarnation in self._num_of:
            self._renewed_at[router_incarnation] = self._clock()

    def end(self, attempt: AttemptKey) -> None:
        """Forget the attempt; idempotent."""
        if self._granted_at.pop(attempt, None) is None:
            return
        router = attempt.router_incarnation
        self._num_of[router] -= 1
        if not self._num_of[router]:
            del self._num_of[router]
            self._renewed_at.pop(router, None)

    def holds(self, attempt: AttemptKey) -> bool:
        """Whether the attempt has a lease that has not run out."""
        return attempt in self._granted_at and not self._has_run_out(attempt)

    def expired(self) -> list[AttemptKey]:
        """Attempts whose lease has run out; each is reported until `end`."""
        return [attempt for attempt in self._granted_at if self._has_run_out(attempt)]

    def _has_run_out(self, attempt: AttemptKey) -> bool:
        granted_at = self._granted_at[attempt]
        since = max(granted_at, self._renewed_at.get(attempt.router_incarnation, granted_at))
        return self._clock() - since >= self._lease_s
