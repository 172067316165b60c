"""Tandem's errors: one small tree, each with its gRPC and HTTP status.

TandemError
├── InvalidRequest        INVALID_ARGUMENT 400   the client's input; names the field and the limit
│   └── UnknownModel      NOT_FOUND 404
├── Unimplemented         UNIMPLEMENTED 501      a known feature that this build lacks
├── DuplicateRequest      ALREADY_EXISTS 409
├── Overloaded            RESOURCE_EXHAUSTED 429 queue full, too many streams, slow reader; with a retry hint
├── Unauthenticated       UNAUTHENTICATED 401
├── DeadlineExceeded      DEADLINE_EXCEEDED 504
├── Cancelled             CANCELLED 499
├── Unavailable           UNAVAILABLE 503        draining, no worker
│   └── WorkerLost        ...                    inside Tandem: leads to a re-run
├── KVTransferError       INTERNAL 500           inside Tandem: leads to a re-run
│   ├── CorruptBlock
│   └── LayoutMismatch
├── ModelError            FAILED_PRECONDITION    a model that cannot be served: names file, key and reason
└── ConfigError           FAILED_PRECONDITION    an operator's setting
Anything else is a bug of ours: INTERNAL 500, with an id that is in the log.
"""

from __future__ import annotations

import grpc

_S = grpc.StatusCode


class TandemError(Exception):
    """Base of all errors that Tandem raises on purpose."""

    grpc_status: grpc.StatusCode = _S.INTERNAL
    http_status: int = 500


class InvalidRequest(TandemError):
    """The client's input is wrong. `field` names the proto field; the message gives value and limit."""

    grpc_status = _S.INVALID_ARGUMENT
    http_status = 400

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class UnknownModel(InvalidRequest):
    """No model of this name is served here."""

    grpc_status = _S.NOT_FOUND
    http_status = 404


class Unimplemented(TandemError):
    """A known feature that this build lacks; refused, never ignored."""

    grpc_status = _S.UNIMPLEMENTED
    http_status = 501

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class DuplicateRequest(TandemError):
    """A live request has this request_id already."""

    grpc_status = _S.ALREADY_EXISTS
    http_status = 409


class Overloaded(TandemError):
    """A queue is full or a reader too slow; `retry_after_s` says when to try again."""

    grpc_status = _S.RESOURCE_EXHAUSTED
    http_status = 429

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unauthenticated(TandemError):
    """Missing or wrong credentials."""

    grpc_status = _S.UNAUTHENTICATED
    http_status = 401


class DeadlineExceeded(TandemError):
    """The request's deadline has passed."""

    grpc_status = _S.DEADLINE_EXCEEDED
    http_status = 504


class Cancelled(TandemError):
    """The client went away or cancelled."""

    grpc_status = _S.CANCELLED
    http_status = 499


class Unavailable(TandemError):
    """No worker can take the request, or the server is draining."""

    grpc_status = _S.UNAVAILABLE
    http_status = 503


class WorkerLost(Unavailable):
    """A worker died, hung or its session broke; the router re-runs what was on it."""

    def __init__(self, worker_id: str, message: str) -> None:
        super().__init__(f"worker {worker_id}: {message}")
        self.worker_id = worker_id


class KVTransferError(TandemError):
    """Moving KV from `peer` failed; the request is re-run."""

    def __init__(self, peer: str, message: str) -> None:
        super().__init__(f"KV transfer with {peer}: {message}")
        self.peer = peer


class CorruptBlock(KVTransferError):
    """A block's generation or checksum is not what was offered."""


class LayoutMismatch(KVTransferError):
    """Two workers differ in model, dtype, block size, layout or wire version."""


class ModelError(TandemError):
    """A model cannot be served: names the file or config key, and the reason."""

    grpc_status = _S.FAILED_PRECONDITION


class ConfigError(TandemError):
    """A setting is wrong: names the key, and what it may be."""

    grpc_status = _S.FAILED_PRECONDITION
