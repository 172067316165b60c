"""The choice of workers: pure functions over what is known of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from router.placement import (
    Need,
    Refusals,
    capacity_tokens,
    choose_decode,
    choose_prefill,
    never_fits,
    pool_is_gone,
    power_of_two,
)
from tandem.types import LoadReport, PeerEndpoint, Role, WorkerInfo

NEED = Need(num_prefill_tokens=20, num_decode_tokens=26)


@dataclass
class Seen:
    """A router.ports.Worker as far as placement looks at it."""

    info: WorkerInfo
    load: LoadReport
    num_reports: int = 1
    usable: bool = True
    num_unreported_tokens: int = 0
    num_unreported_requests: int = 0
    num_unreported_blocks: int = 0
    sent: list[Any] = field(default_factory=list)

    @property
    def worker_id(self) -> str:
        return self.info.worker_id


def worker(name: str, *, fit: bytes = b"fit", num_blocks: int = 16, max_model_len: int = 1000, **levels: Any) -> Seen:
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    info = WorkerInfo(role, PeerEndpoint(name, 1, "", ""), 1, fit, num_blocks, 4, max_model_len)
    load = {name: levels.pop(name) for name in list(levels) if name in LoadReport.__dataclass_fields__}
    return Seen(info, LoadReport(**{"num_total_blocks": 16, "num_free_blocks": 16, **load}), **levels)


def prefill_of(
    prefills: list[Seen], decodes: list[Seen], refusals: Refusals | None = None, **kwargs: Any
) -> str | None:
    avoided = kwargs.pop("avoided", frozenset())
    found = choose_prefill(prefills, decodes, kwargs.pop("need", NEED), refusals or Refusals(), avoided, Random(0))
    return found.worker_id if found else None


def decode_of(
    decodes: list[Seen], prefill: Seen | None = None, refusals: Refusals | None = None, **kwargs: Any
) -> str | None:
    avoided = kwargs.pop("avoided", frozenset())
    found = choose_decode(decodes, prefill, NEED, refusals or Refusals(), avoided, Random(0))
    return found.worker_id if found else None


def test_the_prefill_worker_with_less_queued_is_asked() -> None:
    assert (
        prefill_of([worker("p0", queued_prefill_tokens=900), worker("p1", queued_prefill_tokens=10)], [worker("d0")])
        == "p1"
    )


def test_what_was_given_since_the_last_report_counts_too() -> None:
    assert (
        prefill_of([worker("p0", num_unreported_tokens=500), worker("p1", queued_prefill_tokens=10)], [worker("d0")])
        == "p1"
    )
    assert decode_of([worker("d0", num_unreported_requests=3), worker("d1", num_running=2)]) == "d1"
    assert decode_of([worker("d0", num_unreported_blocks=12), worker("d1", num_running=9)]) == "d1"


def test_room_now_goes_before_a_short_queue() -> None:
    assert (
        prefill_of([worker("p0", num_free_blocks=4), worker("p1", queued_prefill_tokens=900)], [worker("d0")]) == "p1"
    )
    assert decode_of([worker("d0", num_free_blocks=6), worker("d1", num_running=9)]) == "d1"


def test_a_worker_without_room_is_asked_all_the_same_if_there_is_no_other() -> None:
    assert decode_of([worker("d0", num_free_blocks=0)]) == "d0"


@pytest.mark.parametrize("unfit", [{"usable": False}, {"num_blocks": 6}, {"max_model_len": 25}])
def test_an_unusable_or_too_small_worker_is_never_asked(unfit: dict[str, Any]) -> None:
    assert decode_of([worker("d0", **unfit)]) is None


def test_a_prefill_worker_is_asked_only_if_a_decode_worker_can_take_over() -> None:
    p0, p1 = worker("p0", fit=b"old"), worker("p1", fit=b"new", queued_prefill_tokens=900)
    d0 = worker("d0", fit=b"new")
    assert prefill_of([p0, p1], [d0]) == "p1"
    assert prefill_of([p0, p1], [d0], avoided={("p1", "d0")}) is None
    assert prefill_of([p0, p1], []) is None
    assert decode_of([d0], p0) is None
    assert decode_of([d0], p1) == "d0"


def test_one_token_to_make_needs_no_decode_worker() -> None:
    assert prefill_of([worker("p0")], [], need=Need(20, 0)) == "p0"


def test_a_refusal_counts_until_a_report_shows_room() -> None:
    refusals, d0 = Refusals(), worker("d0", num_reports=5)
    refusals.note(d0)
    assert decode_of([d0], refusals=refusals) is None
    assert decode_of([worker("d0", num_reports=6, num_free_blocks=6)], refusals=refusals) is None
    assert decode_of([worker("d0", num_reports=6, num_free_blocks=7)], refusals=refusals) == "d0"


def test_a_refusal_for_good_stays() -> None:
    refusals, d0 = Refusals(), worker("d0")
    refusals.note(d0, for_good=True)
    assert decode_of([worker("d0", num_reports=99)], refusals=refusals) is None
    assert never_fits([d0], 26, refusals) is not None


def test_of_many_workers_two_random_ones_are_compared() -> None:
    workers = [worker(f"d{i}", num_running=i) for i in range(10)]
    chosen = [power_of_two(workers, lambda w: (False, w.load.num_running, 0), Random(seed)) for seed in range(300)]
    counts = [sum(w is c for c in chosen) for w in workers]
    assert counts[9] == 0, "the worst of all is never the better of two"
    assert len([c for c in counts if c]) >= 7, "several routers do not all run to the best"
    assert power_of_two([], lambda w: (False, 0, 0), Random(0)) is None


def test_the_largest_request_is_bounded_by_the_pool_and_by_the_context() -> None:
    assert capacity_tokens(worker("d0", num_blocks=16)) == 64
    assert capacity_tokens(worker("d0", num_blocks=16, max_model_len=40)) == 40


def test_never_fits_looks_at_down_workers_too_and_says_the_largest() -> None:
    assert never_fits([worker("d0", num_blocks=4), worker("d1", usable=False)], 26, Refusals()) is None
    assert never_fits([], 26, Refusals()) is None
    reason = never_fits([worker("d0", num_blocks=4), worker("d1", num_blocks=5)], 26, Refusals())
    assert reason is not None and "26" in reason and "20" in reason


def test_the_reason_why_nobody_can_be_asked() -> None:
    p, d = worker("p0"), worker("d0")
    down_p, down_d = worker("p0", usable=False), worker("d0", usable=False)
    assert pool_is_gone([p], [d], NEED, aggregated=False) is None
    assert pool_is_gone([down_p], [d], NEED, aggregated=False) == "no prefill worker is up"
    assert pool_is_gone([p], [down_d], NEED, aggregated=False) == "no decode worker is up"
    assert pool_is_gone([], [d], NEED, aggregated=True) is None
    assert pool_is_gone([p], [], Need(20, 0), aggregated=False) is None
    reason = pool_is_gone([p], [worker("d0", fit=b"other")], NEED, aggregated=False)
    assert reason is not None and "wire version" in reason
