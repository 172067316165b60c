"""Starting and stopping a whole cluster: what `tandem up`, `tandem down`, `make demo` and the tests call.

`launch` checks what can be checked before anything runs, writes the record, starts Ray's head, lets
`deploy/bootstrap.py` create the controller, and waits until the controller says that everything serves. `take_down`
works from the record alone, at whatever point a launch was interrupted. Ray is not imported in here.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deploy import head, processes, record
from deploy.order import encode_order
from deploy.ports import check_free, free_ports, is_loopback
from deploy.record import ClusterRecord, JoinedRay
from tandem.cluster_client import ClusterClient
from tandem.config import ClusterConfig
from tandem.errors import ConfigError, TandemError, Unavailable
from tandem.model_files import ModelFiles
from tandem.model_info import read_model_info
from tandem.v1 import cluster_pb2 as pb

# Ray's head and the controller, on a busy machine.
START_PATIENCE_S = 120.0
SHUTDOWN_TIMEOUT_S = 10.0
OnStage = Callable[[str], None]


@dataclass(slots=True)
class Launched:
    """A cluster that serves. `head` is its Ray, when it has one of its own; this process is its parent."""

    record: ClusterRecord
    config: ClusterConfig
    head: subprocess.Popen[bytes] | None


def settle(config: ClusterConfig, files: ModelFiles) -> ClusterConfig:
    """Check what can be checked before anything starts, and turn open settings into fixed ones.

    Fixed: ports (a restarted controller or router must come back where it was).
    Raises ModelError, ConfigError.
    """
    read_model_info(files, config.model)
    if config.pools.decode == 0:
        raise ConfigError("pools.decode: a cluster needs at least one decode worker")
    router, control = config.router, config.control
    for setting, host in (("router.host", router.host), ("control.host", control.host)):
        if not is_loopback(host):
            raise ConfigError(f"{setting}: {host} is not loopback, and this build has neither TLS nor API keys yet")
    if router.grpc_port and router.grpc_port == control.port:
        raise ConfigError(f"router.grpc_port and control.port are both {control.port}")
    try:
        if router.grpc_port:
            check_free(router.host, router.grpc_port, "--grpc-port PORT (0: any)")
        if control.port:
            check_free(control.host, control.port, "--set control.port=PORT (0: any)")
    except ConfigError as exc:
        old = record.load(config.name)
        if old is not None and (old.starter_lives() or processes.members(old)):  # the port is its own
            raise record.running_already(config.name) from exc
        raise
    any_router, any_control = free_ports("127.0.0.1", 2)
    return config.model_copy(
        update={
            "router": router.model_copy(update={"grpc_port": router.grpc_port or any_router}),
            "control": control.model_copy(update={"port": control.port or any_control}),
        }
    )


async def launch(
    config: ClusterConfig,
    files: ModelFiles,
    on_stage: OnStage,
    *,
    join: JoinedRay | None = None,
    on_record: Callable[[ClusterRecord], None] = lambda rec: None,
) -> Launched:
    """Start a cluster and wait until all of it serves; whatever goes wrong, also a cancellation, stops it again.

    `on_record` gets the record before anything is started.
    Raises ModelError, ConfigError, Unavailable with one line for the user.
    """
    config = settle(config, files)
    await forget_if_dead(config.name)
    temp_dir = head.new_temp_dir()
    try:
        rec = record.create(config.name, temp_dir, join)
    except BaseException:
        os.rmdir(temp_dir)
        raise
    ray_head: subprocess.Popen[bytes] | None = None
    try:
        on_record(rec)
        rec = rec.updated(
            control_address=f"{config.control.host}:{config.control.port}",
            grpc_address=f"{config.router.host}:{config.router.grpc_port}",
            model=files.name,
        )
        async with asyncio.timeout(START_PATIENCE_S):
            if join is None:
                on_stage("Ray starts on this machine")
                ray_head, rec = head.start_head(rec, os.cpu_count() or 1)
            await _bootstrap(rec, ray_head, config, files, on_stage)
        await _all_serve(rec, config, on_stage)
        return Launched(rec, config, ray_head)
    except TimeoutError as exc:
        await _give_up(rec, ray_head, on_stage)
        raise Unavailable(f"Ray and the controller were not up within {START_PATIENCE_S:g} s") from exc
    except BaseException:
        await _give_up(rec, ray_head, on_stage)
        raise


async def take_down(rec: ClusterRecord, ray_head: subprocess.Popen[bytes] | None = None) -> None:
    """Stop a cluster: its actors, then every process of its own Ray; then forget it. Completes though it is cancelled.

    Raises Unavailable when processes survive, or when the actors in somebody else's Ray cannot be told to stop.
    """
    work = asyncio.ensure_future(_take_down(rec, ray_head))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await work
        raise


async def _give_up(rec: ClusterRecord, ray_head: subprocess.Popen[bytes] | None, on_stage: OnStage) -> None:
    """Take down what was started so far; trouble with that must not hide why the launch failed."""
    try:
        await take_down(rec, ray_head)
    except Unavailable as exc:
        on_stage(str(exc))


async def forget_if_dead(name: str) -> None:
    """Clean up after a cluster of this name that has ended without `tandem down`. Raises ConfigError if it lives."""
    old = record.load(name)
    if old is not None and old.owns_ray and not old.starter_lives() and not processes.members(old):
        await take_down(old)


async def _take_down(rec: ClusterRecord, ray_head: subprocess.Popen[bytes] | None) -> None:
    told = False
    if rec.control_address:
        with suppress(TandemError, TimeoutError):
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S), ClusterClient(rec.control_address, rec.secret()) as client:
                await client.shutdown()
                told = True
    left = await asyncio.to_thread(processes.end, rec)
    if ray_head is not None:
        await asyncio.to_thread(ray_head.wait, processes.KILL_PATIENCE_S)
    if left:
        raise Unavailable(f"these processes of cluster {rec.name!r} do not end: {', '.join(map(str, left))}")
    rec.remove()
    if not told and not rec.owns_ray:
        raise Unavailable(
            f"the controller of {rec.name!r} does not answer: its actors may still run in {rec.ray_address}"
        )


async def _bootstrap(
    rec: ClusterRecord,
    ray_head: subprocess.Popen[bytes] | None,
    config: ClusterConfig,
    files: ModelFiles,
    on_stage: OnStage,
) -> None:
    """Create the controller. The process imports Ray while the head still starts, and gets its order when it is up."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "deploy.bootstrap"),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=head.ray_environment(rec),
        start_new_session=True,
    )
    try:
        if ray_head is not None:
            await head.head_ready(ray_head, rec)
        on_stage("the controller starts")
        out, err = await process.communicate(encode_order(config, files, rec.secret()))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = out.decode(errors="replace").strip().splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        tail = err.decode(errors="replace").strip().splitlines()
        raise Unavailable(f"the controller did not start: {tail[-1] if tail else 'no word from it'}") from None
    if "error" in answer:
        raise Unavailable(answer["error"])


