"""Protobuf to inner types and back, and the metadata that guards internal sockets. Used at the edges only."""

from __future__ import annotations

import hmac

from tandem.types import AttemptKey, LoadReport, PeerEndpoint, RequestKey, Role, Sampling, WorkerInfo
from tandem.v1 import cluster_pb2 as cluster
from tandem.v1 import worker_pb2 as worker

SECRET_METADATA_KEY = "tandem-cluster-secret"
MAX_FRAME_NBYTES = 256 * 1024
# ids per PromptSegment, Reserve or Prefill: a varint takes at most 5 bytes; the rest is for the other fields
MAX_SEGMENT_TOKENS = (MAX_FRAME_NBYTES - 16 * 1024) // 5

_ROLE = {Role.PREFILL: cluster.WORKER_ROLE_PREFILL, Role.DECODE: cluster.WORKER_ROLE_DECODE}
_ROLE_BACK = {v: k for k, v in _ROLE.items()}


def secret_metadata(secret: str) -> tuple[tuple[str, str], ...]:
    """Metadata for a call to another process of the cluster."""
    return ((SECRET_METADATA_KEY, secret),)


def secret_matches(secret: str, metadata: object) -> bool:
    """Whether a call's metadata carries the cluster secret; compared in constant time."""
    for key, value in metadata or ():  # type: ignore[attr-defined]
        if key == SECRET_METADATA_KEY and isinstance(value, str):
            return hmac.compare_digest(value, secret)
    return False


def key_to_wire(key: RequestKey) -> worker.RequestKey:
    return worker.RequestKey(request_id=key.request_id, choice=key.choice, attempt=key.attempt)


def key_from_wire(key: worker.RequestKey) -> RequestKey:
    return RequestKey(key.request_id, key.choice, key.attempt)


def attempt_to_wire(attempt: AttemptKey) -> worker.AttemptKey:
    return worker.AttemptKey(router_incarnation=attempt.router_incarnation, key=key_to_wire(attempt.key))


def attempt_from_wire(attempt: worker.AttemptKey) -> AttemptKey:
    return AttemptKey(attempt.router_incarnation, key_from_wire(attempt.key))


def sampling_to_wire(s: Sampling) -> worker.ResolvedSampling:
    return worker.ResolvedSampling(
        max_tokens=s.max_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        seed=s.seed,
        stop_token_ids=s.stop_token_ids,
    )


def sampling_from_wire(s: worker.ResolvedSampling) -> Sampling:
    return Sampling(s.max_tokens, s.temperature, s.top_p, s.top_k, s.min_p, s.seed, tuple(s.stop_token_ids))


def endpoint_to_wire(e: PeerEndpoint) -> worker.PeerEndpoint:
    return worker.PeerEndpoint(
        worker_id=e.worker_id,
        incarnation=e.incarnation,
        address=e.address,
        node_id=e.node_id,
        shm_name=e.shm_name,
        tcp_address=e.tcp_address,
    )


def endpoint_from_wire(e: worker.PeerEndpoint) -> PeerEndpoint:
    return PeerEndpoint(e.worker_id, e.incarnation, e.address, e.node_id, e.shm_name, e.tcp_address)


def load_to_wire(load: LoadReport) -> worker.LoadReport:
    return worker.LoadReport(
        num_total_blocks=load.num_total_blocks,
        num_free_blocks=load.num_free_blocks,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        queued_prefill_tokens=load.queued_prefill_tokens,
        progress=load.progress,
        announced_step_s=load.announced_step_s,
        draining=load.draining,
    )


def load_from_wire(load: worker.LoadReport) -> LoadReport:
    return LoadReport(
        load.num_total_blocks,
        load.num_free_blocks,
        load.num_running,
        load.num_waiting,
        load.queued_prefill_tokens,
        load.progress,
        load.announced_step_s,
        load.draining,
    )


def worker_info_to_wire(info: WorkerInfo) -> cluster.WorkerInfo:
    return cluster.WorkerInfo(
        role=_ROLE[info.role],
        endpoint=endpoint_to_wire(info.endpoint),
        pid=info.pid,
        state=cluster.WORKER_STATE_DRAINING if info.draining else cluster.WORKER_STATE_READY,
        compatibility_hash=info.compatibility_hash,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
    )


def worker_info_from_wire(info: cluster.WorkerInfo) -> WorkerInfo:
    return WorkerInfo(
        role=_ROLE_BACK[info.role],
        endpoint=endpoint_from_wire(info.endpoint),
        pid=info.pid,
        compatibility_hash=info.compatibility_hash,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        draining=info.state == cluster.WORKER_STATE_DRAINING,
    )


def role_to_wire(role: Role) -> cluster.WorkerRole:
    return _ROLE[role]


def role_from_wire(role: cluster.WorkerRole) -> Role:
    return _ROLE_BACK[role]
