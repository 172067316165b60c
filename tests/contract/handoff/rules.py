"""The rules of the hand-off that can be taken out one at a time, and whether the model misses them."""

from __future__ import annotations

# Without any one of these something goes wrong.
NEEDED = {
    "attempt-key": "a message of another attempt is dropped",
    "router-ends": "the router itself ends the answer at its last token",
    "terminal-fence": "the router drops whatever comes for an answer that has ended",
    "dedup": "the router drops indices that it has delivered already",
    "repeat-first": "the decode worker's first Step repeats the committed token",
    "release": "the router releases both workers, whatever way an attempt ends",
    "return-credit": "the router returns the credit when the reservation is refused",
    "lost-prefill": "the loss of P before Committed ends the attempt",
    "lost-decode": "a broken session to D ends the attempt, even if D lives",
    "overdue": "the router re-runs when Committed is overdue",
    "sequence": "a gap in a session's sequence numbers breaks it",
    "silence": "a silent session is broken",
    "resync": "a session opens with a Resync: the worker frees what it does not name",
    "session-number": "messages of an older session are dropped",
    "lease": "a worker frees what a silent router holds",
    "expiry-notice": "a worker tells the router of an expired lease",
    "all-or-nothing": "a grant is refused unless all of its blocks are free",
    "copy-holds": "a block stays taken until the copy into it has returned",
    "step-holds": "a block stays taken until the step that uses it has returned",
    "generation": "D checks the source's generations after the copy",
    "acks-first": "P commits only after the last Ack",
    "keep-offers": "P keeps its offers until D has subscribed",
    "redial": "a Reserve dials the pair's channel anew if it is broken or stalled",
}

# These end things sooner, or guard against what does not happen here; with one fault the model finds a way out without
# any one of them.
HELPFUL = {
    # needed as soon as a Release may be sent again or overtaken: today it is sent once, in order
    "attempt-per-try": "the attempt rises with every try, also when it was merely refused",
    "reply-timer": "the router waits only so long for the answer to Credit and Reserve",
    "offer-timer": "P fails the attempt when an offer is not acknowledged in time",
    "commit-ack": "CommitAck lets P forget (else the router's Release does)",
    "broken-at-p": "P fails an uncommitted attempt when its subscriber's channel breaks",
    "broken-at-d": "D fails an uncommitted attempt when its channel breaks",
    "abort-by-p": "P tells D when it gives an uncommitted attempt up, or knows nothing of it",
    "abort-by-d": "D tells P when it gives an uncommitted attempt up",
    "verify-commit": "D compares the commit record with what it has copied",
    "ignore-prefill": "the router ignores P's loss and failure after Committed",
}
