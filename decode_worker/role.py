"""⑧ The decode role: reserve, let the receiver fetch (⑦), join the batch after the commit, publish every step.

RESERVED --commit record--> DECODING --stop | length--> FINISHED (held until Release, resync or lease)
PREFILLING (local) --first token--> DECODING
any --Release | resync | lease | failed transfer--> closed

A reservation covers the whole request, prompt + max_tokens, so that a running row never wants for a block. Blocks are
freed once no copy into them is in flight and no running step uses them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from engine.row import Row
from engine.step_loop import StepResult
from kvtransfer.receiver import CommitRecord
from tandem.messages import (
    Committed,
    Credit,
    FailureReason,
    Finished,
    Prefill,
    RefusalReason,
    ReservationGranted,
    Reserve,
    Step,
    StepRow,
    WorkerMessage,
)
from tandem.types import AttemptKey, Sampling
from worker.grants import Refusal
from worker.ports import BlockReceiver
from worker.role_base import Held, RoleBase, RoleParts


class DecodeState(Enum):
    """Where a reserved attempt is."""

    RESERVED = "reserved"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass(slots=True)
class HeldDecode(Held):
    """One reserved attempt. `token_ids`: prompt and delivered ids. Times are of the role's clock."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    block_ids: list[int]
    state: DecodeState
    received_at: float
    peer_worker_id: str = ""
    num_computed_tokens: int = 0
    # the committed token, until the first Step has repeated it
    first_token_id: int | None = None
    started_at: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0

    @property
    def num_uncomputed_tokens(self) -> int:
        if self.state is not DecodeState.PREFILLING:
            return 0
        return len(self.token_ids) - self.num_computed_tokens


