"""Which workers there are. The fleet follows a DirectorySource; the controller's WatchDirectory is the usual one.

Neighbours: fleet (opens and closes sessions), pools' controller (serves WatchDirectory).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import grpc
import grpc.aio

from tandem.grpc_options import internal_channel
from tandem.types import Directory, new_incarnation
from tandem.v1 import cluster_pb2 as pb
from tandem.v1 import cluster_pb2_grpc as rpc
from tandem.wire import secret_metadata, worker_info_from_wire

log = logging.getLogger(__name__)

MIN_RETRY_S = 0.1
MAX_RETRY_S = 1.0
_CHANNEL_OPTIONS = internal_channel(interval_s=5, patience_s=5)


class DirectorySource(Protocol):
    """Where a router learns of workers."""

    @property
    def current(self) -> Directory:
        """The newest directory; empty before the first one has come."""
        ...

    async def wait_changed(self, seen: Directory) -> Directory:
        """Return the newest directory as soon as it is another object than `seen`."""
        ...

    async def run(self) -> None:
        """Keep `current` up to date until cancelled."""
        ...


class StaticDirectory:
    """A directory that changes only when it is told to: tests, benchmarks."""

    def __init__(self, directory: Directory) -> None:
        self._current = directory
        self._changed = asyncio.Event()

    @property
    def current(self) -> Directory:
        return self._current

    def replace(self, directory: Directory) -> None:
        """Make `directory` the current one and wake those who wait."""
        self._current = directory
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_changed(self, seen: Directory) -> Directory:
        while self._current is seen:
            await self._changed.wait()
        return self._current

    async def run(self) -> None:
        """Nothing to keep up to date."""


class WatchedDirectory(StaticDirectory):
    """Follows the controller's WatchDirectory. While the controller is away, the last directory stays."""

    def __init__(self, controller_address: str, secret: str, router_id: str = "") -> None:
        super().__init__(Directory())
        self._address = controller_address
        self._secret = secret
        self._router_id = router_id or f"router-{new_incarnation():016x}"

    async def run(self) -> None:
        """Watch; dial again whenever the stream ends."""
        retry_s = MIN_RETRY_S
        while True:
            try:
                async with grpc.aio.insecure_channel(self._address, options=_CHANNEL_OPTIONS) as channel:
                    stub = rpc.ClusterServiceStub(channel)  # type: ignore[no-untyped-call]
                    request = pb.WatchDirectoryRequest(router_id=self._router_id)
                    async for response in stub.WatchDirectory(request, metadata=secret_metadata(self._secret)):
                        retry_s = MIN_RETRY_S
                        self.take(response)
            except grpc.aio.AioRpcError as exc:
                log.info("the controller at %s: %s: %s", self._address, exc.code().name, exc.details())
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    def take(self, response: pb.WatchDirectoryResponse) -> None:
        """Make a response the current directory, unless it is older than what is here."""
        here = self.current
        if (
            response.controller_incarnation == here.controller_incarnation
            and response.sequence < here.sequence
            and here.controller_incarnation
        ):
            return
        self.replace(
            Directory(
                workers=tuple(worker_info_from_wire(worker) for worker in response.workers),
                prefill_target=response.prefill_target,
                decode_target=response.decode_target,
                sequence=response.sequence,
                controller_incarnation=response.controller_incarnation,
            )
        )
