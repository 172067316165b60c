"""How calls end when the router stops or the client does not read; several routers over the same workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.app import RouterApp
from router.directory import StaticDirectory
from tandem.client import TandemClient
from tandem.errors import ConfigError, Unavailable
from tandem.model_info import read_model_info
from tandem.types import Directory
from tandem.v1 import generation_pb2_grpc as rpc
from tests.support.fake_cluster import cluster, prompt_of, references
from tests.support.fake_model import fake_files
from tests.support.inprocess import SECRET, InProcessCluster, test_config

PROMPT = prompt_of(20)
TIMEOUT_S = 30.0


@asynccontextmanager
async def router(split: InProcessCluster, folder: Path, **settings: object) -> AsyncIterator[tuple[RouterApp, str]]:
    """One more router over the workers of `split`."""
    config = test_config(**settings)
    directory = StaticDirectory(Directory(tuple(split.workers), prefill_target=1, decode_target=1))
    app = RouterApp(config, read_model_info(fake_files(folder), config.model), None, directory, SECRET)
    try:
        yield app, await app.start()
    finally:
        await app.stop(0.0)


async def answer(client: TandemClient, max_tokens: int, begun: asyncio.Event | None = None) -> list[int]:
    ids: list[int] = []
    async for event in client.generate(token_ids=PROMPT, max_tokens=max_tokens, temperature=0, ignore_eos=True):
        ids += event.token_ids
        if begun is not None:
            begun.set()
    return ids


async def until_idle(split: InProcessCluster, meanwhile: Callable[[], Awaitable[object]]) -> None:
    """Do `meanwhile` again and again until no worker holds anything."""
    while any(host.stats().num_attempts for host in split.hosts):
        await meanwhile()


async def test_a_stopping_router_finishes_what_runs_and_refuses_what_comes(tmp_path: Path) -> None:
    (expected,) = await references(tmp_path, [PROMPT], max_tokens=60)
    async with (
        cluster(tmp_path, step_s=0.01) as split,
        router(split, tmp_path) as (app, address),
        TandemClient(address) as client,
        grpc.aio.insecure_channel(address) as channel,
    ):
        begun = asyncio.Event()
        running = asyncio.create_task(answer(client, 60, begun))
        async with asyncio.timeout(TIMEOUT_S):
            await begun.wait()
            stopping = asyncio.create_task(app.stop(TIMEOUT_S))
            await asyncio.sleep(0.02)
            health = health_pb2_grpc.HealthStub(channel)
            status = await health.Check(health_pb2.HealthCheckRequest(service=""))
            assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(Unavailable, match="stopping"):
                await answer(client, 4)
            assert await running == expected
            await stopping


async def test_after_the_grace_running_calls_end_with_unavailable(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, step_s=0.02) as split,
        router(split, tmp_path) as (app, address),
        TandemClient(address) as client,
    ):
        begun = asyncio.Event()
        running = asyncio.create_task(answer(client, 900, begun))
        async with asyncio.timeout(TIMEOUT_S):
            await begun.wait()
            await app.stop(0.05)
            with pytest.raises(Unavailable, match="stopping"):
                await running


async def test_a_client_that_does_not_read_is_ended_and_its_neighbour_is_not(tmp_path: Path) -> None:
    # a connection of its own, whose window is small and does not grow: else the transport takes everything
    options = (
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 1024),
        ("grpc.use_local_subchannel_pool", 1),
    )
    async with (
        cluster(tmp_path, engine__num_blocks=8192) as split,
        router(split, tmp_path, engine__num_blocks=8192, router__slow_reader_tokens=16) as (_, address),
        TandemClient(address) as neighbour,
        grpc.aio.insecure_channel(address, options=options) as channel,
    ):
        request = split.request(PROMPT, max_tokens=30_000, ignore_eos=True)
        slow = rpc.GenerationServiceStub(channel).Generate(request, timeout=TIMEOUT_S)
        responses = aiter(slow)
        async with asyncio.timeout(TIMEOUT_S):
            num_tokens = len((await anext(responses)).chunk.token_ids)
            await until_idle(split, lambda: answer(neighbour, 40))
            with pytest.raises(grpc.aio.AioRpcError, match="does not read") as ended:
                async for response in responses:
                    assert not response.HasField("finish")
                    num_tokens += len(response.chunk.token_ids)
            assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert num_tokens > 16, "what was on its way still arrives"


async def test_two_routers_share_the_workers(tmp_path: Path) -> None:
    (expected,) = await references(tmp_path, [PROMPT], max_tokens=40)
    async with (
        cluster(tmp_path) as split,
        router(split, tmp_path) as (_, second),
        TandemClient(split.address) as a,
        TandemClient(second) as b,
    ):
        async with asyncio.timeout(TIMEOUT_S):
            for ids in await asyncio.gather(*(answer(client, 40) for client in (a, b) * 4)):
                assert ids == expected


async def test_a_port_that_is_taken_is_a_configuration_error_that_names_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as split:
        port = int(split.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"router.grpc_port.*{port}"):
            async with router(split, tmp_path, router__grpc_port=port):
                pass


async def test_a_generator_that_is_closed_early_cancels_the_request(tmp_path: Path) -> None:
    async with cluster(tmp_path, step_s=0.01) as split, TandemClient(split.address) as client:
        stream = client.generate(token_ids=PROMPT, max_tokens=900, temperature=0, ignore_eos=True)
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(TIMEOUT_S):
            await until_idle(split, lambda: asyncio.sleep(0.02))
