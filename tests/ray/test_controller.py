"""The controller on real Ray, with real signals; actors are stand-ins without a model."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from deploy import head
from deploy.ports import free_ports
from deploy.record import ClusterRecord
from tandem.cluster_client import ClusterClient
from tandem.errors import TandemError
from tandem.types import Role
from tandem.v1 import cluster_pb2 as pb

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]
SECRET = "of the stand-ins"
REPO = os.getcwd()


@asynccontextmanager
async def cluster(ray_head: ClusterRecord, name: str, decode: int = 1, **order: str) -> AsyncIterator[ClusterClient]:
    port = free_ports("127.0.0.1", 1)[0]
    settings = {"name": name, "pools.decode": decode, "control.port": port}
    line = json.dumps({"settings": settings, "secret": SECRET, **order})
    driver = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.standin_driver"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPO,
        env={**head.ray_environment(ray_head), "PYTHONPATH": REPO},
    )
    out, _ = await asyncio.wait_for(driver.communicate(line.encode() + b"\n"), 90)
    assert out.decode().strip().endswith(f":{port}")
    async with ClusterClient(f"127.0.0.1:{port}", SECRET) as client:
        try:
            yield client
        finally:
            await client.shutdown()


async def status_when(
    client: ClusterClient, condition: Callable[[pb.GetStatusResponse], bool], timeout_s: float = 60
) -> pb.GetStatusResponse:
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                async for status in client.watch():
                    if condition(status):
                        return status
            except TandemError:
                await asyncio.sleep(0.2)  # the controller is being restarted


def ready(status: pb.GetStatusResponse, role: int) -> dict[str, int]:
    workers = [w for w in status.workers if w.role == role and w.state == pb.WORKER_STATE_READY]
    return {w.endpoint.worker_id: w.pid for w in workers}


def whole(status: pb.GetStatusResponse) -> bool:
    routers = [router for router in status.routers if router.state == "ready"]
    return bool(routers) and all(pool.num_ready == pool.target for pool in status.pools)


async def test_a_killed_worker_is_noticed_and_replaced_by_one_of_another_name(ray_head):
    async with cluster(ray_head, "kill-worker") as client:
        status = await status_when(client, whole)
        (name, pid), *_ = ready(status, pb.WORKER_ROLE_DECODE).items()
        noticed = asyncio.create_task(status_when(client, lambda s: s.pools[1].num_losses == 1))
        await asyncio.sleep(0.5)
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        await noticed
        assert time.monotonic() - killed_at < 5.0  # 1 s promised; this machine is shared
        after = await status_when(client, whole)
        assert name not in ready(after, pb.WORKER_ROLE_DECODE)
        assert ready(after, pb.WORKER_ROLE_PREFILL) == ready(status, pb.WORKER_ROLE_PREFILL)


async def test_a_killed_router_is_replaced(ray_head):
    async with cluster(ray_head, "kill-router") as client:
        status = await status_when(client, whole)
        os.kill(status.routers[0].pid, signal.SIGKILL)
        after = await status_when(client, lambda s: whole(s) and s.routers[-1].pid != status.routers[0].pid)
        assert after.routers[-1].router_id == "router-1"


async def test_a_killed_controller_comes_back_with_its_targets_and_the_same_workers(ray_head):
    async with cluster(ray_head, "kill-controller") as client:
        await status_when(client, whole)
        await client.scale(Role.DECODE, 2)
        before = await status_when(client, lambda s: whole(s) and s.pools[1].target == 2)
        os.kill(controller_pid(client), signal.SIGKILL)
        after = await status_when(
            client, lambda s: s.controller_incarnation != before.controller_incarnation and whole(s)
        )
        assert after.pools[1].target == 2
        for role in (pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE):
            assert ready(after, role) == ready(before, role)
        worker, pid = next(iter(ready(after, pb.WORKER_ROLE_DECODE).items()))
        os.kill(pid, signal.SIGKILL)
        healed = await status_when(client, lambda s: whole(s) and worker not in ready(s, pb.WORKER_ROLE_DECODE))
        assert set(ready(healed, pb.WORKER_ROLE_DECODE)) - set(ready(before, pb.WORKER_ROLE_DECODE))


async def test_scaling_to_zero_and_back_leaves_the_other_pool_alone(ray_head):
    async with cluster(ray_head, "scale") as client:
        before = await status_when(client, whole)
        await client.scale(Role.DECODE, 0)
        await status_when(client, lambda s: not s.pools[1].num_draining and not ready(s, pb.WORKER_ROLE_DECODE))
        await client.scale(Role.DECODE, 2)
        after = await status_when(client, lambda s: s.pools[1].num_ready == 2)
        assert ready(after, pb.WORKER_ROLE_PREFILL) == ready(before, pb.WORKER_ROLE_PREFILL)
        assert sum(pool.num_losses for pool in after.pools) == 0


async def test_a_crash_loop_shows_its_reason_in_one_line_and_backs_off(ray_head):
    reason = "model /x: no such file"
    async with cluster(ray_head, "crash-loop", decode_error=reason) as client:
        status = await status_when(client, lambda s: s.pools[1].num_losses >= 2)
        assert f"RuntimeError: {reason}" in status.pools[1].detail
        assert "\n" not in status.pools[1].detail


async def test_after_shutdown_no_process_of_the_cluster_is_left(ray_head):
    async with cluster(ray_head, "gone", decode=2) as client:
        status = await status_when(client, whole)
        pids = [w.pid for w in status.workers] + [r.pid for r in status.routers] + [controller_pid(client)]
    async with asyncio.timeout(20):
        while any(map(_alive, pids)):  # noqa: ASYNC110 - processes set no event
            await asyncio.sleep(0.1)


def controller_pid(client: ClusterClient) -> int:
    import psutil

    port = int(client.address.rpartition(":")[2])
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port]
    return int(listening[0].pid)


def _alive(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
