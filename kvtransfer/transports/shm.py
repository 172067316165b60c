"""`shm`: the owner hands its pool's memfd, read-only, to peers of the same host; a reader copies by memmove.

The memfd travels over an abstract Unix socket after the handshake. The reader checks the offered generations before
and after the copy: a block that was reused meanwhile is CorruptBlock, never READY.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import fcntl
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvtransfer.region import F_GET_SEALS, F_SEAL_SHRINK, PoolRegion, generations_offset, region_nbytes
from kvtransfer.transports.base import Chunk, FetchResult, check_fits, checksum, join_copy
from kvtransfer.transports.handshake import HandshakeError, prove_as_reader
from kvtransfer.transports.listener import Listener
from tandem.errors import CorruptBlock, KVTransferError, LayoutMismatch
from tandem.types import PeerEndpoint

# what comes with the descriptor: num_blocks, block_nbytes
_HEADER = struct.Struct("<QQ")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
# a copy looks at its deadline and for an abort this often
MAX_MOVE_NBYTES = 8 << 20


class ShmExporter:
    """The owner's side; see Exporter. `name` is that of the abstract socket, without the leading NUL."""

    def __init__(self, region: PoolRegion, secret: str, name: str) -> None:
        self._region = region
        self._secret = secret
        self._name = name
        self._listener: Listener | None = None

    async def start(self) -> str:
        """Serve; return the socket's name."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.bind(f"\0{self._name}")
        except OSError:
            sock.close()
            raise
        self._listener = Listener(sock, self._secret, self._hand_over)
        self._listener.start()
        return self._name

    async def close(self) -> None:
        """Stop serving. Peers that have mapped the pool keep their (read-only) map until they close it."""
        if self._listener is not None:
            await self._listener.close()
            self._listener = None

    async def _hand_over(self, connection: socket.socket) -> None:
        require_same_user(connection)
        fd = self._region.open_read_only()
        try:
            socket.send_fds(connection, [_HEADER.pack(self._region.num_blocks, self._region.layout.block_nbytes)], [fd])
        finally:
            os.close(fd)


def require_same_user(connection: socket.socket) -> None:
    """Raise HandshakeError unless the other end runs as our user or as root."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(credentials)
    if uid not in (0, os.getuid()):
        raise HandshakeError(f"the other end is user {uid}")


