"""⑥ The prefill side of a hand-off: offers per finished chunk, kept until subscribed; the commit after the last ack.

CREDIT (open) -> offers -> [subscribed] -> acks -> commit -> CommitAck (on_committed), then `close`.
Every offer has a deadline from the chunk's completion, subscribed or not. All calls and callbacks happen on the event
loop, but `authorize`, which the tcp transport's threads ask.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtransfer.reasons import abort_message, reason_from_wire
from kvtransfer.region import PoolRegion
from kvtransfer.transports.base import Chunk, Exporter, checksum
from kvtransfer.transports.frames import CAPABILITY_NBYTES
from kvtransfer.transports.shm import ShmExporter
from kvtransfer.transports.tcp import TcpExporter
from tandem.config import TransferConfig
from tandem.messages import FailureReason
from tandem.types import AttemptKey
from tandem.v1 import worker_pb2 as pb
from tandem.wire import attempt_to_wire


class Subscriber(Protocol):
    """A decode worker's control channel, seen from the sender."""

    @property
    def worker_id(self) -> str: ...

    def send(self, response: pb.ChannelResponse) -> None:
        """Enqueue a message; one that no longer fits breaks the channel."""
        ...


@dataclass(slots=True)
class _Commit:
    num_tokens: int
    first_token_id: int
    first_token_index: int


@dataclass(slots=True)
class _Outgoing:
    """One attempt. `offers` holds what is not acknowledged yet, `deadlines` its timers, by chunk index."""

    capability: bytes
    num_chunks: int = 0
    offers: dict[int, Chunk] = field(default_factory=dict)
    deadlines: dict[int, asyncio.TimerHandle] = field(default_factory=dict)
    subscriber: Subscriber | None = None
    first_token_wanted: int = 0
    wants_checksum: bool = False
    commit: _Commit | None = None
    commit_sent: bool = False


