"""⑤ ⑥ The prefill role: credit, prefill in chunks, offer each finished chunk, first token, commit.

CREDIT --Prefill--> RUNNING --last chunk--> HANDING_OVER --CommitAck--> closed
                                       `--> DONE (solo, or the first token ends the answer: nothing to commit)
any --Release | resync | lease | failed transfer--> closed

Neighbours: the engine's step loop computes, `kvtransfer.sender` offers and commits. Blocks are held from the credit to
the close, and freed once no running step uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from engine.row import Row
from engine.step_loop import RowOutput, StepResult
from tandem.messages import (
    Credit,
    CreditGranted,
    FailureReason,
    FirstToken,
    Prefill,
    RefusalReason,
    Reserve,
)
from tandem.types import AttemptKey, Sampling
from worker.grants import Refusal
from worker.ports import BlockSender
from worker.role_base import Held, RoleBase, RoleParts


class PrefillState(Enum):
    """Where a credited attempt is."""

    CREDIT = "credit"
    RUNNING = "running"
    HANDING_OVER = "handing over"
    DONE = "done"


@dataclass(slots=True)
class HeldPrefill(Held):
    """One credited attempt. Times are of the role's clock."""

    num_tokens: int
    solo: bool
    block_ids: list[int]
    state: PrefillState = PrefillState.CREDIT
    sampling: Sampling | None = None
    received_at: float = 0.0
    started_at: float = 0.0
    num_computed_tokens: int = 0
    num_offered_tokens: int = 0
    num_chunks: int = 0
    num_offers: int = 0
    last_acked_chunk: int = -1
    num_overlapped_chunks: int = 0

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens


def ends_answer(sampling: Sampling, index: int, token_id: int) -> bool:
    """Whether the output token at `index` (over all attempts) is the answer's last."""
    return token_id in sampling.stop_token_ids or index + 1 >= sampling.max_tokens


def num_tokens_to_offer(num_computed_tokens: int, block_size: int, last: bool) -> int:
    """Tokens that may be offered by now: whole blocks, and everything once the prompt is done."""
    return num_computed_tokens if last else num_computed_tokens // block_size * block_size


