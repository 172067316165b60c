"""Puts the decode role and the receiver together; `worker/host.py` finds `assemble` by name."""

from __future__ import annotations

import grpc.aio

from decode_worker.role import DecodeRole
from kvtransfer.receiver import Receiver
from worker.assembly import HostContext


class DecodeAssembly:
    """A decode role over its receiver; see worker.assembly.Assembly."""

    def __init__(self, context: HostContext) -> None:
        self._receiver = Receiver(
            worker_id=context.worker_id,
            incarnation=context.incarnation,
            node_id=context.node_id,
            compatibility_hash=context.compatibility_hash,
            region=context.region,
            secret=context.secret,
            config=context.config.transfer,
            counters=context.parts.counters,
            on_committed=lambda attempt, record: self.role.on_committed(attempt, record),
            on_failed=lambda *failure: self.role.on_failed(*failure),
        )
        self.role = DecodeRole(context.parts, self._receiver)

    @property
    def num_copies_in_flight(self) -> int:
        """Fetches that may still write into this worker's blocks."""
        return self._receiver.num_copies_in_flight

    async def start(self, server: grpc.aio.Server) -> tuple[str, str]:
        """Nothing to serve: the receiver dials."""
        return "", ""

    async def stop(self) -> None:
        """End all transfers; idempotent."""
        await self._receiver.stop()


def assemble(context: HostContext) -> DecodeAssembly:
    """Make the role for one host."""
    return DecodeAssembly(context)
