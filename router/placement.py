"""④ Which worker to ask: pure functions over load reports and the router's own work since then.

Power of two choices: of two random eligible workers the less loaded, so that several routers with the same reports do
not all run to the same worker. The worker's grant is what decides; a refusal is kept until the worker has news.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from router.ports import Worker

WorkerT = TypeVar("WorkerT", bound=Worker)


@dataclass(frozen=True, slots=True)
class Need:
    """What one attempt asks for, in tokens: of its prefill worker and, in all, of its decode worker.

    num_decode_tokens 0: no reservation (one token to make).
    """

    num_prefill_tokens: int
    num_decode_tokens: int


@dataclass(slots=True)
class Refusals:
    """Which workers have refused a request, and until when that counts."""

    _until_report: dict[str, int] = field(default_factory=dict)
    _for_good: set[str] = field(default_factory=set)

    def note(self, worker: Worker, for_good: bool = False) -> None:
        """`worker` refused (or did not answer): not again before its next load report, or never."""
        if for_good:
            self._for_good.add(worker.worker_id)
        else:
            self._until_report[worker.worker_id] = worker.num_reports

    def excludes(self, worker: Worker, num_tokens: int) -> bool:
        """Whether asking `worker` would be in vain. After a refusal its report must show the room, too."""
        if worker.worker_id in self._for_good:
            return True
        refused_at = self._until_report.get(worker.worker_id)
        if refused_at is None:
            return False
        return worker.num_reports <= refused_at or worker.load.num_free_blocks < blocks_of(worker, num_tokens)

    def excludes_for_good(self, worker: Worker) -> bool:
        return worker.worker_id in self._for_good


def blocks_of(worker: Worker, num_tokens: int) -> int:
    """Blocks of `worker` that hold `num_tokens` tokens."""
    return -(-num_tokens // worker.info.block_size)


def capacity_tokens(worker: Worker) -> int:
    """The largest request that `worker` could ever hold."""
    return min(worker.info.num_blocks * worker.info.block_size, worker.info.max_model_len)


def may_pair(prefill: Worker, decode: Worker, avoided: Collection[tuple[str, str]]) -> bool:
    """Whether KV may go from `prefill` to `decode`."""
    return (
        prefill.info.compatibility_hash == decode.info.compatibility_hash
        and (prefill.worker_id, decode.worker_id) not in avoided
    )


def choose_prefill(
    prefills: Sequence[WorkerT],
    decodes: Sequence[Worker],
    need: Need,
    refusals: Refusals,
    avoided: Collection[tuple[str, str]],
    rng: Random,
) -> WorkerT | None:
    """The prefill worker to ask for credit, None if there is none now. One that no decode worker can serve is none."""
    partners = [d for d in decodes if _eligible(d, need.num_decode_tokens, refusals)]
    eligible = [
        p
        for p in prefills
        if _eligible(p, need.num_prefill_tokens, refusals)
        and (not need.num_decode_tokens or any(may_pair(p, d, avoided) for d in partners))
    ]
    return power_of_two(eligible, lambda p: prefill_cost(p, need.num_prefill_tokens), rng)


def choose_decode(
    decodes: Sequence[WorkerT],
    prefill: Worker | None,
    need: Need,
    refusals: Refusals,
    avoided: Collection[tuple[str, str]],
    rng: Random,
) -> WorkerT | None:
    """The decode worker to ask for a reservation; `prefill` None: it prefills itself."""
    eligible = [
        d
        for d in decodes
        if _eligible(d, need.num_decode_tokens, refusals) and (prefill is None or may_pair(prefill, d, avoided))
    ]
    return power_of_two(eligible, lambda d: decode_cost(d, need.num_decode_tokens), rng)


def _eligible(worker: Worker, num_tokens: int, refusals: Refusals) -> bool:
    return worker.usable and capacity_tokens(worker) >= num_tokens and not refusals.excludes(worker, num_tokens)


Cost = tuple[bool, int, int]


def prefill_cost(worker: Worker, num_tokens: int) -> Cost:
    """Lower is better: room now, then prompt tokens ahead."""
    lacks_room = worker.load.num_free_blocks - worker.num_unreported_blocks < blocks_of(worker, num_tokens)
    return lacks_room, worker.load.queued_prefill_tokens + worker.num_unreported_tokens, -worker.load.num_free_blocks


def decode_cost(worker: Worker, num_tokens: int) -> Cost:
    """Lower is better: room now, then rows."""
    lacks_room = worker.load.num_free_blocks - worker.num_unreported_blocks < blocks_of(worker, num_tokens)
    rows = worker.load.num_running + worker.load.num_waiting + worker.num_unreported_requests
    return lacks_room, rows, -worker.load.num_free_blocks


def power_of_two(workers: Sequence[WorkerT], cost: Callable[[WorkerT], Cost], rng: Random) -> WorkerT | None:
    """Of two random workers the one of lower cost; None of none."""
    if len(workers) <= 2:
        return min(workers, key=cost, default=None)
    return min(rng.sample(list(workers), 2), key=cost)


def pool_is_gone(prefills: Sequence[Worker], decodes: Sequence[Worker], need: Need, aggregated: bool) -> str | None:
    """Why no usable worker (or pair) exists at all, however long its queue; None if one does."""
    usable_prefills = [p for p in prefills if p.usable]
    usable_decodes = [d for d in decodes if d.usable]
    if not aggregated and not usable_prefills:
        return "no prefill worker is up"
    if need.num_decode_tokens and not usable_decodes:
        return "no decode worker is up"
    if aggregated or not need.num_decode_tokens:
        return None
    if not any(may_pair(p, d, ()) for p in usable_prefills for d in usable_decodes):
        return "no prefill worker and decode worker have the same model, dtype, block layout and wire version"
    return None


def never_fits(workers: Sequence[Worker], num_tokens: int, refusals: Refusals) -> str | None:
    """Why none of the pool's workers, as the directory has them, can ever take `num_tokens`; None if one can."""
    if not workers or any(capacity_tokens(w) >= num_tokens and not refusals.excludes_for_good(w) for w in workers):
        return None
    largest = max(map(capacity_tokens, workers))
    return f"{num_tokens} tokens exceed the KV pool of every worker (the largest holds {largest})"
