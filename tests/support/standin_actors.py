"""ManagedActors that serve nothing, in real Ray processes: for tests of the controller on Ray without a model."""

from __future__ import annotations

import asyncio
import os

from pools.actor_base import ActorBase
from pools.runtime import ActorInfo
from tandem.types import LoadReport, PeerEndpoint, Role, WorkerInfo, new_incarnation


class StandInActor(ActorBase):
    def __init__(self, actor_id: str, *, role: Role | None, start_error: str = "") -> None:
        super().__init__(actor_id)
        self._role = role
        self._start_error = start_error

    async def _begin(self) -> ActorInfo:
        if self._start_error:
            raise RuntimeError(self._start_error)
        worker = None
        if self._role is not None:
            endpoint = PeerEndpoint(self._actor_id, new_incarnation(), "127.0.0.1:1", "node")
            worker = WorkerInfo(self._role, endpoint, os.getpid(), b"h", 8, 16, 128)
        return ActorInfo(os.getpid(), "127.0.0.1:1", worker)

    async def load(self) -> LoadReport:
        return LoadReport(num_total_blocks=8, num_free_blocks=8)

    async def _drain(self, timeout_s: float) -> None:
        await asyncio.sleep(0)

    async def _end(self) -> None:
        await asyncio.sleep(0)
