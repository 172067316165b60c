"""Real workers on real Ray, real signals: streams go on with the same tokens, and nobody sees an error."""

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.launch import launch, take_down
from deploy.record import ClusterRecord, JoinedRay
from tandem.config import load_config
from tandem.model_files import ModelFiles
from tandem.types import Role
from tests.support.ray_cluster import Asked, RayCluster, connected, kill
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
CONTEXT, CHUNK, VOCAB = 4096, 16, 320
NUM_STREAMS = 8


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> ModelFiles:
    folder: Path = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(folder, "llama3", max_position_embeddings=CONTEXT).files


def launched(joined: JoinedRay, files: ModelFiles, name: str, prefill: int, decode: int) -> Iterator[ClusterRecord]:
    settings = {
        "name": name,
        "pools.prefill": prefill,
        "pools.decode": decode,
        "engine.chunk_size": CHUNK,
        "engine.num_blocks": 2048,
        "engine.num_threads": 1,
        "engine.nan_fill": True,
        "router.grpc_port": 0,
        "control.port": 0,
        # a machine shared by many tests is slow, not dead
        "timing.hang_min_s": 15.0,
        "timing.reply_timeout_s": 15.0,
        "timing.commit_overdue_s": 15.0,
    }
    cluster = asyncio.run(launch(load_config(None, settings), files, lambda stage: None, join=joined))
    yield cluster.record
    asyncio.run(take_down(cluster.record))


@pytest.fixture(scope="module")
def with_spares(joined, files):
    yield from launched(joined, files, "with-spares", prefill=2, decode=2)


@pytest.fixture(scope="module")
def without_spares(joined, files):
    yield from launched(joined, files, "without-spares", prefill=1, decode=1)


@pytest.fixture(params=["with_spares", "without_spares"])
def record(request) -> ClusterRecord:
    return request.getfixturevalue(request.param)


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(f"{num_tokens}/{seed}")
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


async def with_reference(cluster: RayCluster, prompt: list[int], max_tokens: int, seed: int | None = None) -> Asked:
    return Asked(prompt, max_tokens, seed, await cluster.reference(prompt, max_tokens, seed))


async def test_prefill_and_decode_run_in_different_processes_and_the_kv_crosses(with_spares):
    async with connected(with_spares) as cluster:
        asked = await cluster.ask(Asked(prompt_of(50, 0), 8))
        timeline = asked.timeline
        assert timeline.prefill_worker.pid != timeline.decode_worker.pid
        assert timeline.transfer_nbytes > 0
        for worker in await cluster.workers(Role.DECODE):
            assert (await cluster.stats(worker)).num_prefill_tokens == 0


async def test_streams_survive_the_kill_of_their_decode_worker(record):
    async with connected(record) as cluster:
        asks = [
            await with_reference(cluster, prompt_of(20 + i, i), 300, i if i % 2 else None) for i in range(NUM_STREAMS)
        ]
        async with asyncio.TaskGroup() as group:
            for asked in asks:
                group.create_task(cluster.ask(asked))
            await asyncio.gather(*(asked.started.wait() for asked in asks))
            victim, _ = await cluster.worker_when(Role.DECODE, lambda stats: stats.load.num_running > 0)
            kill(victim)
        assert any(asked.timeline.attempts > 1 for asked in asks)


async def test_a_stream_survives_the_kill_of_its_prefill_worker_in_the_middle_of_the_prompt(record):
    async with connected(record) as cluster:
        asked = await with_reference(cluster, prompt_of(3000, 1), 8)
        before = {
            w.endpoint.worker_id: (await cluster.stats(w)).num_prefill_tokens
            for w in await cluster.workers(Role.PREFILL)
        }
        request = asyncio.create_task(cluster.ask(asked))
        victim, _ = await cluster.worker_when(
            Role.PREFILL, lambda stats: stats.num_prefill_tokens > before[stats.worker_id] + 2 * CHUNK
        )
        assert asked.token_ids == []
        kill(victim)
        await request
        assert asked.timeline.attempts > 1
        assert asked.timeline.history[0].error


async def test_a_stream_does_not_notice_the_kill_of_its_prefill_worker_after_the_commit(record):
    async with connected(record) as cluster:
        asked = await with_reference(cluster, prompt_of(40, 2), 300)
        before = {
            w.endpoint.worker_id: (await cluster.stats(w)).num_prefill_tokens
            for w in await cluster.workers(Role.PREFILL)
        }
        request = asyncio.create_task(cluster.ask(asked))
        await asked.started.wait()
        victim, _ = await cluster.worker_when(
            Role.PREFILL, lambda stats: stats.num_prefill_tokens > before[stats.worker_id]
        )
        kill(victim)
        await request
        assert asked.timeline.attempts == 1
        assert asked.timeline.prefill_worker.worker_id == victim.endpoint.worker_id


async def test_a_killed_worker_is_noticed_at_once_and_replaced(without_spares):
    async with connected(without_spares) as cluster:
        (victim,) = await cluster.workers(Role.DECODE)
        losses = (await cluster.client.status()).pools[1].num_losses
        noticed = asyncio.create_task(cluster.status_when(lambda s: s.pools[1].num_losses == losses + 1))
        await asyncio.sleep(0.5)  # the watch is established
        killed_at = time.monotonic()
        kill(victim)
        await noticed
        assert time.monotonic() - killed_at < 5.0  # 1 s promised; this machine is shared
        await cluster.whole()
        (replacement,) = await cluster.workers(Role.DECODE)
        assert replacement.endpoint.worker_id != victim.endpoint.worker_id
        await cluster.ask(Asked(prompt_of(30, 3), 8))


@pytest.mark.parametrize("role", list(Role))
async def test_either_pool_scales_alone_while_requests_run_without_an_error(without_spares, role):
    async with connected(without_spares) as cluster:
        asks = [await with_reference(cluster, prompt_of(20 + i, i), 40) for i in range(4)]
        stop = asyncio.Event()
        num_done = 0

        async def client(asked: Asked) -> None:
            nonlocal num_done
            while not stop.is_set():
                await cluster.ask(Asked(asked.prompt, asked.max_tokens, asked.seed, asked.reference))
                num_done += 1

        async with asyncio.TaskGroup() as group:
            for asked in asks:
                group.create_task(client(asked))
            for target in (2, 1):
                await cluster.client.scale(role, target)
                status = await cluster.whole()
                assert {p.role: p.target for p in status.pools}[1 if role is Role.PREFILL else 2] == target
                seen = num_done
                while num_done < seen + len(asks):  # noqa: ASYNC110 - requests really ran at this size
                    await asyncio.sleep(0.05)
            stop.set()
        assert sum(pool.target for pool in (await cluster.client.status()).pools) == 2
