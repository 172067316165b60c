"""The accepting half that both exporters share: bounded connections, handshake with a timeout, clean end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable

from kvtransfer.transports.handshake import HandshakeError, prove_as_owner

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 256


class Listener:
    """Accepts on `sock`, proves the secret, hands each connection to `serve`; a connection lives as long as `serve`."""

    def __init__(self, sock: socket.socket, secret: str, serve: Callable[[socket.socket], Awaitable[None]]) -> None:
        """`sock` is bound, not yet listening; it is owned from here on."""
        self._sock = sock
        self._secret = secret
        self._serve = serve
        self._connections: dict[asyncio.Task[None], socket.socket] = {}
        self._acceptor: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Listen and accept until `close`."""
        self._sock.setblocking(False)
        self._sock.listen(128)
        self._acceptor = asyncio.create_task(self._accept(), name="kv transport acceptor")

    async def close(self) -> None:
        """Stop accepting, shut every connection down, wait for their ends; idempotent."""
        if self._acceptor is not None:
            self._acceptor.cancel()
            await asyncio.gather(self._acceptor, return_exceptions=True)
            self._acceptor = None
        self._sock.close()
        connections = dict(self._connections)
        for task, connection in connections.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that is blocked on it
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        for connection in connections.values():
            connection.close()  # of a task that was cancelled before it began

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._sock)
            except OSError as exc:  # out of descriptors, or a connection that was reset before it was taken
                log.warning("accepting a KV connection failed: %s", exc)
                await asyncio.sleep(0.1)
                continue
            connection.setblocking(False)
            if len(self._connections) >= MAX_CONNECTIONS:
                log.warning("more than %d KV connections: one is refused", MAX_CONNECTIONS)
                connection.close()
                continue
            task = asyncio.create_task(self._run(connection), name="kv transport connection")
            self._connections[task] = connection
            task.add_done_callback(self._connections.pop)

    async def _run(self, connection: socket.socket) -> None:
        with connection:
            try:
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    await prove_as_owner(connection, self._secret)
                await self._serve(connection)
            except (OSError, TimeoutError, HandshakeError) as exc:
                log.info("a KV connection ended: %s", exc)
