r"""One pool (prefill, decode or routers): its target, its members, and the pure decisions about them.

Neighbours: `pools/controller.py` acts on `plan`; `pools/status.py` shows it.
A member's life:  STARTING -> READY -> DRAINING -> gone
                      \__________\__________\-> LOST (kept with its reason until a replacement is up)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from pools.runtime import ActorInfo, ActorSpec

PREFILL, DECODE, ROUTER = "prefill", "decode", "router"
WORKER_KINDS = (PREFILL, DECODE)
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
# A pool that was whole for so long has forgotten its earlier failures.
HEALTHY_AFTER_S = 10.0


class MemberState(Enum):
    """Where an actor is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(slots=True)
class Member:
    """One actor, named by incarnation: `decode-3` is never used twice in a cluster."""

    actor_id: str
    ordinal: int
    state: MemberState = MemberState.STARTING
    info: ActorInfo | None = None
    detail: str = ""
    ready_at: float = 0.0
    drain: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def counts(self) -> bool:
        """Whether the member counts towards its pool's target."""
        return self.state in (MemberState.STARTING, MemberState.READY) and not self.drain.is_set()


@dataclass(slots=True)
class Pool:
    """Members of one kind, oldest first."""

    kind: str
    spec: ActorSpec
    target: int
    members: dict[str, Member] = field(default_factory=dict)
    next_ordinal: int = 0
    num_losses: int = 0
    failures_in_a_row: int = 0
    not_before: float = 0.0
    last_failure: str = ""

    def new_member(self) -> Member:
        """Add a member with a fresh name."""
        return self.adopt(self.next_ordinal)

    def adopt(self, ordinal: int) -> Member:
        """Add the member with this number; later ones get higher numbers."""
        member = Member(f"{self.kind}-{ordinal}", ordinal)
        self.members[member.actor_id] = member
        self.next_ordinal = max(self.next_ordinal, ordinal + 1)
        return member

    def in_state(self, *states: MemberState) -> list[Member]:
        """Members in any of these states, oldest first."""
        return [m for m in self.members.values() if m.state in states]

    def mark_ready(self, member: Member, info: ActorInfo, now: float) -> None:
        """The member serves: what it replaces is no longer shown."""
        member.state, member.info, member.detail, member.ready_at = MemberState.READY, info, "", now
        replaced = self.in_state(MemberState.LOST)
        whole = len(self.in_state(MemberState.READY)) >= self.target
        for lost in replaced if whole else replaced[:1]:
            del self.members[lost.actor_id]

    def mark_lost(self, member: Member, reason: str, now: float) -> None:
        """The member is gone against our will: count it and set the earliest time for a replacement."""
        healthy_s = now - member.ready_at if member.state is MemberState.READY else 0.0
        member.state, member.detail = MemberState.LOST, reason
        self.num_losses += 1
        self.last_failure = f"{member.actor_id}: {reason}"
        if healthy_s >= HEALTHY_AFTER_S:
            self.failures_in_a_row = 0
        if now >= self.not_before:  # failures of one wave count once
            self.failures_in_a_row += 1
            self.not_before = now + backoff_s(self.failures_in_a_row)
        losses = self.in_state(MemberState.LOST)
        for old in losses[: max(0, len(losses) - max(1, self.target))]:
            del self.members[old.actor_id]

    def remove(self, member: Member) -> None:
        """The member was stopped on purpose."""
        self.members.pop(member.actor_id, None)

    def detail(self, now: float) -> str:
        """Why the pool is not at its target, in one line; empty when it is."""
        num_ready = len(self.in_state(MemberState.READY))
        if num_ready >= self.target:
            return ""
        wait_s = self.not_before - now
        if wait_s > 0 and self.last_failure:
            return f"{self.last_failure}; next try in {wait_s:.0f} s ({self.failures_in_a_row} failures in a row)"
        if self.last_failure and self.failures_in_a_row:
            return f"starting a replacement for {self.last_failure}"
        return f"starting {self.target - num_ready} of {self.target}"


def backoff_s(failures_in_a_row: int) -> float:
    """Wait before the next start: none after a first failure, then doubling up to BACKOFF_MAX_S."""
    if failures_in_a_row <= 1:
        return 0.0
    return min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(failures_in_a_row - 2, 30))


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now. `wake_at`: when to look again though nothing changed; None: no need."""

    num_to_start: int = 0
    to_drain: tuple[str, ...] = ()
    wake_at: float | None = None


def plan(target: int, members: Sequence[Member], not_before: float, now: float) -> Plan:
    """Bring the members that count to `target`: those still starting go first, then the newest."""
    counting = [m for m in members if m.counts]
    missing = target - len(counting)
    if missing > 0:
        return Plan(num_to_start=missing) if now >= not_before else Plan(wake_at=not_before)
    surplus = sorted(counting, key=lambda m: (m.state is not MemberState.STARTING, -m.ordinal))[: -missing or None]
    return Plan(to_drain=tuple(m.actor_id for m in surplus)) if missing < 0 else Plan()
