"""⑦ The decode side of a hand-off: subscribe, fetch each offered chunk into own blocks, ack, take the commit.

One control channel and one transport per prefill worker (`kvtransfer/link.py`), dialled at the first reservation and
anew when broken or stalled; a broken one fails the attempts on it. Blocks are let go only when no copy into them is in
flight. All calls and callbacks happen on the event loop; bytes are copied in the transports' threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtransfer.incoming import Incoming, problem_with_commit, problem_with_offer
from kvtransfer.link import Link
from kvtransfer.reasons import abort_message, reason_from_wire, reason_of
from kvtransfer.region import PoolRegion
from kvtransfer.transports.base import Chunk
from tandem.config import TransferConfig
from tandem.errors import KVTransferError
from tandem.messages import FailureReason
from tandem.types import AttemptKey, PeerEndpoint
from tandem.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A verified commit. transfer_s: first offer to this commit; exposed_transfer_s: of that, since the last offer.

    Both are 0 where nothing had to be moved. num_chunks and nbytes count what was.
    """

    num_tokens: int
    first_token_id: int
    first_token_index: int
    transfer_s: float
    exposed_transfer_s: float
    nbytes: int
    num_chunks: int
    transport: str


class Receiver:
    """Fetches of all attempts of one decode worker."""

    def __init__(
        self,
        *,
        worker_id: str,
        incarnation: int,
        node_id: str,
        compatibility_hash: bytes,
        region: PoolRegion,
        secret: str,
        config: TransferConfig,
        counters: Counter[str],
        on_committed: Callable[[AttemptKey, CommitRecord], None],
        on_failed: Callable[[AttemptKey, int, str, str], None],
    ) -> None:
        """on_failed(attempt, FailureReason, detail, peer worker id)."""
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.node_id = node_id
        self.compatibility_hash = compatibility_hash
        self.region = region
        self.secret = secret
        self.config = config
        self.counters = counters
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._incoming: dict[AttemptKey, Incoming] = {}
        self._links: dict[int, Link] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._copies: set[asyncio.Task[None]] = set()

    @property
    def num_copies_in_flight(self) -> int:
        """Fetches that may still write into blocks."""
        return len(self._copies)

    # ---- from the decode role

    def open(
        self,
        attempt: AttemptKey,
        peer: PeerEndpoint,
        capability: bytes,
        block_ids: Sequence[int],
        first_token_wanted: int,
    ) -> None:
        """Subscribe to an attempt.

        block_ids: own blocks of the whole prompt, from token 0 on; first_token_wanted: what our cache holds already, a
        whole number of blocks.
        """
        assert attempt not in self._incoming, f"{attempt} is open already"
        assert first_token_wanted % self.region.layout.block_size == 0, "our cache holds whole blocks"
        link = self._link(peer)
        self._incoming[attempt] = Incoming(
            attempt,
            peer,
            capability,
            tuple(block_ids),
            first_token_wanted,
            link,
            next_token=first_token_wanted,
        )
        link.subscribe(attempt, capability, first_token_wanted)

    def close(self, attempt: AttemptKey, then: Callable[[], None]) -> None:
        """Forget the attempt, end its copies; call `then` once none of them is in flight. Idempotent."""
        incoming = self._incoming.pop(attempt, None)
        if incoming is None:
            then()
            return
        if not incoming.over:
            incoming.over = True
            incoming.link.send(attempt, abort=abort_message(FailureReason.TRANSFER, "released"))
        if not incoming.copies:
            then()
            return
        remaining = len(incoming.copies)

        def on_copy_done(_task: asyncio.Task[None]) -> None:
            nonlocal remaining
            remaining -= 1
            if remaining == 0:
                then()

        for copy in list(incoming.copies):
            copy.add_done_callback(on_copy_done)
            copy.cancel()  # a fetch returns only when nothing writes our blocks any more

    async def stop(self) -> None:
        """End every link and copy; idempotent."""
        for attempt in list(self._incoming):
            self.close(attempt, lambda: None)
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links), *self._ending)
        await asyncio.gather(*self._copies, return_exceptions=True)

    # ---- links

    def _link(self, peer: PeerEndpoint) -> Link:
        """The peer's link; a new one where there is none, or the old one is broken or stalled."""
        link = self._links.get(peer.incarnation)
        if link is not None and not link.broken and not link.stalled:
            return link
        if link is not None:
            self.counters["redialled_links"] += 1
            self._retire(link)
        link = self._links[peer.incarnation] = Link(self, peer)
        link.start()
        return link

    def _retire(self, link: Link) -> None:
        """Close a link in the background; whatever still hangs on it fails."""
        if self._links.get(link.peer.incarnation) is link:
            del self._links[link.peer.incarnation]
        task = asyncio.create_task(link.close(), name=f"close link to {link.peer.worker_id}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        self._fail_all(link, FailureReason.TRANSFER, "the control channel was dialled anew")

    def link_broken(self, link: Link, reason: FailureReason, detail: str) -> None:
        """The link's channel ended, by the peer's death, its refusal or a broken path; called by the link."""
        self._fail_all(link, reason, detail)
        if self._links.get(link.peer.incarnation) is link:
            self._retire(link)

    def _fail_all(self, link: Link, reason: FailureReason, detail: str) -> None:
        for incoming in list(self._incoming.values()):
            if incoming.link is link:
                self._fail(incoming, reason, detail, tell_peer=False)

    # ---- from the control channel

    def offered(self, link: Link, attempt: AttemptKey, offer: pb.Offer) -> None:
        """A chunk can be fetched."""
        incoming = self._of(link, attempt, "offer")
        if incoming is None:
            return
        now = time.monotonic()
        if problem := problem_with_offer(incoming, offer, self.region.layout):
            self._fail(incoming, FailureReason.TRANSFER, problem)
            return
        if incoming.first_offer_at is None:
            incoming.first_offer_at = now
        if offer.last:
            incoming.saw_last, incoming.last_offer_at = True, now
        size = self.region.layout.block_size
        first_block = offer.first_token // size
        into = incoming.block_ids[first_block : first_block + len(offer.block_ids)]
        incoming.next_token = offer.first_token + offer.num_tokens
        chunk = Chunk(
            offer.chunk,
            tuple(offer.block_ids),
            tuple(offer.generations),
            offer.first_token,
            offer.num_tokens,
            offer.checksum if offer.HasField("checksum") else None,
            offer.last,
        )
        copy = asyncio.create_task(self._copy(incoming, chunk, into), name=f"fetch {attempt} chunk {chunk.index}")
        incoming.copies.add(copy)
        self._copies.add(copy)
        copy.add_done_callback(lambda task: self._copy_done(incoming, task))

    async def _copy(self, incoming: Incoming, chunk: Chunk, into: tuple[int, ...]) -> None:
        link, deadline = incoming.link, time.monotonic() + self.config.offer_timeout_s
        try:
            transport = await link.transport(deadline)
            if incoming.over:
                return
            result = await transport.fetch(incoming.capability, chunk, into, deadline)
        except KVTransferError as exc:
            self._fail(incoming, reason_of(exc), str(exc))
            return
        if incoming.over:
            return
        incoming.num_copied_tokens += chunk.num_tokens
        incoming.num_chunks += 1
        incoming.nbytes += result.nbytes
        link.send(incoming.attempt, ack=pb.Ack(chunk=chunk.index))

    def _copy_done(self, incoming: Incoming, task: asyncio.Task[None]) -> None:
        self._copies.discard(task)
        incoming.copies.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("fetching for %s failed unexpectedly", incoming.attempt, exc_info=exc)
            self._fail(incoming, FailureReason.INTERNAL, f"{type(exc).__name__}: {exc}")

    def committed(self, link: Link, attempt: AttemptKey, commit: pb.Commit) -> None:
        """The commit record came: verify that it speaks of exactly what was copied."""
        incoming = self._of(link, attempt, "commit")
        if incoming is None:
            return
        if commit.compatibility_hash != self.compatibility_hash:
            return self._fail(incoming, FailureReason.LAYOUT_MISMATCH, "the commit's compatibility hash differs")
        if problem := problem_with_commit(incoming, commit):
            return self._fail(incoming, FailureReason.TRANSFER, problem)
        now = time.monotonic()
        first_offer_at, last_offer_at = incoming.first_offer_at, incoming.last_offer_at
        incoming.over = True
        link.send(attempt, commit_ack=pb.CommitAck())
        self._on_committed(
            attempt,
            CommitRecord(
                num_tokens=commit.num_tokens,
                first_token_id=commit.first_token_id,
                first_token_index=commit.first_token_index,
                transfer_s=0.0 if first_offer_at is None else now - first_offer_at,
                exposed_transfer_s=0.0 if last_offer_at is None else now - last_offer_at,
                nbytes=incoming.nbytes,
                num_chunks=incoming.num_chunks,
                transport=link.transport_name,
            ),
        )

    def aborted(self, link: Link, attempt: AttemptKey, abort: pb.Abort) -> None:
        """The prefill worker gave the attempt up."""
        incoming = self._of(link, attempt, "abort")
        if incoming is not None:
            self._fail(incoming, reason_from_wire(abort.reason), abort.detail, tell_peer=False)

    def _of(self, link: Link, attempt: AttemptKey, what: str) -> Incoming | None:
        incoming = self._incoming.get(attempt)
        if incoming is None or incoming.link is not link or incoming.over:
            self.counters[f"fenced_{what}"] += 1
            return None
        return incoming

    def _fail(self, incoming: Incoming, reason: FailureReason, detail: str, *, tell_peer: bool = True) -> None:
        if incoming.over:
            return
        incoming.over = True
        self.counters[f"transfer_{reason.name.lower()}"] += 1
        if tell_peer:
            incoming.link.send(incoming.attempt, abort=abort_message(reason, detail))
        self._on_failed(incoming.attempt, reason, detail, incoming.peer.worker_id)
