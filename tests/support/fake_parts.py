"""Fakes around a worker role: clock, outlet, engine, sender, receiver. Block pool and leases are the real ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.block_pool import BlockPool
from engine.row import Row
from engine.step_loop import RowOutput, StepResult
from kvtransfer.leases import LeaseTable
from tandem.layout import KVLayout
from tandem.messages import WorkerMessage
from tandem.types import AttemptKey, FinishReason, PeerEndpoint, RequestKey, Sampling
from worker.role_base import RoleParts

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
VOCAB_SIZE = 100
MAX_MODEL_LEN = 64
LEASE_S = 10.0


@dataclass
class FakeClock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeOutlet:
    sent: list[tuple[int, WorkerMessage]] = field(default_factory=list)
    loads: list[int | None] = field(default_factory=list)

    def send(self, router_incarnation: int, message: WorkerMessage) -> None:
        self.sent.append((router_incarnation, message))

    def send_load(self, router_incarnation: int | None = None) -> None:
        self.loads.append(router_incarnation)

    def take(self) -> list[WorkerMessage]:
        """What was sent since the last take."""
        messages = [message for _, message in self.sent]
        self.sent.clear()
        return messages


@dataclass
class FakeEngine:
    """Rows wait until the test says what a step made of them; `in_step` rows are let go at `end_step` only."""

    rows: dict[AttemptKey, Row] = field(default_factory=dict)
    in_step: set[AttemptKey] = field(default_factory=set)
    waiting_for_step: list[tuple[AttemptKey, Callable[[], None]]] = field(default_factory=list)
    num_running: int = 0
    num_waiting: int = 0
    progress: int = 0
    announced_step_s: float = 0.0

    def add(self, row: Row) -> None:
        assert row.key not in self.rows, f"{row.key} is added twice"
        self.rows[row.key] = row

    def remove(self, key: AttemptKey, then: Callable[[], None]) -> None:
        self.rows.pop(key, None)
        if key in self.in_step:
            self.waiting_for_step.append((key, then))
        else:
            then()

    def end_step(self) -> None:
        self.in_step.clear()
        waiting, self.waiting_for_step = self.waiting_for_step, []
        for _, then in waiting:
            then()


@dataclass
class FakeSender:
    opened: list[AttemptKey] = field(default_factory=list)
    offers: list[tuple[AttemptKey, tuple[int, ...], int, int, bool]] = field(default_factory=list)
    commits: list[tuple[AttemptKey, int, int, int]] = field(default_factory=list)
    closed: list[AttemptKey] = field(default_factory=list)

    def open(self, attempt: AttemptKey) -> bytes:
        self.opened.append(attempt)
        return b"capability of %d" % attempt.key.attempt

    def offer(
        self, attempt: AttemptKey, block_ids: Sequence[int], first_token: int, num_tokens: int, last: bool
    ) -> None:
        self.offers.append((attempt, tuple(block_ids), first_token, num_tokens, last))

    def commit(self, attempt: AttemptKey, num_tokens: int, first_token_id: int, first_token_index: int) -> None:
        self.commits.append((attempt, num_tokens, first_token_id, first_token_index))

    def close(self, attempt: AttemptKey) -> None:
        self.closed.append(attempt)


@dataclass
class FakeReceiver:
    """Attempts in `copying` are let go at `end_copies` only."""

    opened: dict[AttemptKey, tuple[PeerEndpoint, bytes, tuple[int, ...], int]] = field(default_factory=dict)
    copying: set[AttemptKey] = field(default_factory=set)
    closed: list[AttemptKey] = field(default_factory=list)
    waiting_for_copies: list[Callable[[], None]] = field(default_factory=list)
    num_copies_in_flight: int = 0

    def open(
        self,
        attempt: AttemptKey,
        peer: PeerEndpoint,
        capability: bytes,
        block_ids: Sequence[int],
        first_token_wanted: int,
    ) -> None:
        self.opened[attempt] = (peer, capability, tuple(block_ids), first_token_wanted)

    def close(self, attempt: AttemptKey, then: Callable[[], None]) -> None:
        self.closed.append(attempt)
        if attempt in self.copying:
            self.waiting_for_copies.append(then)
        else:
            then()

    def end_copies(self) -> None:
        self.copying.clear()
        waiting, self.waiting_for_copies = self.waiting_for_copies, []
        for then in waiting:
            then()


@dataclass
class Surroundings:
    """Everything around one role under test."""

    parts: RoleParts
    pool: BlockPool
    clock: FakeClock
    outlet: FakeOutlet
    engine: FakeEngine
    counters: Counter[str]

    def assert_baseline(self, role: object) -> None:
        """Nothing is held: all blocks free, no lease, no attempt."""
        assert self.pool.num_free == self.pool.num_total
        assert role.num_held == 0  # type: ignore[attr-defined]
        assert role.num_leases == 0  # type: ignore[attr-defined]
        assert not self.engine.rows


def surroundings(num_blocks: int = 8) -> Surroundings:
    clock, outlet, engine, counters = FakeClock(), FakeOutlet(), FakeEngine(), Counter()
    pool = BlockPool(num_blocks, generations=None, on_grant=None)
    parts = RoleParts(
        engine=engine,
        pool=pool,
        leases=LeaseTable(LEASE_S, clock),
        outlet=outlet,
        layout=LAYOUT,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        lease_s=LEASE_S,
        clock=clock,
        counters=counters,
    )
    return Surroundings(parts, pool, clock, outlet, engine, counters)


def request_key(name: str = "r", attempt: int = 1) -> RequestKey:
    return RequestKey(name, 0, attempt)


def greedy(max_tokens: int = 8, stop_token_ids: tuple[int, ...] = ()) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, stop_token_ids=stop_token_ids)


def output(
    attempt: AttemptKey,
    num_computed_tokens: int,
    index: int | None = None,
    token_id: int | None = None,
    finish: FinishReason | None = None,
    started: bool = False,
    failed: bool = False,
) -> RowOutput:
    return RowOutput(
        key=attempt,
        index=index,
        token_id=token_id,
        num_computed_tokens=num_computed_tokens,
        finish=finish,
        started=started,
        failed=failed,
    )


def step(*outputs: RowOutput, duration_s: float = 0.5) -> StepResult:
    return StepResult(outputs=list(outputs), duration_s=duration_s)
