"""One choice of a request as the engine sees it: token ids, the blocks granted to it, how far it has come (⑤ and ⑧)."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.types import AttemptKey, FinishReason, Sampling


@dataclass(slots=True)
class Row:
    """A prompt being computed, or an answer being decoded.

    token_ids: prompt, delivered and sampled ids; grows by one for each sampled token.
    num_prompt_tokens: length of the original prompt; limits and output indices count from here.
    block_table: ids of the granted blocks, in order; covers every token that may still come.
    num_computed_tokens: tokens whose KV is in the pool. A committed row joins with len(token_ids) - 1.
    prefill_only: leaves the loop with its first sampled token.
    """

    key: AttemptKey
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    block_table: list[int]
    num_computed_tokens: int = 0
    prefill_only: bool = False

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that must pass through the model before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def decoding(self) -> bool:
        """Whether only the newest sampled token is uncomputed."""
        behind = self.num_uncomputed_tokens
        return behind == 1 and len(self.token_ids) > self.num_prompt_tokens and not self.prefill_only

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far, over all attempts."""
        return len(self.token_ids) - self.num_prompt_tokens

    def finish_reason(self) -> FinishReason | None:
        """Why the answer ends with the newest token, or None."""
        if self.num_output_tokens < 1:
            return None
        if self.token_ids[-1] in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if self.num_output_tokens >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        return None
