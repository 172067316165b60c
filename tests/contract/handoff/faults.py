"""What can go wrong, and what may happen but need not: faults cost one unit of the budget, the rest is free.

Lost messages on the pair's channel are a fault as well, though gRPC loses none: only our own bug could.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.contract.handoff import decode_party, prefill_party, router_party
from tests.contract.handoff.world import (
    COPYING,
    FROM_THE_DEAD,
    GAP,
    SESSION_OF,
    World,
    inbox_part,
    nothing_held,
)

# (label, what it does, whether it costs a fault)
Deed = tuple[str, Callable[[World], None], bool]


def cut_session(w: World, worker: str, lingers: bool) -> None:
    """The session is gone and R does not know. lingers: what had arrived is still read, by both."""
    setattr(w, f"session_{worker}", "cut" if w.r_alive else "dead")
    if not lingers:
        setattr(w, f"r{worker}", ())
        setattr(w, f"{worker}r", inbox_part(getattr(w, f"{worker}r")))


def lose_message(w: World, channel: str) -> None:
    """The next message of a channel vanishes; in a session its number leaves a gap."""
    if channel in SESSION_OF and w.on("sequence"):
        setattr(w, channel, (GAP,))  # its receiver goes no further
    else:
        w.take(channel)


def crash_p(w: World, lingers: bool) -> None:
    """P dies and is back at once, as a new incarnation."""
    w.p_channel = ""
    prefill_party.close(w)
    w.p_step, w.rp = 0, ()
    w.d_copies = tuple([FROM_THE_DEAD if source else 0 for source in w.d_copies])
    _after_crash(w, "p", lingers)


def crash_d(w: World, lingers: bool) -> None:
    decode_party.crash(w)
    w.rd = ()
    _after_crash(w, "d", lingers)


def _after_crash(w: World, worker: str, lingers: bool) -> None:
    decode_party.drop_channel(w)
    if getattr(w, f"session_{worker}") in ("up", "mute"):
        inbox = getattr(w, f"{worker}r")
        cut_session(w, worker, lingers=False)
        if lingers:  # what the worker had sent
            setattr(w, f"{worker}r", inbox)


def crash_r(w: World, lingers: bool) -> None:
    """R dies for good; another router knows nothing of its requests."""
    w.r_alive, w.phase, w.first_seen, w.solo, w.open_p, w.open_d = False, "DONE", False, False, 0, 0
    for worker in ("p", "d"):
        cut_session(w, worker, lingers)
    w.pr = w.dr = ()


def break_silence(w: World, worker: str) -> None:
    """The worker breaks a session on which it has heard nothing for a lease's time."""
    cut_session(w, worker, lingers=True)


def heal(link: str) -> Callable[[World], None]:
    return lambda w: setattr(w, link, "up")


def deeds(w: World) -> Iterator[Deed]:
    """Everything of the kind that may happen in this state."""
    if w.r_alive and not w.end and w.phase != "NEW":
        yield "the client cancels, or the deadline passes", lambda w: router_party.finish(w, "cancelled"), False
    if w.pair == "stall":
        yield "the pair's channel recovers", heal("pair"), False
    for worker in ("p", "d"):
        if getattr(w, f"session_{worker}") == "mute":
            yield f"the session R-{worker.upper()} recovers", heal(f"session_{worker}"), False
            if w.on("silence"):
                yield f"{worker.upper()} breaks its silent session", lambda w, x=worker: break_silence(w, x), False
    if w.faults and w.phase != "NEW" and not (w.phase == "DONE" and nothing_held(w)):
        for label, deed in _faults(w):
            yield label, deed, True


def _faults(w: World) -> Iterator[tuple[str, Callable[[World], None]]]:
    for lingers in (False, True):
        how = "what had arrived is read" if lingers else "what was on its way is lost"
        yield f"P crashes and is back, {how}", lambda w, x=lingers: crash_p(w, x)
        yield f"D crashes and is back, {how}", lambda w, x=lingers: crash_d(w, x)
        if w.r_alive:
            yield f"R crashes, {how}", lambda w, x=lingers: crash_r(w, x)
        for worker in ("p", "d"):
            if getattr(w, f"session_{worker}") == "up":
                label = f"the session R-{worker.upper()} breaks, {how}"
                yield label, lambda w, x=worker, y=lingers: cut_session(w, x, y)
    for worker in ("p", "d"):
        if getattr(w, f"session_{worker}") == "up":
            yield f"the session R-{worker.upper()} falls silent", lambda w, x=worker: setattr(w, f"session_{x}", "mute")
    for channel in ("rp", "pr", "rd", "dr", "dp", "pd"):
        queue = getattr(w, channel)
        on_the_wire = getattr(w, SESSION_OF.get(channel, "pair")) == "up" and not inbox_part(queue)
        if queue and on_the_wire and queue[0][0] not in ("Gap", "Resync"):
            yield f"{queue[0][0]} is lost on {channel}", lambda w, x=channel: lose_message(w, x)
    if w.pair == "up":
        yield "the pair's channel breaks", decode_party.drop_channel
        yield "the pair's channel stalls", lambda w: setattr(w, "pair", "stall")
    for chunk, block in enumerate(w.d_blocks):
        if block == COPYING:
            yield f"the copy of chunk {chunk} fails", lambda w, x=chunk: decode_party.copy_returns(w, x, False)
