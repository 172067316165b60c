"""What waits to be written to one router: bounded, control first, steps coalesced (④).

Order per request is kept: a Finished or Failed that follows tokens of the same request is written after them. A router
that reads slowly gets few, larger Step messages; only control messages can fill the box, and then it is `overflowed`
and the session ends, which the router takes for the loss of the worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from tandem.messages import Step, StepRow, WorkerMessage
from tandem.types import LoadReport, RequestKey

MAX_CONTROL_MESSAGES = 8192
# rows and ids of one Step: well under a frame of 256 KiB (a row's key takes at most about 160 bytes, an id 5)
MAX_STEP_ROWS = 512
MAX_STEP_TOKENS = 16 * 1024


class Outbox:
    """Messages of one session, in the order in which they are to be written."""

    def __init__(self) -> None:
        self._control: deque[WorkerMessage] = deque()
        self._rows: dict[RequestKey, StepRow] = {}
        self._after_rows: deque[WorkerMessage] = deque()
        self._load_wanted = False
        self._greeted = False
        self.overflowed = False

    def __bool__(self) -> bool:
        return self._load_wanted or bool(self._control or self._rows or self._after_rows)

    def put(self, message: WorkerMessage) -> None:
        """Add a message; tokens of a request that is waiting already join its row."""
        if isinstance(message, Step):
            for row in message.rows:
                waiting = self._rows.get(row.key)
                if waiting is not None:
                    assert waiting.index + len(waiting.token_ids) == row.index, f"{row.key}: hole before {row.index}"
                    row = replace(waiting, token_ids=waiting.token_ids + row.token_ids)
                self._rows[row.key] = row
            return
        if len(self._control) + len(self._after_rows) >= MAX_CONTROL_MESSAGES:
            self.overflowed = True
            return
        key = getattr(message, "key", None)
        (self._after_rows if key in self._rows else self._control).append(message)

    def want_load(self) -> None:
        """Have the newest load report written; wanting it twice writes it once."""
        self._load_wanted = True

    def take(self, load: Callable[[], LoadReport]) -> list[WorkerMessage]:
        """Everything that waits, in writing order; `load` makes a wanted report. Leaves the box empty.

        A session opens with a load report. Later ones follow the refusals that they answer: ahead of them, the router
        would not know that it has been told of the room already.
        """
        messages: list[WorkerMessage] = list(self._control)
        if self._load_wanted:
            messages.insert(len(messages) if self._greeted else 0, load())
            self._greeted = True
        messages += [Step(rows) for rows in _split(list(self._rows.values()))]
        messages += self._after_rows
        self._control.clear()
        self._rows.clear()
        self._after_rows.clear()
        self._load_wanted = False
        return messages


def _split(rows: list[StepRow]) -> list[tuple[StepRow, ...]]:
    """Rows in groups that fit a frame; a row of very many ids is cut."""
    groups: list[tuple[StepRow, ...]] = []
    group: list[StepRow] = []
    num_tokens = 0
    for row in rows:
        for start in range(0, len(row.token_ids), MAX_STEP_TOKENS):
            piece = replace(row, index=row.index + start, token_ids=row.token_ids[start : start + MAX_STEP_TOKENS])
            if group and (len(group) == MAX_STEP_ROWS or num_tokens + len(piece.token_ids) > MAX_STEP_TOKENS):
                groups.append(tuple(group))
                group, num_tokens = [], 0
            group.append(piece)
            num_tokens += len(piece.token_ids)
    if group:
        groups.append(tuple(group))
    return groups
