"""Which transport a pair uses: `shm` on one host, else `tcp`; the configuration can force either."""

from __future__ import annotations

import logging

from kvtransfer.region import PoolRegion
from kvtransfer.transports.base import Transport
from kvtransfer.transports.shm import ShmTransport
from kvtransfer.transports.tcp import TcpTransport
from tandem.config import TransferConfig
from tandem.errors import KVTransferError, LayoutMismatch
from tandem.types import PeerEndpoint

log = logging.getLogger(__name__)


def candidates(config: TransferConfig, peer: PeerEndpoint, node_id: str) -> list[str]:
    """Names of transports to try with `peer`, best first. A shared node id is a hint only: the connect decides."""
    if config.transport != "auto":
        return [config.transport]
    names = ["shm"] if peer.node_id == node_id and peer.shm_name else []
    return [*names, "tcp"] if peer.tcp_address else names


def make(name: str, region: PoolRegion, secret: str, num_connections: int) -> Transport:
    """Build the reader's side of the transport called `name`."""
    if name == "shm":
        return ShmTransport(region, secret, num_connections)
    return TcpTransport(region, secret, num_connections)


async def connect(
    config: TransferConfig, peer: PeerEndpoint, node_id: str, region: PoolRegion, secret: str, deadline: float
) -> Transport:
    """Connect by the first candidate that works before `deadline` (monotonic). Raises KVTransferError."""
    names = candidates(config, peer, node_id)
    if not names:
        raise KVTransferError(peer.worker_id, "it serves no transport that this worker can use")
    for name in names:
        transport = make(name, region, secret, config.connections_per_peer)
        try:
            await transport.connect(peer, deadline)
            return transport
        except BaseException as exc:
            await transport.close()
            if name == names[-1] or isinstance(exc, LayoutMismatch) or not isinstance(exc, KVTransferError):
                raise
            log.info("%s to %s does not work, trying the next transport: %s", name, peer.worker_id, exc)
    raise AssertionError("unreachable: the last candidate returns or raises")
