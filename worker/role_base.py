"""What the prefill and the decode role have in common: fencing, leases, resync, release, draining, load (④).

A role is synchronous and lives on the event loop. `receive` takes a router's message, `publish` a finished step,
the transfer side calls back, and everything leaves through the Outlet. An attempt's record is in `_held` from grant to
close; its blocks stay granted until `_let_go` has waited for the running step and the copies in flight.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from engine.block_pool import BlockPool
from engine.step_loop import StepResult
from kvtransfer.leases import LeaseTable
from tandem.layout import KVLayout
from tandem.messages import (
    Credit,
    Failed,
    FailureReason,
    Heartbeat,
    Prefill,
    PromptSegment,
    Refused,
    Release,
    Reserve,
    Resync,
    RouterMessage,
)
from tandem.types import AttemptKey, LoadReport, RequestKey, Sampling
from worker.grants import Grants, Refusal
from worker.ports import Engine, Outlet
from worker.prompts import PromptAssembler


@dataclass(frozen=True, slots=True)
class RoleParts:
    """What the host hands a role. Durations in seconds; `clock` is monotonic."""

    engine: Engine
    pool: BlockPool
    leases: LeaseTable
    outlet: Outlet
    layout: KVLayout
    vocab_size: int
    max_model_len: int
    lease_s: float
    clock: Callable[[], float]
    counters: Counter[str] = field(default_factory=Counter)


class Held(ABC):
    """An attempt's record; `num_uncomputed_tokens` is what the worker has still to prefill of it."""

    __slots__ = ()

    @property
    @abstractmethod
    def num_uncomputed_tokens(self) -> int: ...


HeldT = TypeVar("HeldT", bound=Held)