async def _all_serve(rec: ClusterRecord, config: ClusterConfig, on_stage: OnStage) -> None:
    """Wait until the pools are at their targets and a router serves. The first failed start ends the wait."""
    try:
        async with (
            asyncio.timeout(config.pools.start_timeout_s),
            ClusterClient(rec.control_address, rec.secret()) as client,
        ):
            async for status in client.watch():
                on_stage(progress(status))
                if reason := first_failure(status):
                    raise ConfigError(reason)
                if whole(status):
                    return
    except TimeoutError as exc:
        raise Unavailable(
            f"not everything was up within {config.pools.start_timeout_s:g} s (pools.start_timeout_s); "
            f"logs were in {Path(rec.temp_dir) / 'session_latest/logs'}"
        ) from exc


def progress(status: pb.GetStatusResponse) -> str:
    """One line: how much of the cluster serves."""
    parts = [
        f"{pb.WorkerRole.Name(pool.role).rpartition('_')[2].lower()} {pool.num_ready}/{pool.target}"
        for pool in status.pools
    ]
    routers = sum(router.state == "ready" for router in status.routers)
    return f"workers load the model: {', '.join(parts)}, router {routers}/1"


def first_failure(status: pb.GetStatusResponse) -> str:
    """Why the first actor that failed to start failed; empty if none did."""
    for worker in status.workers:
        if worker.state == pb.WORKER_STATE_LOST:
            return f"{worker.endpoint.worker_id} did not start: {worker.detail}"
    for router in status.routers:
        if router.state.startswith("lost"):
            return f"{router.router_id} did not start: {router.state.removeprefix('lost: ')}"
    return ""


def whole(status: pb.GetStatusResponse) -> bool:
    """Whether every pool is at its target and a router serves."""
    return all(pool.num_ready >= pool.target for pool in status.pools) and any(
        router.state == "ready" for router in status.routers
    )
