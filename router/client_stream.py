"""⑨ What a client has still to get: a bounded buffer between the lifecycles of a request and its gRPC call.

Lifecycles put and never wait; new tokens join those that wait, so that a slow reader gets few large chunks and costs
its neighbours nothing. A client with too many undelivered tokens is ended. Each choice ends with exactly one finish, or
the whole stream with one error, which is last (I2).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from router.detokenize import Piece
from tandem.errors import Overloaded
from tandem.v1 import generation_pb2 as pb


@dataclass(slots=True)
class _Outgoing:
    """One choice's share. `next_index`: of the next token to be put."""

    next_index: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    seed_reported: bool = False
    finished: bool = False


class ClientStream:
    """The responses of one request, in order.

    max_undelivered: tokens that may wait for the client. on_stalled: called when there are more, since the writer then
    stands still in a write that may never end.
    """

    def __init__(self, num_choices: int, seed: int, max_undelivered: int) -> None:
        self._choices = [_Outgoing() for _ in range(num_choices)]
        self._seed = seed
        self._max_undelivered = max_undelivered
        self._num_undelivered = 0
        self._finishes: deque[pb.GenerateResponse] = deque()
        self._error: Exception | None = None
        self._arrived = asyncio.Event()
        self.on_stalled: Callable[[], None] = lambda: None

    @property
    def error(self) -> Exception | None:
        """What ended the stream, if it was an error."""
        return self._error

    @property
    def over(self) -> bool:
        """Whether every choice has its terminal event."""
        return self._error is not None or all(choice.finished for choice in self._choices)

    def put(self, choice: int, piece: Piece) -> None:
        """New tokens of a choice. Raises Overloaded when the client does not read them."""
        out = self._choices[choice]
        assert not out.finished, "tokens after the terminal event"
        if self._error is not None:
            return  # ended from outside; the lifecycle is about to be cancelled
        if self._num_undelivered and self._num_undelivered + len(piece.token_ids) > self._max_undelivered:
            raise Overloaded(
                f"the client does not read: {self._num_undelivered + len(piece.token_ids)} tokens wait for it, "
                f"the limit is {self._max_undelivered}"
            )
        out.token_ids.extend(piece.token_ids)
        out.text.append(piece.text)
        self._num_undelivered += len(piece.token_ids)
        self._arrived.set()

    def finish(self, choice: int, finish: pb.Finish, held: Piece) -> None:
        """The end of a choice; `held` is what the detokenizer had kept back."""
        out = self._choices[choice]
        assert not out.finished, "a second terminal event"
        if self._error is not None:
            return
        if held and not out.seed_reported and not out.token_ids:
            out.token_ids.extend(held.token_ids)  # a choice's first tokens travel in a chunk, with the seed
            out.text.append(held.text)
            held = Piece()
        finish.choice = choice
        finish.index = out.next_index + len(out.token_ids)
        finish.token_ids.extend(held.token_ids)
        finish.text = held.text
        if (chunk := self._take_chunk(choice)) is not None:
            self._finishes.append(chunk)
        self._finishes.append(pb.GenerateResponse(finish=finish))
        out.finished = True
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """The whole stream ends with `error` once what waits is written; without effect when it is over."""
        if self.over:
            return
        self._error = error
        self._arrived.set()
        if isinstance(error, Overloaded):
            self.on_stalled()

    async def responses(self) -> AsyncIterator[pb.GenerateResponse]:
        """Everything to write, until every choice has finished. Raises the error that ended the stream."""
        while True:
            while self._finishes:
                yield self._finishes.popleft()
            for choice in range(len(self._choices)):
                if (chunk := self._take_chunk(choice)) is not None:
                    yield chunk
            if self._finishes or any(out.token_ids or out.text for out in self._choices):
                continue
            if self._error is not None:
                raise self._error
            if self.over:
                return
            self._arrived.clear()
            await self._arrived.wait()

    def _take_chunk(self, choice: int) -> pb.GenerateResponse | None:
        out = self._choices[choice]
        if not out.token_ids and not any(out.text):
            return None
        chunk = pb.Chunk(choice=choice, index=out.next_index, token_ids=out.token_ids, text="".join(out.text))
        if not out.seed_reported:
            chunk.seed = self._seed
            out.seed_reported = True
        self._num_undelivered -= len(out.token_ids)
        out.next_index += len(out.token_ids)
        out.token_ids = []
        out.text = []
        return pb.GenerateResponse(chunk=chunk)
