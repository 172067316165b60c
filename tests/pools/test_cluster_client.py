"""The operator's client against a real listener of the controller."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from deploy.ports import free_ports
from pools.service import ClusterServicer, serve
from tandem.cluster_client import ClusterClient
from tandem.errors import InvalidRequest, Unauthenticated, Unavailable
from tandem.types import Role
from tests.support.fake_runtime import FakeRuntime, make_controller, until

SECRET = "of the cluster"


@asynccontextmanager
async def served():
    runtime = FakeRuntime()
    controller = make_controller(runtime)
    loop = asyncio.create_task(controller.run())
    servicer = ClusterServicer(controller, cluster_name="c", model="m", dtype="float32", on_shutdown=lambda: None)
    server, address = await serve(servicer, SECRET, "127.0.0.1", 0)
    await until(controller, lambda: len(controller.directory.value.workers) == 2)
    yield controller, runtime, address
    await server.stop(None)
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


async def test_an_operator_sees_scales_and_drains():
    async with served() as (controller, runtime, address), ClusterClient(address, SECRET) as client:
        assert (await client.status()).cluster_name == "c"
        assert (await client.scale(Role.DECODE, 2)).target == 2
        await until(controller, lambda: len(controller.directory.value.workers) == 3)
        await client.drain("decode-0")
        assert controller.pools["decode"].members["decode-0"].drain.is_set()
        runtime.live["decode-0"].drained.set()


async def test_a_watch_shows_every_change():
    async with served() as (controller, _, address), ClusterClient(address, SECRET) as client:
        targets = []
        async with asyncio.timeout(10):
            async for status in client.watch():
                targets.append(status.pools[1].target)
                if targets[-1] == 1:
                    controller.scale("decode", 2)
                else:
                    break
        assert targets[0] == 1
        assert targets[-1] == 2


async def test_errors_come_as_tandems_own_with_the_servers_words():
    async with served() as (_, _, address), ClusterClient(address, SECRET) as client:
        with pytest.raises(InvalidRequest, match="target: 2000 is outside"):
            await client.scale(Role.DECODE, 2000)
        with pytest.raises(InvalidRequest, match="worker_id: 'x' is not a live worker"):
            await client.drain("x")
    async with served() as (_, _, address), ClusterClient(address, "wrong") as stranger:
        with pytest.raises(Unauthenticated):
            await stranger.status()
        with pytest.raises(Unauthenticated):
            async for _ in stranger.watch():
                pass


async def test_a_controller_that_is_away_is_named_by_its_address():
    address = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    async with ClusterClient(address, SECRET) as client:
        with pytest.raises(Unavailable, match=f"controller at {address} does not answer"):
            await client.status()
