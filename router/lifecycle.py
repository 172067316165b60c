"""④ One choice of one request, from the queue to its terminal event: the owner of everything held for it anywhere.

    QUEUED        in line for workers; Credit to a prefill worker                    (_credit)
    RESERVED      Reserve on a decode worker; a refusal gives the credit back        (_reserve)
    PREFILLING    Prefill; the workers move the KV between themselves                (_start_prefill)
    TRANSFERRING  FirstToken: delivered at once; the commit is due                   (_follow)
    DECODING      Committed; Steps: delivered, indices already delivered are dropped (_follow)
    FINISHED      the answer has ended by the router's own count

Aggregated: the decode worker prefills; no credit. One token to make: no reservation. An attempt that is refused, lost,
failed or preempted ends with Releases to both workers, and the next one begins in the queue with a higher number, from
the prompt and what is delivered. Each wait is bounded by the request's deadline and, where a worker owes an answer, by
that worker's failure detector. HANDOFF's table of ways out is tested state by state in test_lifecycle_faults.py.
"""

from __future__ import annotations

import asyncio
import logging
from random import Random

from router.admission import Line
from router.answer import Answer
from router.attempt import Again, Attempt, raise_if_over
from router.client_stream import ClientStream
from router.inbox import Event, Tokens
from router.placement import Need, blocks_of
from router.ports import Cluster, Worker
from router.request import ResolvedRequest
from router.search import WorkerSearch
from router.timeline import AttemptTimes, TimelineRecorder
from tandem.config import TimingConfig
from tandem.errors import (
    Cancelled,
    CorruptBlock,
    DeadlineExceeded,
    KVTransferError,
    TandemError,
    WorkerLost,
)
from tandem.messages import (
    Committed,
    Credit,
    CreditGranted,
    Finished,
    FirstToken,
    Prefill,
    RefusalReason,
    Refused,
    ReservationGranted,
    Reserve,
)
from tandem.states import RequestState, advance
from tandem.types import RequestKey, Role

log = logging.getLogger(__name__)


