"""The states of one choice of a request, and the only way to change them.

QUEUED -> RESERVED -> PREFILLING -> TRANSFERRING -> DECODING -> FINISHED
   ^          |            |             |             |
   +--------- re-run (worker lost | transfer failed | preempted) --------+
any live state -> ABORTED (cancel, deadline) | FAILED (typed error)
"""

from __future__ import annotations

from enum import Enum


class RequestState(Enum):
    """Where a choice is on its path; PROMISES section 2 describes each."""

    QUEUED = "queued"
    RESERVED = "reserved"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def live(self) -> bool:
        """Whether the choice may still deliver tokens."""
        return self not in TERMINAL


_S = RequestState
TERMINAL = frozenset({_S.FINISHED, _S.ABORTED, _S.FAILED})
_ENDS = frozenset({_S.ABORTED, _S.FAILED})
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    # straight to PREFILLING: one token to make, no reservation
    _S.QUEUED: frozenset({_S.RESERVED, _S.PREFILLING}) | _ENDS,
    _S.RESERVED: frozenset({_S.PREFILLING, _S.QUEUED}) | _ENDS,
    # straight to DECODING: the decode worker prefilled itself; to FINISHED: one token to make
    _S.PREFILLING: frozenset({_S.TRANSFERRING, _S.DECODING, _S.FINISHED, _S.QUEUED}) | _ENDS,
    # to FINISHED: the first token ends the answer
    _S.TRANSFERRING: frozenset({_S.DECODING, _S.FINISHED, _S.QUEUED}) | _ENDS,
    _S.DECODING: frozenset({_S.FINISHED, _S.QUEUED}) | _ENDS,
    _S.FINISHED: frozenset(),
    _S.ABORTED: frozenset(),
    _S.FAILED: frozenset(),
}


def advance(now: RequestState, then: RequestState) -> RequestState:
    """Return `then` if the table allows the step. Raises AssertionError otherwise: a bug of ours."""
    assert then in TRANSITIONS[now], f"{now.name} -> {then.name} is not a transition"
    return then
