"""The router's end of a session, message by message."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from router import session as module
from router.inbox import Inbox, Lost, Tokens
from router.session import SessionBroken, WorkerLink, split
from tandem.config import TimingConfig
from tandem.messages import (
    Committed,
    Credit,
    Heartbeat,
    Preempted,
    Prefill,
    PromptSegment,
    Release,
    Resync,
    Step,
    StepRow,
    WorkerMessage,
)
from tandem.session_wire import fill_response, read_request
from tandem.types import LoadReport, PeerEndpoint, RequestKey, Role, Sampling, WorkerInfo
from tandem.v1 import worker_pb2 as pb
from tandem.wire import MAX_SEGMENT_TOKENS
from tests.support.virtual_time import run_virtually

ROUTER, WORKER = 11, 77
KEY = RequestKey("r", 0, 1)
INFO = WorkerInfo(Role.DECODE, PeerEndpoint("decode-0", WORKER, "", ""), 1, b"", 8, 4, 100)
TIMING = TimingConfig()


class FakeStream:
    """A session as the worker sees it."""

    def __init__(self) -> None:
        self.requests: list[pb.SessionRequest] = []
        self.responses: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()
        self.writable = asyncio.Event()
        self.writable.set()
        self.seq = 0

    async def read(self) -> pb.SessionResponse | None:
        return await self.responses.get()

    async def write(self, request: pb.SessionRequest) -> None:
        await self.writable.wait()
        self.requests.append(request)

    def say(self, message: WorkerMessage, **envelope: int) -> None:
        session = self.requests[0].session if self.requests else 1
        fields = {"router_incarnation": ROUTER, "worker_incarnation": WORKER, "session": session, "seq": self.seq}
        response = pb.SessionResponse(**{**fields, **envelope})
        fill_response(response, message)
        self.responses.put_nowait(response)
        self.seq += not envelope

    def heard(self) -> list[Any]:
        """Messages of this session but heartbeats."""
        return [m for m in map(read_request, self.requests) if not isinstance(m, Heartbeat)]


class Bench:
    """One link with the streams that it dialled."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.counters: Counter[str] = Counter()
        self.changes: list[bool] = []
        self.link = WorkerLink(INFO, ROUTER, TIMING, self._dial, itertools.count(1), self.counters, self.changes.append)
        self.task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def _dial(self, info: WorkerInfo) -> AsyncIterator[FakeStream]:
        self.streams.append(FakeStream())
        yield self.streams[-1]

    @property
    def stream(self) -> FakeStream:
        return self.streams[-1]

    async def up(self) -> None:
        """Run the link until the first session is up."""
        self.task = asyncio.create_task(self.link.run())
        await self.settle()
        self.stream.say(LoadReport(num_free_blocks=8, progress=1))
        await self.settle()
        assert self.link.up

    async def settle(self) -> None:
        await asyncio.sleep(0.001)


def on_a_bench(test: Callable[[Bench], Any]) -> Callable[[], None]:
    def run() -> None:
        async def play() -> None:
            bench = Bench()
            try:
                await test(bench)
            finally:
                if bench.task is not None:
                    bench.task.cancel()
                    await asyncio.gather(bench.task, return_exceptions=True)

        run_virtually(play())

    run.__name__ = test.__name__
    return run


@on_a_bench
async def test_a_session_opens_with_a_resync_and_is_up_with_the_first_load_report(bench: Bench) -> None:
    bench.task = asyncio.create_task(bench.link.run())
    await bench.settle()
    assert bench.stream.heard() == [Resync()]
    assert bench.stream.requests[0].seq == 0 and not bench.link.up
    bench.stream.say(LoadReport(progress=1))
    await bench.settle()
    assert bench.link.usable and bench.changes[-1] is True


@on_a_bench
async def test_messages_are_numbered_and_silence_is_filled_with_heartbeats(bench: Bench) -> None:
    await bench.up()
    bench.link.open(KEY, Inbox(), 4, 1)
    bench.link.send(Credit(KEY, 4))
    for progress in range(2, 6):
        await asyncio.sleep(TIMING.heartbeat_s)
        bench.stream.say(LoadReport(progress=progress))
    requests = bench.stream.requests
    assert [r.seq for r in requests] == list(range(len(requests)))
    assert 3 <= sum(r.HasField("heartbeat") for r in requests) <= 5


