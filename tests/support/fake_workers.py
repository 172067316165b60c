"""A small honest model of a prefill and a decode worker, to run the router's lifecycle against without an engine.

They speak the real messages over `FakeSession`, move "KV" chunk by chunk between each other, grant blocks all or
nothing, keep leases, free at Release, Resync or lease, and break a session at a hole in its sequence. What must never
happen is asserted where it would: a copy into a granted-again block, decoding what is not copied, a grant given twice.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from router.session import SessionBroken
from tandem.messages import (
    Committed,
    Credit,
    CreditGranted,
    Failed,
    FailureReason,
    Finished,
    FirstToken,
    Heartbeat,
    Preempted,
    Prefill,
    PromptSegment,
    RefusalReason,
    Refused,
    Release,
    ReservationGranted,
    Reserve,
    Resync,
    RouterMessage,
    Step,
    StepRow,
    WorkerMessage,
)
from tandem.session_wire import fill_response, read_request
from tandem.types import (
    AttemptKey,
    FinishReason,
    LoadReport,
    PeerEndpoint,
    RequestKey,
    Role,
    Sampling,
    WorkerInfo,
)
from tandem.v1 import worker_pb2 as pb
from tests.support.fake_network import FakeSession, Network, Pipe

BLOCK_SIZE = 4
CHUNK_SIZE = 8
LEASE_S = 10.0
HEARTBEAT_S = 0.5
OFFER_TIMEOUT_S = 10.0
CHUNK_S = 0.02
STEP_S = 0.01
COPY_S = 0.01
VOCAB_SIZE = 200
EOS_ID = 0
FIT = b"fit"


def next_token(token_ids: tuple[int, ...]) -> int:
    """What the fake model says after `token_ids`; never EOS."""
    return hash(token_ids) % (VOCAB_SIZE - 1) + 1


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def chunks_for(num_tokens: int) -> int:
    return -(-num_tokens // CHUNK_SIZE)


# ---- what the pair says to each other; names as in worker.proto


@dataclass(frozen=True, slots=True)
class Subscribe:
    key: AttemptKey
    capability: bytes


@dataclass(frozen=True, slots=True)
class Offer:
    key: AttemptKey
    chunk: int


@dataclass(frozen=True, slots=True)
class Ack:
    key: AttemptKey
    chunk: int


@dataclass(frozen=True, slots=True)
class Commit:
    key: AttemptKey
    num_tokens: int
    first_token_id: int


@dataclass(frozen=True, slots=True)
class CommitAck:
    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Abort:
    key: AttemptKey


@dataclass(slots=True)
class Held:
    """What an attempt has of a worker."""

    num_blocks: int
    token_ids: tuple[int, ...] = ()
    num_prompt_tokens: int = 0
    sampling: Sampling | None = None
    phase: str = ""
    # prefill
    solo: bool = False
    capability: bytes = b""
    num_computed: int = 0
    subscriber: PairChannel | None = None
    acked: set[int] = field(default_factory=set)
    # decode
    peer: PeerEndpoint | None = None
    copied: set[int] = field(default_factory=set)
    num_chunks: int = 0


class FakeWorker(ABC):
    """One process. `pause` stops it as SIGSTOP does, `wedge` its step loop only, `die` for good.

    pace: how many times slower than usual it computes and copies.
    """

    letter: str
    role: Role

    def __init__(
        self,
        network: Network,
        number: int,
        num_blocks: int,
        workers: dict[str, FakeWorker],
        compatibility_hash: bytes = FIT,
    ) -> None:
        self.network = network
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_steps = 0
        self.num_refused = 0
        self.held: dict[AttemptKey, Held] = {}
        self.num_fenced = 0
        self.draining = False
        self.pace = 1.0
        self.offer_timeout_s = OFFER_TIMEOUT_S
        self.alive = True
        self._workers = workers
        self._running = asyncio.Event()
        self._running.set()
        self._stepping = asyncio.Event()
        self._stepping.set()
        self._backlog: list[Callable[[], None]] = []
        self._sessions: dict[int, FakeSession] = {}
        self._newest_session: dict[int, int] = {}
        self._heard_at: dict[int, float] = {}
        self._wants_room: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        name = f"{self.role.value}-{number}"
        self.rng = network.rng_for(name)
        endpoint = PeerEndpoint(name, self.rng.getrandbits(63) | 1, f"fake:{name}", "node")
        self.info = WorkerInfo(
            role=self.role,
            endpoint=endpoint,
            pid=number,
            compatibility_hash=compatibility_hash,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=1 << 20,
        )
        workers[name] = self
        self._spawn(self._idle_loop())

    # ---- the process

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, duration_s: float) -> None:
        """Let the step loop compute for so long."""
        await asyncio.sleep(duration_s * self.pace * self.rng.uniform(0.5, 1.5))
        await self._stepping.wait()
        await self._running.wait()
        self.num_steps += 1

    def die(self) -> None:
        """As kill -9 does: sessions and channels are reset, nothing is said."""
        self.alive = False
        for session in list(self._sessions.values()):
            session.break_off()
        self._sessions.clear()
        self.held.clear()
        self.num_free = self.num_blocks
        for task in self._tasks:
            task.cancel()
        self._break_pairs()

    def pause(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()
        backlog, self._backlog = self._backlog, []
        for handle in backlog:
            handle()

    def wedge(self) -> None:
        """The step loop hangs; the process goes on talking."""
        self._stepping.clear()

    def unwedge(self) -> None:
        self._stepping.set()

    def occupy(self, num_blocks: int, duration_s: float) -> None:
        """Somebody else holds so many blocks for a while."""
        num_blocks = min(num_blocks, self.num_free)
        self.num_free -= num_blocks

        def give_back() -> None:
            self._give_back(AttemptKey(0, RequestKey("somebody else", 0, 0)), Held(num_blocks))

        asyncio.get_running_loop().call_later(duration_s, give_back)

    def drain(self) -> None:
        self.draining = True
        for router in list(self._sessions):
            self._send(router, self.load())

    def undrain(self) -> None:
        self.draining = False

    def break_sessions(self) -> None:
        """The network between router and this worker fails for a moment."""
        for session in list(self._sessions.values()):
            session.break_off()
        self._sessions.clear()

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def when_running(self, handle: Callable[[], None]) -> None:
        """Messages that come to a paused process wait in its sockets."""
        if not self.alive:
            return
        if self._running.is_set():
            handle()
        else:
            self._backlog.append(handle)

    async def _idle_loop(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._running.wait()
            if self._stepping.is_set():
                self.num_steps += 1
            now = asyncio.get_running_loop().time()
            for key in list(self.held):
                if now - self._heard_at.get(key.router_incarnation, 0.0) > LEASE_S:
                    self._fail(key, FailureReason.LEASE_EXPIRED, "silence")
            for router in list(self._sessions):
                self._send(router, self.load())

    def load(self) -> LoadReport:
        return LoadReport(
            num_total_blocks=self.num_blocks,
            num_free_blocks=self.num_free,
            num_running=len(self.held),
            progress=self.num_steps,
            announced_step_s=0.1,
            draining=self.draining,
        )

    # ---- sessions

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[FakeSession]:
        if not self.alive:
            await asyncio.sleep(self.network.most_delay_s)
            raise_dead()
        session = FakeSession(self.network, self.letter, self._arrive)
        try:
            yield session
        finally:
            session.break_off()
            if self._sessions.get(session.router_incarnation) is session:
                del self._sessions[session.router_incarnation]

    def _arrive(self, session: FakeSession, request: pb.SessionRequest) -> None:
        self.when_running(lambda: self._take(session, request))

    def _take(self, session: FakeSession, request: pb.SessionRequest) -> None:
        if session.broken:
            return
        router = request.router_incarnation
        if request.worker_incarnation != self.info.endpoint.incarnation or request.seq != session.next_seq_in:
            return session.break_off()
        session.next_seq_in += 1
        if request.seq == 0:
            if request.WhichOneof("body") != "resync" or request.session <= self._newest_session.get(router, -1):
                return session.break_off()
            session.number, session.router_incarnation = request.session, router
            self._newest_session[router] = request.session
            if (older := self._sessions.get(router)) is not None:
                older.break_off()
            self._sessions[router] = session
        self._heard_at[router] = asyncio.get_running_loop().time()
        message = read_request(request)
        assert message is not None
        self._receive(router, message)
        if request.seq == 0:
            self._send(router, self.load())

    def _receive(self, router: int, message: RouterMessage) -> None:
        match message:
            case Heartbeat() | PromptSegment():
                pass
            case Resync(live):
                for key in list(self.held):
                    if key.router_incarnation == router and key.key not in live:
                        self._free(key)
            case Release(key):
                self._free(AttemptKey(router, key))
            case _:
                self._on(router, AttemptKey(router, message.key), message)

    def _send(self, router: int, message: WorkerMessage) -> None:
        session = self._sessions.get(router)
        if session is None:
            return
        response = pb.SessionResponse(
            router_incarnation=router,
            worker_incarnation=self.info.endpoint.incarnation,
            session=session.number,
            seq=session.next_seq_out,
        )
        session.next_seq_out += 1
        fill_response(response, message)
        session.send(message, response)

    def _answer(self, key: AttemptKey, message: WorkerMessage) -> None:
        self._send(key.router_incarnation, message)

    # ---- grants

    def _grant(self, key: AttemptKey, num_tokens: int) -> Held | None:
        """Blocks for so many tokens, or a Refused."""
        assert key not in self.held, f"{key} is granted twice"
        need = blocks_for(num_tokens)
        reason = None
        if self.draining:
            reason = RefusalReason.DRAINING
        elif need > self.num_blocks:
            reason = RefusalReason.TOO_LARGE
        elif need > self.num_free:
            reason = RefusalReason.NO_ROOM
            self._wants_room.add(key.router_incarnation)
        if reason is not None:
            self.num_refused += 1
            self._answer(key, Refused(key.key, reason, f"needs {need} blocks, {self.num_free} are free"))
            return None
        self.num_free -= need
        held = self.held[key] = Held(need)
        return held

    def _free(self, key: AttemptKey) -> None:
        held = self.held.pop(key, None)
        if held is not None:
            self._give_back(key, held)

    def _give_back(self, key: AttemptKey, held: Held) -> None:
        self.num_free += held.num_blocks
        assert self.num_free <= self.num_blocks, "more blocks free than there are"
        waiting, self._wants_room = self._wants_room, set()
        for router in waiting:
            self._send(router, self.load())

    def _fail(self, key: AttemptKey, reason: FailureReason, detail: str, peer: str = "") -> None:
        if key in self.held:
            self._answer(key, Failed(key.key, reason, detail, peer))
            self._free(key)

    def assert_baseline(self) -> None:
        """Nothing is held for anybody."""
        assert not self.held, f"{self.info.worker_id} still holds {[str(key) for key in self.held]}"
        assert self.num_free == self.num_blocks, f"{self.info.worker_id}: {self.num_free} of {self.num_blocks} free"

    @abstractmethod
    def _on(self, router: int, key: AttemptKey, message: RouterMessage) -> None: ...

    @abstractmethod
    def _break_pairs(self) -> None: ...


def raise_dead() -> None:
    raise SessionBroken("connection refused (fake)")


class PairChannel:
    """The control channel of one pair; `decode` dials it."""

    def __init__(self, network: Network, decode: FakeDecode, prefill: FakePrefill) -> None:
        self.decode, self.prefill = decode, prefill
        self._dp = Pipe(network, "dp", lambda m: prefill.when_running(lambda: prefill.on_pair(self, m)))
        self._pd = Pipe(network, "pd", lambda m: decode.when_running(lambda: decode.on_pair(self, m)))
        decode.pairs[prefill.info.endpoint.incarnation] = self
        prefill.pairs.append(self)

    @property
    def usable(self) -> bool:
        return not self._dp.broken and self._dp.stalled is None

    def to_prefill(self, message: Any) -> None:
        self._dp.send(message, message)

    def to_decode(self, message: Any) -> None:
        self._pd.send(message, message)

    def break_off(self) -> None:
        self._dp.broken = self._pd.broken = True

    def stall(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        self._dp.stalled, self._pd.stalled = [], []


class FakePrefill(FakeWorker):
    """Chunks, offers, first token, commit after the last ack."""

    letter = "p"
    role = Role.PREFILL

    def __init__(self, *args: Any) -> None:
        self.pairs: list[PairChannel] = []
        super().__init__(*args)

    def _break_pairs(self) -> None:
        for pair in self.pairs:
            pair.break_off()

    def _on(self, router: int, key: AttemptKey, message: RouterMessage) -> None:
        match message:
            case Credit(_, num_tokens, solo):
                if (held := self._grant(key, num_tokens)) is not None:
                    held.phase, held.solo = "CREDIT", solo
                    held.capability = b"" if solo else self.rng.randbytes(8)
                    self._answer(key, CreditGranted(key.key, LEASE_S, held.capability))
            case Prefill():
                held = self.held.get(key)
                if held is None or held.phase != "CREDIT":
                    self.num_fenced += 1
                    return
                assert len(message.token_ids) == message.num_tokens
                assert blocks_for(message.num_tokens) == held.num_blocks
                held.phase, held.token_ids = "RUN", message.token_ids
                held.num_prompt_tokens, held.sampling = message.num_prompt_tokens, message.sampling
                self._spawn(self._compute(key, held))
            case _:
                raise AssertionError(f"{message} to a prefill worker")

    async def _compute(self, key: AttemptKey, held: Held) -> None:
        num_overlapped = 0
        for chunk in range(chunks_for(len(held.token_ids))):
            await self._work(CHUNK_S)
            if self.held.get(key) is not held:
                return
            num_overlapped += chunk > 0 and len(held.acked) == chunk
            held.num_computed = chunk + 1
            if not held.solo:
                if held.subscriber is not None:
                    held.subscriber.to_decode(Offer(key, chunk))
                self._spawn(self._offer_deadline(key, held, chunk))
        index = len(held.token_ids) - held.num_prompt_tokens
        token = next_token(held.token_ids)
        self._answer(
            key,
            FirstToken(
                key.key,
                index,
                token,
                prefill_s=CHUNK_S * held.num_computed,
                num_computed_tokens=len(held.token_ids),
                num_chunks=held.num_computed,
                num_overlapped_chunks=num_overlapped,
            ),
        )
        held.phase = "DONE"
        self._commit_when_acked(key, held)

    async def _offer_deadline(self, key: AttemptKey, held: Held, chunk: int) -> None:
        await asyncio.sleep(self.offer_timeout_s)
        await self._running.wait()
        if self.held.get(key) is held and chunk not in held.acked:
            peer = held.subscriber.decode.info.worker_id if held.subscriber else ""
            self._fail(key, FailureReason.TRANSFER, f"chunk {chunk} was not acknowledged", peer)

    def _commit_when_acked(self, key: AttemptKey, held: Held) -> None:
        all_acked = len(held.acked) == chunks_for(len(held.token_ids))
        if held.phase == "DONE" and all_acked and held.subscriber is not None:
            held.phase = "COMMIT"
            held.subscriber.to_decode(Commit(key, len(held.token_ids), next_token(held.token_ids)))

    def on_pair(self, channel: PairChannel, message: Any) -> None:
        held = self.held.get(message.key)
        if held is None:
            self.num_fenced += 1
            return
        match message:
            case Subscribe(key, capability):
                if capability != held.capability:
                    self.num_fenced += 1
                    return
                held.subscriber = channel
                for chunk in range(held.num_computed):
                    channel.to_decode(Offer(key, chunk))
            case Ack(key, chunk):
                held.acked.add(chunk)
                self._commit_when_acked(key, held)
            case CommitAck(key):
                self._free(key)
            case Abort(key):
                self._fail(key, FailureReason.CORRUPT, "the decode worker aborted", channel.decode.info.worker_id)

    def still_offers(self, key: AttemptKey, chunk: int) -> bool:
        """Whether the source blocks of a chunk are still what was offered: what the generation check finds."""
        held = self.held.get(key)
        return self.alive and held is not None and chunk < held.num_computed and chunk not in held.acked


class FakeDecode(FakeWorker):
    """Reservations, copies, decode steps.

    `corrupts` spoils the next copy of a request, `preempt` takes a row's blocks.
    """

    letter = "d"
    role = Role.DECODE

    def __init__(self, *args: Any) -> None:
        self.pairs: dict[int, PairChannel] = {}
        self.copying: dict[tuple[AttemptKey, int], int] = {}
        self.corrupts: str | None = None
        super().__init__(*args)

    def _break_pairs(self) -> None:
        for pair in self.pairs.values():
            pair.break_off()
        self.copying.clear()

    def preempt(self, key: AttemptKey) -> None:
        if key in self.held:
            self._answer(key, Preempted(key.key))
            self._free(key)

    def _on(self, router: int, key: AttemptKey, message: RouterMessage) -> None:
        if not isinstance(message, Reserve):
            raise AssertionError(f"{message} to a decode worker")
        assert len(message.token_ids) == message.num_tokens
        held = self._grant(key, message.num_prompt_tokens + message.sampling.max_tokens)
        if held is None:
            return
        held.phase, held.token_ids = "RESERVED", message.token_ids
        held.num_prompt_tokens, held.sampling, held.peer = message.num_prompt_tokens, message.sampling, message.peer
        self._answer(key, ReservationGranted(key.key, LEASE_S))
        if message.local_prefill:
            self._spawn(self._prefill_here(key, held))
            return
        assert message.peer is not None
        prefill = self._workers.get(message.peer.worker_id)
        channel = self.pairs.get(message.peer.incarnation)
        if channel is None or not channel.usable:
            if channel is not None:
                channel.break_off()
            if not isinstance(prefill, FakePrefill) or prefill.info.endpoint.incarnation != message.peer.incarnation:
                return self._fail(key, FailureReason.TRANSFER, "cannot dial", message.peer.worker_id)
            channel = PairChannel(self.network, self, prefill)
        channel.to_prefill(Subscribe(key, message.capability))

    async def _prefill_here(self, key: AttemptKey, held: Held) -> None:
        for _ in range(chunks_for(len(held.token_ids))):
            await self._work(CHUNK_S)
        if self.held.get(key) is held:
            held.phase = "DECODING"
            await self._decode(key, held, len(held.token_ids))

    def on_pair(self, channel: PairChannel, message: Any) -> None:
        key = message.key
        held = self.held.get(key)
        if held is None or held.phase != "RESERVED":
            self.num_fenced += 1
            return
        match message:
            case Offer(_, chunk):
                if chunk not in held.copied and (key, chunk) not in self.copying:
                    self.copying[key, chunk] = chunk
                    self._spawn(self._copy(channel, key, held, chunk))
            case Commit(_, num_tokens, first_token_id):
                assert num_tokens == len(held.token_ids), "a commit of another prompt"
                assert len(held.copied) == chunks_for(num_tokens), "committed before everything was copied"
                held.phase, held.num_chunks = "DECODING", chunks_for(num_tokens)
                channel.to_prefill(CommitAck(key))
                self._answer(key, Committed(key.key, 0.01, 0.005, 1024, len(held.copied), "fake"))
                first_index = len(held.token_ids)
                held.token_ids = (*held.token_ids, first_token_id)
                self._spawn(self._decode(key, held, first_index))

    async def _copy(self, channel: PairChannel, key: AttemptKey, held: Held, chunk: int) -> None:
        try:
            await asyncio.sleep(COPY_S * self.pace * self.rng.uniform(0.2, 2))
            await self._running.wait()
        finally:
            self.copying.pop((key, chunk), None)
            if self.held.get(key) is not held and self.alive:
                self._return_if_last(key, held)
        if self.held.get(key) is not held:
            return
        corrupted = self.corrupts == key.key.request_id
        if corrupted:
            self.corrupts = None
        if corrupted or not channel.prefill.still_offers(key, chunk):
            channel.to_prefill(Abort(key))
            return self._fail(key, FailureReason.CORRUPT, f"chunk {chunk}", channel.prefill.info.worker_id)
        held.copied.add(chunk)
        channel.to_prefill(Ack(key, chunk))

    def _give_back(self, key: AttemptKey, held: Held) -> None:
        """Blocks with a copy in flight become free when it has returned."""
        held.phase = "GONE"
        self._return_if_last(key, held)

    def _return_if_last(self, key: AttemptKey, held: Held) -> None:
        if held.phase == "GONE" and not any(other == key for other, _ in self.copying):
            held.phase = "FREED"
            super()._give_back(key, held)

    async def _decode(self, key: AttemptKey, held: Held, num_sent: int) -> None:
        """One row; the first Step repeats the committed token. `num_sent`: tokens the router need not hear again."""
        assert held.sampling is not None
        last = held.num_prompt_tokens + held.sampling.max_tokens
        while self.held.get(key) is held:
            await self._work(STEP_S)
            if self.held.get(key) is not held:
                return
            assert held.phase == "DECODING", f"decodes in {held.phase}"
            assert len(held.copied) == held.num_chunks, "decodes blocks that were not copied"
            if len(held.token_ids) < last:
                held.token_ids = (*held.token_ids, next_token(held.token_ids))
            new = held.token_ids[num_sent:]
            self._answer(key, Step((StepRow(key.key, num_sent - held.num_prompt_tokens, new),)))
            num_sent = len(held.token_ids)
            if num_sent == last:
                held.phase = "FINISHED"
                self._answer(key, Finished(key.key, FinishReason.LENGTH, last - held.num_prompt_tokens))
                return

    def assert_baseline(self) -> None:
        super().assert_baseline()
        assert not self.copying


Dialled = AbstractAsyncContextManager[FakeSession]


def dialler(workers: dict[str, FakeWorker]) -> Callable[[WorkerInfo], Dialled]:
    """A `router.session.Dial` to whoever has the address now."""

    def dial(info: WorkerInfo) -> Dialled:
        return workers[info.worker_id].dial()

    return dial
