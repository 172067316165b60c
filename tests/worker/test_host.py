from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from engine.fake import FakeRunner
from engine.scheduler import Batch
from tandem.errors import WorkerLost
from tandem.messages import (
    Credit,
    CreditGranted,
    FirstToken,
    Heartbeat,
    Prefill,
    RefusalReason,
    Refused,
    Release,
    ReservationGranted,
    Reserve,
    Resync,
    Step,
)
from tandem.session_wire import fill_request
from tandem.types import Role, Sampling
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as rpc
from tandem.wire import secret_metadata
from tests.support.fake_model import fake_files, fake_runner_factory
from tests.support.fake_parts import request_key
from tests.support.inprocess import SECRET, test_config
from tests.support.router_session import ROUTER, TIMEOUT_S, session, worker
from worker.host import WorkerHost

KEY = request_key()
GREEDY = Sampling(max_tokens=4, temperature=0.0)


async def test_a_prefill_worker_gives_credit_and_the_first_token(tmp_path: Path) -> None:
    async with worker(tmp_path, Role.PREFILL) as (host, info), session(info) as router:
        await router.send(Credit(KEY, 5, solo=True))
        granted = await router.receive(CreditGranted)
        assert granted.lease_s == 10.0
        await router.send(Prefill(KEY, (5, 6, 7, 8, 9), 5, 5, Sampling(max_tokens=1, temperature=0.0)))
        first = await router.receive(FirstToken)
        assert first.index == 0 and first.num_computed_tokens == 5
        assert host.stats().num_attempts == 1
        await router.send(Release(KEY))
        assert await host.drain(TIMEOUT_S)
        stats = host.stats()
        assert stats.load.num_free_blocks == stats.load.num_total_blocks == 256 and stats.load.draining
        assert stats.num_prefill_tokens == 5 and stats.num_decode_tokens == 0
        await router.send(Credit(KEY, 5))
        refused = await router.receive(Refused)
        assert refused.reason is RefusalReason.DRAINING


async def test_a_decode_worker_serves_alone_and_its_tokens_are_contiguous(tmp_path: Path) -> None:
    async with worker(tmp_path, Role.DECODE) as (_, info), session(info) as router:
        await router.send(Reserve(KEY, (5, 6, 7), 3, 3, GREEDY, local_prefill=True))
        await router.receive(ReservationGranted)
        token_ids: list[int] = []
        while len(token_ids) < GREEDY.max_tokens:
            step = await router.receive(Step)
            for row in step.rows:
                assert row.key == KEY and row.index == len(token_ids)
                token_ids += row.token_ids
        await router.send(Release(KEY))


async def test_a_router_that_goes_away_is_cleaned_up_after_by_its_lease(tmp_path: Path) -> None:
    timing = {"timing__lease_s": 0.5, "timing__lease_margin_s": 0.1, "timing__heartbeat_s": 0.1}
    async with worker(tmp_path, Role.DECODE, **timing) as (host, info):
        async with session(info) as router:
            await router.send(Reserve(KEY, (5, 6, 7), 3, 3, Sampling(max_tokens=100), local_prefill=True))
            await router.receive(ReservationGranted)
            for _ in range(10):
                await asyncio.sleep(0.1)
                await router.send(Heartbeat())
            assert host.stats().num_attempts == 1
        async with asyncio.timeout(TIMEOUT_S):
            await host.wait_empty()
        assert host.stats().counters["expired_leases"] == 1
        assert host.stats().load.num_free_blocks == 256


async def test_a_session_meant_for_another_incarnation_is_refused(tmp_path: Path) -> None:
    async with worker(tmp_path, Role.DECODE) as (_, info), grpc.aio.insecure_channel(info.endpoint.address) as channel:
        call = rpc.WorkerServiceStub(channel).Session(metadata=secret_metadata(SECRET))
        request = pb.SessionRequest(router_incarnation=ROUTER, worker_incarnation=1, session=1)
        fill_request(request, Resync(()))
        await call.write(request)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is grpc.StatusCode.ABORTED


class FailingRunner:
    """Fails in its second step."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner, self._num_steps = runner, 0

    def execute(self, batch: Batch) -> list[int | None]:
        self._num_steps += 1
        if self._num_steps == 2:
            raise MemoryError("no memory for step 2")
        return self._runner.execute(batch)


async def test_a_step_that_raises_ends_the_worker_and_breaks_its_sessions(tmp_path: Path) -> None:
    factory = fake_runner_factory(wrap=FailingRunner)
    async with worker(tmp_path, Role.DECODE, factory) as (host, info), session(info) as router:
        await router.send(Reserve(KEY, (5, 6, 7), 3, 3, GREEDY, local_prefill=True))
        with pytest.raises(WorkerLost, match="no memory for step 2"):
            async with asyncio.timeout(TIMEOUT_S):
                await host.wait_failed()
        assert await router.ended() in (grpc.StatusCode.OK, grpc.StatusCode.ABORTED)
        with pytest.raises((grpc.aio.AioRpcError, AssertionError)):
            async with session(info, number=2):
                pass


async def test_stopping_returns_wait_failed_and_may_be_repeated(tmp_path: Path) -> None:
    async with worker(tmp_path, Role.PREFILL) as (host, _):
        waiting = asyncio.create_task(host.wait_failed())
        await asyncio.sleep(0)
        await host.stop()
        await host.stop()
        async with asyncio.timeout(TIMEOUT_S):
            await waiting


async def test_a_worker_that_cannot_start_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(*_: object) -> object:
        raise ValueError("no such weights")

    host = WorkerHost(
        Role.PREFILL,
        "prefill-0",
        test_config(),
        fake_files(tmp_path),
        SECRET,
        runner_factory=fail,  # type: ignore[arg-type]
    )
    before = len(asyncio.all_tasks())
    with pytest.raises(ValueError, match="no such weights"):
        await host.start()
    assert len(asyncio.all_tasks()) == before


async def test_drain_gives_up_after_its_timeout_while_something_runs(tmp_path: Path) -> None:
    async with (
        worker(tmp_path, Role.DECODE, fake_runner_factory(step_s=0.05)) as (host, info),
        session(info) as router,
    ):
        await router.send(Reserve(KEY, (5, 6, 7), 3, 3, Sampling(max_tokens=500), local_prefill=True))
        await router.receive(ReservationGranted)
        assert not await host.drain(timeout_s=0.2)
        assert host.stats().num_attempts == 1
