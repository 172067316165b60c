"""⑨ One choice's accepted tokens, over all attempts: drops what it has already, detokenizes, decides the end.

"Delivered" means accepted here. The router itself ends an answer: at max_tokens, a stop token (EOS among them) or a
stop string; no worker has to say so. Neighbours: lifecycle (feeds it), client_stream (what the client gets).
"""

from __future__ import annotations

from collections.abc import Sequence

from router.client_stream import ClientStream
from router.detokenize import Detokenizer
from router.request import ResolvedRequest
from tandem.tokenizer import Tokenizer
from tandem.types import FinishReason
from tandem.v1 import generation_pb2 as pb

_REASON = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}


class Answer:
    """Tokens of one choice, delivered in order, each once."""

    def __init__(self, request: ResolvedRequest, choice: int, tokenizer: Tokenizer | None, out: ClientStream) -> None:
        self.token_ids: list[int] = []
        self.num_cached_tokens = 0
        self._max_tokens = request.sampling.max_tokens
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._choice = choice
        self._detokenizer = Detokenizer(tokenizer, request.stop, request.sampling.stop_token_ids)
        self._out = out

    @property
    def num_remaining(self) -> int:
        """Tokens still to make at most."""
        return self._max_tokens - len(self.token_ids)

    @property
    def reason(self) -> FinishReason | None:
        """Why the answer has ended; None while it goes on."""
        if self._detokenizer.stopped:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_remaining <= 0 else None

    def accept(self, index: int, token_ids: Sequence[int]) -> int:
        """Take tokens from `index` on; return how many of them were new. Tokens beyond the end are dropped.

        Raises Overloaded when the client does not read. `index` may lie in what is here, never behind it.
        """
        here = len(self.token_ids)
        assert index <= here, f"token {index} arrives when {here} is due"
        if self.reason is not None:
            return 0
        before = self._detokenizer.num_tokens
        pieces = self._detokenizer.push(token_ids[here - index :][: self.num_remaining])
        new = max(0, self._detokenizer.num_tokens - before)
        self.token_ids.extend(token_ids[here - index :][:new])
        for piece in pieces:
            self._out.put(self._choice, piece)
        return new

    def finish(self, timeline: pb.Timeline) -> None:
        """Hand the client the end of the answer."""
        assert self.reason is not None
        held = self._detokenizer.finish()
        # what was held may have turned out to hold a stop string
        self._out.finish(
            self._choice,
            pb.Finish(
                reason=_REASON[self.reason],
                usage=pb.Usage(
                    prompt_tokens=self._num_prompt_tokens,
                    completion_tokens=self._detokenizer.num_tokens,
                    cached_tokens=self.num_cached_tokens,
                ),
                timeline=timeline,
                stop_string=self._detokenizer.stop_string,
                stop_token_id=self._detokenizer.stop_token_id,
            ),
            held,
        )
