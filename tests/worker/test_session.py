from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tandem.messages import Credit, CreditGranted, Heartbeat, Resync, RouterMessage, Step, StepRow, WorkerMessage
from tandem.session_wire import fill_request, read_response
from tandem.types import LoadReport
from tandem.v1 import worker_pb2 as pb
from tests.support.fake_parts import request_key
from worker.session import SessionBroken, Sessions

WORKER, ROUTER = 77, 11
KEY = request_key()
TIMEOUT_S = 20.0


class RecordingRole:
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.received: list[tuple[int, RouterMessage]] = []

    def receive(self, router_incarnation: int, message: RouterMessage) -> None:
        self.received.append((router_incarnation, message))

    def load(self) -> LoadReport:
        return LoadReport(progress=len(self.received))


class RouterEnd:
    """The router's end of an in-memory session."""

    def __init__(self, sessions: Sessions, role: RecordingRole, router: int = ROUTER, session: int = 1) -> None:
        self.router, self.session, self.seq = router, session, 0
        self._to_worker: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self._to_router: asyncio.Queue[pb.SessionResponse] = asyncio.Queue()
        self.reading = asyncio.Event()
        self.reading.set()
        self._role, self._sessions = role, sessions
        self.responses: list[pb.SessionResponse] = []

    async def _write(self, response: pb.SessionResponse) -> None:
        await self.reading.wait()
        self._to_router.put_nowait(response)

    async def serve(self) -> None:
        await self._sessions.serve(self._role, self._to_worker.get, self._write)  # type: ignore[arg-type]

    def send(self, message: RouterMessage, **envelope: int) -> None:
        fields = {
            "router_incarnation": self.router,
            "worker_incarnation": WORKER,
            "session": self.session,
            "seq": self.seq,
        }
        request = pb.SessionRequest(**{**fields, **envelope})
        fill_request(request, message)
        self._to_worker.put_nowait(request)
        if not envelope:
            self.seq += 1

    def hang_up(self) -> None:
        self._to_worker.put_nowait(None)

    async def receive(self) -> WorkerMessage | None:
        async with asyncio.timeout(TIMEOUT_S):
            response = await self._to_router.get()
        self.responses.append(response)
        return read_response(response)

    async def receive_other_than_load(self) -> WorkerMessage | None:
        while isinstance(message := await self.receive(), LoadReport):
            pass
        return message


