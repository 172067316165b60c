"""The ports between a role and its surroundings (④ to ⑧). Roles are plain synchronous classes between them.

All calls and all callbacks happen on the worker's event loop. Tests stand fakes in (`tests/support/fake_parts.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from tandem.messages import RouterMessage, WorkerMessage
from tandem.types import AttemptKey, LoadReport, PeerEndpoint

if TYPE_CHECKING:
    from engine.row import Row
    from engine.step_loop import StepResult


class Outlet(Protocol):
    """Where a role's messages go. Never blocks; a router without a session loses them (it re-runs everything)."""

    def send(self, router_incarnation: int, message: WorkerMessage) -> None: ...

    def send_load(self, router_incarnation: int | None = None) -> None:
        """Have the newest load report sent to one router, or to all."""
        ...


class Engine(Protocol):
    """The step loop, seen from a role."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def progress(self) -> int: ...
    @property
    def announced_step_s(self) -> float: ...

    def add(self, row: Row) -> None: ...

    def remove(self, key: AttemptKey, then: Callable[[], None]) -> None:
        """`then` is called once no running step uses the row's blocks; at once for an unknown key."""
        ...


class BlockSender(Protocol):
    """The prefill side of kvtransfer."""

    def open(self, attempt: AttemptKey) -> bytes: ...

    def offer(
        self, attempt: AttemptKey, block_ids: Sequence[int], first_token: int, num_tokens: int, last: bool
    ) -> None: ...

    def commit(self, attempt: AttemptKey, num_tokens: int, first_token_id: int, first_token_index: int) -> None: ...

    def close(self, attempt: AttemptKey) -> None: ...


class BlockReceiver(Protocol):
    """The decode side of kvtransfer."""

    @property
    def num_copies_in_flight(self) -> int: ...

    def open(
        self,
        attempt: AttemptKey,
        peer: PeerEndpoint,
        capability: bytes,
        block_ids: Sequence[int],
        first_token_wanted: int,
    ) -> None: ...

    def close(self, attempt: AttemptKey, then: Callable[[], None]) -> None:
        """`then` is called once no copy into the attempt's blocks is in flight; at once for an unknown attempt."""
        ...


class WorkerRole(Protocol):
    """A role, seen from the Session server and the host."""

    def receive(self, router_incarnation: int, message: RouterMessage) -> None:
        """Take one message of a router; any message renews all of that router's leases first."""
        ...

    def publish(self, result: StepResult) -> None:
        """Take a finished step's outputs; called by the step loop."""
        ...

    def load(self) -> LoadReport: ...

    def sweep(self) -> None:
        """Fail what holds an expired lease; called several times a lease."""
        ...

    def start_draining(self) -> None:
        """Refuse new grants from now on."""
        ...

    @property
    def num_held(self) -> int:
        """Attempts that hold blocks, closing ones included."""
        ...

    async def wait_empty(self) -> None:
        """Return as soon as nothing is held."""
        ...

    @property
    def num_leases(self) -> int: ...
    @property
    def counters(self) -> Counter[str]: ...
