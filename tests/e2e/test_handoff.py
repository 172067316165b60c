"""Two real workers, real sockets, and the router played by hand: the hand-off message by message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tandem.messages import (
    Committed,
    Credit,
    CreditGranted,
    Failed,
    FailureReason,
    Finished,
    FirstToken,
    Heartbeat,
    Prefill,
    Release,
    ReservationGranted,
    Reserve,
    Resync,
    Step,
)
from tandem.types import RequestKey, Role, Sampling, WorkerInfo
from tests.support.fake_model import fake_runner_factory
from tests.support.fake_parts import request_key
from tests.support.router_session import TIMEOUT_S, RouterSession, session, worker
from worker.host import WorkerHost

PROMPT = tuple(range(3, 40))
SAMPLING = Sampling(max_tokens=5, temperature=0.0)


@dataclass
class Pair:
    """A prefill and a decode worker with an open session to each."""

    prefill_host: WorkerHost
    prefill: WorkerInfo
    p: RouterSession
    decode_host: WorkerHost
    decode: WorkerInfo
    d: RouterSession

    async def reserve(self, key: RequestKey, sampling: Sampling = SAMPLING, **changes: object) -> None:
        """Credit, then reservation."""
        await self.p.send(Credit(key, len(PROMPT)))
        granted = await self.p.receive(CreditGranted)
        reserve = Reserve(key, PROMPT, len(PROMPT), len(PROMPT), sampling, self.prefill.endpoint, granted.capability)
        await self.d.send(replace(reserve, **changes))  # type: ignore[arg-type]
        await self.d.receive(ReservationGranted)

    async def start_prefill(self, key: RequestKey, sampling: Sampling = SAMPLING) -> None:
        await self.p.send(Prefill(key, PROMPT, len(PROMPT), len(PROMPT), sampling))

    async def tokens(self, key: RequestKey, count: int) -> list[int]:
        token_ids: list[int] = []
        while len(token_ids) < count:
            for row in (await self.d.receive(Step)).rows:
                assert row.key == key and row.index == len(token_ids)
                token_ids += row.token_ids
        return token_ids

    async def empty(self) -> None:
        """Both workers hold nothing any more."""
        async with asyncio.timeout(TIMEOUT_S):
            await self.prefill_host.wait_empty()
            await self.decode_host.wait_empty()
        for host in (self.prefill_host, self.decode_host):
            stats = host.stats()
            assert stats.load.num_free_blocks == stats.load.num_total_blocks
            assert (stats.num_leases, stats.num_attempts, stats.num_copies_in_flight) == (0, 0, 0)


@asynccontextmanager
async def pair(
    folder: Path, decode_identity: str = "fake", step_s: float = 0.0, **settings: object
) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        runner = fake_runner_factory(step_s)
        prefill_host, prefill = await enter(worker(folder, Role.PREFILL, runner, **settings))
        runner = fake_runner_factory(step_s, decode_identity)
        decode_host, decode = await enter(worker(folder, Role.DECODE, runner, **settings))
        p, d = await enter(session(prefill)), await enter(session(decode))
        yield Pair(prefill_host, prefill, p, decode_host, decode, d)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_the_whole_hand_off(tmp_path: Path, transport: str) -> None:
    key = request_key()
    async with pair(tmp_path, transfer__transport=transport) as both:
        await both.reserve(key)
        await both.start_prefill(key)
        first = await both.p.receive(FirstToken)
        committed = await both.d.receive(Committed)
        assert committed.transport == transport and committed.num_chunks == first.num_chunks == 3
        token_ids = await both.tokens(key, 5)
        assert token_ids[0] == first.token_id and first.index == 0
        assert (await both.d.receive(Finished)).num_output_tokens == 5
        assert both.decode_host.stats().num_attempts == 1, "held until the release"
        await both.d.send(Release(key))
        await both.p.send(Release(key))
        await both.empty()
        assert both.decode_host.stats().num_prefill_tokens == 0
        assert both.decode_host.stats().counters["poisoned_blocks"] == 11

        alone = request_key("alone")
        await both.d.send(Reserve(alone, PROMPT, len(PROMPT), len(PROMPT), SAMPLING, local_prefill=True))
        await both.d.receive(ReservationGranted)
        assert await both.tokens(alone, 5) == token_ids, "disaggregated and local prefill agree"
        await both.d.receive(Finished)
        await both.d.send(Release(alone))
        await both.empty()


async def test_the_prefill_worker_may_start_before_anybody_subscribed(tmp_path: Path) -> None:
    key = request_key()
    async with pair(tmp_path) as both:
        await both.p.send(Credit(key, len(PROMPT)))
        granted = await both.p.receive(CreditGranted)
        await both.start_prefill(key)
        await both.p.receive(FirstToken)
        await both.d.send(
            Reserve(key, PROMPT, len(PROMPT), len(PROMPT), SAMPLING, both.prefill.endpoint, granted.capability)
        )
        await both.d.receive(ReservationGranted)
        await both.d.receive(Committed)
        await both.tokens(key, 5)
        await both.d.receive(Finished)
        await both.d.send(Release(key))
        await both.empty()


async def test_a_wrong_capability_fails_the_attempt_and_names_the_peer(tmp_path: Path) -> None:
    key = request_key()
    async with pair(tmp_path) as both:
        await both.reserve(key, capability=b"forged capability 0123456789abcd")
        failed = await both.d.receive(Failed)
        assert failed.key == key and failed.peer_worker_id == both.prefill.worker_id
        await both.p.send(Release(key))
        await both.empty()


async def test_workers_that_do_not_fit_are_told_apart_before_a_byte_moves(tmp_path: Path) -> None:
    key = request_key()
    async with pair(tmp_path, decode_identity="other weights") as both:
        assert both.prefill.compatibility_hash != both.decode.compatibility_hash
        await both.reserve(key)
        failed = await both.d.receive(Failed)
        assert failed.peer_worker_id == both.prefill.worker_id
        await both.p.send(Release(key))
        await both.empty()


async def test_a_decode_worker_that_dies_is_noticed_by_the_prefill_worker(tmp_path: Path) -> None:
    key = request_key()
    async with pair(tmp_path, step_s=0.1, transfer__offer_timeout_s=1.0) as both:
        await both.reserve(key)
        await both.start_prefill(key)
        await both.decode_host.stop()
        failed = await both.p.receive(Failed, skipping=(FirstToken,))
        assert failed.reason is FailureReason.TRANSFER
        async with asyncio.timeout(TIMEOUT_S):
            await both.prefill_host.wait_empty()


async def test_a_prefill_worker_that_dies_fails_what_waits_for_it(tmp_path: Path) -> None:
    key = request_key()
    async with pair(tmp_path) as both:
        await both.reserve(key)
        await both.prefill_host.stop()
        failed = await both.d.receive(Failed)
        assert failed.reason is FailureReason.TRANSFER and failed.peer_worker_id == both.prefill.worker_id
        async with asyncio.timeout(TIMEOUT_S):
            await both.decode_host.wait_empty()


@pytest.mark.parametrize("silent", ["p", "d"])
async def test_when_one_lease_runs_out_in_the_middle_both_sides_end_free(tmp_path: Path, silent: str) -> None:
    key = request_key()
    lease = {"timing__lease_s": 0.6, "timing__lease_margin_s": 0.1, "timing__heartbeat_s": 0.1}
    settings = {**lease, "transfer__offer_timeout_s": 1.0}
    async with pair(tmp_path, **settings) as both:
        await both.reserve(key)
        heard = both.d if silent == "p" else both.p
        host = both.prefill_host if silent == "p" else both.decode_host
        async with asyncio.timeout(TIMEOUT_S):
            while not host.stats().counters["expired_leases"]:
                await asyncio.sleep(0.05)
                await heard.send(Heartbeat())
        failed = await heard.receive(Failed)
        assert failed.key == key
        await both.empty()


async def test_a_resync_ends_what_is_in_the_middle_of_a_hand_off(tmp_path: Path) -> None:
    key = request_key()
    async with pair(tmp_path, step_s=0.02) as both:
        await both.reserve(key)
        await both.start_prefill(key)
        async with session(both.prefill, number=2) as p, session(both.decode, number=2) as d:
            await both.empty()
            assert both.prefill_host.stats().counters["freed_by_resync"] == 1
            await p.send(Resync(()))
            await d.send(Heartbeat())


async def test_one_channel_and_transport_serve_many_attempts(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        fds = 0
        for attempt in range(1, 6):
            key = request_key(attempt=attempt)
            await both.reserve(key)
            await both.start_prefill(key)
            await both.p.receive(FirstToken)
            await both.d.receive(Committed)
            await both.tokens(key, 5)
            await both.d.receive(Finished)
            await both.d.send(Release(key))
            await both.empty()
            fds = fds or both.decode_host.stats().num_fds
        assert both.decode_host.stats().num_fds == fds