class Bench:
    def __init__(self, heartbeat_s: float = 30.0, silence_s: float = 30.0) -> None:
        self.counters: Counter[str] = Counter()
        self.sessions = Sessions(WORKER, heartbeat_s, silence_s, self.counters)
        self.role = RecordingRole()

    def end(self, **kwargs: int) -> RouterEnd:
        return RouterEnd(self.sessions, self.role, **kwargs)

    @asynccontextmanager
    async def open(self, **kwargs: int) -> AsyncIterator[tuple[RouterEnd, asyncio.Task[None]]]:
        end = self.end(**kwargs)
        task = asyncio.create_task(end.serve())
        try:
            end.send(Resync((KEY,)))
            assert isinstance(await end.receive(), LoadReport)
            yield end, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def ended(task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await task


async def test_a_session_opens_with_resync_and_answers_with_a_load_report() -> None:
    bench = Bench()
    async with bench.open() as (end, _):
        assert bench.role.received == [(ROUTER, Resync((KEY,)))]
        first = end.responses[0]
        assert (first.router_incarnation, first.worker_incarnation, first.session, first.seq) == (ROUTER, WORKER, 1, 0)


async def test_messages_reach_the_role_in_order_and_answers_are_numbered() -> None:
    bench = Bench()
    async with bench.open() as (end, task):
        end.send(Credit(KEY, 5))
        end.send(Heartbeat())
        bench.sessions.send(ROUTER, CreditGranted(KEY, 1.0))
        bench.sessions.send(ROUTER, Step((StepRow(KEY, 0, (1,)),)))
        assert await end.receive() == CreditGranted(KEY, 1.0)
        assert await end.receive() == Step((StepRow(KEY, 0, (1,)),))
        end.hang_up()
        await ended(task)
        assert [m for _, m in bench.role.received[1:]] == [Credit(KEY, 5), Heartbeat()]
        assert [r.seq for r in end.responses] == [0, 1, 2]
    assert bench.sessions.num_open == 0


async def test_a_gap_in_the_numbers_breaks_the_session() -> None:
    bench = Bench()
    async with bench.open() as (end, task):
        end.seq += 1
        end.send(Credit(KEY, 5))
        with pytest.raises(SessionBroken, match="message 1 is due, 2 came"):
            await ended(task)
    assert bench.counters["broken_sequences"] == 1
    assert len(bench.role.received) == 1


async def test_a_repeated_number_breaks_the_session() -> None:
    bench = Bench()
    async with bench.open() as (end, task):
        end.seq = 0
        end.send(Heartbeat())
        with pytest.raises(SessionBroken, match="message 1 is due, 0 came"):
            await ended(task)


@pytest.mark.parametrize("wrong", ["router_incarnation", "worker_incarnation", "session"])
async def test_an_envelope_of_somebody_else_is_dropped_and_counted(wrong: str) -> None:
    bench = Bench()
    async with bench.open() as (end, task):
        end.send(Credit(KEY, 1), **{wrong: 999})
        end.send(Credit(KEY, 2))
        end.hang_up()
        await ended(task)
    assert [m for _, m in bench.role.received[1:]] == [Credit(KEY, 2)]
    assert bench.counters["fenced_envelope"] == 1


@pytest.mark.parametrize(
    ("message", "envelope"),
    [
        (Resync(()), {"worker_incarnation": 78}),
        (Resync(()), {"seq": 1}),
        (Resync(()), {"router_incarnation": 0}),
        (Heartbeat(), {"seq": 0}),
    ],
    ids=["another incarnation", "a number other than 0", "no router", "no resync"],
)
async def test_a_session_that_opens_wrongly_is_refused(message: RouterMessage, envelope: dict[str, int]) -> None:
    bench = Bench()
    end = bench.end()
    end.send(message, **envelope)
    with pytest.raises(SessionBroken):
        async with asyncio.timeout(TIMEOUT_S):
            await end.serve()
    assert bench.role.received == [] and bench.sessions.num_open == 0


async def test_a_newer_session_ends_the_older_one_and_an_older_one_cannot_come_back() -> None:
    bench = Bench()
    async with bench.open(session=5) as (_, old), bench.open(session=6) as (new, _):
        await ended(old)
        bench.sessions.send(ROUTER, CreditGranted(KEY, 1.0))
        assert await new.receive() == CreditGranted(KEY, 1.0)
        for stale in (5, 6):
            late = bench.end(session=stale)
            late.send(Resync(()))
            with pytest.raises(SessionBroken, match="not newer"):
                await late.serve()
        assert bench.sessions.num_open == 1


async def test_routers_do_not_see_each_others_messages() -> None:
    bench = Bench()
    async with bench.open() as (one, _), bench.open(router=12) as (two, _):
        bench.sessions.send(12, CreditGranted(KEY, 2.0))
        bench.sessions.send(ROUTER, CreditGranted(KEY, 1.0))
        assert await two.receive() == CreditGranted(KEY, 2.0)
        assert await one.receive() == CreditGranted(KEY, 1.0)


async def test_load_reports_come_with_every_heartbeat_also_between_steps() -> None:
    bench = Bench(heartbeat_s=0.01)
    async with bench.open() as (end, _):
        assert isinstance(await end.receive(), LoadReport)
        kinds: list[type] = []
        for index in range(1000):
            bench.sessions.send(ROUTER, Step((StepRow(KEY, index, (1,)),)))
            kinds.append(type(await end.receive()))
            await asyncio.sleep(0.001)
            if LoadReport in kinds:
                break
        assert {LoadReport, Step} == set(kinds)


async def test_a_reader_that_stalls_gets_its_tokens_together_and_stalls_nobody() -> None:
    bench = Bench()
    async with bench.open() as (end, _), bench.open(router=12) as (other, _):
        end.reading.clear()
        for index in range(100):
            bench.sessions.send(ROUTER, Step((StepRow(KEY, index, (index,)),)))
            await asyncio.sleep(0)
        bench.sessions.send(12, CreditGranted(KEY, 2.0))
        assert await other.receive() == CreditGranted(KEY, 2.0)
        end.reading.set()
        token_ids: list[int] = []
        num_messages = 0
        while len(token_ids) < 100:
            step = await end.receive()
            assert isinstance(step, Step)
            token_ids += step.rows[0].token_ids
            num_messages += 1
        assert token_ids == list(range(100)) and num_messages <= 3


async def test_a_silent_router_breaks_its_session() -> None:
    bench = Bench(silence_s=0.05)
    async with bench.open() as (_, task):
        with pytest.raises(SessionBroken, match="no message for"):
            await ended(task)


async def test_messages_to_a_router_without_a_session_are_counted() -> None:
    bench = Bench()
    bench.sessions.send(ROUTER, CreditGranted(KEY, 1.0))
    assert bench.counters["undeliverable_messages"] == 1


async def test_stopping_ends_all_sessions_and_opens_no_more() -> None:
    bench = Bench()
    async with bench.open() as (_, task):
        bench.sessions.close_all()
        await ended(task)
        late = bench.end(session=9)
        late.send(Resync(()))
        with pytest.raises(SessionBroken, match="stopping"):
            await late.serve()


async def test_what_an_older_session_sent_never_comes_after_the_newer_ones_resync() -> None:
    bench = Bench()
    async with bench.open() as (old, old_task):
        new = bench.end(session=2)
        new.send(Resync(()))
        new_task = asyncio.create_task(new.serve())
        old.send(Credit(KEY, 5))  # is read in the same turn of the loop, after the Resync
        await ended(old_task)
        assert [type(message) for _, message in bench.role.received][-1] is Resync
        new_task.cancel()
        await asyncio.gather(new_task, return_exceptions=True)
