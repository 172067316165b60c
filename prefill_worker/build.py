"""Puts the prefill role and the sender together; `worker/host.py` finds `assemble` by name."""

from __future__ import annotations

import grpc.aio

from kvtransfer.sender import Sender
from kvtransfer.service import TransferServicer
from prefill_worker.role import PrefillRole
from tandem.v1 import worker_pb2_grpc as rpc
from worker.assembly import HostContext


class PrefillAssembly:
    """A prefill role over its sender; see worker.assembly.Assembly."""

    def __init__(self, context: HostContext) -> None:
        self._host = context.host
        self._sender = Sender(
            incarnation=context.incarnation,
            compatibility_hash=context.compatibility_hash,
            region=context.region,
            secret=context.secret,
            config=context.config.transfer,
            counters=context.parts.counters,
            on_acked=lambda attempt, chunk: self.role.on_acked(attempt, chunk),
            on_committed=lambda attempt: self.role.on_committed(attempt),
            on_failed=lambda *failure: self.role.on_failed(*failure),
        )
        self.role = PrefillRole(context.parts, self._sender)

    @property
    def num_copies_in_flight(self) -> int:
        """Copies are the decode side's."""
        return 0

    async def start(self, server: grpc.aio.Server) -> tuple[str, str]:
        """Serve the control channel on the worker's listener and the pool by the configured transports."""
        rpc.add_TransferServiceServicer_to_server(TransferServicer(self._sender), server)  # type: ignore[no-untyped-call]
        return await self._sender.start(self._host)

    async def stop(self) -> None:
        """End all transfers; idempotent."""
        await self._sender.stop()


def assemble(context: HostContext) -> PrefillAssembly:
    """Make the role for one host."""
    return PrefillAssembly(context)