class Sender:
    """Offers, acks and commits of all attempts of one prefill worker."""

    def __init__(
        self,
        *,
        incarnation: int,
        compatibility_hash: bytes,
        region: PoolRegion,
        secret: str,
        config: TransferConfig,
        counters: Counter[str],
        on_acked: Callable[[AttemptKey, int], None],
        on_committed: Callable[[AttemptKey], None],
        on_failed: Callable[[AttemptKey, int, str, str], None],
    ) -> None:
        """on_failed(attempt, FailureReason, detail, peer worker id or ""); nothing is closed by a callback's cause."""
        self.incarnation = incarnation
        self.compatibility_hash = compatibility_hash
        self.counters = counters
        self._region = region
        self._secret = secret
        self._config = config
        self._on_acked = on_acked
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._outgoing: dict[AttemptKey, _Outgoing] = {}
        self._by_capability: dict[bytes, _Outgoing] = {}
        self._exporters: list[Exporter] = []

    # ---- transports

    async def start(self, host: str) -> tuple[str, str]:
        """Serve the pool on `host` by what the configuration allows; return (shm_name, tcp_address), "" for none."""
        shm_name = tcp_address = ""
        if self._config.transport in ("auto", "shm"):
            shm = ShmExporter(self._region, self._secret, f"tandem-kv-{self.incarnation:016x}")
            self._exporters.append(shm)
            shm_name = await shm.start()
        if self._config.transport in ("auto", "tcp"):
            tcp = TcpExporter(self._region, self._secret, host, self.authorize)
            self._exporters.append(tcp)
            tcp_address = await tcp.start()
        return shm_name, tcp_address

    async def stop(self) -> None:
        """Close every attempt and transport; idempotent."""
        for attempt in list(self._outgoing):
            self.close(attempt)
        while self._exporters:
            await self._exporters.pop().close()

    def authorize(self, capability: bytes, block_ids: Sequence[int], generations: Sequence[int]) -> bool:
        """Whether exactly these blocks, in this order, are an unacknowledged offer of the capability's attempt."""
        outgoing = self._by_capability.get(capability)
        if outgoing is None:
            return False
        wanted = tuple(block_ids), tuple(generations)
        return any(
            (c.block_ids, c.generations) == wanted
            for c in (self._trimmed(chunk, outgoing) for chunk in tuple(outgoing.offers.values()))
        )

    # ---- from the prefill role

    def open(self, attempt: AttemptKey) -> bytes:
        """Begin an attempt; return the capability that its subscriber must present."""
        assert attempt not in self._outgoing, f"{attempt} is open already"
        capability = secrets.token_bytes(CAPABILITY_NBYTES)
        self._outgoing[attempt] = self._by_capability[capability] = _Outgoing(capability)
        return capability

    def offer(
        self, attempt: AttemptKey, block_ids: Sequence[int], first_token: int, num_tokens: int, last: bool
    ) -> None:
        """Offer a finished chunk. It stays readable until acknowledged or closed."""
        outgoing = self._outgoing.get(attempt)
        if outgoing is None:
            return
        index = outgoing.num_chunks
        outgoing.num_chunks += 1
        generations = self._region.generations[list(block_ids)].tolist()
        chunk = Chunk(index, tuple(block_ids), tuple(generations), first_token, num_tokens, None, last)
        outgoing.offers[index] = chunk
        outgoing.deadlines[index] = asyncio.get_running_loop().call_later(
            self._config.offer_timeout_s, self._overdue, attempt, index
        )
        if outgoing.subscriber is not None:
            self._send_offer(attempt, outgoing, chunk)

    def commit(self, attempt: AttemptKey, num_tokens: int, first_token_id: int, first_token_index: int) -> None:
        """The prompt is done: commit as soon as every chunk is acknowledged."""
        outgoing = self._outgoing.get(attempt)
        if outgoing is None:
            return
        outgoing.commit = _Commit(num_tokens, first_token_id, first_token_index)
        self._commit_if_acked(attempt, outgoing)

    def close(self, attempt: AttemptKey) -> None:
        """Forget the attempt; idempotent. A subscriber that has not committed is told."""
        outgoing = self._outgoing.pop(attempt, None)
        if outgoing is None:
            return
        del self._by_capability[outgoing.capability]
        for timer in outgoing.deadlines.values():
            timer.cancel()
        if outgoing.subscriber is not None and not outgoing.commit_sent:
            abort = abort_message(FailureReason.TRANSFER, "the prefill worker gave the attempt up")
            self._send(attempt, outgoing, pb.ChannelResponse(abort=abort))

    # ---- from the control channel

    def subscribe(self, attempt: AttemptKey, message: pb.Subscribe, subscriber: Subscriber) -> None:
        """A decode worker asks for the attempt's chunks; what it need not have counts as acknowledged."""
        outgoing = self._outgoing.get(attempt)
        problem = ""
        if outgoing is None or not hmac.compare_digest(outgoing.capability, message.capability):
            problem = "no such attempt, or not its capability"
        elif outgoing.subscriber is not None:
            problem = "somebody has subscribed already"
        elif message.first_token_wanted % self._region.layout.block_size:
            problem = f"token {message.first_token_wanted} is not the first of a block"
        if outgoing is None or problem:
            self.counters["fenced_subscribe"] += 1
            abort = abort_message(FailureReason.TRANSFER, problem)
            subscriber.send(pb.ChannelResponse(attempt=attempt_to_wire(attempt), abort=abort))
            return
        outgoing.subscriber = subscriber
        outgoing.first_token_wanted = message.first_token_wanted
        outgoing.wants_checksum = message.checksum
        for chunk in list(outgoing.offers.values()):
            self._send_offer(attempt, outgoing, chunk)
        self._commit_if_acked(attempt, outgoing)  # a cache that holds the whole prompt leaves nothing to wait for

    def ack(self, attempt: AttemptKey, chunk_index: int, subscriber: Subscriber) -> None:
        """The subscriber has copied a chunk."""
        outgoing = self._of(attempt, subscriber, "ack")
        if outgoing is None or chunk_index not in outgoing.offers:
            return
        self._acked(attempt, outgoing, chunk_index)
        self._commit_if_acked(attempt, outgoing)

    def commit_ack(self, attempt: AttemptKey, subscriber: Subscriber) -> None:
        """The subscriber has taken the commit record."""
        outgoing = self._of(attempt, subscriber, "commit_ack")
        if outgoing is not None and outgoing.commit_sent:
            self._on_committed(attempt)

    def abort(self, attempt: AttemptKey, reason: int, detail: str, subscriber: Subscriber) -> None:
        """The subscriber gave the attempt up."""
        if self._of(attempt, subscriber, "abort") is not None:
            self._on_failed(attempt, reason_from_wire(reason), detail, subscriber.worker_id)

    def channel_broken(self, subscriber: Subscriber) -> None:
        """A control channel is gone. After the commit was sent the router decides: it may have arrived."""
        for attempt, outgoing in list(self._outgoing.items()):
            if outgoing.subscriber is subscriber and not outgoing.commit_sent:
                self._on_failed(attempt, FailureReason.TRANSFER, "the control channel broke", subscriber.worker_id)

    # ---- inside

    def _of(self, attempt: AttemptKey, subscriber: Subscriber, what: str) -> _Outgoing | None:
        outgoing = self._outgoing.get(attempt)
        if outgoing is None or outgoing.subscriber is not subscriber:
            self.counters[f"fenced_{what}"] += 1
            return None
        return outgoing

    def _trimmed(self, chunk: Chunk, outgoing: _Outgoing) -> Chunk:
        """The part of a chunk that the subscriber wants."""
        size = self._region.layout.block_size
        skip = min(max(outgoing.first_token_wanted - chunk.first_token, 0) // size, len(chunk.block_ids))
        if skip == 0:
            return chunk
        return Chunk(
            chunk.index,
            chunk.block_ids[skip:],
            chunk.generations[skip:],
            chunk.first_token + skip * size,
            chunk.num_tokens - min(skip * size, chunk.num_tokens),
            None,
            chunk.last,
        )

    def _send_offer(self, attempt: AttemptKey, outgoing: _Outgoing, chunk: Chunk) -> None:
        wanted = self._trimmed(chunk, outgoing)
        if wanted.num_tokens == 0:
            self._acked(attempt, outgoing, chunk.index)
            return
        offer = pb.Offer(
            chunk=wanted.index,
            block_ids=wanted.block_ids,
            generations=wanted.generations,
            first_token=wanted.first_token,
            num_tokens=wanted.num_tokens,
            last=wanted.last,
        )
        if outgoing.wants_checksum:
            offer.checksum = checksum(self._region, wanted.block_ids)
        self._send(attempt, outgoing, pb.ChannelResponse(offer=offer))

    def _send(self, attempt: AttemptKey, outgoing: _Outgoing, response: pb.ChannelResponse) -> None:
        assert outgoing.subscriber is not None
        response.attempt.CopyFrom(attempt_to_wire(attempt))
        outgoing.subscriber.send(response)

    def _acked(self, attempt: AttemptKey, outgoing: _Outgoing, chunk_index: int) -> None:
        del outgoing.offers[chunk_index]
        outgoing.deadlines.pop(chunk_index).cancel()
        self._on_acked(attempt, chunk_index)

    def _commit_if_acked(self, attempt: AttemptKey, outgoing: _Outgoing) -> None:
        commit = outgoing.commit
        if commit is None or outgoing.offers or outgoing.commit_sent or outgoing.subscriber is None:
            return
        outgoing.commit_sent = True
        record = pb.Commit(
            compatibility_hash=self.compatibility_hash,
            num_tokens=commit.num_tokens,
            first_token_id=commit.first_token_id,
            first_token_index=commit.first_token_index,
        )
        self._send(attempt, outgoing, pb.ChannelResponse(commit=record))

    def _overdue(self, attempt: AttemptKey, chunk_index: int) -> None:
        outgoing = self._outgoing.get(attempt)
        if outgoing is None or chunk_index not in outgoing.offers:
            return
        self.counters["overdue_offers"] += 1
        subscriber = outgoing.subscriber
        state = "subscribed" if subscriber is not None else "never subscribed"
        self._on_failed(
            attempt,
            FailureReason.TRANSFER,
            f"chunk {chunk_index} was not acknowledged within {self._config.offer_timeout_s:g} s ({state})",
            subscriber.worker_id if subscriber is not None else "",
        )