class DecodeRole(RoleBase[HeldDecode]):
    """The decode side of the hand-off, and the whole of the aggregated mode."""

    def __init__(self, parts: RoleParts, receiver: BlockReceiver) -> None:
        super().__init__(parts)
        self._receiver = receiver

    # ---- from the router

    def _on_reserve(self, attempt: AttemptKey, message: Reserve) -> None:
        if attempt in self._grants:
            self._prompts.drop(attempt)
            return self._fenced("reserve")
        token_ids = self._prompts.take(attempt, message.token_ids)
        num_tokens_at_end = (
            message.num_prompt_tokens + message.sampling.max_tokens
        )  # = num_tokens + what remains of max_tokens
        num_blocks = self._layout.num_blocks_for(num_tokens_at_end)
        if refusal := self._reserve_refusal(attempt, message, token_ids, num_tokens_at_end, num_blocks):
            return self._refuse(attempt, refusal)
        held = HeldDecode(
            token_ids=token_ids,
            num_prompt_tokens=message.num_prompt_tokens,
            sampling=message.sampling,
            block_ids=self._grants.grant(attempt, num_blocks),
            state=DecodeState.PREFILLING if message.local_prefill else DecodeState.RESERVED,
            received_at=self._clock(),
        )
        self._held[attempt] = held
        self._outlet.send(attempt.router_incarnation, ReservationGranted(attempt.key, self._lease_s))
        if message.peer is None:
            self._add_row(attempt, held, list(token_ids), num_computed_tokens=0)
        else:
            held.peer_worker_id = message.peer.worker_id
            blocks_of_prompt = held.block_ids[: self._layout.num_blocks_for(message.num_tokens)]
            self._receiver.open(attempt, message.peer, message.capability, blocks_of_prompt, 0)

    def _reserve_refusal(
        self, attempt: AttemptKey, message: Reserve, token_ids: list[int], num_tokens_at_end: int, num_blocks: int
    ) -> Refusal | None:
        problem = self._prompt_problem(token_ids, message.num_tokens, message.num_prompt_tokens, message.sampling)
        if problem is None and message.local_prefill != (message.peer is None):
            problem = "a reservation names either a peer or local_prefill"
        if problem is not None:
            return Refusal(RefusalReason.INVALID, problem)
        if num_tokens_at_end > self._max_model_len:
            return Refusal(
                RefusalReason.TOO_LARGE,
                f"prompt and max_tokens make {num_tokens_at_end} tokens, the context is {self._max_model_len}",
            )
        return self._grants.refusal(attempt.router_incarnation, num_blocks)

    def _on_credit(self, attempt: AttemptKey, message: Credit) -> None:
        self._refuse(attempt, Refusal(RefusalReason.INVALID, "a decode worker gives no prefill credit"))

    def _on_prefill(self, attempt: AttemptKey, message: Prefill) -> None:
        self._prompts.drop(attempt)
        self._fenced("prefill")

    # ---- from the receiver

    def on_committed(self, attempt: AttemptKey, record: CommitRecord) -> None:
        """All blocks are here and the commit record fits them: join the batch."""
        held = self._held.get(attempt)
        if held is None or held.state is not DecodeState.RESERVED or not self._grants.lease_holds(attempt):
            self._counters["refused_commits"] += 1
            return
        first_index = len(held.token_ids) - held.num_prompt_tokens
        if record.num_tokens != len(held.token_ids) or record.first_token_index != first_index:
            return self._fail(
                attempt,
                FailureReason.INTERNAL,
                f"commit of {record.num_tokens} tokens and index {record.first_token_index}, "
                f"reserved were {len(held.token_ids)} and {first_index}",
                held.peer_worker_id,
            )
        held.state = DecodeState.DECODING
        held.first_token_id = record.first_token_id
        self._outlet.send(
            attempt.router_incarnation,
            Committed(
                key=attempt.key,
                transfer_s=record.transfer_s,
                exposed_transfer_s=record.exposed_transfer_s,
                nbytes=record.nbytes,
                num_chunks=record.num_chunks,
                transport=record.transport,
            ),
        )
        self._add_row(attempt, held, [*held.token_ids, record.first_token_id], num_computed_tokens=len(held.token_ids))

    def _add_row(self, attempt: AttemptKey, held: HeldDecode, token_ids: list[int], num_computed_tokens: int) -> None:
        self._engine.add(
            Row(
                key=attempt,
                token_ids=token_ids,
                num_prompt_tokens=held.num_prompt_tokens,
                sampling=held.sampling,
                block_table=held.block_ids,
                num_computed_tokens=num_computed_tokens,
            )
        )

    # ---- from the engine

    def publish(self, result: StepResult) -> None:
        """Take a finished step: one Step message per router, then what has finished."""
        now = self._clock()
        rows: defaultdict[int, list[StepRow]] = defaultdict(list)
        after: list[tuple[int, WorkerMessage]] = []
        for output in result.outputs:
            held = self._held.get(output.key)
            if held is None or held.state not in (DecodeState.DECODING, DecodeState.PREFILLING):
                continue  # released while the step ran
            if output.failed:
                self._fail_not_finite(output.key)
                continue
            router, key = output.key.router_incarnation, output.key.key
            held.num_computed_tokens = output.num_computed_tokens
            if output.started and held.state is DecodeState.PREFILLING:
                held.started_at = now - result.duration_s
                held.queue_s = held.started_at - held.received_at
            if output.token_id is None:
                continue
            assert output.index is not None
            if held.state is DecodeState.PREFILLING:
                held.prefill_s = now - held.started_at
                held.state = DecodeState.DECODING
            if held.first_token_id is None:
                rows[router].append(StepRow(key, output.index, (output.token_id,)))
            else:
                rows[router].append(StepRow(key, output.index - 1, (held.first_token_id, output.token_id)))
                held.first_token_id = None
            if output.finish is not None:
                held.state = DecodeState.FINISHED
                finished = Finished(key, output.finish, output.index + 1, held.queue_s, held.prefill_s)
                after.append((router, finished))
        for router, router_rows in rows.items():
            self._outlet.send(router, Step(tuple(router_rows)))
        for router, message in after:
            self._outlet.send(router, message)

    # ---- the end

    def _let_go(self, attempt: AttemptKey, held: HeldDecode, then: Callable[[], None]) -> None:
        # both are told at once and answer in their own time; whoever was prefilled here has no transfer
        answered = after_calls(2, then)
        self._engine.remove(attempt, answered)
        self._receiver.close(attempt, answered)


def after_calls(num_calls: int, then: Callable[[], None]) -> Callable[[], None]:
    """A callback whose `num_calls`-th call, and no other, calls `then`."""
    left = num_calls

    def called() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            then()

    return called
