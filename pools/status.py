"""The controller's state as protobuf: GetStatus and WatchDirectory answers. Pure."""

from __future__ import annotations

from pools.controller import Controller
from pools.pool import DECODE, PREFILL, ROUTER, WORKER_KINDS, Member, MemberState, Pool
from tandem.types import Directory, LoadReport, Role
from tandem.v1 import cluster_pb2 as pb
from tandem.wire import load_to_wire, role_to_wire, worker_info_to_wire

_STATE = {
    MemberState.STARTING: pb.WORKER_STATE_STARTING,
    MemberState.READY: pb.WORKER_STATE_READY,
    MemberState.DRAINING: pb.WORKER_STATE_DRAINING,
    MemberState.LOST: pb.WORKER_STATE_LOST,
}


def status_to_wire(
    controller: Controller, cluster_name: str, model: str, dtype: str, loads: dict[str, LoadReport]
) -> pb.GetStatusResponse:
    """Everything `tandem status` shows."""
    now = controller.now()
    pools = [controller.pools[kind] for kind in WORKER_KINDS]
    return pb.GetStatusResponse(
        cluster_name=cluster_name,
        model=model,
        dtype=dtype,
        controller_incarnation=controller.incarnation,
        uptime_s=now - controller.started_at,
        pools=[pool_to_wire(pool, now) for pool in pools],
        workers=[_worker(pool, member) for pool in pools for member in pool.members.values()],
        routers=[_router(member) for member in controller.pools[ROUTER].members.values()],
        loads={worker_id: load_to_wire(load) for worker_id, load in loads.items()},
    )


NO_DECODE_DETAIL = "no decode worker is wanted: requests wait until the pool grows"


def pool_to_wire(pool: Pool, now: float) -> pb.PoolStatus:
    """One pool's counts."""
    return pb.PoolStatus(
        role=role_to_wire(Role.PREFILL if pool.kind == PREFILL else Role.DECODE),
        target=pool.target,
        num_ready=len(pool.in_state(MemberState.READY)),
        num_starting=len(pool.in_state(MemberState.STARTING)),
        num_draining=len(pool.in_state(MemberState.DRAINING)),
        num_losses=pool.num_losses,
        detail=NO_DECODE_DETAIL if pool.kind == DECODE and pool.target == 0 else pool.detail(now),
    )


def directory_to_wire(sequence: int, directory: Directory) -> pb.WatchDirectoryResponse:
    """What routers learn."""
    return pb.WatchDirectoryResponse(
        controller_incarnation=directory.controller_incarnation,
        sequence=sequence,
        workers=[worker_info_to_wire(worker) for worker in directory.workers],
        prefill_target=directory.prefill_target,
        decode_target=directory.decode_target,
    )


def _worker(pool: Pool, member: Member) -> pb.WorkerInfo:
    if member.info is not None and member.info.worker is not None:
        info = worker_info_to_wire(member.info.worker)
    else:
        info = pb.WorkerInfo(role=role_to_wire(Role.PREFILL if pool.kind == PREFILL else Role.DECODE))
        info.endpoint.worker_id = member.actor_id
    info.state = _STATE[member.state]
    info.detail = member.detail
    return info


def _router(member: Member) -> pb.RouterInfo:
    return pb.RouterInfo(
        router_id=member.actor_id,
        pid=member.info.pid if member.info else 0,
        grpc_address=member.info.address if member.info else "",
        state=f"{member.state.value}: {member.detail}" if member.detail else member.state.value,
    )
