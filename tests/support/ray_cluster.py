"""A real cluster on the test session's Ray: launch, ask, count, kill. Every stream goes through a StreamChecker."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio

from deploy.record import ClusterRecord
from tandem.cluster_client import ClusterClient
from tandem.stream_checker import Baseline, StreamChecker, StreamViolation
from tandem.types import Role
from tandem.v1 import cluster_pb2 as pb
from tandem.v1 import generation_pb2 as generation
from tandem.v1 import generation_pb2_grpc as generation_rpc
from tandem.v1 import worker_pb2
from tandem.v1 import worker_pb2_grpc as worker_rpc
from tandem.wire import role_to_wire, secret_metadata

PATIENCE_S = 90.0
BASELINE_PATIENCE_S = 15.0


@dataclass(slots=True)
class Asked:
    """One request; `started` is set with its second token (the first that the decode worker made)."""

    prompt: Sequence[int]
    max_tokens: int
    seed: int | None = None
    reference: Sequence[int] | None = None
    checker: StreamChecker | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def token_ids(self) -> list[int]:
        assert self.checker is not None
        return self.checker.token_ids

    @property
    def timeline(self) -> generation.Timeline:
        assert self.checker is not None and self.checker.finish is not None
        return self.checker.finish.timeline


class RayCluster:
    """Connections to one launched cluster, for the length of one test."""

    def __init__(self, record: ClusterRecord) -> None:
        self.record = record
        self.client = ClusterClient(record.control_address, record.secret())
        self._channel = grpc.aio.insecure_channel(record.grpc_address)
        self._generation = generation_rpc.GenerationServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()
        await self.client.close()

    async def ask(self, asked: Asked) -> Asked:
        """Run one request to its end. Raises for any error: no fault may reach a client."""
        sampling = {"temperature": 0.0} if asked.seed is None else {"temperature": 1.0, "seed": asked.seed}
        request = generation.GenerateRequest(
            token_ids=generation.TokenIds(ids=asked.prompt),
            sampling=generation.SamplingParams(max_tokens=asked.max_tokens, ignore_eos=True, **sampling),
        )
        references = {} if asked.reference is None else {0: asked.reference}
        checker = asked.checker = StreamChecker(
            max_tokens=asked.max_tokens, num_prompt_tokens=len(asked.prompt), references=references
        )
        async for response in self._generation.Generate(request, timeout=PATIENCE_S):
            checker.accept(response)
            if len(checker.token_ids) >= 2:
                asked.started.set()
        checker.close()
        return asked

    async def reference(self, prompt: Sequence[int], max_tokens: int, seed: int | None = None) -> list[int]:
        """The tokens of an undisturbed run."""
        return (await self.ask(Asked(prompt, max_tokens, seed))).token_ids

    async def status_when(self, condition: Callable[[pb.GetStatusResponse], bool]) -> pb.GetStatusResponse:
        async with asyncio.timeout(PATIENCE_S):
            async for status in self.client.watch():
                if condition(status):
                    return status
        raise AssertionError("the controller ended the stream")

    async def whole(self) -> pb.GetStatusResponse:
        """Wait until every pool is at its target with nobody leaving, and a router serves."""

        def settled(status: pb.GetStatusResponse) -> bool:
            pools = all(p.num_ready == p.target and not p.num_starting and not p.num_draining for p in status.pools)
            return pools and any(router.state == "ready" for router in status.routers)

        return await self.status_when(settled)

    async def workers(self, role: Role) -> list[pb.WorkerInfo]:
        status = await self.client.status()
        states = (pb.WORKER_STATE_READY, pb.WORKER_STATE_DRAINING)
        return [w for w in status.workers if w.role == role_to_wire(role) and w.state in states]

    async def stats(self, worker: pb.WorkerInfo) -> worker_pb2.GetStatsResponse:
        async with grpc.aio.insecure_channel(worker.endpoint.address) as channel:
            stub = worker_rpc.WorkerServiceStub(channel)
            metadata = secret_metadata(self.record.secret())
            return await stub.GetStats(worker_pb2.GetStatsRequest(), metadata=metadata, timeout=10)

    async def worker_when(
        self, role: Role, condition: Callable[[worker_pb2.GetStatsResponse], bool]
    ) -> tuple[pb.WorkerInfo, worker_pb2.GetStatsResponse]:
        """The first worker of a role whose counters meet the condition."""
        workers = await self.workers(role)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for worker in workers:
                    stats = await self.stats(worker)
                    if condition(stats):
                        return worker, stats
                await asyncio.sleep(0.002)

    async def assert_baseline(self) -> None:
        """I5: within 15 s every worker has all blocks free and holds no lease, attempt or copy."""
        for role in Role:
            for worker in await self.workers(role):
                await self._idle(worker)

    async def _idle(self, worker: pb.WorkerInfo) -> None:
        deadline = asyncio.get_running_loop().time() + BASELINE_PATIENCE_S
        while True:
            stats = await self.stats(worker)
            try:
                Baseline.of(stats)
                return
            except StreamViolation:
                if asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(0.1)


def kill(worker: pb.WorkerInfo) -> None:
    os.kill(worker.pid, signal.SIGKILL)


@asynccontextmanager
async def connected(record: ClusterRecord) -> AsyncIterator[RayCluster]:
    """For one test: whole before it, at baseline and whole after it."""
    cluster = RayCluster(record)
    try:
        await cluster.whole()
        yield cluster
        await cluster.whole()
        await cluster.assert_baseline()
    finally:
        await cluster.close()