class ShmTransport:
    """The reader's side; see Transport. `num_threads` copies run at a time."""

    name = "shm"

    def __init__(self, region: PoolRegion, secret: str, num_threads: int) -> None:
        self._region = region
        self._secret = secret
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-shm")
        self._peer = ""
        self._map: mmap.mmap | None = None
        self._source: np.ndarray | None = None
        self._generations: np.ndarray | None = None
        self._aborted = threading.Event()

    async def connect(self, peer: PeerEndpoint, deadline: float) -> None:
        """Fetch and map the peer's pool; see Transport."""
        self._peer = peer.worker_id
        loop = asyncio.get_running_loop()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                async with asyncio.timeout_at(loop.time() + deadline - time.monotonic()):
                    await loop.sock_connect(sock, f"\0{peer.shm_name}")
                    require_same_user(sock)
                    await prove_as_reader(sock, self._secret)
                    await _readable(sock)
                header, fds = receive_fds(sock, _HEADER.size)
        except (OSError, TimeoutError, HandshakeError) as exc:
            raise KVTransferError(peer.worker_id, f"shm socket {peer.shm_name}: {str(exc) or 'timed out'}") from exc
        try:
            self._attach(header, fds)
        except OSError as exc:
            raise KVTransferError(peer.worker_id, f"its pool cannot be mapped: {exc}") from exc
        finally:
            for fd in fds:
                os.close(fd)

    def _attach(self, header: bytes, fds: list[int]) -> None:
        if len(fds) != 1 or len(header) != _HEADER.size:
            raise KVTransferError(self._peer, "the peer handed no pool over")
        num_blocks, block_nbytes = _HEADER.unpack(header)
        if block_nbytes != self._region.layout.block_nbytes:
            raise LayoutMismatch(
                self._peer, f"its blocks have {block_nbytes} bytes, ours {self._region.layout.block_nbytes}"
            )
        nbytes = region_nbytes(num_blocks, block_nbytes)
        if not num_blocks or os.fstat(fds[0]).st_size != nbytes:
            raise LayoutMismatch(self._peer, f"its pool has {os.fstat(fds[0]).st_size} bytes, {nbytes} were announced")
        if not fcntl.fcntl(fds[0], F_GET_SEALS) & F_SEAL_SHRINK:  # shrinking it would kill us with SIGBUS
            raise KVTransferError(self._peer, "its pool is not sealed")
        self._map = mmap.mmap(fds[0], nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self._source = np.frombuffer(self._map, dtype=np.uint8, count=num_blocks * block_nbytes)
        self._generations = np.frombuffer(
            self._map, dtype=np.uint64, count=num_blocks, offset=generations_offset(num_blocks, block_nbytes)
        )

    async def fetch(
        self, capability: bytes, chunk: Chunk, into_block_ids: Sequence[int], deadline: float
    ) -> FetchResult:
        """Copy in a side thread; see Transport. The capability is not asked: whoever has the map may read it."""
        if self._generations is None or self._aborted.is_set():
            raise KVTransferError(self._peer, "the transport is not connected")
        check_fits(self._peer, self._region, chunk, into_block_ids)
        if min(chunk.block_ids) < 0 or max(chunk.block_ids) >= len(self._generations):
            raise KVTransferError(self._peer, f"chunk {chunk.index} names blocks that the peer's pool does not have")
        cancelled = threading.Event()
        copy = asyncio.get_running_loop().run_in_executor(
            self._executor, self._copy, chunk, tuple(into_block_ids), deadline, cancelled
        )
        return await join_copy(copy, cancelled.set)

    def _copy(self, chunk: Chunk, into: tuple[int, ...], deadline: float, cancelled: threading.Event) -> FetchResult:
        started, nbytes = time.monotonic(), self._region.layout.block_nbytes
        assert self._source is not None
        self._check_generations(chunk, "before")
        source, runs = self._source.ctypes.data, pair_runs(chunk.block_ids, into, max(1, MAX_MOVE_NBYTES // nbytes))
        with self._region.buffer[:]:  # our map stays while it is written by address
            target = np.frombuffer(self._region.buffer, np.uint8).ctypes.data
            for src, dst, count in runs:
                if self._aborted.is_set() or cancelled.is_set():
                    raise KVTransferError(self._peer, "aborted")
                if time.monotonic() > deadline:
                    raise KVTransferError(self._peer, f"chunk {chunk.index} was not copied in time")
                ctypes.memmove(target + dst * nbytes, source + src * nbytes, count * nbytes)
        self._check_generations(chunk, "during")
        if chunk.checksum is not None and checksum(self._region, into) != chunk.checksum:
            raise CorruptBlock(self._peer, f"chunk {chunk.index} fails its checksum")
        return FetchResult(len(into) * nbytes, time.monotonic() - started)

    def _check_generations(self, chunk: Chunk, when: str) -> None:
        assert self._generations is not None
        if self._generations[list(chunk.block_ids)].tolist() != list(chunk.generations):
            raise CorruptBlock(self._peer, f"blocks of chunk {chunk.index} were reused {when} the copy")

    def abort(self) -> None:
        """Running copies stop within MAX_MOVE_NBYTES; later fetches fail."""
        self._aborted.set()

    async def close(self) -> None:
        """Wait for the copies, unmap; see Transport."""
        self.abort()
        await asyncio.to_thread(self._executor.shutdown)
        self._source = self._generations = None
        if self._map is not None:
            self._map.close()
            self._map = None


def pair_runs(source: Sequence[int], target: Sequence[int], max_count: int) -> list[tuple[int, int, int]]:
    """(first source id, first target id, count <= max_count) for stretches that are consecutive on both sides."""
    runs: list[tuple[int, int, int]] = []
    for src, dst in zip(source, target, strict=True):
        if runs:
            first_src, first_dst, count = runs[-1]
            if (src, dst) == (first_src + count, first_dst + count) and count < max_count:
                runs[-1] = (first_src, first_dst, count + 1)
                continue
        runs.append((src, dst, 1))
    return runs


def receive_fds(sock: socket.socket, nbytes: int) -> tuple[bytes, list[int]]:
    """Up to `nbytes` and the descriptors that came with them, closed on exec (socket.recv_fds of 3.11 drops flags)."""
    fds = array.array("i")
    data, ancillary, _flags, _address = sock.recvmsg(nbytes, socket.CMSG_LEN(fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)


async def _readable(sock: socket.socket) -> None:
    """Wait until `sock` has something to read."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)
