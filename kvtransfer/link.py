"""The decode worker's end of a pair: the control channel to one prefill worker's incarnation, and the transport (⑦).

A link never outlives its channel: when that ends, the link is broken and the receiver dials a new one at the next
reservation, so that a peer restarted at the same address works at once and none is avoided for good.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from kvtransfer.transports import select
from kvtransfer.transports.base import Transport
from tandem.errors import KVTransferError
from tandem.types import AttemptKey, PeerEndpoint
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as rpc
from tandem.wire import attempt_from_wire, attempt_to_wire, secret_metadata

if TYPE_CHECKING:
    from kvtransfer.receiver import Receiver

log = logging.getLogger(__name__)

MAX_QUEUED_MESSAGES = 4096
CLOSE_TIMEOUT_S = 5.0
_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    # two links to one address (a restarted peer) must not share a connection
    ("grpc.use_local_subchannel_pool", 1),
)


class Link:
    """One peer incarnation's channel and transport. Made and closed by the receiver."""

    def __init__(self, receiver: Receiver, peer: PeerEndpoint) -> None:
        self.peer = peer
        self.broken = False
        self._receiver = receiver
        self._outbox: asyncio.Queue[pb.ChannelRequest] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self._task: asyncio.Task[None] | None = None
        self._connecting: asyncio.Task[Transport] | None = None
        self._last_inbound = time.monotonic()
        self._unanswered = False
        self.transport_name = ""

    @property
    def wants_checksum(self) -> bool:
        """Whether this pair's offers shall carry checksums: as configured; auto means unless shm is what comes first."""
        config = self._receiver.config
        if config.checksum != "auto":
            return config.checksum == "on"
        return select.candidates(config, self.peer, self._receiver.node_id)[:1] != ["shm"]

    @property
    def stalled(self) -> bool:
        """Whether an attempt waited here for the whole patience of an offer and heard nothing at all."""
        return self._unanswered

    def note_unanswered(self, since: float) -> None:
        """An attempt that was opened at `since` (monotonic) ends without its commit."""
        patience_s = self._receiver.config.offer_timeout_s
        if self._last_inbound < since and time.monotonic() - since >= patience_s:
            self._unanswered = True

    def start(self) -> None:
        """Dial the channel and begin to connect the transport."""
        self._task = asyncio.create_task(self._run(), name=f"kv link to {self.peer.worker_id}")

    def send(self, attempt: AttemptKey, **body: Any) -> None:
        """Enqueue a message; a broken link drops it. A full outbox breaks the link: nobody reads it."""
        if self.broken:
            return
        try:
            self._outbox.put_nowait(self._envelope(attempt=attempt_to_wire(attempt), **body))
        except asyncio.QueueFull:
            self._break("its outbox is full")

    async def transport(self, deadline: float) -> Transport:
        """The connected transport; connects on first use. Raises KVTransferError."""
        if self.broken:
            raise KVTransferError(self.peer.worker_id, "the control channel broke")
        if self._connecting is None or (self._connecting.done() and self._connecting.exception() is not None):
            r = self._receiver
            self._connecting = asyncio.create_task(
                select.connect(r.config, self.peer, r.node_id, r.region, r.secret, deadline),
                name=f"kv transport to {self.peer.worker_id}",
            )
        try:
            transport = await asyncio.shield(self._connecting)
        except asyncio.CancelledError:
            if self.broken:
                raise KVTransferError(self.peer.worker_id, "the control channel broke") from None
            raise
        self.transport_name = transport.name
        return transport

    async def close(self) -> None:
        """End channel, transport and copies; idempotent."""
        self.broken = True
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
            (transport,) = await asyncio.gather(connecting, return_exceptions=True)
            if not isinstance(transport, BaseException):
                await transport.close()

    # ---- inside

    def _envelope(self, **body: Any) -> pb.ChannelRequest:
        return pb.ChannelRequest(
            decode_incarnation=self._receiver.incarnation, prefill_incarnation=self.peer.incarnation, **body
        )

    async def _run(self) -> None:
        detail = "it ended the control channel"
        try:
            async with grpc.aio.insecure_channel(self.peer.address, options=_CHANNEL_OPTIONS) as channel:
                call = rpc.TransferServiceStub(channel).Channel(metadata=secret_metadata(self._receiver.secret))
                hello = pb.ChannelHello(
                    compatibility_hash=self._receiver.compatibility_hash, decode_worker_id=self._receiver.worker_id
                )
                await call.write(self._envelope(hello=hello))
                writer = asyncio.create_task(self._write(call), name=f"kv link writer to {self.peer.worker_id}")
                try:
                    async for response in call:
                        self._receive(response)
                finally:
                    writer.cancel()
                    await asyncio.gather(writer, return_exceptions=True)
                    call.cancel()
        except grpc.aio.AioRpcError as exc:
            detail = f"{exc.code().name}: {exc.details()}"
        except asyncio.CancelledError:
            if self.broken:
                raise
            # grpc cancels the reader when the call was cancelled by the peer's shutdown
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
        except asyncio.InvalidStateError as exc:
            detail = f"the call ended: {exc}"
        self._break(detail)

    async def _write(self, call: Any) -> None:
        """The one writer of the call."""
        while True:
            await call.write(await self._outbox.get())

    def _receive(self, response: pb.ChannelResponse) -> None:
        receiver = self._receiver
        self._last_inbound = time.monotonic()
        self._unanswered = False
        if (response.decode_incarnation, response.prefill_incarnation) != (
            receiver.incarnation,
            self.peer.incarnation,
        ):
            receiver.counters["fenced_channel_messages"] += 1
            return
        attempt = attempt_from_wire(response.attempt)
        match response.WhichOneof("body"):
            case "offer":
                receiver.offered(self, attempt, response.offer)
            case "commit":
                receiver.committed(self, attempt, response.commit)
            case "abort":
                receiver.aborted(self, attempt, response.abort)
            case other:
                log.warning("%s sent an unexpected %s", self.peer.worker_id, other)

    def _break(self, detail: str) -> None:
        if self.broken:
            return
        self.broken = True
        log.info("the link to %s broke: %s", self.peer.worker_id, detail)
        self._receiver.link_broken(self, f"control channel to {self.peer.worker_id}: {detail}")
