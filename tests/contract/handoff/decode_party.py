"""D: `decode_worker/role.py`, `worker/role_base.py`, `kvtransfer/receiver.py` and `kvtransfer/link.py`."""

from __future__ import annotations

from tests.contract.handoff.world import (
    ALL_FREE,
    ALL_READY,
    COPYING,
    FREE,
    NO_COPIES,
    NUM_CHUNKS,
    NUM_TOKENS,
    ORPHAN,
    READY,
    RESERVED,
    STALE,
    Violation,
    World,
    d_has_room,
    replaced,
)


def close(w: World) -> None:
    """The attempt is over; a block that a copy writes into stays taken until the copy has returned."""
    if w.d_state == "RESERVED" and w.on("abort-by-d"):
        _tell_peer(w, "Abort", w.d_attempt)
    orphan = ORPHAN if w.on("copy-holds") else FREE
    w.d_blocks = tuple([{COPYING: orphan, ORPHAN: ORPHAN}.get(block, FREE) for block in w.d_blocks])
    w.d_attempt, w.d_state, w.d_repeat, w.d_next, w.d_channel = 0, "", -1, 0, ""


def fail(w: World) -> None:
    w.send("dr", "Failed", w.d_attempt)
    close(w)


def lease_expires(w: World) -> None:
    fail(w) if w.on("expiry-notice") else close(w)


def receive(w: World, channel: str) -> None:
    kind, attempt, *rest = w.take(channel)
    if kind == "Reserve":
        _on_reserve(w, attempt, *rest)
    elif kind == "Resync":
        if w.d_attempt:
            close(w)
    elif not w.belongs(attempt, w.d_attempt):
        return
    elif kind == "Release":
        close(w)
    elif w.d_state != "RESERVED":
        return
    elif kind == "Offer":
        _on_offer(w, attempt, rest[0])
    elif kind == "Commit":
        _on_commit(w, attempt, rest[0])
    elif kind == "Abort":
        w.d_channel = ""  # nobody to tell
        fail(w)


def _on_reserve(w: World, attempt: int, index: int) -> None:
    if not d_has_room(w) and (w.d_attempt or w.on("all-or-nothing")):
        return w.send("dr", "Refused", attempt)
    if w.d_copies != NO_COPIES:
        raise Violation("a block of D is granted again while a copy into it is in flight")
    if w.d_step:
        raise Violation("blocks of D are granted again while a step uses them")
    w.d_attempt, w.d_blocks, w.d_next = attempt, (RESERVED,) * NUM_CHUNKS, index
    w.d_state = "PREFILLING" if w.aggregated else "RESERVED"
    w.send("dr", "Granted", attempt)
    if not w.aggregated:
        if w.on("redial") and (w.pair == "cut" or (w.pair == "stall" and w.pinged)):
            drop_channel(w)
            w.pair, w.d_channel = "up", "up"
        w.d_channel = "cut" if w.pair == "cut" else "up"
        w.pinged = w.pinged or w.pair != "cut"
        _tell_peer(w, "Subscribe", attempt)


def drop_channel(w: World) -> None:
    """The pair's channel and what is on it are gone; either end finds out by itself."""
    w.pair, w.pinged, w.dp, w.pd = "cut", False, (), ()
    if w.p_channel == "up":
        w.p_channel = "cut"
    if w.d_channel == "up":
        w.d_channel = "cut"


def _on_offer(w: World, attempt: int, chunk: int) -> None:
    num_before = NUM_CHUNKS - w.d_blocks.count(RESERVED)
    if chunk != num_before:  # one got lost
        return fail(w)
    w.d_blocks, w.d_copies = replaced(w.d_blocks, chunk, COPYING), replaced(w.d_copies, chunk, attempt)


def _on_commit(w: World, attempt: int, index: int) -> None:
    if w.on("verify-commit") and any(block not in (READY, STALE) for block in w.d_blocks):
        return fail(w)
    if w.on("commit-ack"):
        _tell_peer(w, "CommitAck", attempt)
    w.d_state, w.d_repeat, w.d_next, w.d_channel = "DECODING", index, index + 1, ""
    w.send("dr", "Committed", w.d_attempt)


def _tell_peer(w: World, *message) -> None:
    if w.d_channel == "up":
        w.send("dp", *message)


def copy_returns(w: World, chunk: int, intact: bool) -> None:
    """The bytes are here, or the fetch failed. intact: the source held them all the time."""
    source, w.d_copies = w.d_copies[chunk], replaced(w.d_copies, chunk, 0)
    block = w.d_blocks[chunk]
    if block == ORPHAN:
        w.d_blocks = replaced(w.d_blocks, chunk, FREE)
    elif block == COPYING:
        if not intact and (source <= 0 or w.on("generation")):
            w.d_blocks = replaced(w.d_blocks, chunk, FREE)
            return fail(w)
        w.d_blocks = replaced(w.d_blocks, chunk, READY if intact and source == w.d_attempt else STALE)
        _tell_peer(w, "Ack", w.d_attempt, chunk)


def channel_broken(w: World) -> None:
    """D sees that its channel is gone."""
    w.d_channel = ""
    if w.on("broken-at-d"):
        fail(w)


def step_begins(w: World) -> None:
    if w.d_state not in ("DECODING", "PREFILLING"):
        raise Violation("D computes a row that is not committed")
    if w.d_state == "DECODING" and w.d_blocks != ALL_READY:
        raise Violation(f"D decodes blocks that are {' and '.join(w.d_blocks)}")
    w.d_step = w.d_attempt


def step_returns(w: World) -> None:
    """One token more; or a chunk of a local prefill, the last one with the first token."""
    attempt, w.d_step = w.d_step, 0
    if attempt != w.d_attempt:
        return  # released while the step ran
    low = w.d_next
    if w.d_state == "PREFILLING":
        w.d_blocks = replaced(w.d_blocks, w.d_blocks.index(RESERVED), READY)
        if w.d_blocks != ALL_READY:
            return
        w.d_state = "DECODING"
    elif w.d_repeat >= 0 and w.on("repeat-first"):
        low = w.d_repeat
    w.d_repeat = -1
    w.d_next += 1
    w.send("dr", "Step", attempt, low, w.d_next)
    if w.d_next >= NUM_TOKENS:
        w.send("dr", "Finished", attempt)
        w.d_state = "FINISHED"  # held until Release, resync or lease


def crash(w: World) -> None:
    w.d_blocks, w.d_copies, w.d_step = ALL_FREE, NO_COPIES, 0
    w.d_channel = ""
    close(w)
