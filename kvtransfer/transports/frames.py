"""The frames of `tcp` and the blocking socket calls under it, each with a deadline. See tcp.py for who sends what."""

from __future__ import annotations

import contextlib
import socket
import struct
import time

# magic, number of blocks, bytes of one block, capability
REQUEST = struct.Struct("<4sIQ32s")
REQUEST_MAGIC = b"KVRQ"
CAPABILITY_NBYTES = 32
GRANTED, REFUSED, OTHER_LAYOUT = b"\x00", b"\x01", b"\x02"
MAX_BLOCKS_PER_FETCH = 1 << 16
MAX_IOVECS = 1024
# a peer whose host is gone is noticed so, in an idle connection: idle s + interval s * count
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class MalformedRequest(Exception):
    """What a connection brought is no request."""


def decode_header(header: bytes | bytearray) -> tuple[int, int, bytes]:
    """REQUEST's fields: (number of blocks, bytes of one block, capability). Raises MalformedRequest."""
    if len(header) != REQUEST.size:
        raise MalformedRequest(f"a header of {len(header)} bytes")
    magic, num_blocks, block_nbytes, capability = REQUEST.unpack(header)
    if magic != REQUEST_MAGIC or not 0 < num_blocks <= MAX_BLOCKS_PER_FETCH:
        raise MalformedRequest(f"magic {magic!r}, {num_blocks} blocks")
    return num_blocks, block_nbytes, capability


def set_up(sock: socket.socket) -> None:
    """Options of both ends."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def shut_down(sock: socket.socket) -> None:
    """Wake whoever is blocked on `sock`; from any thread."""
    with contextlib.suppress(OSError):  # not connected any more
        sock.shutdown(socket.SHUT_RDWR)


def is_open(sock: socket.socket) -> bool:
    """Whether an idle connection still stands: its peer has sent neither an end nor anything else."""
    sock.setblocking(False)
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _patience(sock: socket.socket, deadline: float) -> None:
    """Let the next call on `sock` wait until `deadline` at most. Raises TimeoutError when that is past."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    sock.settimeout(left_s)


def receive_into(sock: socket.socket, views: list[memoryview], deadline: float) -> None:
    """Fill `views` in order. Raises OSError when the connection ends, breaks or the deadline (monotonic) passes."""
    views = [v.cast("B") for v in views if v.nbytes]
    while views:
        _patience(sock, deadline)
        received = sock.recvmsg_into(views[:MAX_IOVECS])[0]
        if received == 0:
            raise ConnectionResetError("the connection ended")
        views = _advance(views, received)


def send_all(sock: socket.socket, views: list[memoryview], deadline: float) -> None:
    """Send `views` in order. Raises OSError when the connection breaks or the deadline (monotonic) passes."""
    views = [v.cast("B") for v in views if v.nbytes]
    while views:
        _patience(sock, deadline)
        views = _advance(views, sock.sendmsg(views[:MAX_IOVECS]))


def _advance(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """Drop the first `nbytes` bytes of `views`."""
    index = 0
    while nbytes and nbytes >= views[index].nbytes:
        nbytes -= views[index].nbytes
        index += 1
    return [views[index][nbytes:], *views[index + 1 :]] if nbytes else views[index:]