@on_a_bench
async def test_messages_reach_the_attempts_inbox_and_those_of_others_are_dropped_and_counted(bench: Bench) -> None:
    await bench.up()
    inbox, other = Inbox(), RequestKey("r", 0, 2)
    bench.link.open(KEY, inbox, 4, 1)
    bench.stream.say(Committed(KEY))
    bench.stream.say(Step((StepRow(KEY, 0, (5,)), StepRow(other, 0, (9,)))))
    bench.stream.say(Preempted(other))
    await bench.settle()
    assert [await inbox.next() for _ in range(2)] == [("decode-0", Committed(KEY)), ("decode-0", Tokens(0, (5,)))]
    assert len(inbox) == 0 and bench.counters["fenced_messages"] == 2


@on_a_bench
async def test_envelopes_of_other_incarnations_and_sessions_are_dropped_and_counted(bench: Bench) -> None:
    await bench.up()
    inbox = Inbox()
    bench.link.open(KEY, inbox, 4, 1)
    for fenced in ({"session": 99}, {"router_incarnation": 1}, {"worker_incarnation": 1}):
        bench.stream.say(Committed(KEY), **fenced)
    await bench.settle()
    assert len(inbox) == 0 and bench.counters["fenced_envelopes"] == 3
    bench.stream.say(Committed(KEY))
    await bench.settle()
    assert len(inbox) == 1


@on_a_bench
async def test_a_hole_in_the_sequence_is_the_loss_of_the_worker_and_the_next_session_has_a_higher_number(
    bench: Bench,
) -> None:
    await bench.up()
    inbox = Inbox()
    bench.link.open(KEY, inbox, 4, 1)
    bench.stream.seq += 1
    bench.stream.say(Committed(KEY))
    await bench.settle()
    source, event = await inbox.next()
    assert (source, type(event)) == ("decode-0", Lost) and "message 1 is due, 2 came" in str(event)
    assert not bench.link.up
    await asyncio.sleep(0.2)
    first, second = bench.streams
    assert second.heard() == [Resync()], "what was lost with the old session is not live"
    assert second.requests[0].session > first.requests[0].session


@on_a_bench
async def test_the_end_of_the_stream_is_a_loss_too(bench: Bench) -> None:
    await bench.up()
    inbox = Inbox()
    bench.link.open(KEY, inbox, 4, 1)
    bench.stream.responses.put_nowait(None)
    await bench.settle()
    assert isinstance((await inbox.next())[1], Lost)


@on_a_bench
async def test_whoever_opens_without_a_session_hears_of_the_loss_at_once(bench: Bench) -> None:
    inbox = Inbox()
    bench.link.open(KEY, inbox, 4, 1)
    assert isinstance((await inbox.next())[1], Lost)
    bench.link.send(Credit(KEY, 4))
    bench.link.close(KEY)
    assert bench.counters["undeliverable_messages"] == 1


@on_a_bench
async def test_closing_releases_once_and_delivers_nothing_more(bench: Bench) -> None:
    await bench.up()
    inbox = Inbox()
    bench.link.open(KEY, inbox, 4, 1)
    bench.link.close(KEY)
    bench.link.close(KEY)
    bench.stream.say(Committed(KEY))
    await bench.settle()
    assert bench.stream.heard() == [Resync(), Release(KEY)]
    assert len(inbox) == 0


@on_a_bench
async def test_a_worker_that_floods_an_attempt_is_cut_off(bench: Bench) -> None:
    await bench.up()
    inbox = Inbox()
    bench.link.open(KEY, inbox, 4, 1)
    for _ in range(200):
        bench.stream.say(Committed(KEY))
    await bench.settle()
    assert not bench.link.up
    events = [(await inbox.next())[1] for _ in range(len(inbox))]
    assert len(events) < 100 and isinstance(events[-1], Lost) and "floods" in events[-1].detail


@on_a_bench
async def test_a_worker_that_does_not_read_is_cut_off_before_its_queue_grows_for_ever(bench: Bench) -> None:
    await bench.up()
    for _ in range(module.MAX_OUTBOX_MESSAGES + 2):
        bench.link.send(Credit(KEY, 4))
    await bench.settle()
    assert not bench.link.up


@on_a_bench
async def test_a_worker_that_says_nothing_after_dialling_is_given_up(bench: Bench) -> None:
    bench.task = asyncio.create_task(bench.link.run())
    await asyncio.sleep(TIMING.reply_timeout_s + 1)
    assert len(bench.streams) >= 2 and not bench.link.up


