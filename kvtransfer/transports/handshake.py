"""Mutual proof that both ends of a transport's socket know the cluster secret; the secret itself never travels.

reader -> owner: MAGIC, nonce
owner -> reader: nonce, HMAC("owner", both nonces)
reader -> owner: HMAC("reader", both nonces)
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket

MAGIC = b"TANDEMKV"
NONCE_NBYTES = 16
PROOF_NBYTES = 32


class HandshakeError(Exception):
    """The other end does not know the secret, or speaks something else."""


def _proof(secret: str, who: bytes, ours: bytes, theirs: bytes) -> bytes:
    return hmac.new(secret.encode(), who + ours + theirs, hashlib.sha256).digest()


async def receive_exactly(sock: socket.socket, nbytes: int) -> bytes:
    """Read `nbytes` from a non-blocking socket. Raises HandshakeError at its end."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < nbytes:
        more = await loop.sock_recv(sock, nbytes - len(data))
        if not more:
            raise HandshakeError("the connection ended")
        data += more
    return data


async def prove_as_reader(sock: socket.socket, secret: str) -> None:
    """Reader's part, on a non-blocking socket. Raises HandshakeError, OSError; the caller has the timeout."""
    loop = asyncio.get_running_loop()
    nonce = secrets.token_bytes(NONCE_NBYTES)
    await loop.sock_sendall(sock, MAGIC + nonce)
    answer = await receive_exactly(sock, NONCE_NBYTES + PROOF_NBYTES)
    theirs, proof = answer[:NONCE_NBYTES], answer[NONCE_NBYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"owner", nonce, theirs)):
        raise HandshakeError("the peer does not know the cluster secret")
    await loop.sock_sendall(sock, _proof(secret, b"reader", nonce, theirs))


async def prove_as_owner(sock: socket.socket, secret: str) -> None:
    """Owner's part, on a non-blocking socket. Raises HandshakeError, OSError; the caller has the timeout."""
    loop = asyncio.get_running_loop()
    hello = await receive_exactly(sock, len(MAGIC) + NONCE_NBYTES)
    if not hello.startswith(MAGIC):
        raise HandshakeError("not a KV transport")
    theirs, nonce = hello[len(MAGIC) :], secrets.token_bytes(NONCE_NBYTES)
    await loop.sock_sendall(sock, nonce + _proof(secret, b"owner", theirs, nonce))
    proof = await receive_exactly(sock, PROOF_NBYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"reader", theirs, nonce)):
        raise HandshakeError("the reader does not know the cluster secret")
