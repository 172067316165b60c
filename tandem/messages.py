"""What routers and workers say to each other over `WorkerService.Session`, as plain values.

Both sides of ④ speak these; `tandem/session_wire.py` turns them into protobuf and back at the edges. The meaning of
each field is in `proto/tandem/v1/worker.proto`. Every body but Resync, Heartbeat, Step and LoadReport names its
RequestKey.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from tandem.types import FinishReason, LoadReport, PeerEndpoint, RequestKey, Sampling


class RefusalReason(IntEnum):
    """Why a grant was refused; numbers as on the wire."""

    NO_ROOM = 1
    DRAINING = 2
    TOO_LARGE = 3
    INVALID = 4


class FailureReason(IntEnum):
    """Why a worker gave an attempt up; numbers as on the wire."""

    TRANSFER = 1
    CORRUPT = 2
    LEASE_EXPIRED = 3
    LAYOUT_MISMATCH = 4
    INTERNAL = 5


# ---- router -> worker


@dataclass(frozen=True, slots=True)
class Resync:
    """First message of a session: the worker frees whatever else this router incarnation holds."""

    live: tuple[RequestKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Renews all leases of the router, as every message does."""


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """A piece of ids too long for one frame, ahead of the Reserve or Prefill that uses them."""

    key: RequestKey
    offset: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Credit:
    """Asks a prefill worker for the blocks of `num_tokens` tokens. solo: one token to make, nothing is offered."""

    key: RequestKey
    num_tokens: int
    solo: bool = False


@dataclass(frozen=True, slots=True)
class Reserve:
    """Asks a decode worker for the blocks of the whole request.

    token_ids: the last segment; the whole, prompt and delivered ids, has num_tokens. peer: where the blocks come
    from, None when local_prefill.
    """

    key: RequestKey
    token_ids: tuple[int, ...]
    num_tokens: int
    num_prompt_tokens: int
    sampling: Sampling
    peer: PeerEndpoint | None = None
    capability: bytes = b""
    local_prefill: bool = False


@dataclass(frozen=True, slots=True)
class Prefill:
    """Starts the prefill that a Credit was granted for; fields as in Reserve."""

    key: RequestKey
    token_ids: tuple[int, ...]
    num_tokens: int
    num_prompt_tokens: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Release:
    """Idempotent: the worker frees the key's blocks at the next step boundary at the latest."""

    key: RequestKey


RouterMessage = Resync | Heartbeat | PromptSegment | Credit | Reserve | Prefill | Release


# ---- worker -> router


@dataclass(frozen=True, slots=True)
class CreditGranted:
    """The prompt's blocks are held. capability: whoever presents it may read what is offered for this key."""

    key: RequestKey
    lease_s: float
    capability: bytes = b""
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReservationGranted:
    """The request's blocks are held on the decode worker."""

    key: RequestKey
    lease_s: float
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was granted."""

    key: RequestKey
    reason: RefusalReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The prefill worker's token. index: number of ids delivered before this attempt."""

    key: RequestKey
    index: int
    token_id: int
    queue_s: float = 0.0
    prefill_s: float = 0.0
    num_computed_tokens: int = 0
    num_chunks: int = 0
    num_overlapped_chunks: int = 0


@dataclass(frozen=True, slots=True)
class Committed:
    """The decode worker has verified the commit record; the row joins the batch at the next step."""

    key: RequestKey
    transfer_s: float = 0.0
    exposed_transfer_s: float = 0.0
    nbytes: int = 0
    num_chunks: int = 0
    transport: str = ""


@dataclass(frozen=True, slots=True)
class StepRow:
    """New tokens of one request; index is the first one's."""

    key: RequestKey
    index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """All new tokens of one router's rows in one step."""

    rows: tuple[StepRow, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """Adds counts; the router has ended the stream by itself. queue_s, prefill_s: local prefill only."""

    key: RequestKey
    reason: FinishReason
    num_output_tokens: int
    queue_s: float = 0.0
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker gave the attempt up and has freed it. peer_worker_id: the other worker, where one is involved."""

    key: RequestKey
    reason: FailureReason
    detail: str = ""
    peer_worker_id: str = ""


@dataclass(frozen=True, slots=True)
class Preempted:
    """The decode worker needed the blocks; the router re-runs the request."""

    key: RequestKey


WorkerMessage = (
    LoadReport
    | CreditGranted
    | ReservationGranted
    | Refused
    | FirstToken
    | Committed
    | Step
    | Finished
    | Failed
    | Preempted
)
