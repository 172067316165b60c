"""④ The router's side of `WorkerService.Session`: one long-lived stream per worker carries all requests.

Three tasks per session: one writes (grpc.aio allows one writer), one reads and hands each message to its attempt's
inbox without ever waiting, one watches the worker's progress. Whatever ends a session counts as the loss of the worker
for all attempts on it: a reset stream (a crash), a hole in the sequence (a lost message), no progress (a hang), a
silence of ours that may have ended our leases. Then the link dials again, with a new session number and a Resync.
Neighbours: fleet (owns the links), lifecycle (opens, sends, closes), dial (the gRPC stream).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Protocol

from router.inbox import Event, Inbox, Lost, Tokens
from tandem.config import TimingConfig
from tandem.messages import (
    Heartbeat,
    Prefill,
    PromptSegment,
    Release,
    Reserve,
    Resync,
    RouterMessage,
    Step,
    WorkerMessage,
)
from tandem.session_wire import fill_request, read_response
from tandem.types import LoadReport, RequestKey, WorkerInfo
from tandem.v1 import worker_pb2 as pb
from tandem.wire import MAX_SEGMENT_TOKENS

log = logging.getLogger(__name__)

MAX_OUTBOX_MESSAGES = 16 * 1024
OWN_CLOSE = "the router has closed the session"
MIN_REDIAL_S = 0.05
MAX_REDIAL_S = 1.0


class SessionBroken(Exception):
    """The session cannot go on; the message says why."""


class SessionStream(Protocol):
    """One open stream to a worker. Both methods raise SessionBroken when it is reset."""

    async def read(self) -> pb.SessionResponse | None:
        """The next message; None when the worker has ended the stream."""
        ...

    async def write(self, request: pb.SessionRequest) -> None: ...


Dial = Callable[[WorkerInfo], AbstractAsyncContextManager[SessionStream]]


class WorkerLink:
    """One worker, seen from the router.

    on_change(topology): called when the worker came, went or changed its mind about draining (True), or reported its
    load (False). session_numbers: rising, shared by all links of a router.
    """

    def __init__(
        self,
        info: WorkerInfo,
        incarnation: int,
        timing: TimingConfig,
        dial: Dial,
        session_numbers: Iterator[int],
        counters: Counter[str],
        on_change: Callable[[bool], None],
    ) -> None:
        self.info = info
        self.load = LoadReport()
        self.num_reports = 0
        self.up = False
        self.num_unreported_tokens = 0
        self.num_unreported_requests = 0
        self.num_unreported_blocks = 0
        self._incarnation = incarnation
        self._timing = timing
        self._dial = dial
        self._session_numbers = session_numbers
        self._counters = counters
        self._on_change = on_change
        self._inboxes: dict[RequestKey, Inbox] = {}
        self._outbox: deque[RouterMessage] = deque()
        self._wake = asyncio.Event()
        self._flushed = asyncio.Event()
        self._flushed.set()
        self._leaving = False
        self._may_leave = asyncio.Event()
        self._hung_at_progress: int | None = None

    # ---- for lifecycles

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def usable(self) -> bool:
        """Whether new work may be given to it."""
        return self.up and not self._leaving and not self.info.draining and not self.load.draining

    def open(self, key: RequestKey, inbox: Inbox, num_tokens: int, num_blocks: int) -> None:
        """Have the messages of `key` delivered to `inbox`; the worker will be asked for so much.

        If the session is down, the inbox hears of it at once.
        """
        self.num_unreported_tokens += num_tokens
        self.num_unreported_requests += 1
        self.num_unreported_blocks += num_blocks
        if not self.up:
            inbox.put(self.worker_id, Lost("it has no session"))
            return
        self._inboxes[key] = inbox

    def send(self, message: RouterMessage) -> None:
        """Queue a message, in segments if it is long. Lost when the session is down: the resync does the rest."""
        if not self.up:
            self._counters["undeliverable_messages"] += 1
            return
        if isinstance(message, Reserve | Prefill) and len(message.token_ids) > MAX_SEGMENT_TOKENS:
            segments, message = split(message)
            self._outbox.extend(segments)
        self._outbox.append(message)
        self._flushed.clear()
        self._wake.set()

    def close(self, key: RequestKey) -> None:
        """Release `key` and hear no more of it; idempotent, without effect after a loss of the session."""
        if self._inboxes.pop(key, None) is not None:
            self.send(Release(key))
            self._check_leave()

    # ---- for the fleet

    def leave(self) -> None:
        """Give it no new work and end the session as soon as nothing runs on it. It left the directory."""
        self._leaving = True
        self._check_leave()

    def update(self, info: WorkerInfo) -> None:
        """It is in the directory, as `info`."""
        self.info = info
        self._leaving = False
        self._may_leave.clear()

    async def wait_flushed(self) -> None:
        """Return when everything queued has been written, or the session is down."""
        await self._flushed.wait()

    def _check_leave(self) -> None:
        if self._leaving and not self._inboxes:
            self._may_leave.set()

    # ---- sessions, one after the other

    async def run(self) -> None:
        """Keep a session open until cancelled, or until the worker has left."""
        redial_s = MIN_REDIAL_S
        while True:
            num_reports = self.num_reports
            try:
                async with self._dial(self.info) as stream:
                    await self._serve(stream)
            except SessionBroken as exc:
                log.debug("worker %s: %s", self.worker_id, exc)
            if self._leaving:
                return
            answered = self.num_reports > num_reports
            redial_s = MIN_REDIAL_S if answered else min(2 * redial_s, MAX_REDIAL_S)
            await asyncio.sleep(redial_s)

    async def _serve(self, stream: SessionStream) -> None:
        """One session, until it breaks or is cancelled."""
        session = next(self._session_numbers)
        self._outbox.clear()
        self._outbox.append(Resync(tuple(self._inboxes)))
        self._wake.set()
        # not a TaskGroup: one that fails swallows a cancellation that comes at the same moment
        works = {
            "writer": self._write_all(stream, session),
            "reader": self._read_all(stream, session),
            "failure detector": self._watch_progress(),
            "leave": self._wait_to_leave(),
        }
        tasks = [asyncio.create_task(work, name=f"{self.worker_id} {name}") for name, work in works.items()]
        reason = OWN_CLOSE
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reason = _reason(done.pop())
        finally:
            self._end_session(reason)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _end_session(self, reason: str) -> None:
        """Whatever was on the session is lost. Idempotent."""
        was_up, self.up = self.up, False
        self._outbox.clear()
        self._flushed.set()
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.put(self.worker_id, Lost(reason))
        self._check_leave()
        if was_up:
            expected = self._leaving or reason == OWN_CLOSE
            log.log(logging.INFO if expected else logging.WARNING, "worker %s: %s", self.worker_id, reason)
            self._counters["sessions_ended"] += 1
            self._on_change(True)

    async def _wait_to_leave(self) -> None:
        await self._may_leave.wait()
        await self._flushed.wait()
        raise SessionBroken("it has left the directory")

    # ---- writing

    async def _write_all(self, stream: SessionStream, session: int) -> None:
        loop = asyncio.get_running_loop()
        seq = 0
        sent_at = loop.time()
        patience_s = self._timing.lease_s - self._timing.lease_margin_s
        while True:
            try:
                async with asyncio.timeout_at(sent_at + self._timing.heartbeat_s):
                    await self._wake.wait()
            except TimeoutError:
                self._outbox.append(Heartbeat())
            self._wake.clear()
            if len(self._outbox) > MAX_OUTBOX_MESSAGES:
                raise SessionBroken("does not read its session")
            while self._outbox:
                now = loop.time()
                if now - sent_at > patience_s:  # the holder of leases gives up before their grantor does
                    raise SessionBroken(f"was sent nothing for {now - sent_at:.1f} s, its leases may have ended")
                sent_at = now
                request = pb.SessionRequest(
                    router_incarnation=self._incarnation,
                    worker_incarnation=self.info.endpoint.incarnation,
                    session=session,
                    seq=seq,
                )
                fill_request(request, self._outbox.popleft())
                await stream.write(request)
                seq += 1
            self._flushed.set()

    # ---- reading

    async def _read_all(self, stream: SessionStream, session: int) -> None:
        try:
            async with asyncio.timeout(self._timing.reply_timeout_s):
                first = await stream.read()
        except TimeoutError as exc:
            raise SessionBroken(f"no load report within {self._timing.reply_timeout_s:g} s of dialling") from exc
        seq = 0
        response = first
        while response is not None:
            if (
                response.router_incarnation != self._incarnation
                or response.worker_incarnation != self.info.endpoint.incarnation
                or response.session != session
            ):
                self._counters["fenced_envelopes"] += 1
            else:
                if response.seq != seq:
                    raise SessionBroken(f"message {seq} is due, {response.seq} came")
                seq += 1
                message = read_response(response)
                if message is None:
                    raise SessionBroken(f"message {response.seq} has no body that this build knows")
                self._receive(message)
            response = await stream.read()
        raise SessionBroken("ended its session")

    def _receive(self, message: WorkerMessage) -> None:
        match message:
            case LoadReport():
                self._on_load(message)
            case Step(rows):
                for row in rows:
                    self._deliver(row.key, Tokens(row.index, row.token_ids))
            case _:
                self._deliver(message.key, message)

    def _deliver(self, key: RequestKey, event: Event) -> None:
        inbox = self._inboxes.get(key)
        if inbox is None:
            self._counters["fenced_messages"] += 1
        elif not inbox.put(self.worker_id, event):
            raise SessionBroken(f"floods {key} with messages")

    def _on_load(self, load: LoadReport) -> None:
        topology = load.draining != self.load.draining
        self.load = load
        self.num_reports += 1
        self.num_unreported_tokens = self.num_unreported_requests = self.num_unreported_blocks = 0
        if not self.up and load.progress != self._hung_at_progress:
            self._hung_at_progress = None
            self.up = topology = True
            log.info("worker %s is up", self.worker_id)
        self._on_change(topology)

    # ---- the failure detector

    async def _watch_progress(self) -> None:
        """Raise when the progress counter stands still for too long.

        Time is added up in ticks and a tick counts for two at most, so that a pause of this process is not taken for
        one of the worker.
        """
        loop = asyncio.get_running_loop()
        tick_s = self._timing.heartbeat_s / 2
        progress, unchanged_s = -1, 0.0
        while True:
            before = loop.time()
            await asyncio.sleep(tick_s)
            unchanged_s += min(loop.time() - before, 2 * tick_s)
            if self.load.progress != progress:
                progress, unchanged_s = self.load.progress, 0.0
            limit_s = max(self._timing.hang_min_s, self._timing.hang_factor * self.load.announced_step_s)
            if unchanged_s > limit_s:
                self._hung_at_progress = progress
                raise SessionBroken(f"no progress for {unchanged_s:.1f} s")


def _reason(ended: asyncio.Task[None]) -> str:
    """Why a task of a session has ended."""
    exc = ended.exception()
    if isinstance(exc, SessionBroken):
        return str(exc)
    log.error("%s failed", ended.get_name(), exc_info=exc)
    return "a bug in the router ended the session"


def split(message: Reserve | Prefill) -> tuple[list[PromptSegment], Reserve | Prefill]:
    """The segments that go ahead of a message with very many ids, and the message with the rest of them."""
    ids = message.token_ids
    last = (len(ids) - 1) // MAX_SEGMENT_TOKENS * MAX_SEGMENT_TOKENS
    segments = [
        PromptSegment(message.key, offset, ids[offset : offset + MAX_SEGMENT_TOKENS])
        for offset in range(0, last, MAX_SEGMENT_TOKENS)
    ]
    return segments, replace(message, token_ids=ids[last:])