class PrefillRole(RoleBase[HeldPrefill]):
    """The prefill side of the hand-off."""

    def __init__(self, parts: RoleParts, sender: BlockSender) -> None:
        super().__init__(parts)
        self._sender = sender

    # ---- from the router

    def _on_credit(self, attempt: AttemptKey, message: Credit) -> None:
        if attempt in self._grants:
            return self._fenced("credit")
        if refusal := self._credit_refusal(attempt, message):
            return self._refuse(attempt, refusal)
        block_ids = self._grants.grant(attempt, self._layout.num_blocks_for(message.num_tokens))
        self._held[attempt] = HeldPrefill(message.num_tokens, message.solo, block_ids)
        capability = b"" if message.solo else self._sender.open(attempt)
        self._outlet.send(attempt.router_incarnation, CreditGranted(attempt.key, self._lease_s, capability))

    def _credit_refusal(self, attempt: AttemptKey, message: Credit) -> Refusal | None:
        if message.num_tokens < 1:
            return Refusal(RefusalReason.INVALID, "credit for no tokens")
        if message.num_tokens > self._max_model_len:
            return Refusal(
                RefusalReason.TOO_LARGE, f"{message.num_tokens} tokens, the context is {self._max_model_len}"
            )
        num_blocks = self._layout.num_blocks_for(message.num_tokens)
        return self._grants.refusal(attempt.router_incarnation, num_blocks)

    def _on_prefill(self, attempt: AttemptKey, message: Prefill) -> None:
        held = self._held.get(attempt)
        if held is None or held.state is not PrefillState.CREDIT:
            self._prompts.drop(attempt)
            return self._fenced("prefill")
        token_ids = self._prompts.take(attempt, message.token_ids)
        problem = self._prompt_problem(token_ids, message.num_tokens, message.num_prompt_tokens, message.sampling)
        if problem is None and message.num_tokens != held.num_tokens:
            problem = f"credit was granted for {held.num_tokens} tokens, not {message.num_tokens}"
        if problem is not None:
            return self._fail(attempt, FailureReason.INTERNAL, problem)
        held.state = PrefillState.RUNNING
        held.sampling = message.sampling
        held.received_at = self._clock()
        self._engine.add(
            Row(
                key=attempt,
                token_ids=token_ids,
                num_prompt_tokens=message.num_prompt_tokens,
                sampling=message.sampling,
                block_table=held.block_ids,
                prefill_only=True,
            )
        )

    def _on_reserve(self, attempt: AttemptKey, message: Reserve) -> None:
        self._prompts.drop(attempt)
        self._refuse(attempt, Refusal(RefusalReason.INVALID, "a prefill worker takes no reservations"))

    # ---- from the engine

    def publish(self, result: StepResult) -> None:
        """Take a finished step: offer what became whole, hand the first token over."""
        step_started_at = self._clock() - result.duration_s
        for output in result.outputs:
            held = self._held.get(output.key)
            if held is None or held.state is not PrefillState.RUNNING:
                continue  # released while the step ran
            if output.failed:
                self._fail_not_finite(output.key)
                continue
            if output.started:
                held.started_at = step_started_at
            self._on_chunk(output.key, held, output)

    def _on_chunk(self, attempt: AttemptKey, held: HeldPrefill, output: RowOutput) -> None:
        held.num_computed_tokens = output.num_computed_tokens
        held.num_chunks += 1
        if held.num_offers and held.last_acked_chunk == held.num_offers - 1:
            held.num_overlapped_chunks += 1
        if output.token_id is None:
            if not held.solo:
                self._offer(attempt, held, last=False)
            return
        assert output.index is not None and held.sampling is not None
        self._outlet.send(
            attempt.router_incarnation,
            FirstToken(
                key=attempt.key,
                index=output.index,
                token_id=output.token_id,
                queue_s=held.started_at - held.received_at,
                prefill_s=self._clock() - held.started_at,
                num_computed_tokens=held.num_computed_tokens,
                num_chunks=held.num_chunks,
                num_overlapped_chunks=held.num_overlapped_chunks,
            ),
        )
        if held.solo or ends_answer(held.sampling, output.index, output.token_id):
            held.state = PrefillState.DONE  # the router releases
            return
        held.state = PrefillState.HANDING_OVER
        self._offer(attempt, held, last=True)
        self._sender.commit(attempt, held.num_tokens, output.token_id, output.index)

    def _offer(self, attempt: AttemptKey, held: HeldPrefill, last: bool) -> None:
        first_token = held.num_offered_tokens
        num_tokens = num_tokens_to_offer(held.num_computed_tokens, self._layout.block_size, last) - first_token
        if num_tokens == 0:
            return
        first_block = first_token // self._layout.block_size
        end_block = self._layout.num_blocks_for(first_token + num_tokens)
        self._sender.offer(attempt, held.block_ids[first_block:end_block], first_token, num_tokens, last)
        held.num_offered_tokens += num_tokens
        held.num_offers += 1

    # ---- from the sender

    def on_acked(self, attempt: AttemptKey, chunk_index: int) -> None:
        """The decode worker has copied a chunk."""
        held = self._held.get(attempt)
        if held is not None:
            held.last_acked_chunk = max(held.last_acked_chunk, chunk_index)

    def on_committed(self, attempt: AttemptKey) -> None:
        """CommitAck: the decode worker has everything; the attempt is forgotten here."""
        self._close(attempt)

    # ---- the end

    def _let_go(self, attempt: AttemptKey, held: HeldPrefill, then: Callable[[], None]) -> None:
        if not held.solo:
            self._sender.close(attempt)
        self._engine.remove(attempt, then)
