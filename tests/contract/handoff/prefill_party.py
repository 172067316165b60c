"""P: `prefill_worker/role.py`, `worker/role_base.py` and `kvtransfer/sender.py`."""

from __future__ import annotations

from tests.contract.handoff.world import ALL_ACKED, NUM_CHUNKS, NUM_TOKENS, Violation, World, p_has_room


def close(w: World) -> None:
    """The attempt is over; its blocks are free when no step uses them, and count as used anew from then on."""
    if w.p_channel in ("up", "cut") and w.p_state != "SENT" and not w.p_solo and w.on("abort-by-p"):
        _tell_subscriber(w, "Abort", w.p_attempt)
    w.p_attempt, w.p_state, w.p_solo, w.p_index = 0, "", False, 0
    w.p_chunks, w.p_acked, w.p_channel = 0, 0, ""


def fail(w: World) -> None:
    w.send("pr", "Failed", w.p_attempt)
    close(w)


def lease_expires(w: World) -> None:
    fail(w) if w.on("expiry-notice") else close(w)


def receive(w: World, channel: str) -> None:
    kind, attempt, *rest = w.take(channel)
    if kind == "Credit":
        _on_credit(w, attempt, rest[0])
    elif kind == "Resync":
        if w.p_attempt:
            close(w)
    elif not w.belongs(attempt, w.p_attempt):
        if kind == "Subscribe":
            w.pinged = False
            if w.on("abort-by-p"):
                w.send("pd", "Abort", attempt)
    elif kind == "Release":
        close(w)
    elif kind == "Prefill" and w.p_state == "CREDIT":
        w.p_state, w.p_index = "RUNNING", rest[0]
    elif kind == "Subscribe" and not w.p_channel:
        w.pinged = False  # the Pong, for brevity without a message
        w.p_channel = "up"
        if w.on("keep-offers"):
            for chunk in range(w.p_chunks):
                w.send("pd", "Offer", w.p_attempt, chunk)
    elif kind == "Ack":
        w.p_acked |= 1 << rest[0]
        _commit_if_acked(w)
    elif kind == "CommitAck" and w.p_state == "SENT":
        close(w)
    elif kind == "Abort":
        fail(w)


def _on_credit(w: World, attempt: int, solo: bool) -> None:
    if not p_has_room(w):
        return w.send("pr", "Refused", attempt)
    if w.p_step:
        raise Violation("blocks of P are granted again while a step writes into them")
    w.p_attempt, w.p_state, w.p_solo = attempt, "CREDIT", solo
    w.send("pr", "Granted", attempt)


def step_begins(w: World) -> None:
    w.p_step = w.p_attempt


def step_returns(w: World, first_ends: bool) -> None:
    """A chunk is computed; the last one brings the first token, which may end the answer."""
    attempt, w.p_step = w.p_step, 0
    if attempt != w.p_attempt or w.p_state != "RUNNING":
        return  # released while the step ran
    last = w.p_chunks == NUM_CHUNKS - 1
    if not last:
        w.p_chunks += 1
        if w.p_channel:
            _tell_subscriber(w, "Offer", attempt, w.p_chunks - 1)
        return
    first_ends = first_ends or w.p_index + 1 >= NUM_TOKENS
    w.send("pr", "FirstToken", attempt, w.p_index, first_ends)
    if w.p_solo or first_ends:
        w.p_state = "DONE"
        return
    w.p_state = "COMPUTED"
    w.p_chunks += 1
    if w.p_channel:
        _tell_subscriber(w, "Offer", attempt, w.p_chunks - 1)
    _commit_if_acked(w)


def _commit_if_acked(w: World) -> None:
    acked = w.p_acked == ALL_ACKED or not w.on("acks-first")
    if w.p_state != "COMPUTED" or not acked or not w.p_channel:
        return
    w.p_state = "SENT"
    _tell_subscriber(w, "Commit", w.p_attempt, w.p_index)


def _tell_subscriber(w: World, *message) -> None:
    """Into the subscriber's channel; a broken one swallows it."""
    if w.p_channel == "up":
        w.send("pd", *message)


def has_open_offers(w: World) -> bool:
    return not w.p_solo and w.p_acked.bit_count() < w.p_chunks and w.p_state in ("RUNNING", "COMPUTED", "DONE")


def channel_broken(w: World) -> None:
    """P sees that its subscriber's channel is gone. Once the commit was sent, the router decides."""
    if w.p_state != "SENT" and w.on("broken-at-p"):
        return fail(w)
    w.p_channel = "gone"
