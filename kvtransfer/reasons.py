"""Which FailureReason a failed transfer has: from our own errors, and from what a peer names (⑥ and ⑦)."""

from __future__ import annotations

from tandem.errors import CorruptBlock, KVTransferError, LayoutMismatch
from tandem.messages import FailureReason
from tandem.v1 import worker_pb2 as pb


def reason_of(error: KVTransferError) -> FailureReason:
    """What the router is told of an error of ours."""
    if isinstance(error, CorruptBlock):
        return FailureReason.CORRUPT
    return FailureReason.LAYOUT_MISMATCH if isinstance(error, LayoutMismatch) else FailureReason.TRANSFER


def reason_from_wire(number: int) -> FailureReason:
    """What a peer named; a number of a newer build, or none, is a failed transfer."""
    try:
        return FailureReason(number)
    except ValueError:
        return FailureReason.TRANSFER


def abort_message(reason: FailureReason, detail: str) -> pb.Abort:
    """The Abort that tells a peer."""
    return pb.Abort(reason=pb.FailureReason.Name(reason), detail=detail)
