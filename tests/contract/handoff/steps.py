"""All steps that are possible in a state. Fair ones happen if nothing else does; faults and cancels need not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from tests.contract.handoff import decode_party, prefill_party, router_party
from tests.contract.handoff.faults import cut_session, deeds
from tests.contract.handoff.world import (
    COPYING,
    NUM_CHUNKS,
    NUM_TOKENS,
    ORPHAN,
    Violation,
    World,
    d_has_room,
    inbox_part,
    p_has_room,
)

# label, whether it is fair, the state after it or what it violates
Step = tuple[str, bool, "tuple | Violation"]
Act = tuple[str, Callable[[World], None]]

READERS = {
    "pr": ("R", router_party.receive),
    "dr": ("R", router_party.receive),
    "rp": ("P", prefill_party.receive),
    "dp": ("P", prefill_party.receive),
    "rd": ("D", decode_party.receive),
    "pd": ("D", decode_party.receive),
}


def successors(state: tuple, off: frozenset[str]) -> list[Step]:
    w = World(state, off)
    steps = [_do(state, off, label, act, fair=True) for label, act in _progress(w)]
    idle = not steps
    if w.faults or idle:
        for label, act in _timers(w):
            steps.append(_do(state, off, label if idle else f"early: {label}", act, fair=idle, cost=0 if idle else 1))
    for label, act in _leases(w):
        steps.append(_do(state, off, label, act, fair=not w.r_alive))
    for label, act, costs in deeds(w):
        steps.append(_do(state, off, label, act, fair=False, cost=int(costs)))
    return steps


def _do(state: tuple, off: frozenset[str], label: str, act: Callable[[World], None], fair: bool, cost: int = 0) -> Step:
    w = World(state, off)
    w.faults -= cost
    try:
        act(w)
    except Violation as violation:
        return label, fair, violation
    return label, fair, w.freeze()


def _progress(w: World) -> Iterator[Act]:
    """What happens when nothing goes wrong, and what a party does about what did."""
    yield from _deliveries(w)
    if w.r_alive:
        yield from _router(w)
    if w.p_state == "RUNNING" and not w.p_step:
        yield f"P begins a chunk of attempt {w.p_attempt}", prefill_party.step_begins
    if w.p_step:
        yield f"P's step of attempt {w.p_step} returns", partial(prefill_party.step_returns, first_ends=False)
        if w.p_attempt == w.p_step and w.p_chunks == NUM_CHUNKS - 1 and not w.p_solo:
            yield "P's step returns, the first token is EOS", partial(prefill_party.step_returns, first_ends=True)
    if w.p_channel == "cut":
        yield "P sees that the pair's channel is broken", prefill_party.channel_broken
    if w.d_channel == "cut" and w.d_state == "RESERVED":
        yield "D sees that the pair's channel is broken", decode_party.channel_broken
    for chunk, source in enumerate(w.d_copies):
        if source:
            yield from _copies(w, chunk, source)
    if w.d_state in ("DECODING", "PREFILLING") and not w.d_step:
        yield f"D begins a step of attempt {w.d_attempt}", decode_party.step_begins
    if w.d_step:
        yield f"D's step of attempt {w.d_step} returns", decode_party.step_returns


def _deliveries(w: World) -> Iterator[Act]:
    for channel, (reader, receive) in READERS.items():
        queue = getattr(w, channel)
        if not queue:
            continue
        kind, attempt, *rest = queue[0]
        worker = channel.strip("r")
        if channel in ("dp", "pd"):
            readable = w.pair == "up"
        else:  # what has reached R's inbox is read, whatever the session does
            readable = getattr(w, f"session_{worker}") != "mute" or inbox_part(queue)
        if not readable:
            continue
        if kind == "Gap":
            if reader == "R":
                yield f"R sees a gap on {channel}", partial(router_party.session_ends, worker=worker)
            else:
                yield f"{reader} sees a gap on {channel}", partial(_gap_at_worker, worker=worker)
        else:
            what = ", ".join(map(str, [attempt, *rest]))
            yield f"{reader} takes {kind}({what}) from {channel}", partial(receive, channel=channel)


def _gap_at_worker(w: World, worker: str) -> None:
    setattr(w, f"r{worker}", ())
    if getattr(w, f"session_{worker}") == "up":
        cut_session(w, worker, lingers=True)


def _copies(w: World, chunk: int, source: int) -> Iterator[Act]:
    returns = partial(decode_party.copy_returns, chunk=chunk)
    if w.d_blocks[chunk] == ORPHAN or source == w.p_attempt:
        yield f"the copy of chunk {chunk} returns", partial(returns, intact=True)
    else:
        yield f"the copy of chunk {chunk} returns, its source was reused", partial(returns, intact=False)
        if source > 0 and w.d_blocks[chunk] == COPYING:
            yield f"the copy of chunk {chunk} returns, its source was freed", partial(returns, intact=True)


def _router(w: World) -> Iterator[Act]:
    if w.phase == "NEW":
        yield "R takes the request", router_party.begin_try
    p_up, d_up = w.session_p != "down", w.session_d != "down"
    if w.phase == "WANT" and (d_up if w.aggregated else p_up and (d_up or w.delivered == NUM_TOKENS - 1)):
        yield f"R asks for attempt {w.attempt}", router_party.ask
    if w.phase == "NO_CREDIT" and p_has_room(w):
        yield "R sees that P has room", router_party.sees_room
    if w.phase == "NO_ROOM" and d_has_room(w):
        yield "R sees that D has room", router_party.sees_room
    for worker in ("p", "d"):
        session, name = getattr(w, f"session_{worker}"), worker.upper()
        if session == "cut" or (session == "mute" and w.on("silence")):
            yield f"R sees that its session to {name} is over", partial(router_party.session_ends, worker=worker)
        elif session == "down":
            yield f"R dials {name}", partial(router_party.dial, worker=worker)


def _timers(w: World) -> Iterator[Act]:
    if w.on("overdue") and w.phase == "RUN" and w.first_seen and w.r_alive:
        yield "Committed is overdue", router_party.lose
    if w.on("reply-timer") and w.phase in ("CREDIT", "RESERVE"):
        yield "R has no answer in time", router_party.lose
    if w.on("offer-timer") and prefill_party.has_open_offers(w):
        yield "an offer is not acknowledged in time", prefill_party.fail


def _leases(w: World) -> Iterator[Act]:
    if not w.on("lease"):
        return
    if w.p_attempt and w.session_p != "up":
        yield "the lease at P expires", prefill_party.lease_expires
    if w.d_attempt and w.session_d != "up":
        yield "the lease at D expires", decode_party.lease_expires
