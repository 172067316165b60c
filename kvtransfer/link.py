"""The decode worker's end of a pair: the control channel to one prefill worker's incarnation, and the transport (⑦).

A link never outlives its channel: when that ends, the link is broken and the receiver dials a new one at the next
reservation, so that a peer restarted at the same address works at once and none is avoided for good. A channel that
stands but is silent shows by a ping that an earlier reservation sent and that nothing has answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any, Protocol

import grpc
import grpc.aio

from kvtransfer.region import PoolRegion
from kvtransfer.transports import select
from kvtransfer.transports.base import Transport
from tandem.config import TransferConfig
from tandem.errors import KVTransferError
from tandem.grpc_options import internal_channel
from tandem.messages import FailureReason
from tandem.types import AttemptKey, PeerEndpoint
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as rpc
from tandem.wire import attempt_from_wire, attempt_to_wire, secret_metadata

log = logging.getLogger(__name__)

MAX_QUEUED_MESSAGES = 4096
STALLED_AFTER_S = 3.0
# from the dial to the peer's answer to our hello; from then on keepalive watches the peer
DIAL_TIMEOUT_S = 10.0
_CHANNEL_OPTIONS = internal_channel(interval_s=2, patience_s=3)


class LinkOwner(Protocol):
    """The receiver, seen from its links: who we are, and where to take what a peer says."""

    worker_id: str
    incarnation: int
    node_id: str
    compatibility_hash: bytes
    region: PoolRegion
    secret: str
    config: TransferConfig
    counters: Counter[str]

    def offered(self, link: Link, attempt: AttemptKey, offer: pb.Offer) -> None: ...
    def committed(self, link: Link, attempt: AttemptKey, commit: pb.Commit) -> None: ...
    def aborted(self, link: Link, attempt: AttemptKey, abort: pb.Abort) -> None: ...
    def link_broken(self, link: Link, reason: FailureReason, detail: str) -> None: ...


class Link:
    """One peer incarnation's channel and transport. Made and closed by its owner."""

    def __init__(self, owner: LinkOwner, peer: PeerEndpoint) -> None:
        self.peer = peer
        self.broken = False
        self._owner = owner
        self._outbox: asyncio.Queue[pb.ChannelRequest] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self._task: asyncio.Task[None] | None = None
        self._connecting: asyncio.Task[Transport] | None = None
        self._pinged_at: float | None = None
        self.transport_name = ""

    @property
    def wants_checksum(self) -> bool:
        """Whether this pair's offers shall carry checksums: as configured; auto means unless shm is used."""
        config = self._owner.config
        if config.checksum != "auto":
            return config.checksum == "on"
        expected = select.candidates(config, self.peer, self._owner.node_id)[:1]
        return (self.transport_name or "".join(expected)) != "shm"

    @property
    def stalled(self) -> bool:
        """Whether a ping has waited for STALLED_AFTER_S and nothing at all has come since."""
        return self._pinged_at is not None and time.monotonic() - self._pinged_at >= STALLED_AFTER_S

    def start(self) -> None:
        """Dial the channel; the transport connects at the first fetch."""
        self._task = asyncio.create_task(self._run(), name=f"kv link to {self.peer.worker_id}")

    def send(self, attempt: AttemptKey, **body: Any) -> None:
        """Enqueue a message; a broken link drops it. A full outbox breaks the link: nobody reads it."""
        self._enqueue(attempt=attempt_to_wire(attempt), **body)

    def subscribe(self, attempt: AttemptKey, capability: bytes, first_token_wanted: int) -> None:
        """Ask for an attempt's chunks, and for a sign of life where none is due yet."""
        subscribe = pb.Subscribe(
            capability=capability, first_token_wanted=first_token_wanted, checksum=self.wants_checksum
        )
        self.send(attempt, subscribe=subscribe)
        if self._pinged_at is None:
            self._pinged_at = time.monotonic()
            self._enqueue(ping=pb.Ping())

    async def transport(self, deadline: float) -> Transport:
        """The connected transport; connects on first use. Raises KVTransferError."""
        if self.broken:
            raise KVTransferError(self.peer.worker_id, "the control channel broke")
        if self._connecting is None or (self._connecting.done() and self._connecting.exception() is not None):
            our = self._owner
            self._connecting = asyncio.create_task(
                select.connect(our.config, self.peer, our.node_id, our.region, our.secret, deadline),
                name=f"kv transport to {self.peer.worker_id}",
            )
        try:
            transport = await asyncio.shield(self._connecting)
        except asyncio.CancelledError:
            if _cancelled_by_its_owner():
                raise
            raise KVTransferError(self.peer.worker_id, "the control channel broke") from None
        self.transport_name = transport.name
        return transport

    async def close(self) -> None:
        """End channel, transport and copies; idempotent."""
        self.broken = True
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
            (end,) = await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            if isinstance(end, Exception):  # a callback's: what ends a conversation is dealt with in _run
                log.error("the link to %s ended badly", self.peer.worker_id, exc_info=end)
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
            (transport,) = await asyncio.gather(connecting, return_exceptions=True)
            if not isinstance(transport, BaseException):
                await transport.close()

    # ---- inside

    def _enqueue(self, **fields: Any) -> None:
        if self.broken:
            return
        try:
            self._outbox.put_nowait(self._envelope(**fields))
        except asyncio.QueueFull:
            self._break(FailureReason.TRANSFER, "our outbox is full: nobody reads it")

    def _envelope(self, **body: Any) -> pb.ChannelRequest:
        return pb.ChannelRequest(
            decode_incarnation=self._owner.incarnation, prefill_incarnation=self.peer.incarnation, **body
        )

    async def _run(self) -> None:
        reason, detail = FailureReason.TRANSFER, "it ended the control channel"
        try:
            await self._converse()
        except grpc.aio.AioRpcError as exc:
            detail = f"{exc.code().name}: {exc.details()}"
            if exc.code() is grpc.StatusCode.FAILED_PRECONDITION:  # the answer to our hello
                reason = FailureReason.LAYOUT_MISMATCH
        except TimeoutError:
            detail = f"no answer to our hello within {DIAL_TIMEOUT_S:g} s"
        except (asyncio.InvalidStateError, grpc.aio.BaseError) as exc:
            detail = f"the call ended: {exc}"
        except asyncio.CancelledError:
            if _cancelled_by_its_owner():
                raise
            detail = "the call was cancelled"  # by grpc
        except Exception as exc:  # whatever it is, nobody may wait on this link for ever
            log.exception("the link to %s failed", self.peer.worker_id)
            reason, detail = FailureReason.INTERNAL, f"{type(exc).__name__}: {exc}"
        self._break(reason, detail)

    async def _converse(self) -> None:
        """Hold the channel until it ends. Raises what grpc or a callback raised."""
        async with grpc.aio.insecure_channel(self.peer.address, options=_CHANNEL_OPTIONS) as channel:
            stub = rpc.TransferServiceStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Channel(metadata=secret_metadata(self._owner.secret))
            hello = pb.ChannelHello(
                compatibility_hash=self._owner.compatibility_hash, decode_worker_id=self._owner.worker_id
            )
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await call.write(self._envelope(hello=hello))
                await call.initial_metadata()  # comes with the hello's acceptance, or the call's end
            reader = asyncio.create_task(self._read(call), name=f"kv link reader to {self.peer.worker_id}")
            writer = asyncio.create_task(self._write(call), name=f"kv link writer to {self.peer.worker_id}")
            try:
                await asyncio.wait([reader, writer], return_when=asyncio.FIRST_COMPLETED)
            finally:
                writer.cancel()
                call.cancel()  # no effect on a call that has ended: the reader then says how
                ends = await asyncio.gather(reader, writer, return_exceptions=True)
            for end in ends:
                if isinstance(end, Exception):
                    raise end

    async def _read(self, call: Any) -> None:
        async for response in call:
            self._receive(response)

    async def _write(self, call: Any) -> None:
        """The one writer of the call."""
        while True:
            await call.write(await self._outbox.get())

    def _receive(self, response: pb.ChannelResponse) -> None:
        owner = self._owner
        if (response.decode_incarnation, response.prefill_incarnation) != (
            owner.incarnation,
            self.peer.incarnation,
        ):
            owner.counters["fenced_channel_messages"] += 1
            return
        self._pinged_at = None
        attempt = attempt_from_wire(response.attempt)
        match response.WhichOneof("body"):
            case "offer":
                owner.offered(self, attempt, response.offer)
            case "commit":
                owner.committed(self, attempt, response.commit)
            case "abort":
                owner.aborted(self, attempt, response.abort)
            case "pong":
                pass  # any message answers a ping
            case other:
                log.warning("%s sent an unexpected %s", self.peer.worker_id, other)

    def _break(self, reason: FailureReason, detail: str) -> None:
        if self.broken:
            return
        self.broken = True
        log.info("the link to %s broke: %s", self.peer.worker_id, detail)
        self._owner.link_broken(self, reason, f"control channel to {self.peer.worker_id}: {detail}")


def _cancelled_by_its_owner() -> bool:
    """Whether the CancelledError at hand is meant for this task, not for something that it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
