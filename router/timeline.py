"""⑨ Where a choice's time went. Durations that each were measured inside one process; clocks are never compared.

Neighbours: lifecycle (marks), client_stream (sends it with the finish). Times are the router's loop times.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.messages import Committed, FirstToken
from tandem.types import RequestKey, WorkerInfo
from tandem.v1 import generation_pb2 as pb

_NOT_COMMITTED = Committed(RequestKey("", 0, 0))


@dataclass(slots=True)
class AttemptTimes:
    """One try. Whatever is not known of it stays 0."""

    attempt: int
    aggregated: bool
    prefill_worker: WorkerInfo | None = None
    decode_worker: WorkerInfo | None = None
    asked_at: float = 0.0
    granted_at: float = 0.0
    worker_queue_s: float = 0.0
    prefill_s: float = 0.0
    num_chunks: int = 0
    num_overlapped_chunks: int = 0
    first_token_at: float = 0.0
    commit_s: float = 0.0
    committed: Committed | None = None
    error: str = ""


@dataclass(slots=True)
class TimelineRecorder:
    """Marks of one choice over all its attempts. `history` leaves out tries that were merely refused."""

    arrived_at: float
    queued_since: float = field(init=False)
    queue_s: float = 0.0
    first_token_at: float | None = None
    second_token_at: float | None = None
    last_token_at: float | None = None
    history: list[AttemptTimes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queued_since = self.arrived_at

    def begin(self, times: AttemptTimes, now: float) -> None:
        """A try has its grants: the wait in the queue ended when it began to ask."""
        times.granted_at = now
        self.queue_s += times.asked_at - self.queued_since
        self.history.append(times)

    def fail(self, times: AttemptTimes, error: str, now: float) -> None:
        """A try failed, with or without its grants: back into the queue."""
        if not times.granted_at:
            self.queue_s += times.asked_at - self.queued_since
            self.history.append(times)
        times.error = error
        self.queued_since = now

    def on_tokens(self, num_before: int, num_new: int, now: float) -> None:
        """`num_new` tokens were accepted after `num_before`."""
        if num_before == 0:
            self.first_token_at = now
        if num_before <= 1 < num_before + num_new:
            self.second_token_at = now
        self.last_token_at = now

    def on_first_token(self, token: FirstToken, now: float) -> None:
        """The prefill worker's report of the current try."""
        times = self.history[-1]
        times.worker_queue_s, times.prefill_s = token.queue_s, token.prefill_s
        times.num_chunks, times.num_overlapped_chunks = token.num_chunks, token.num_overlapped_chunks
        times.first_token_at = now

    def on_local_prefill(self, now: float) -> None:
        """The first token of a try whose decode worker prefilled: its queue and prefill, seen from here."""
        times = self.history[-1]
        if not times.first_token_at:
            times.first_token_at = now
            times.prefill_s = now - times.granted_at

    def on_committed(self, committed: Committed, now: float) -> None:
        """The decode worker's report of the current try."""
        times = self.history[-1]
        times.committed = committed
        times.commit_s = now - times.first_token_at if times.first_token_at else 0.0

    def to_wire(self, num_tokens: int, now: float) -> pb.Timeline:
        """The finished choice's timeline; `num_tokens` were delivered."""
        last = self.history[-1]
        first = self.first_token_at if self.first_token_at is not None else now
        end = self.last_token_at if self.last_token_at is not None else first
        committed = last.committed or _NOT_COMMITTED
        return pb.Timeline(
            mode=pb.SERVING_MODE_AGGREGATED if last.aggregated else pb.SERVING_MODE_DISAGGREGATED,
            queue_s=self.queue_s + last.worker_queue_s,
            reserve_s=last.granted_at - last.asked_at,
            prefill_s=last.prefill_s,
            ttft_s=first - self.arrived_at,
            transfer_s=committed.transfer_s,
            exposed_transfer_s=committed.exposed_transfer_s,
            commit_s=last.commit_s,
            first_decode_s=self.second_token_at - first if self.second_token_at is not None else 0.0,
            total_s=now - self.arrived_at,
            itl_mean_s=(end - first) / (num_tokens - 1) if num_tokens > 1 else 0.0,
            attempts=len(self.history),
            prefill_worker=_worker(last.prefill_worker),
            decode_worker=_worker(last.decode_worker),
            history=[
                pb.AttemptRecord(
                    attempt=times.attempt,
                    prefill_worker_id=times.prefill_worker.worker_id if times.prefill_worker else "",
                    decode_worker_id=times.decode_worker.worker_id if times.decode_worker else "",
                    error=times.error,
                )
                for times in self.history
            ],
            transfer_nbytes=committed.nbytes,
            num_chunks=committed.num_chunks or last.num_chunks,
            num_overlapped_chunks=last.num_overlapped_chunks,
            transport=committed.transport,
        )


def _worker(info: WorkerInfo | None) -> pb.WorkerRef | None:
    if info is None:
        return None
    return pb.WorkerRef(worker_id=info.worker_id, pid=info.pid, node_id=info.endpoint.node_id)
