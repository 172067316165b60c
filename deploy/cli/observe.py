"""`tandem status` and `tandem scale`: the operator's side, over the controller's gRPC."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer
from rich.table import Table

from deploy.cli.app import app, running_cluster
from deploy.cli.interrupt import run
from deploy.cli.output import Output, OutputFormat, fail, reports_errors, show_json, stderr, stdout
from deploy.record import ClusterRecord
from tandem.cluster_client import ClusterClient
from tandem.errors import ConfigError, Unavailable
from tandem.types import Role
from tandem.v1 import cluster_pb2 as pb
from tandem.v1 import worker_pb2

WAIT_PATIENCE_S = 300.0
# A pool that lost so many workers while we wait will not get there by waiting.
MAX_LOSSES = 3
_ROLES = {pb.WORKER_ROLE_PREFILL: "prefill", pb.WORKER_ROLE_DECODE: "decode"}


@app.command()
@reports_errors
def status(context: typer.Context, output: Output = OutputFormat.TEXT) -> None:
    """Show pools, workers with their load, and routers.

    For example:

      tandem status

      tandem status -o json | jq '.pools[].num_ready'
    """
    rec = running_cluster(context)
    found = run(_status(rec))
    if output is OutputFormat.JSON:
        show_json(status_to_dict(found, rec))
    else:
        _show(found, rec)


def status_to_dict(found: pb.GetStatusResponse, rec: ClusterRecord) -> dict[str, Any]:
    """What `status -o json` prints: plain numbers and names, each worker with its load."""
    return {
        "cluster": found.cluster_name,
        "model": found.model,
        "dtype": found.dtype,
        "uptime_s": found.uptime_s,
        "grpc_address": rec.grpc_address,
        "control_address": rec.control_address,
        "pools": [pool_to_dict(pool) for pool in found.pools],
        "workers": [
            {
                "worker_id": worker.endpoint.worker_id,
                "role": _ROLES[worker.role],
                "state": _state(worker),
                "pid": worker.pid,
                "address": worker.endpoint.address,
                "detail": worker.detail,
                "load": _load_to_dict(found.loads.get(worker.endpoint.worker_id)),
            }
            for worker in found.workers
        ],
        "routers": [
            {"router_id": r.router_id, "state": r.state, "pid": r.pid, "grpc_address": r.grpc_address}
            for r in found.routers
        ],
    }


def pool_to_dict(pool: pb.PoolStatus) -> dict[str, Any]:
    """One pool, as `status` and `scale` print it."""
    return {
        "role": _ROLES[pool.role],
        "target": pool.target,
        "num_ready": pool.num_ready,
        "num_starting": pool.num_starting,
        "num_draining": pool.num_draining,
        "num_losses": pool.num_losses,
        "detail": pool.detail,
    }


def _load_to_dict(load: worker_pb2.LoadReport | None) -> dict[str, int] | None:
    """None for a worker that did not answer."""
    if load is None:
        return None
    return {
        "num_total_blocks": load.num_total_blocks,
        "num_free_blocks": load.num_free_blocks,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "queued_prefill_tokens": load.queued_prefill_tokens,
    }


def _state(worker: pb.WorkerInfo) -> str:
    return pb.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower()


async def _status(rec: ClusterRecord) -> pb.GetStatusResponse:
    async with ClusterClient(rec.control_address, rec.secret()) as client:
        return await client.status()


def _show(found: pb.GetStatusResponse, rec: ClusterRecord) -> None:
    uptime_s = int(found.uptime_s)
    stdout.print(
        f"[bold]{found.cluster_name}[/]  {found.model} ({found.dtype})  "
        f"controller up {uptime_s // 3600}:{uptime_s // 60 % 60:02}:{uptime_s % 60:02}  clients call {rec.grpc_address}"
    )
    pools = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("POOL", "READY", "STARTING", "DRAINING", "LOSSES", "DETAIL"):
        pools.add_column(column)
    for pool in found.pools:
        counts = (f"{pool.num_ready}/{pool.target}", pool.num_starting, pool.num_draining, pool.num_losses)
        pools.add_row(_ROLES[pool.role], *map(str, counts), pool.detail)
    workers = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("WORKER", "STATE", "PID", "ADDRESS", "FREE BLOCKS", "RUNNING", "WAITING", "DETAIL"):
        workers.add_column(column)
    for worker in found.workers:
        worker_id = worker.endpoint.worker_id
        load = found.loads.get(worker_id)
        levels = (
            (f"{load.num_free_blocks}/{load.num_total_blocks}", str(load.num_running), str(load.num_waiting))
            if load is not None
            else ("", "", "")
        )
        workers.add_row(
            worker_id, _state(worker), str(worker.pid or ""), worker.endpoint.address, *levels, worker.detail
        )
    for router in found.routers:
        workers.add_row(router.router_id, router.state, str(router.pid or ""), router.grpc_address)
    for table in (pools, workers):
        stdout.print()
        stdout.print(table)


@app.command()
@reports_errors
def scale(
    context: typer.Context,
    targets: Annotated[list[str], typer.Argument(metavar="prefill=N decode=N", help="one pool or both")],
    wait: Annotated[bool, typer.Option("--wait", help="return when the pools are at their targets")] = False,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Change the size of either pool while requests run.

    A worker that goes takes no new work, and ends when its streams have ended; a stream that takes longer is re-run on
    another worker, and its reader sees a pause at most.

    For example:

      tandem scale decode=3

      tandem scale prefill=2 decode=3 --wait
    """
    wanted = parse_targets(targets)
    run(_scale(running_cluster(context), wanted, wait, output))


