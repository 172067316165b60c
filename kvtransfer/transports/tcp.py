"""`tcp`: scatter/gather straight out of one pool and into another, for workers on different hosts.

reader -> owner: REQUEST header, block ids (uint64 each), generations (uint64 each)
owner -> reader: a status byte, then the blocks' bytes in order, then their generations after the send (uint64 each)
The owner serves exactly the blocks that were offered under the capability; anything else ends the connection.
One fetch at a time on a connection, several connections to a peer. Shutting a socket down wakes a thread blocked on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtransfer.region import PoolRegion
from kvtransfer.transports.base import Authorize, Chunk, FetchResult, checksum
from kvtransfer.transports.handshake import HandshakeError, prove_as_reader
from kvtransfer.transports.listener import MAX_CONNECTIONS, Listener
from tandem.errors import CorruptBlock, KVTransferError, LayoutMismatch
from tandem.types import PeerEndpoint

log = logging.getLogger(__name__)

# magic, number of blocks, bytes of one block, capability
REQUEST = struct.Struct("<4sIQ32s")
REQUEST_MAGIC = b"KVRQ"
CAPABILITY_NBYTES = 32
GRANTED, REFUSED, OTHER_LAYOUT = b"\x00", b"\x01", b"\x02"
MAX_BLOCKS_PER_FETCH = 1 << 16
MAX_IOVECS = 1024
# an owner gives up on a reader that takes nothing for so long
SEND_TIMEOUT_S = 30.0


class TcpExporter:
    """The owner's side; see Exporter. Each connection is served by a thread, as sending large blocks blocks."""

    def __init__(self, region: PoolRegion, secret: str, host: str, authorize: Authorize) -> None:
        self._region = region
        self._secret = secret
        self._host = host
        self._authorize = authorize
        self._listener: Listener | None = None
        self._executor = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="kv-tcp-serve")

    async def start(self) -> str:
        """Serve on a free port; return `host:port`."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.bind((self._host, 0))
        except OSError:
            sock.close()
            raise
        self._listener = Listener(sock, self._secret, self._serve)
        self._listener.start()
        port = sock.getsockname()[1]
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    async def close(self) -> None:
        """Stop serving and end every connection; idempotent."""
        if self._listener is not None:
            await self._listener.close()
            self._listener = None
        await asyncio.to_thread(self._executor.shutdown)

    async def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(True)
        serving = asyncio.get_running_loop().run_in_executor(self._executor, self._answer_all, connection)
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            await asyncio.wait([serving])  # no thread may use the descriptor once it is closed
            raise

    def _answer_all(self, connection: socket.socket) -> None:
        """Answer requests until the reader closes or misbehaves."""
        while True:
            connection.settimeout(None)  # a reader may be silent for long; close() wakes us
            header = bytearray(REQUEST.size)
            if not receive_into(connection, [memoryview(header)]):
                return
            connection.settimeout(SEND_TIMEOUT_S)
            magic, num_blocks, block_nbytes, capability = REQUEST.unpack(header)
            if magic != REQUEST_MAGIC or not 0 < num_blocks <= MAX_BLOCKS_PER_FETCH:
                raise HandshakeError("a malformed request")
            body = bytearray(16 * num_blocks)
            if not receive_into(connection, [memoryview(body)]):
                raise HandshakeError("a request was cut short")
            numbers = struct.unpack(f"<{2 * num_blocks}Q", body)
            block_ids, generations = numbers[:num_blocks], numbers[num_blocks:]
            if block_nbytes != self._region.layout.block_nbytes:
                connection.sendall(OTHER_LAYOUT)
                return
            if not self._authorize(capability, block_ids, generations):
                connection.sendall(REFUSED)
                return
            send_all(connection, [memoryview(GRANTED), *self._region.runs(block_ids)])
            connection.sendall(self._region.generations[list(block_ids)].tobytes())


class TcpTransport:
    """The reader's side; see Transport. A connection that failed is dialled anew by the next fetch."""

    name = "tcp"

    def __init__(self, region: PoolRegion, secret: str, num_connections: int) -> None:
        self._region = region
        self._secret = secret
        self._executor = ThreadPoolExecutor(num_connections, thread_name_prefix="kv-tcp-fetch")
        self._turns = asyncio.Semaphore(num_connections)
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._peer: PeerEndpoint | None = None
        self._aborted = False

    async def connect(self, peer: PeerEndpoint, deadline: float) -> None:
        """Dial the first connection; see Transport."""
        self._peer = peer
        self._idle.append(await self._dial(peer, deadline))

    async def _dial(self, peer: PeerEndpoint, deadline: float) -> socket.socket:
        host, _, port = peer.tcp_address.rpartition(":")
        host = host.strip("[]")
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            async with asyncio.timeout_at(loop.time() + deadline - time.monotonic()):
                await loop.sock_connect(sock, (host, int(port)))
                await prove_as_reader(sock, self._secret)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, ValueError, TimeoutError, HandshakeError) as exc:
            sock.close()
            raise KVTransferError(peer.worker_id, f"tcp {peer.tcp_address}: {exc or 'timed out'}") from exc
        except BaseException:
            sock.close()
            raise
        return sock

    async def fetch(
        self, capability: bytes, chunk: Chunk, into_block_ids: Sequence[int], deadline: float
    ) -> FetchResult:
        """Receive straight into own blocks, in a side thread; see Transport."""
        peer = self._peer
        if peer is None:
            raise KVTransferError("", "not connected")
        if not 0 < len(chunk.block_ids) <= MAX_BLOCKS_PER_FETCH or len(chunk.block_ids) != len(into_block_ids):
            raise KVTransferError(peer.worker_id, f"chunk {chunk.index} has {len(chunk.block_ids)} blocks")
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                await self._turns.acquire()
        except TimeoutError as exc:
            raise KVTransferError(peer.worker_id, f"chunk {chunk.index} found no free connection in time") from exc
        try:
            return await self._fetch(peer, capability, chunk, tuple(into_block_ids), deadline)
        finally:
            self._turns.release()

    async def _fetch(
        self, peer: PeerEndpoint, capability: bytes, chunk: Chunk, into: tuple[int, ...], deadline: float
    ) -> FetchResult:
        if self._aborted:
            raise KVTransferError(peer.worker_id, "aborted")
        sock = self._idle.pop() if self._idle else await self._dial(peer, deadline)
        if self._aborted:  # while dialling
            sock.close()
            raise KVTransferError(peer.worker_id, "aborted")
        self._busy.add(sock)
        receive = asyncio.get_running_loop().run_in_executor(
            self._executor, self._receive, sock, peer.worker_id, capability, chunk, into, deadline
        )
        reusable = False
        try:
            result = await asyncio.shield(receive)
            reusable = True
            return result
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            await asyncio.wait([receive])  # its blocks are not free before it has returned
            raise
        except OSError as exc:
            reason = "timed out" if isinstance(exc, TimeoutError) else str(exc)
            raise KVTransferError(peer.worker_id, f"chunk {chunk.index}: {reason}") from exc
        finally:
            self._busy.discard(sock)
            if reusable and not self._aborted:
                self._idle.append(sock)
            else:
                sock.close()

    def _receive(
        self,
        sock: socket.socket,
        peer: str,
        capability: bytes,
        chunk: Chunk,
        into: tuple[int, ...],
        deadline: float,
    ) -> FetchResult:
        started, num_blocks = time.monotonic(), len(into)
        header = REQUEST.pack(REQUEST_MAGIC, num_blocks, self._region.layout.block_nbytes, capability)
        body = struct.pack(f"<{2 * num_blocks}Q", *chunk.block_ids, *chunk.generations)
        _patience(sock, deadline)
        sock.sendall(header + body)
        status, trailer = bytearray(1), bytearray(8 * num_blocks)
        if not receive_into(sock, [memoryview(status)], deadline):
            raise KVTransferError(peer, "the connection ended")
        if bytes(status) == OTHER_LAYOUT:
            raise LayoutMismatch(peer, "its blocks have another size")
        if bytes(status) != GRANTED:
            raise CorruptBlock(peer, f"chunk {chunk.index} is no longer offered")
        if not receive_into(sock, [*self._region.runs(into), memoryview(trailer)], deadline):
            raise KVTransferError(peer, "the connection ended")
        if struct.unpack(f"<{num_blocks}Q", trailer) != chunk.generations:
            raise CorruptBlock(peer, f"blocks of chunk {chunk.index} were reused during the copy")
        if chunk.checksum is not None and checksum(self._region, into) != chunk.checksum:
            raise CorruptBlock(peer, f"chunk {chunk.index} fails its checksum")
        return FetchResult(num_blocks * self._region.layout.block_nbytes, time.monotonic() - started)

    def abort(self) -> None:
        """Shut every busy connection down; later fetches fail."""
        self._aborted = True
        for sock in list(self._busy):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """Wait for the copies, close the connections; see Transport."""
        self.abort()
        await asyncio.to_thread(self._executor.shutdown)
        while self._idle:
            self._idle.pop().close()


