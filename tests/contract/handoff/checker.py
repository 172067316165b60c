"""Breadth-first search of all reachable states.

Safety: no step raises a Violation. Liveness: from every reachable state some path of fair steps leads to a final state.
Without faults: one attempt, and no error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tests.contract.handoff.steps import successors
from tests.contract.handoff.world import INITIAL, Violation, World, is_final, start

MAX_STATES = 5_000_000


@dataclass(frozen=True, slots=True)
class Finding:
    """How many states there are, and, if something is wrong: what, and the shortest way there."""

    num_states: int
    problem: str = ""
    trace: tuple[str, ...] = ()


class _Graph:
    """States by number, in order of discovery: how each was reached first, and from where by fair steps."""

    def __init__(self, first: tuple) -> None:
        self.numbers = {first: 0}
        self.states = [first]
        self.reached_by: list[tuple[int, str]] = [(-1, "")]
        self.fair_sources: list[list[int]] = [[]]

    def add(self, source: int, label: str, fair: bool, state: tuple) -> None:
        number = self.numbers.get(state)
        if number is None:
            number = self.numbers[state] = len(self.states)
            self.states.append(state)
            self.reached_by.append((source, label))
            self.fair_sources.append([])
        if fair:
            self.fair_sources[number].append(source)

    def trace(self, number: int, *last: str) -> tuple[str, ...]:
        steps = list(reversed(last))
        while number > 0:
            number, label = self.reached_by[number]
            steps.append(label)
        return tuple(reversed(steps))


def check(faults: int, *, aggregated: bool = False, off: Iterable[str] = ()) -> Finding:
    """Search everything that up to `faults` faults can lead to, with the rules `off` taken out."""
    rules_off = frozenset(off)
    graph = _Graph(start(faults, aggregated))
    stuck: list[int] = []  # states without a fair step
    number = 0
    while number < len(graph.states):
        moves = False
        for label, fair, state in successors(graph.states[number], rules_off):
            if isinstance(state, Violation):
                return Finding(len(graph.states), f"safety: {state}", graph.trace(number, label))
            graph.add(number, label, fair, state)
            moves = moves or fair
        if not moves:
            stuck.append(number)
        number += 1
        if number > MAX_STATES:
            raise RuntimeError(f"more than {MAX_STATES} states")
    return _needless(graph, faults) or _no_way_out(graph, stuck) or Finding(len(graph.states))


def _needless(graph: _Graph, faults: int) -> Finding | None:
    if faults:
        return None
    for number, state in enumerate(graph.states):
        w = World(state)
        if w.attempt > 1 or w.end == "error":
            return Finding(len(graph.states), "without a fault: another try, or an error", graph.trace(number))
    return None


def _no_way_out(graph: _Graph, stuck: list[int]) -> Finding | None:
    """Walk fair steps backwards from the final states; what that does not reach has no way out."""
    todo = [number for number, state in enumerate(graph.states) if is_final(World(state))]
    good = bytearray(len(graph.states))
    for number in todo:
        good[number] = 1
    while todo:
        for source in graph.fair_sources[todo.pop()]:
            if not good[source]:
                good[source] = 1
                todo.append(source)
    bad = good.find(0)
    if bad < 0:
        return None
    bad = next((number for number in stuck if not good[number]), bad)  # the plainest: nothing happens any more
    differing = zip(INITIAL, graph.states[bad], strict=True)
    left = ", ".join(f"{name}={value!r}" for name, value in differing if value != INITIAL[name] and name != "faults")
    return Finding(len(graph.states), f"liveness: no way out of {left}", graph.trace(bad))
