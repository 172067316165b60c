"""④ One try of a choice: its key, its messages, who holds something for it, and what its bad news mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from router.inbox import Event, Inbox, Lost
from router.placement import Need
from router.ports import Worker
from router.timeline import AttemptTimes
from tandem.errors import CorruptBlock, KVTransferError, LayoutMismatch, TandemError, WorkerLost
from tandem.messages import Failed, FailureReason, Preempted
from tandem.types import RequestKey


class Again(Exception):
    """The attempt is over without anybody's loss: refused or preempted. It costs nothing of the retry budget."""


@dataclass(slots=True)
class Attempt:
    """`token_ids`: prompt and delivered ids. Times are loop times."""

    key: RequestKey
    token_ids: tuple[int, ...]
    need: Need
    times: AttemptTimes
    inbox: Inbox = field(default_factory=Inbox)
    prefill: Worker | None = None
    decode: Worker | None = None
    first_token_seen: bool = False
    commit_due_at: float | None = None

    @property
    def pair(self) -> tuple[str, str] | None:
        """The two workers between whom KV travels, if it does."""
        if self.prefill is None or self.decode is None:
            return None
        return self.prefill.worker_id, self.decode.worker_id

    def release(self) -> None:
        """Give everything back; idempotent."""
        self.release_prefill()
        if self.decode is not None:
            self.decode.close(self.key)

    def release_prefill(self) -> None:
        if self.prefill is not None:
            self.prefill.close(self.key)


def raise_if_over(attempt: Attempt, source: str, event: Event) -> NoReturn:
    """Raise what `event` of worker `source` means for the attempt: none of these is part of its normal course.

    Raises WorkerLost and KVTransferError, which count as losses, and Again, which does not.
    """
    match event:
        case Lost(detail):
            raise WorkerLost(source, detail)
        case Preempted():
            raise Again(f"{source} preempted it")
        case Failed():
            raise _failure(attempt, source, event)
        case _:
            raise WorkerLost(source, f"sends {type(event).__name__} out of turn")


def _failure(attempt: Attempt, source: str, failed: Failed) -> TandemError:
    peer = failed.peer_worker_id or source
    match failed.reason:
        case FailureReason.CORRUPT if attempt.pair:
            return CorruptBlock(peer, failed.detail)
        case FailureReason.LAYOUT_MISMATCH if attempt.pair:
            return LayoutMismatch(peer, failed.detail)
        case FailureReason.TRANSFER if attempt.pair:
            return KVTransferError(peer, failed.detail)
        case _:
            return WorkerLost(source, f"{failed.reason.name.lower()}: {failed.detail}")
