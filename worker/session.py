"""④ The worker's side of `WorkerService.Session`: one long-lived stream per router carries all its requests.

A session opens with a Resync. Both directions count their messages; a gap breaks the session, since a lost message
would leave somebody waiting, and a broken session has one well-tested way out (the router re-runs). A newer session of
the same router replaces the older one. One task reads, one writes; neither ever waits for the other.
Neighbours: the role takes and sends plain messages; `host.py` owns the listener.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable

import grpc

from tandem.messages import Resync, WorkerMessage
from tandem.session_wire import fill_response, read_request
from tandem.types import LoadReport
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as rpc
from worker.outbox import Outbox
from worker.ports import WorkerRole

log = logging.getLogger(__name__)

MAX_ROUTERS_REMEMBERED = 1024

FIRST_MESSAGE_TIMEOUT_S = 10.0

# the next request, None at the end of the stream
Read = Callable[[], Awaitable[pb.SessionRequest | None]]
Write = Callable[[pb.SessionResponse], Awaitable[object]]


class SessionBroken(Exception):
    """The session cannot go on; the message says why."""


class _Link:
    """One open session."""

    def __init__(self, router_incarnation: int, session: int) -> None:
        self.router_incarnation = router_incarnation
        self.session = session
        self.outbox = Outbox()
        self.wake = asyncio.Event()
        self.closed = asyncio.Event()

    def close(self) -> None:
        self.closed.set()
        self.wake.set()


class Sessions:
    """All routers' sessions: an Outlet for the role, and what the servicer feeds.

    silence_s: a session without a message for so long is broken; the lease, since nothing of the router lives longer.
    Messages to a router without a session are dropped and counted.
    """

    def __init__(self, worker_incarnation: int, heartbeat_s: float, silence_s: float, counters: Counter[str]) -> None:
        self._worker_incarnation = worker_incarnation
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self._counters = counters
        self._links: dict[int, _Link] = {}
        # the newest session number of each router, so that an older one cannot come back
        self._newest: OrderedDict[int, int] = OrderedDict()
        self._closing = False

    @property
    def num_open(self) -> int:
        return len(self._links)

    # ---- Outlet

    def send(self, router_incarnation: int, message: WorkerMessage) -> None:
        """Queue a message for a router."""
        link = self._links.get(router_incarnation)
        if link is None:
            self._counters["undeliverable_messages"] += 1
            return
        link.outbox.put(message)
        link.wake.set()

    def send_load(self, router_incarnation: int | None = None) -> None:
        """Queue the newest load report for one router, or for all."""
        for link in list(self._links.values()):
            if router_incarnation is None or link.router_incarnation == router_incarnation:
                link.outbox.want_load()
                link.wake.set()

    # ---- opening and closing

    def close_all(self) -> None:
        """End every session; no new ones open."""
        self._closing = True
        for link in list(self._links.values()):
            link.close()

    def _open(self, first: pb.SessionRequest) -> _Link:
        router, session = first.router_incarnation, first.session
        if self._closing:
            raise SessionBroken("the worker is stopping")
        if first.worker_incarnation != self._worker_incarnation:
            raise SessionBroken(f"this is worker incarnation {self._worker_incarnation:016x}")
        if router == 0 or first.seq != 0 or first.WhichOneof("body") != "resync":
            raise SessionBroken("a session opens with a Resync of sequence number 0")
        if session <= self._newest.get(router, -1):
            raise SessionBroken(f"session {session} is not newer than {self._newest[router]}")
        self._newest[router] = session
        self._newest.move_to_end(router)
        while len(self._newest) > MAX_ROUTERS_REMEMBERED:
            self._newest.popitem(last=False)
        if (older := self._links.get(router)) is not None:
            older.close()
        link = _Link(router, session)
        self._links[router] = link
        return link

    def _close(self, link: _Link) -> None:
        link.close()
        if self._links.get(link.router_incarnation) is link:
            del self._links[link.router_incarnation]

    # ---- one session

    async def serve(self, role: WorkerRole, read: Read, write: Write) -> None:
        """Run one session until either side ends it.

        Raises SessionBroken when it cannot go on: a rule was broken, a message is missing, the router is silent.
        """
        first = await self._read_within(read, FIRST_MESSAGE_TIMEOUT_S)
        if first is None:
            return
        link = self._open(first)
        try:
            role.receive(link.router_incarnation, read_request(first) or Resync())
            link.outbox.want_load()
            link.wake.set()
            tasks = [
                asyncio.create_task(self._read_all(role, link, read), name="session-reader"),
                asyncio.create_task(self._write_all(role, link, write), name="session-writer"),
                asyncio.create_task(link.closed.wait(), name="session-closed"),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for task in done:
                task.result()
        finally:
            self._close(link)

    async def _read_within(self, read: Read, timeout_s: float) -> pb.SessionRequest | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await read()
        except TimeoutError as exc:
            raise SessionBroken(f"no message for {timeout_s:g} s") from exc

    async def _read_all(self, role: WorkerRole, link: _Link, read: Read) -> None:
        seq = 1
        while (request := await self._read_within(read, self._silence_s)) is not None:
            if link.closed.is_set():  # a newer session has said what lives; nothing of this one may come after that
                self._counters["fenced_messages"] += 1
                return
            if (
                request.router_incarnation != link.router_incarnation
                or request.worker_incarnation != self._worker_incarnation
                or request.session != link.session
            ):
                self._counters["fenced_messages"] += 1
                self._counters["fenced_envelope"] += 1
                continue
            if request.seq != seq:
                self._counters["broken_sequences"] += 1
                raise SessionBroken(f"message {seq} is due, {request.seq} came")
            seq += 1
            message = read_request(request)
            if message is None:
                raise SessionBroken(f"message {request.seq} has no body that this build knows")
            role.receive(link.router_incarnation, message)

    async def _write_all(self, role: WorkerRole, link: _Link, write: Write) -> None:
        seq = 0
        loop = asyncio.get_running_loop()
        load_due_at = loop.time() + self._heartbeat_s
        while True:
            try:
                async with asyncio.timeout_at(load_due_at):
                    await link.wake.wait()
            except TimeoutError:
                link.outbox.want_load()
            link.wake.clear()
            if link.outbox.overflowed:
                raise SessionBroken("the router does not read")
            if loop.time() >= load_due_at:
                link.outbox.want_load()
            for message in link.outbox.take(role.load):
                if isinstance(message, LoadReport):
                    load_due_at = loop.time() + self._heartbeat_s
                response = pb.SessionResponse(
                    router_incarnation=link.router_incarnation,
                    worker_incarnation=self._worker_incarnation,
                    session=link.session,
                    seq=seq,
                )
                fill_response(response, message)
                await write(response)
                seq += 1


class WorkerServicer(rpc.WorkerServiceServicer):
    """The gRPC face of `Sessions`."""

    def __init__(self, sessions: Sessions, role: WorkerRole, stats: Callable[[], pb.GetStatsResponse]) -> None:
        self._sessions = sessions
        self._role = role
        self._stats = stats

    async def Session(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        """See worker.proto."""

        async def read() -> pb.SessionRequest | None:
            request = await context.read()
            return None if request is grpc.aio.EOF else request

        try:
            await self._sessions.serve(self._role, read, context.write)
        except SessionBroken as exc:
            log.info("session broken: %s", exc)
            await context.abort(grpc.StatusCode.ABORTED, str(exc))

    async def GetStats(self, request: pb.GetStatsRequest, context: grpc.aio.ServicerContext) -> pb.GetStatsResponse:
        """See worker.proto."""
        return self._stats()