class RoleBase(ABC, Generic[HeldT]):
    """The common half of a WorkerRole."""

    def __init__(self, parts: RoleParts) -> None:
        self._engine = parts.engine
        self._outlet = parts.outlet
        self._layout = parts.layout
        self._vocab_size = parts.vocab_size
        self._max_model_len = parts.max_model_len
        self._lease_s = parts.lease_s
        self._clock = parts.clock
        self._pool = parts.pool
        self._counters = parts.counters
        self._grants = Grants(parts.pool, parts.leases, parts.outlet, parts.counters)
        self._prompts = PromptAssembler(parts.max_model_len, parts.lease_s, parts.clock, parts.counters)
        self._held: dict[AttemptKey, HeldT] = {}

    # ---- what differs

    @abstractmethod
    def publish(self, result: StepResult) -> None:
        """Take a finished step's outputs."""

    @abstractmethod
    def _on_credit(self, attempt: AttemptKey, message: Credit) -> None: ...
    @abstractmethod
    def _on_reserve(self, attempt: AttemptKey, message: Reserve) -> None: ...
    @abstractmethod
    def _on_prefill(self, attempt: AttemptKey, message: Prefill) -> None: ...

    @abstractmethod
    def _let_go(self, attempt: AttemptKey, held: HeldT, then: Callable[[], None]) -> None:
        """Stop all work on the attempt; call `then` once nothing uses its blocks any more."""

    # ---- messages

    def receive(self, router_incarnation: int, message: RouterMessage) -> None:
        """Take one message; whatever it is, it renews the leases of its router."""
        self._fail_expired()  # what ran out before this message came is not revived by it
        self._grants.renew_all(router_incarnation)
        match message:
            case Heartbeat():
                pass
            case Resync(live):
                self._on_resync(router_incarnation, frozenset(live))
            case PromptSegment():
                self._prompts.add(router_incarnation, message)
            case Credit():
                self._on_credit(AttemptKey(router_incarnation, message.key), message)
            case Reserve():
                self._on_reserve(AttemptKey(router_incarnation, message.key), message)
            case Prefill():
                self._on_prefill(AttemptKey(router_incarnation, message.key), message)
            case Release(key):
                attempt = AttemptKey(router_incarnation, key)
                self._prompts.drop(attempt)
                self._close(attempt)

    def _on_resync(self, router_incarnation: int, live: frozenset[RequestKey]) -> None:
        self._prompts.keep_only(router_incarnation, live)
        for attempt in list(self._held):
            if attempt.router_incarnation == router_incarnation and attempt.key not in live:
                self._counters["freed_by_resync"] += 1
                self._close(attempt)

    def _refuse(self, attempt: AttemptKey, refusal: Refusal) -> None:
        self._outlet.send(attempt.router_incarnation, Refused(attempt.key, refusal.reason, refusal.detail))

    def _fenced(self, what: str) -> None:
        """Count a message that matches nothing held here."""
        self._counters["fenced_messages"] += 1
        self._counters[f"fenced_{what}"] += 1

    # ---- the end of an attempt

    def _close(self, attempt: AttemptKey) -> None:
        """End the attempt if it is held; idempotent. Its blocks are freed exactly once, when nothing uses them."""
        held = self._held.pop(attempt, None)
        if held is None:
            return
        self._grants.end_lease(attempt)
        self._let_go(attempt, held, lambda: self._grants.free(attempt))

    def _fail(self, attempt: AttemptKey, reason: FailureReason, detail: str, peer_worker_id: str = "") -> None:
        """Close a held attempt and tell its router."""
        if attempt not in self._held:
            return
        self._counters[f"failed_{reason.name.lower()}"] += 1
        self._outlet.send(attempt.router_incarnation, Failed(attempt.key, reason, detail, peer_worker_id))
        self._close(attempt)

    def _fail_not_finite(self, attempt: AttemptKey) -> None:
        """The model gave no token that can be told; only this attempt is wrong, its neighbours go on."""
        self._counters["non_finite_logits"] += 1
        self._fail(attempt, FailureReason.INTERNAL, "the model's logits are not finite")

    def on_failed(self, attempt: AttemptKey, reason: int, detail: str, peer_worker_id: str) -> None:
        """The transfer of an attempt failed; the router avoids the pair and re-runs."""
        self._fail(attempt, FailureReason(reason), detail, peer_worker_id)

    def _fail_expired(self) -> None:
        for attempt in self._grants.expired():
            self._counters["expired_leases"] += 1
            self._fail(attempt, FailureReason.LEASE_EXPIRED, f"no message of the router for {self._lease_s:g} s")

    def sweep(self) -> None:
        """Fail what holds an expired lease, forget prompts that nobody finishes."""
        self._fail_expired()
        self._prompts.sweep()

    # ---- levels

    def start_draining(self) -> None:
        """Refuse new grants from now on, and say so to all routers."""
        self._grants.draining = True
        self._outlet.send_load()

    @property
    def num_held(self) -> int:
        """Attempts that hold blocks, those that are closing included."""
        return len(self._grants)

    async def wait_empty(self) -> None:
        """Return as soon as nothing is held."""
        await self._grants.wait_empty()

    @property
    def num_leases(self) -> int:
        return self._grants.num_leases

    @property
    def counters(self) -> Counter[str]:
        return self._counters

    def load(self) -> LoadReport:
        """The worker's levels now."""
        return LoadReport(
            num_total_blocks=self._pool.num_total,
            num_free_blocks=self._pool.num_free,
            num_running=self._engine.num_running,
            num_waiting=self._engine.num_waiting,
            queued_prefill_tokens=sum(held.num_uncomputed_tokens for held in self._held.values()),
            progress=self._engine.progress,
            announced_step_s=self._engine.announced_step_s,
            draining=self._grants.draining,
        )

    # ---- checks shared by Reserve and Prefill

    def _prompt_problem(
        self, token_ids: list[int], num_tokens: int, num_prompt_tokens: int, sampling: Sampling
    ) -> str | None:
        """What is wrong with a prompt, its counts and its sampling, or None: in a step it would end all rows."""
        if len(token_ids) != num_tokens:
            return f"{len(token_ids)} token ids came, {num_tokens} were announced"
        if not 1 <= num_prompt_tokens <= num_tokens:
            return f"{num_prompt_tokens} prompt tokens of {num_tokens} tokens"
        if num_tokens - num_prompt_tokens >= sampling.max_tokens:
            return f"{num_tokens - num_prompt_tokens} of at most {sampling.max_tokens} tokens are delivered already"
        if max(token_ids) >= self._vocab_size:
            return f"token id {max(token_ids)} is outside the vocabulary of {self._vocab_size}"
        if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
            return f"temperature {sampling.temperature} is not a finite number of at least 0"
        if not (0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1):
            return f"top_p {sampling.top_p} or min_p {sampling.min_p} is out of range"
        return None