@on_a_bench
async def test_no_progress_for_long_is_a_hang_and_a_long_step_that_was_announced_is_none(bench: Bench) -> None:
    await bench.up()
    for _ in range(12):  # 6 s of one step that may take 2 s: 5 x 2 s is the limit
        await asyncio.sleep(TIMING.heartbeat_s)
        bench.stream.say(LoadReport(progress=1, announced_step_s=2.0))
    assert bench.link.up
    for _ in range(10):
        await asyncio.sleep(TIMING.heartbeat_s)
        bench.stream.say(LoadReport(progress=1, announced_step_s=2.0))
    assert not bench.link.up


@on_a_bench
async def test_a_worker_that_left_the_directory_goes_with_its_last_attempt(bench: Bench) -> None:
    await bench.up()
    inbox = Inbox()
    bench.link.open(KEY, inbox, 4, 1)
    bench.link.leave()
    assert not bench.link.usable and bench.link.up
    await bench.settle()
    assert bench.link.up
    bench.link.close(KEY)
    assert bench.task is not None
    async with asyncio.timeout(5):
        await bench.task
    assert bench.stream.heard() == [Resync(), Release(KEY)], "the release is still said"


@on_a_bench
async def test_a_worker_that_comes_back_into_the_directory_stays(bench: Bench) -> None:
    await bench.up()
    bench.link.open(KEY, Inbox(), 4, 1)
    bench.link.leave()
    bench.link.update(INFO)
    bench.link.close(KEY)
    await bench.settle()
    assert bench.link.usable


@on_a_bench
async def test_what_was_given_since_the_last_report_is_counted_until_the_next(bench: Bench) -> None:
    await bench.up()
    bench.link.open(KEY, Inbox(), 40, 10)
    bench.link.open(RequestKey("s", 0, 1), Inbox(), 2, 1)
    levels = (bench.link.num_unreported_tokens, bench.link.num_unreported_requests, bench.link.num_unreported_blocks)
    assert levels == (42, 2, 11)
    bench.stream.say(LoadReport(progress=2))
    await bench.settle()
    assert bench.link.num_unreported_tokens == 0 and bench.link.num_reports == 2


@on_a_bench
async def test_a_draining_worker_gets_no_new_work_and_everyone_hears_of_it(bench: Bench) -> None:
    await bench.up()
    bench.stream.say(LoadReport(progress=2, draining=True))
    await bench.settle()
    assert bench.link.up and not bench.link.usable and bench.changes[-1] is True


def test_ids_that_are_too_many_for_a_frame_go_ahead_in_segments() -> None:
    ids = tuple(range(2 * MAX_SEGMENT_TOKENS + 5))
    message = Prefill(KEY, ids, len(ids), len(ids), Sampling(max_tokens=1))
    segments, rest = split(message)
    assert segments == [
        PromptSegment(KEY, 0, ids[:MAX_SEGMENT_TOKENS]),
        PromptSegment(KEY, MAX_SEGMENT_TOKENS, ids[MAX_SEGMENT_TOKENS : 2 * MAX_SEGMENT_TOKENS]),
    ]
    assert rest.token_ids == ids[2 * MAX_SEGMENT_TOKENS :] and rest.num_tokens == len(ids)


def test_the_message_itself_always_carries_the_last_ids() -> None:
    ids = tuple(range(2 * MAX_SEGMENT_TOKENS))
    segments, rest = split(Prefill(KEY, ids, len(ids), len(ids), Sampling(max_tokens=1)))
    assert len(segments) == 1 and len(rest.token_ids) == MAX_SEGMENT_TOKENS


def test_a_broken_dial_is_tried_again() -> None:
    async def play() -> None:
        dialled = []

        @asynccontextmanager
        async def dial(info: WorkerInfo) -> AsyncIterator[FakeStream]:
            dialled.append(asyncio.get_running_loop().time())
            raise SessionBroken("connection refused")
            yield

        link = WorkerLink(INFO, ROUTER, TIMING, dial, itertools.count(1), Counter(), lambda topology: None)
        task = asyncio.create_task(link.run())
        await asyncio.sleep(10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gaps = [b - a for a, b in itertools.pairwise(dialled)]
        assert len(gaps) > 8 and max(gaps) <= 1.0 + 1e-9 and gaps[0] <= 0.2

    run_virtually(play())
