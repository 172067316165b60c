"""What the host hands to a role's `build.py` and what it gets back. The roles live in packages above this one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from kvtransfer.region import PoolRegion
from tandem.config import ClusterConfig
from worker.ports import WorkerRole
from worker.role_base import RoleParts


@dataclass(frozen=True, slots=True)
class HostContext:
    """One worker's identity and the things a role is built over. `compatibility_hash`: who may be paired with it."""

    worker_id: str
    incarnation: int
    node_id: str
    host: str
    secret: str
    config: ClusterConfig
    compatibility_hash: bytes
    region: PoolRegion
    parts: RoleParts


class Assembly(Protocol):
    """A role with its half of kvtransfer."""

    @property
    def role(self) -> WorkerRole: ...

    @property
    def num_copies_in_flight(self) -> int: ...

    async def start(self, server: grpc.aio.Server) -> tuple[str, str]:
        """Open the transports, add services to the worker's listener; return (shm_name, tcp_address), "" for none."""
        ...

    async def stop(self) -> None:
        """End all transfers; idempotent."""
        ...


class Assembler(Protocol):
    """`assemble` of a role's build module."""

    def __call__(self, context: HostContext) -> Assembly: ...
