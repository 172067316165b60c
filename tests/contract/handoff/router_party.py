"""R: `router/lifecycle.py` (what happens to the attempt) and `router/session.py` (what happens to the sessions)."""

from __future__ import annotations

from tests.contract.handoff.world import NUM_TOKENS, RETRY_BUDGET, Violation, World, inbox_part

# ---- the life cycle


def begin_try(w: World) -> None:
    """Stand in line."""
    w.phase, w.first_seen = "WANT", False
    w.attempt += 1


def ask(w: World) -> None:
    """It is this request's turn: credit, or in aggregated mode the reservation."""
    if w.aggregated:
        return reserve(w)
    w.solo = w.delivered == NUM_TOKENS - 1
    w.phase, w.open_p = "CREDIT", w.attempt
    w.send("rp", "Credit", w.attempt, w.solo)


def reserve(w: World) -> None:
    if w.session_d == "down":  # no decode worker may be asked now
        return try_again(w)
    w.phase, w.open_d = "RESERVE", w.attempt
    w.send("rd", "Reserve", w.attempt, w.delivered)


def release_prefill(w: World) -> None:
    """Nothing is sent where the session broke: the next one's Resync does it."""
    if w.open_p and w.on("release"):
        w.send("rp", "Release", w.open_p)
    w.open_p = 0


def release(w: World) -> None:
    release_prefill(w)
    if w.open_d and w.on("release"):
        w.send("rd", "Release", w.open_d)
    w.open_d = 0


def finish(w: World, reason: str) -> None:
    release(w)
    if w.end:
        raise Violation("a second terminal event")
    w.end, w.phase, w.first_seen, w.solo = reason, "DONE", False, False


def try_again(w: World) -> None:
    """The try is over without anybody's loss."""
    release(w)
    begin_try(w)


def lose(w: World) -> None:
    """The try is over by a loss or a failed transfer, which costs of the retry budget."""
    w.losses += 1
    if w.losses > RETRY_BUDGET:
        return finish(w, "error")
    try_again(w)


def refused(w: World, phase: str) -> None:
    if phase == "NO_CREDIT" or w.on("return-credit"):
        release(w)
    w.open_p = w.open_d = 0
    w.phase = phase


def sees_room(w: World) -> None:
    if w.on("attempt-per-try"):
        begin_try(w)
    else:
        w.phase = "WANT"


def deliver(w: World, attempt: int, index: int) -> None:
    if w.end:
        raise Violation(f"token {index} is delivered after the terminal event")
    if attempt != w.attempt:
        raise Violation(f"token {index} of attempt {attempt} is delivered during attempt {w.attempt}")
    if index < w.delivered:
        if not w.on("dedup"):
            raise Violation(f"token {index} is delivered twice")
        return
    if index > w.delivered:
        raise Violation(f"token {index} is delivered when {w.delivered} is due")
    if index >= NUM_TOKENS:
        raise Violation(f"token {index} is delivered, beyond max_tokens")
    w.delivered += 1


def receive(w: World, channel: str) -> None:
    """The life cycle takes the next event of its inbox."""
    kind, attempt, *rest = w.take(channel)
    if (w.phase == "DONE" and w.on("terminal-fence")) or not w.belongs(attempt, w.attempt):
        return
    if channel == "pr":
        _from_prefill(w, kind, attempt, rest)
    else:
        _from_decode(w, kind, attempt, rest)


def _from_prefill(w: World, kind: str, attempt: int, rest: list) -> None:
    if kind == "FirstToken":
        _on_first_token(w, attempt, *rest)
    elif kind == "Granted" and w.phase == "CREDIT":
        if w.solo:
            _start_prefill(w)
        else:
            reserve(w)
    elif kind == "Refused" and w.phase == "CREDIT":
        refused(w, "NO_CREDIT")
    elif _ends_try(w, kind, "lost-prefill"):
        before_commit = w.phase in ("CREDIT", "RESERVE", "RUN")
        if before_commit or (w.phase == "DECODE" and not w.on("ignore-prefill")):
            lose(w)


def _ends_try(w: World, kind: str, rule: str) -> bool:
    return kind == "Failed" or (kind == "Lost" and w.on(rule))


def _from_decode(w: World, kind: str, attempt: int, rest: list) -> None:
    if kind == "Granted" and w.phase == "RESERVE":
        _start_prefill(w)
    elif kind == "Refused" and w.phase == "RESERVE":
        refused(w, "NO_ROOM")
    elif kind == "Committed" and w.phase == "RUN":
        w.phase = "DECODE"
        if w.first_seen:
            release_prefill(w)
    elif kind == "Step":
        if w.aggregated and w.phase == "RUN":
            w.phase = "DECODE"
        for index in range(*rest):
            deliver(w, attempt, index)
        if w.delivered == NUM_TOKENS and w.on("router-ends"):
            finish(w, "ok")
    elif kind == "Finished":  # with tokens missing it counts as a loss
        finish(w, "ok") if w.delivered == NUM_TOKENS else lose(w)
    elif _ends_try(w, kind, "lost-decode") and w.phase in ("RESERVE", "RUN", "DECODE"):
        lose(w)


def _start_prefill(w: World) -> None:
    w.phase = "RUN"
    if not w.aggregated:  # else D has begun by itself
        w.send("rp", "Prefill", w.attempt, w.delivered)


def _on_first_token(w: World, attempt: int, index: int, ends: bool) -> None:
    deliver(w, attempt, index)
    if w.phase not in ("RUN", "DECODE"):
        return
    w.first_seen = True
    if ends or (w.delivered == NUM_TOKENS and (w.solo or w.on("router-ends"))):
        finish(w, "ok")
    elif w.phase == "DECODE":  # the commit was faster
        release_prefill(w)


# ---- the sessions. W is P or D.


def session_ends(w: World, worker: str) -> None:
    """The link gives its session up; the attempt on it finds a Lost behind what had arrived."""
    session, inbox, opened = f"session_{worker}", f"{worker}r", f"open_{worker}"
    if getattr(w, session) == "mute":
        setattr(w, inbox, inbox_part(getattr(w, inbox)))
    queue = tuple([message for message in getattr(w, inbox) if message[0] != "Gap"])
    if attempt := getattr(w, opened):
        queue += (("Lost", attempt),)
    setattr(w, inbox, queue)
    setattr(w, session, "down")
    setattr(w, opened, 0)


def dial(w: World, worker: str) -> None:
    """A new session, to the same or to a new incarnation. No attempt is open on it: its Resync names none."""
    old = getattr(w, f"r{worker}")
    hello = (("Resync", None),) if w.on("resync") else ()
    # without session numbers the worker goes on reading the old session after the new one's first message
    setattr(w, f"r{worker}", hello + (() if w.on("session-number") else old))
    setattr(w, f"session_{worker}", "up")
