"""`tcp`: scatter/gather straight out of one pool and into another, for workers on different hosts.

reader -> owner: REQUEST header, block ids (uint64 each), generations (uint64 each)
owner -> reader: a status byte, then the blocks' bytes in order, then their generations after the send (uint64 each)
Numbers are little-endian. The owner serves exactly the blocks that were offered under the capability; anything else
ends the connection, and nobody else's. One fetch at a time on a connection, several connections to a peer. Shutting a
socket down wakes a thread that is blocked on it; closing it would not.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtransfer.region import PoolRegion
from kvtransfer.transports.base import Authorize, Chunk, FetchResult, check_fits, checksum, join_copy
from kvtransfer.transports.frames import (
    CAPABILITY_NBYTES,
    GRANTED,
    MAX_BLOCKS_PER_FETCH,
    OTHER_LAYOUT,
    REFUSED,
    REQUEST,
    REQUEST_MAGIC,
    MalformedRequest,
    decode_header,
    is_open,
    receive_into,
    send_all,
    set_up,
    shut_down,
)
from kvtransfer.transports.handshake import HandshakeError, prove_as_reader
from kvtransfer.transports.listener import MAX_CONNECTIONS, Listener
from tandem.errors import CorruptBlock, KVTransferError, LayoutMismatch
from tandem.types import PeerEndpoint

# an owner gives up on a reader that takes longer to state a request and take the answer
REQUEST_TIMEOUT_S = 30.0


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
        set_up(connection)
        connection.setblocking(True)
        serving = asyncio.get_running_loop().run_in_executor(self._executor, self._answer_all, connection)
        # no thread may use the descriptor once it is closed
        await join_copy(serving, lambda: shut_down(connection))

    def _answer_all(self, connection: socket.socket) -> None:
        """Answer requests until the reader closes or misbehaves."""
        try:
            while self._answer(connection):
                pass
        except MalformedRequest as exc:
            raise HandshakeError(f"malformed request: {exc}") from exc

    def _answer(self, connection: socket.socket) -> bool:
        """Answer the next request; False ends the connection."""
        connection.settimeout(None)  # a reader may be silent for long; close() wakes us
        if not connection.recv(1, socket.MSG_PEEK):
            return False
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        header = bytearray(REQUEST.size)
        receive_into(connection, [memoryview(header)], deadline)
        num_blocks, block_nbytes, capability = decode_header(header)
        body = bytearray(2 * 8 * num_blocks)
        receive_into(connection, [memoryview(body)], deadline)
        numbers = struct.unpack(f"<{2 * num_blocks}Q", body)
        block_ids, generations = numbers[:num_blocks], numbers[num_blocks:]
        if block_nbytes != self._region.layout.block_nbytes:
            connection.sendall(OTHER_LAYOUT)
            return False
        if not self._authorize(capability, block_ids, generations):
            connection.sendall(REFUSED)
            return False
        send_all(connection, [memoryview(GRANTED), *self._region.runs(block_ids)], deadline)
        # read only now: a block that was reused while it was sent shows by them
        trailer = self._region.generations[list(block_ids)].astype("<u8").tobytes()
        send_all(connection, [memoryview(trailer)], deadline)
        return True


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
            set_up(sock)
        except (OSError, ValueError, TimeoutError, HandshakeError) as exc:
            sock.close()
            raise KVTransferError(peer.worker_id, f"tcp {peer.tcp_address}: {str(exc) or 'timed out'}") from exc
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
            raise KVTransferError("", "the transport is not connected")
        check_fits(peer.worker_id, self._region, chunk, into_block_ids)
        if len(chunk.block_ids) > MAX_BLOCKS_PER_FETCH or len(capability) != CAPABILITY_NBYTES:
            raise KVTransferError(
                peer.worker_id,
                f"chunk {chunk.index} has {len(chunk.block_ids)} blocks and a capability of {len(capability)} bytes",
            )
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
        sock = self._take_idle() or await self._dial(peer, deadline)
        reusable = False
        try:
            self._busy.add(sock)
            if self._aborted:  # while dialling, or from another thread: abort() has not seen this socket
                raise KVTransferError(peer.worker_id, "aborted")
            receive = asyncio.get_running_loop().run_in_executor(
                self._executor, self._receive, sock, peer.worker_id, capability, chunk, into, deadline
            )
            result = await join_copy(receive, lambda: shut_down(sock))
            reusable = True
            return result
        except OSError as exc:
            reason = "timed out" if isinstance(exc, TimeoutError) else str(exc)
            raise KVTransferError(peer.worker_id, f"chunk {chunk.index}: {reason}") from exc
        finally:
            self._busy.discard(sock)
            if reusable and not self._aborted:
                self._idle.append(sock)
            else:
                sock.close()

    def _take_idle(self) -> socket.socket | None:
        """Take a connection from the idle ones; those that the owner has ended meanwhile are closed."""
        while self._idle:
            sock = self._idle.pop()
            if is_open(sock):
                return sock
            sock.close()
        return None

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
        send_all(sock, [memoryview(header + body)], deadline)
        status, trailer = bytearray(1), bytearray(8 * num_blocks)
        receive_into(sock, [memoryview(status)], deadline)
        if bytes(status) == OTHER_LAYOUT:
            raise LayoutMismatch(peer, "its blocks have another size")
        if bytes(status) != GRANTED:
            raise KVTransferError(peer, f"chunk {chunk.index} is not offered, or no longer")
        receive_into(sock, [*self._region.runs(into), memoryview(trailer)], deadline)
        if struct.unpack(f"<{num_blocks}Q", trailer) != chunk.generations:
            raise CorruptBlock(peer, f"blocks of chunk {chunk.index} were reused during the copy")
        if chunk.checksum is not None and checksum(self._region, into) != chunk.checksum:
            raise CorruptBlock(peer, f"chunk {chunk.index} fails its checksum")
        return FetchResult(num_blocks * self._region.layout.block_nbytes, time.monotonic() - started)

    def abort(self) -> None:
        """Shut every busy connection down; later fetches fail."""
        self._aborted = True
        for sock in list(self._busy):
            shut_down(sock)

    async def close(self) -> None:
        """Wait for the copies, close the connections; see Transport."""
        self.abort()
        await asyncio.to_thread(self._executor.shutdown)
        while self._idle:
            self._idle.pop().close()
