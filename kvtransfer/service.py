"""The prefill worker's end of the pair's control channel: TransferService on the worker's gRPC listener (⑥)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from kvtransfer.sender import Sender
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as rpc
from tandem.wire import attempt_from_wire

log = logging.getLogger(__name__)

# messages that wait for the network; a channel that has more is not being read
MAX_QUEUED_MESSAGES = 4096
HELLO_TIMEOUT_S = 10.0


class ChannelSubscriber:
    """One open channel: an outbox with one writer; see sender.Subscriber."""

    def __init__(self, worker_id: str, decode_incarnation: int, prefill_incarnation: int) -> None:
        self._worker_id = worker_id
        self.incarnations = decode_incarnation, prefill_incarnation
        self.outbox: asyncio.Queue[pb.ChannelResponse] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self.overflown = asyncio.Event()

    @property
    def worker_id(self) -> str:
        """The decode worker at the other end."""
        return self._worker_id

    def send(self, response: pb.ChannelResponse) -> None:
        """Enqueue; a full outbox ends the channel instead of growing."""
        response.decode_incarnation, response.prefill_incarnation = self.incarnations
        try:
            self.outbox.put_nowait(response)
        except asyncio.QueueFull:
            self.overflown.set()


class TransferServicer(rpc.TransferServiceServicer):
    """Hands a decode worker's messages to the Sender. The cluster secret is checked by the server's interceptor."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    async def Channel(
        self,
        request_iterator: AsyncIterator[pb.ChannelRequest],
        context: grpc.aio.ServicerContext[pb.ChannelRequest, pb.ChannelResponse],
    ) -> None:
        """Serve one decode worker until either side ends it."""
        subscriber = await self._greet(request_iterator, context)
        tasks = [
            asyncio.create_task(self._read(request_iterator, subscriber), name="kv channel reader"),
            asyncio.create_task(self._write(subscriber, context), name="kv channel writer"),
            asyncio.create_task(subscriber.overflown.wait(), name="kv channel overflow"),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for end in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(end, grpc.aio.BaseError):  # the call ended under a read or a write
                    log.info("the control channel of %s ended: %s", subscriber.worker_id, end)
                elif isinstance(end, Exception):
                    log.error("the control channel of %s failed", subscriber.worker_id, exc_info=end)
            self._sender.channel_broken(subscriber)

    async def _greet(
        self,
        requests: AsyncIterator[pb.ChannelRequest],
        context: grpc.aio.ServicerContext[pb.ChannelRequest, pb.ChannelResponse],
    ) -> ChannelSubscriber:
        sender = self._sender
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(aiter(requests))
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the channel's first message is its hello")
        if first.WhichOneof("body") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the channel's first message is its hello")
        if first.prefill_incarnation != sender.incarnation:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this is another incarnation")
        if first.hello.compatibility_hash != sender.compatibility_hash:
            sender.counters["refused_incompatible_peer"] += 1
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "model, dtype, KV layout or wire version differ: no pair"
            )
        await context.send_initial_metadata(())
        return ChannelSubscriber(first.hello.decode_worker_id, first.decode_incarnation, sender.incarnation)

    async def _read(self, requests: AsyncIterator[pb.ChannelRequest], subscriber: ChannelSubscriber) -> None:
        sender = self._sender
        async for request in requests:
            if (request.decode_incarnation, request.prefill_incarnation) != subscriber.incarnations:
                sender.counters["fenced_channel_messages"] += 1
                continue
            attempt = attempt_from_wire(request.attempt)
            match request.WhichOneof("body"):
                case "subscribe":
                    sender.subscribe(attempt, request.subscribe, subscriber)
                case "ack":
                    sender.ack(attempt, request.ack.chunk, subscriber)
                case "commit_ack":
                    sender.commit_ack(attempt, subscriber)
                case "abort":
                    sender.abort(attempt, request.abort.reason, request.abort.detail, subscriber)
                case "ping":
                    subscriber.send(pb.ChannelResponse(pong=pb.Pong()))
                case other:
                    log.warning("a decode worker sent an unexpected %s", other)

    async def _write(
        self,
        subscriber: ChannelSubscriber,
        context: grpc.aio.ServicerContext[pb.ChannelRequest, pb.ChannelResponse],
    ) -> None:
        while True:
            await context.write(await subscriber.outbox.get())