class Lifecycle:
    """`run` is the whole life. Its clock is the event loop's.

    queue_ttl_s: how long it waits while no worker that it needs is up.
    """

    def __init__(
        self,
        request: ResolvedRequest,
        choice: int,
        answer: Answer,
        out: ClientStream,
        cluster: Cluster,
        line: Line,
        timing: TimingConfig,
        queue_ttl_s: float,
        rng: Random,
    ) -> None:
        self.state = RequestState.QUEUED
        self._request = request
        self._choice = choice
        self._answer = answer
        self._out = out
        self._cluster = cluster
        self._timing = timing
        self._search = WorkerSearch(request.arrival, cluster, line, queue_ttl_s, rng)
        self._timeline = TimelineRecorder(request.arrived_at)
        self._num_attempts = 0
        self._num_failures = 0

    # ---- the whole life

    async def run(self) -> None:
        """Deliver the answer to the client stream, then its one terminal event. Raises only CancelledError."""
        try:
            async with asyncio.timeout_at(self._request.deadline):
                while self._answer.reason is None:
                    await self._attempt()
            self._answer.finish(self._timeline.to_wire(len(self._answer.token_ids), self._now()))
            self._advance(RequestState.FINISHED)
        except TimeoutError:
            waiting = f", waiting because {self._search.waiting_because}" if self._search.waiting_because else ""
            self._fail(
                RequestState.ABORTED,
                DeadlineExceeded(
                    f"the deadline passed while the request was {self.state.value}{waiting}; "
                    f"{len(self._answer.token_ids)} tokens were delivered"
                ),
            )
        except asyncio.CancelledError:
            self._fail(RequestState.ABORTED, Cancelled("the client has cancelled"))
            raise
        except Exception as exc:
            self._fail(RequestState.FAILED, exc)
        finally:
            self._search.leave()

    async def _attempt(self) -> None:
        """One try, top to bottom. Whatever way it ends, both workers are released."""
        first = await self._search.first_worker(self._need(aggregated=False), self._need(aggregated=True))
        attempt = self._new_attempt(aggregated=first.info.role is Role.DECODE)
        try:
            if attempt.times.aggregated:
                await self._reserve(attempt, first)
            else:
                granted = await self._credit(attempt, first)
                if attempt.need.num_decode_tokens:
                    partner = self._search.partner_of(first, attempt.need)
                    if partner is None:
                        raise Again("no decode worker may be asked now")
                    await self._reserve(attempt, partner, granted.capability)
            self._search.leave()
            self._start_prefill(attempt)
            await self._follow(attempt)
        except Again as exc:
            self._requeue(attempt, str(exc), lost=False)
        except (WorkerLost, KVTransferError) as exc:
            if isinstance(exc, KVTransferError) and not isinstance(exc, CorruptBlock) and attempt.pair is not None:
                self._cluster.avoid(*attempt.pair)
            self._requeue(attempt, str(exc), lost=True)
            self._num_failures += 1
            if self._num_failures > self._timing.retry_budget:
                raise
        finally:
            attempt.release()

    # ---- QUEUED

    def _need(self, aggregated: bool) -> Need:
        num_prompt_tokens = len(self._request.prompt_token_ids)
        solo = self._answer.num_remaining == 1 and not aggregated
        return Need(
            num_prefill_tokens=num_prompt_tokens + len(self._answer.token_ids),
            num_decode_tokens=0 if solo else num_prompt_tokens + self._request.sampling.max_tokens,
        )

    def _new_attempt(self, aggregated: bool) -> Attempt:
        """The number rises with every try, refused ones included: it is what fences them from each other."""
        self._num_attempts += 1
        return Attempt(
            key=RequestKey(self._request.request_id, self._choice, self._num_attempts),
            token_ids=(*self._request.prompt_token_ids, *self._answer.token_ids),
            need=self._need(aggregated),
            times=AttemptTimes(self._num_attempts, aggregated, asked_at=self._now()),
        )

    async def _credit(self, attempt: Attempt, worker: Worker) -> CreditGranted:
        """Blocks for the whole prompt on the prefill worker. Raises Again when it refuses."""
        num_tokens = attempt.need.num_prefill_tokens
        attempt.prefill = worker
        attempt.times.prefill_worker = worker.info
        worker.open(attempt.key, attempt.inbox, num_tokens, blocks_of(worker, num_tokens))
        worker.send(Credit(attempt.key, num_tokens, solo=not attempt.need.num_decode_tokens))
        event = await self._reply(attempt, worker)
        if not isinstance(event, CreditGranted):
            raise self._refused(worker, event)
        self._note_cached(event.num_cached_tokens)
        return event

    async def _reserve(self, attempt: Attempt, worker: Worker, capability: bytes = b"") -> None:
        """Blocks for the whole request on the decode worker. Raises Again when it refuses."""
        attempt.decode = worker
        attempt.times.decode_worker = worker.info
        num_tokens = attempt.need.num_decode_tokens
        worker.open(attempt.key, attempt.inbox, attempt.need.num_prefill_tokens, blocks_of(worker, num_tokens))
        worker.send(
            Reserve(
                key=attempt.key,
                token_ids=attempt.token_ids,
                num_tokens=len(attempt.token_ids),
                num_prompt_tokens=len(self._request.prompt_token_ids),
                sampling=self._request.sampling,
                peer=attempt.prefill.info.endpoint if attempt.prefill is not None else None,
                capability=capability,
                local_prefill=attempt.prefill is None,
            )
        )
        event = await self._reply(attempt, worker)
        if not isinstance(event, ReservationGranted):
            raise self._refused(worker, event)
        if attempt.prefill is None:
            self._note_cached(event.num_cached_tokens)
        self._advance(RequestState.RESERVED)

    async def _reply(self, attempt: Attempt, worker: Worker) -> Event:
        """The worker's answer to what it was asked. Raises WorkerLost when there is none."""
        try:
            async with asyncio.timeout(self._timing.reply_timeout_s):
                while True:
                    source, event = await attempt.inbox.next()
                    if source == worker.worker_id and isinstance(event, CreditGranted | ReservationGranted | Refused):
                        return event
                    raise_if_over(attempt, source, event)
        except TimeoutError as exc:
            self._search.refusals.note(worker)
            raise WorkerLost(worker.worker_id, f"no answer within {self._timing.reply_timeout_s:g} s") from exc

    def _refused(self, worker: Worker, event: Event) -> Exception:
        if not isinstance(event, Refused):
            return WorkerLost(worker.worker_id, f"answers with {type(event).__name__}")
        if event.reason is RefusalReason.INVALID:
            return TandemError(f"{worker.worker_id} refuses the request as invalid: {event.detail}")
        self._search.refusals.note(worker, for_good=event.reason is RefusalReason.TOO_LARGE)
        return Again(f"{worker.worker_id} refused: {event.detail}")

    # ---- PREFILLING, TRANSFERRING, DECODING

    def _start_prefill(self, attempt: Attempt) -> None:
        """Both grants are there. A decode worker that prefills has begun by itself."""
        self._timeline.begin(attempt.times, self._now())
        if attempt.prefill is not None:
            attempt.prefill.send(
                Prefill(
                    key=attempt.key,
                    token_ids=attempt.token_ids,
                    num_tokens=len(attempt.token_ids),
                    num_prompt_tokens=len(self._request.prompt_token_ids),
                    sampling=self._request.sampling,
                )
            )
        self._advance(RequestState.PREFILLING)

    async def _follow(self, attempt: Attempt) -> None:
        """Deliver tokens as they come, until the answer ends. Raises what ends the attempt before that."""
        while self._answer.reason is None:
            source, event = await self._next_event(attempt)
            if attempt.decode is not None and source == attempt.decode.worker_id:
                match event:
                    case Committed() if attempt.times.committed is None:
                        self._on_committed(attempt, event)
                    case Tokens(index, token_ids):
                        self._on_step(attempt, attempt.decode, index, token_ids)
                    case Finished():
                        raise WorkerLost(source, f"finished after {event.num_output_tokens} tokens, others are missing")
                    case _:
                        raise_if_over(attempt, source, event)
            elif isinstance(event, FirstToken) and attempt.prefill is not None:
                self._on_first_token(attempt, attempt.prefill, event)
            elif self.state is not RequestState.DECODING:
                raise_if_over(attempt, source, event)
            # else: the prefill worker was lost after the commit, it is not needed any more

    async def _next_event(self, attempt: Attempt) -> tuple[str, Event]:
        try:
            async with asyncio.timeout_at(attempt.commit_due_at):
                return await attempt.inbox.next()
        except TimeoutError as exc:
            assert attempt.pair is not None
            prefill_id, decode_id = attempt.pair
            raise KVTransferError(prefill_id, f"{decode_id} has not committed in time") from exc

    def _on_first_token(self, attempt: Attempt, prefill: Worker, token: FirstToken) -> None:
        """Deliver it while the last chunk is still being copied."""
        if attempt.first_token_seen:
            raise WorkerLost(prefill.worker_id, "sends FirstToken twice")
        attempt.first_token_seen = True
        self._timeline.on_first_token(token, self._now())
        self._accept(prefill, token.index, (token.token_id,))
        if self.state is RequestState.DECODING:  # the commit was faster
            attempt.release_prefill()
        elif attempt.decode is not None:
            self._advance(RequestState.TRANSFERRING)
            attempt.commit_due_at = self._now() + self._commit_patience_s(attempt.decode, token)

    def _commit_patience_s(self, decode: Worker, token: FirstToken) -> float:
        """Time for the chunks that are not copied yet (as long as computing them took) and the worker's own pace."""
        num_chunks = max(token.num_chunks, 1)
        share_to_copy = (num_chunks - min(token.num_overlapped_chunks, num_chunks - 1)) / num_chunks
        return self._timing.commit_overdue_s + token.prefill_s * share_to_copy + decode.load.announced_step_s

    def _on_committed(self, attempt: Attempt, committed: Committed) -> None:
        """The decode worker has it all; the prefill worker is not needed any more."""
        self._timeline.on_committed(committed, self._now())
        self._advance(RequestState.DECODING)
        attempt.commit_due_at = None
        if attempt.first_token_seen:
            attempt.release_prefill()

    def _on_step(self, attempt: Attempt, decode: Worker, index: int, token_ids: tuple[int, ...]) -> None:
        if attempt.times.aggregated and self.state is RequestState.PREFILLING:
            self._timeline.on_local_prefill(self._now())
            self._advance(RequestState.DECODING)
        if self.state is not RequestState.DECODING:
            raise WorkerLost(decode.worker_id, "decodes what it has not committed")
        self._accept(decode, index, token_ids)

    def _accept(self, worker: Worker, index: int, token_ids: tuple[int, ...]) -> None:
        num_before = len(self._answer.token_ids)
        if index > num_before:
            raise WorkerLost(worker.worker_id, f"token {index} arrives when {num_before} is due")
        if num_new := self._answer.accept(index, token_ids):
            self._timeline.on_tokens(num_before, num_new, self._now())

    # ---- bookkeeping

    def _requeue(self, attempt: Attempt, reason: str, *, lost: bool) -> None:
        log.info("%s: %s", attempt.key, reason)
        if self.state is not RequestState.QUEUED:
            self._advance(RequestState.QUEUED)
        if attempt.times.granted_at or lost:  # whoever merely refused has not taken part
            self._timeline.fail(attempt.times, reason, self._now())

    def _note_cached(self, num_cached_tokens: int) -> None:
        if self._num_attempts == 1:
            self._answer.num_cached_tokens = num_cached_tokens

    def _advance(self, state: RequestState) -> None:
        self.state = advance(self.state, state)

    def _fail(self, state: RequestState, error: Exception) -> None:
        self._advance(state)
        self._out.fail(error)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