async def _scale(rec: ClusterRecord, wanted: dict[Role, int], wait: bool, output: OutputFormat) -> None:
    async with ClusterClient(rec.control_address, rec.secret()) as client:
        before = {pool.role: pool.num_losses for pool in (await client.status()).pools}
        pools = [await client.scale(role, target) for role, target in wanted.items()]
        if wait:
            roles = {pool.role for pool in pools}
            with stderr.status("scaling ...") as line:
                try:
                    async with asyncio.timeout(WAIT_PATIENCE_S):
                        async for found in client.watch():
                            pools = [pool for pool in found.pools if pool.role in roles]
                            line.update("  ".join(map(_pool_line, pools)))
                            if all(_settled(pool) for pool in pools):
                                break
                            for pool in pools:
                                if pool.num_losses - before[pool.role] >= MAX_LOSSES:
                                    raise ConfigError(f"{_ROLES[pool.role]} pool: {pool.detail}")
                except TimeoutError as exc:
                    raise Unavailable(
                        f"not settled within {WAIT_PATIENCE_S:g} s, it goes on by itself: "
                        f"{'; '.join(map(_pool_line, pools))}"
                    ) from exc
    if output is OutputFormat.JSON:
        show_json([pool_to_dict(pool) for pool in pools])
    else:
        for pool in pools:
            stdout.print(_pool_line(pool))


def _settled(pool: pb.PoolStatus) -> bool:
    return pool.num_ready == pool.target and not pool.num_starting and not pool.num_draining


def _pool_line(pool: pb.PoolStatus) -> str:
    line = f"{_ROLES[pool.role]} {pool.num_ready}/{pool.target}"
    notes = [f"{pool.num_draining} draining"] if pool.num_draining else []
    if pool.role == pb.WORKER_ROLE_DECODE and pool.target == 0:
        notes.append(pool.detail)
    return f"{line} ({'; '.join(notes)})" if notes else line


def parse_targets(targets: list[str]) -> dict[Role, int]:
    """`["prefill=2", "decode=3"]` -> {Role.PREFILL: 2, Role.DECODE: 3}; ends the command with a hint otherwise."""
    wanted: dict[Role, int] = {}
    for text in targets:
        pool, _, count = text.partition("=")
        if pool not in ("prefill", "decode") or not count.isdecimal():
            fail(f"{text!r}: expected prefill=N or decode=N", "for example: tandem scale prefill=2 decode=3")
        if Role(pool) in wanted:
            fail(f"{pool} is given twice")
        wanted[Role(pool)] = int(count)
    return wanted
