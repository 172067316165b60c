"""What a lifecycle needs of its surroundings. `WorkerLink` and `Fleet` are these; tests may stand others in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.inbox import Inbox
from tandem.messages import RouterMessage
from tandem.types import LoadReport, RequestKey, WorkerInfo


class Worker(Protocol):
    """One worker with its session."""

    @property
    def info(self) -> WorkerInfo: ...
    @property
    def worker_id(self) -> str: ...
    @property
    def load(self) -> LoadReport: ...

    @property
    def num_reports(self) -> int:
        """Load reports so far: a higher number is later news."""
        ...

    @property
    def usable(self) -> bool:
        """Whether it may be given new work."""
        ...

    @property
    def num_unreported_tokens(self) -> int:
        """Prompt tokens this router has given to it since its last load report; the same for requests and blocks."""
        ...

    @property
    def num_unreported_requests(self) -> int: ...
    @property
    def num_unreported_blocks(self) -> int: ...

    def open(self, key: RequestKey, inbox: Inbox, num_tokens: int, num_blocks: int) -> None:
        """Deliver messages of `key` to `inbox` from now on; a Lost at once if there is no session."""
        ...

    def send(self, message: RouterMessage) -> None:
        """Queue a message; never blocks."""
        ...

    def close(self, key: RequestKey) -> None:
        """Release `key` and deliver nothing of it any more; idempotent."""
        ...


class Cluster(Protocol):
    """All workers, and which pairs of them to avoid."""

    @property
    def prefill_target(self) -> int:
        """0: aggregated serving. Never the live count: a dead prefill pool means waiting."""
        ...

    @property
    def prefill_workers(self) -> Sequence[Worker]:
        """Every prefill worker of the directory, usable or not."""
        ...

    @property
    def decode_workers(self) -> Sequence[Worker]: ...

    def avoid(self, prefill_worker_id: str, decode_worker_id: str) -> None:
        """Do not pair these two for a while."""
        ...

    @property
    def avoided_pairs(self) -> frozenset[tuple[str, str]]: ...

    @property
    def next_reunion_at(self) -> float:
        """Loop time at which the next avoided pair may meet again; inf if none is avoided."""
        ...
