"""The state of the model: one request, its router R, a prefill worker P, a decode worker D, and what is between them.

Small numbers that show everything: a prompt of two chunks of one block each, pools of exactly these two blocks, so that
every try wants the very blocks of the one before; an answer of three tokens; a retry budget of two.

Channels are FIFO tuples of messages (kind, attempt, ...). `pr` and `dr` hold what is on the wire and what waits in the
attempt's inbox at R; a Lost in them is the inbox's own.

    rp  Resync | Credit solo | Prefill index | Release
    pr  Granted | Refused | FirstToken index ends | Failed | Lost
    rd  Resync | Reserve index | Release
    dr  Granted | Refused | Committed | Step low high | Finished | Failed | Lost
    dp  Subscribe | Ack chunk | CommitAck | Abort
    pd  Offer chunk | Commit index | Abort
    any session channel: Gap, where a message was lost; whatever follows it is never taken
"""

from __future__ import annotations

NUM_TOKENS, NUM_CHUNKS, RETRY_BUDGET = 3, 2, 2
FREE, RESERVED, COPYING, READY = "free", "reserved", "copying", "ready"
ORPHAN = "orphan"  # a copy writes into it, its attempt is over
STALE = "stale"  # ready, but what was copied is not what was offered
ALL_FREE, ALL_READY = (FREE,) * NUM_CHUNKS, (READY,) * NUM_CHUNKS
ALL_ACKED = (1 << NUM_CHUNKS) - 1
NO_COPIES, FROM_THE_DEAD = (0,) * NUM_CHUNKS, -1

INITIAL = {
    "faults": 0,  # that may still happen
    "aggregated": False,  # no prefill worker: D prefills
    # the router's life cycle. NEW WANT CREDIT RESERVE RUN DECODE NO_CREDIT NO_ROOM DONE; RUN is PREFILLING and
    # TRANSFERRING, told apart by `first_seen`
    "r_alive": True,
    "attempt": 0,
    "phase": "NEW",
    "delivered": 0,
    "end": "",
    "first_seen": False,
    "solo": False,  # one token to make: no reservation
    "losses": 0,
    # attempts whose inbox is registered at the router's link to P and D
    "open_p": 0,
    "open_d": 0,
    # up | mute: nothing gets through, nobody knows | cut: the router does not know | down: it does | dead: it is dead
    "session_p": "up",
    "session_d": "up",
    # the pair's channel: up | stall | cut, and whether D's ping is unanswered
    "pair": "cut",
    "pinged": False,
    # P. "" CREDIT RUNNING COMPUTED (all chunks) SENT (the commit) DONE (the first token ends the answer)
    "p_attempt": 0,
    "p_state": "",
    "p_solo": False,
    "p_index": 0,
    "p_chunks": 0,  # computed, and offered or kept
    "p_acked": 0,  # bit mask
    "p_channel": "",  # its subscriber's channel: "" none, up, cut (P does not know), gone
    "p_step": 0,  # attempt in the running step
    # D. "" RESERVED PREFILLING DECODING FINISHED
    "d_attempt": 0,
    "d_state": "",
    "d_repeat": -1,  # index of the committed token until the first Step has repeated it
    "d_next": 0,  # index of the next token to make
    "d_channel": "",  # "" none needed, up, cut (D does not know)
    "d_blocks": ALL_FREE,
    "d_copies": NO_COPIES,  # by chunk: attempt whose blocks are being read, or FROM_THE_DEAD
    "d_step": 0,
    "rp": (),
    "pr": (),
    "rd": (),
    "dr": (),
    "dp": (),
    "pd": (),
}
SESSION_OF = {"rp": "session_p", "pr": "session_p", "rd": "session_d", "dr": "session_d"}


class Violation(Exception):
    """Something happened that must never happen."""


class World:
    """One state, open for change; `off` are the rules taken out."""

    __slots__ = (*INITIAL, "off")

    def __init__(self, values: tuple, off: frozenset[str] = frozenset()) -> None:
        for name, value in zip(INITIAL, values, strict=True):
            setattr(self, name, value)
        self.off = off

    def on(self, rule: str) -> bool:
        return rule not in self.off

    def send(self, channel: str, *message) -> None:
        """Send; what has no channel is lost, and nobody gets to read what follows a gap."""
        open_states = ("up", "mute") if channel in SESSION_OF else ("up", "stall")
        queue = getattr(self, channel)
        if getattr(self, SESSION_OF.get(channel, "pair")) in open_states and not has_gap(queue):
            setattr(self, channel, (*queue, message))

    def take(self, channel: str) -> tuple:
        head, *rest = getattr(self, channel)
        setattr(self, channel, tuple(rest))
        return head

    def belongs(self, attempt: int, held: int) -> bool:
        """Whether a message of `attempt` is for what is held."""
        return held != 0 and (attempt == held or not self.on("attempt-key"))

    def freeze(self) -> tuple:
        """The state as a value. States that behave alike become equal: what no longer matters is forgotten."""
        if self.on("terminal-fence") and self.phase == "DONE":
            self.attempt = self.delivered = self.losses = 0
        if self.on("attempt-key") and self.on("attempt-per-try") and self.on("terminal-fence"):
            # attempts only rise: what is for another one now is for another one for ever
            self.pr = tuple([m for m in self.pr if m[1] in (self.attempt, None)])
            self.dr = tuple([m for m in self.dr if m[1] in (self.attempt, None)])
            self.pd = tuple([m for m in self.pd if m[1] == self.d_attempt])
            self.dp = tuple([m for m in self.dp if m[1] == self.p_attempt or m[0] == "Subscribe"])
        return tuple([getattr(self, name) for name in INITIAL])


GAP = ("Gap", None)


def has_gap(queue: tuple) -> bool:
    return GAP in queue


def inbox_part(queue: tuple) -> tuple:
    """What is left of a channel to the router when the wire is gone: the inbox, as far as its last Lost shows it."""
    marks = [at for at, message in enumerate(queue) if message[0] == "Lost"]
    return queue[: marks[-1] + 1] if marks else ()


def replaced(items: tuple, at: int, item) -> tuple:
    return (*items[:at], item, *items[at + 1 :])


def start(faults: int, aggregated: bool) -> tuple:
    return tuple({**INITIAL, "faults": faults, "aggregated": aggregated}.values())


def p_has_room(w: World) -> bool:
    return w.p_attempt == 0 and (w.p_step == 0 or not w.on("step-holds"))


def d_has_room(w: World) -> bool:
    return w.d_attempt == 0 and w.d_blocks == ALL_FREE and (w.d_step == 0 or not w.on("step-holds"))


def nothing_held(w: World) -> bool:
    idle = w.p_attempt == w.p_step == w.d_attempt == w.d_step == 0
    return idle and w.d_blocks == ALL_FREE and w.d_copies == NO_COPIES


def is_final(w: World) -> bool:
    """The client has its terminal event, or nobody to have it from, and the workers hold nothing."""
    return bool(w.end or not w.r_alive) and nothing_held(w)