def _patience(sock: socket.socket, deadline: float | None) -> None:
    """Let the next call on `sock` wait until `deadline` at most. Raises TimeoutError when that is past."""
    if deadline is not None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left_s)


def receive_into(sock: socket.socket, views: list[memoryview], deadline: float | None = None) -> bool:
    """Fill `views` in order; False when the connection ends before the first byte.

    Raises OSError when it ends later, breaks or the deadline (monotonic) passes.
    """
    views, first = [v.cast("B") for v in views if v.nbytes], True
    while views:
        _patience(sock, deadline)
        received = sock.recvmsg_into(views[:MAX_IOVECS])[0]
        if received == 0:
            if first:
                return False
            raise ConnectionResetError("the connection ended in mid-message")
        first = False
        views = _advance(views, received)
    return True


def send_all(sock: socket.socket, views: list[memoryview]) -> None:
    """Send `views` in order. Raises OSError."""
    views = [v.cast("B") for v in views if v.nbytes]
    while views:
        views = _advance(views, sock.sendmsg(views[:MAX_IOVECS]))


def _advance(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """Drop the first `nbytes` bytes of `views`."""
    index = 0
    while nbytes and nbytes >= views[index].nbytes:
        nbytes -= views[index].nbytes
        index += 1
    return [views[index][nbytes:], *views[index + 1 :]] if nbytes else views[index:]
