"""Small values that cross packages. Protobuf stays at the edges; these are what the inside speaks."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import Enum


def new_incarnation() -> int:
    """A random non-zero 64-bit number, drawn by each process at start."""
    return secrets.randbits(64) or 1


class Role(Enum):
    """What a pool's workers do."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class RequestKey:
    """One try of one choice of one request; `attempt` is the fencing epoch."""

    request_id: str
    choice: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.choice}#{self.attempt}"


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """A RequestKey where many routers meet (inside workers and between them)."""

    router_incarnation: int
    key: RequestKey

    def __str__(self) -> str:
        return f"{self.key}@{self.router_incarnation:016x}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling with every default resolved. temperature 0 is greedy; top_k 0 is off.

    A token at absolute position p (prompt included) of choice c is drawn by f(seed, c, p) alone: a re-run draws what
    the attempt before it drew. `max_tokens` counts from `num_prompt_tokens`, over all attempts.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerEndpoint:
    """What a decode worker needs to reach a prefill worker."""

    worker_id: str
    incarnation: int
    address: str
    node_id: str
    shm_name: str = ""
    tcp_address: str = ""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A directory entry: what a router needs to know of a worker before it speaks to it."""

    role: Role
    endpoint: PeerEndpoint
    pid: int
    compatibility_hash: bytes
    num_blocks: int
    block_size: int
    max_model_len: int
    draining: bool = False

    @property
    def worker_id(self) -> str:
        """Stable name of this incarnation, such as `decode-3`."""
        return self.endpoint.worker_id


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a worker says of itself with every heartbeat."""

    num_total_blocks: int = 0
    num_free_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    progress: int = 0
    announced_step_s: float = 0.0
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Directory:
    """What the cluster looks like now. The serving mode follows `prefill_target`, never the live count."""

    workers: tuple[WorkerInfo, ...] = ()
    prefill_target: int = 0
    decode_target: int = 0
    sequence: int = 0
    controller_incarnation: int = 0

    @property
    def by_id(self) -> dict[str, WorkerInfo]:
        """The workers by their ids."""
        return {w.worker_id: w for w in self.workers}
