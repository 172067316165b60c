"""A tcp owner against readers that misbehave: each is refused and hung up on, and nobody else notices."""

import asyncio
import random
import socket
import struct
import time

import pytest

from kvtransfer.transports import listener, tcp
from kvtransfer.transports.frames import GRANTED, OTHER_LAYOUT, REFUSED, REQUEST, REQUEST_MAGIC
from kvtransfer.transports.handshake import HandshakeError, prove_as_reader
from kvtransfer.transports.tcp import TcpExporter, TcpTransport
from tandem.errors import KVTransferError
from tests.support.kv_pools import LAYOUT, NUM_BLOCKS, SECRET, bytes_of, chunk_of, endpoint, pool
from tests.support.leaks import nothing_left_behind

MINE, ANOTHERS = b"m" * 32, b"a" * 32
OFFERED = {MINE: [1, 2, 5], ANOTHERS: [7, 8]}


def soon():
    return time.monotonic() + 20


@pytest.fixture
async def source():
    async with nothing_left_behind():
        with pool(seed=1) as region:
            yield region


@pytest.fixture
async def address(source):
    def authorize(capability, block_ids, generations):
        offered = OFFERED.get(capability)
        return offered is not None and list(block_ids) == offered and _generations(source, offered) == list(generations)

    exporter = TcpExporter(source, SECRET, "127.0.0.1", authorize)
    yield await exporter.start()
    await exporter.close()


@pytest.fixture
async def neighbour(source, address):
    """A well-behaved reader with an open connection, who must not notice anything."""
    with pool() as target:
        transport = TcpTransport(target, SECRET, 1)
        await transport.connect(endpoint(tcp_address=address), soon())
        yield transport
        (connection,) = transport._idle
        await transport.fetch(MINE, chunk_of(source, OFFERED[MINE]), [0, 1, 2], soon())
        assert bytes_of(target, [0, 1, 2]) == bytes_of(source, OFFERED[MINE])
        assert transport._idle == [connection], "the same connection still serves"
        await transport.close()


def _generations(region, block_ids):
    return region.generations[list(block_ids)].tolist()


async def dial(address: str, *, prove: bool = True) -> socket.socket:
    host, _, port = address.rpartition(":")
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    if prove:
        try:
            await prove_as_reader(sock, SECRET)
        except BaseException:
            sock.close()
            raise
    return sock


async def answer(sock: socket.socket) -> bytes:
    """Everything until the owner hangs up."""
    loop, data = asyncio.get_running_loop(), b""
    async with asyncio.timeout(20):
        while more := await _received(loop, sock):
            data += more
    sock.close()
    return data


async def _received(loop, sock):
    try:
        return await loop.sock_recv(sock, 1 << 16)
    except ConnectionResetError:  # the owner closed with our bytes unread
        return b""


def request(
    capability=MINE, block_ids=(1, 2, 5), generations=(101, 102, 105), *, nbytes=LAYOUT.block_nbytes, count=None
) -> bytes:
    count = len(block_ids) if count is None else count
    header = REQUEST.pack(REQUEST_MAGIC, count, nbytes, capability)
    return header + struct.pack(f"<{len(block_ids)}Q{len(generations)}Q", *block_ids, *generations)


async def say(address: str, data: bytes, *, then_end: bool = False, prove: bool = True) -> bytes:
    sock = await dial(address, prove=prove)
    try:
        await asyncio.get_running_loop().sock_sendall(sock, data)
        if then_end:
            sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # hung up on already
    return await answer(sock)


async def test_the_helper_speaks_the_protocol(source, address, neighbour):
    got = await say(address, request(), then_end=True)
    expected = bytes_of(source, OFFERED[MINE]) + struct.pack("<3Q", 101, 102, 105)
    assert got == GRANTED + expected


@pytest.mark.parametrize(
    "asked",
    [
        request(capability=b"f" * 32),
        request(capability=bytes(32)),
        request(capability=ANOTHERS),
        request(block_ids=(7, 8), generations=(107, 108)),
        request(block_ids=(1, 2), generations=(101, 102)),
        request(block_ids=(1, 2, 5, 6), generations=(101, 102, 105, 106)),
        request(block_ids=(2, 1, 5), generations=(102, 101, 105)),
        request(block_ids=(1, 2, 2**64 - 1)),
        request(block_ids=(1, 2, NUM_BLOCKS)),
        request(generations=(101, 102, 104)),
        request(generations=(101, 102, 2**64 - 1)),
    ],
    ids=[
        "a forged capability",
        "an empty capability",
        "another attempt's capability",
        "another attempt's blocks",
        "a part of the offer",
        "more than the offer",
        "another order",
        "a block far outside",
        "a block just outside",
        "a stale generation",
        "a future generation",
    ],
)
async def test_what_was_not_offered_under_the_capability_is_refused(address, neighbour, asked):
    assert await say(address, asked) == REFUSED


async def test_another_block_size_is_refused_by_name(address, neighbour):
    assert await say(address, request(nbytes=LAYOUT.block_nbytes * 2)) == OTHER_LAYOUT


@pytest.mark.parametrize(
    "bad",
    [
        b"XXXX" + request()[4:],
        request(count=0),
        request(count=2**32 - 1),
        request(count=tcp.MAX_BLOCKS_PER_FETCH + 1),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64),
    ],
    ids=["wrong magic", "no blocks", "oversized", "just oversized", "http"],
)
async def test_a_malformed_request_ends_the_connection_without_an_answer(address, neighbour, bad):
    assert await say(address, bad) == b""


@pytest.mark.parametrize("length", [1, REQUEST.size - 1, REQUEST.size, REQUEST.size + 8, len(request()) - 1])
async def test_a_truncated_request_ends_the_connection_without_an_answer(address, neighbour, length):
    assert await say(address, request()[:length], then_end=True) == b""


@pytest.mark.parametrize("length", [1, REQUEST.size, len(request()) - 1])
async def test_a_request_that_is_never_finished_is_given_up(address, neighbour, monkeypatch, length):
    monkeypatch.setattr(tcp, "REQUEST_TIMEOUT_S", 0.1)
    assert await say(address, request()[:length]) == b""


async def test_a_reader_that_takes_nothing_is_given_up(source, monkeypatch):
    monkeypatch.setattr(tcp, "REQUEST_TIMEOUT_S", 0.2)
    with pool(20_000, seed=None) as large:  # more than the socket buffers hold
        exporter = TcpExporter(large, SECRET, "127.0.0.1", lambda *_: True)
        blocks = tuple(range(20_000))
        sock = await dial(await exporter.start())
        asked = request(block_ids=blocks, generations=tuple(_generations(large, blocks)))
        await asyncio.get_running_loop().sock_sendall(sock, asked)
        await asyncio.sleep(0.5)
        got = await answer(sock)
        assert got.startswith(GRANTED) and len(got) < 20_000 * LAYOUT.block_nbytes
        await exporter.close()


@pytest.mark.parametrize("seed", range(40))
async def test_random_bytes_after_the_handshake_end_only_their_own_connection(address, neighbour, seed):
    rng = random.Random(seed)
    data = bytearray(request())
    if seed % 2:  # near misses, else plain noise
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        data = bytearray(rng.randbytes(rng.randint(1, 400)))
    assert await say(address, bytes(data), then_end=True) in (b"", REFUSED, OTHER_LAYOUT)


@pytest.mark.parametrize("seed", range(20))
async def test_random_bytes_instead_of_the_handshake_get_no_block(source, address, neighbour, seed):
    data = random.Random(seed).randbytes(seed * 7 + 1)
    got = await say(address, b"TANDEMKV" * (seed % 3) + data, then_end=True, prove=False)
    assert len(got) in (0, 48), "nothing, or the owner's half of the handshake"


async def test_a_reader_that_never_proves_itself_is_hung_up_on(address, neighbour, monkeypatch):
    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT_S", 0.1)
    assert await say(address, b"TANDEMKV", prove=False) == b""


async def test_connections_beyond_the_limit_are_refused_and_the_others_stay(address, neighbour, monkeypatch):
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 3)
    held = [await dial(address) for _ in range(2)]
    with pytest.raises((HandshakeError, ConnectionError)):
        await dial(address)
    for sock in held:
        sock.close()


async def test_a_handshake_that_is_replayed_proves_nothing(address, neighbour):
    sock = await dial(address, prove=False)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, b"TANDEMKV" + bytes(16))
    first = await loop.sock_recv(sock, 48)
    await loop.sock_sendall(sock, first[16:])  # the owner's own proof, reflected
    assert await answer(sock) == b""


async def test_an_idle_connection_that_the_owner_has_ended_is_replaced_by_the_next_fetch(source):
    with pool() as target:
        exporter = TcpExporter(source, SECRET, "127.0.0.1", lambda *_: True)
        address = await exporter.start()
        transport = TcpTransport(target, SECRET, 1)
        await transport.connect(endpoint(tcp_address=address), soon())
        await transport.fetch(MINE, chunk_of(source, [1]), [1], soon())
        (task, connection), *_ = exporter._listener._connections.items()
        connection.shutdown(socket.SHUT_RDWR)
        await asyncio.wait([task])
        await transport.fetch(MINE, chunk_of(source, [2]), [2], soon())
        assert bytes_of(target, [2]) == bytes_of(source, [2])
        await transport.close()
        await exporter.close()


async def test_a_fetch_that_finds_every_connection_busy_waits_no_longer_than_its_deadline(source):
    started, resume = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold(*_):
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(resume.wait(), loop).result(20)
        return True

    with pool() as target:
        exporter = TcpExporter(source, SECRET, "127.0.0.1", hold)
        transport = TcpTransport(target, SECRET, 1)
        await transport.connect(endpoint(tcp_address=await exporter.start()), soon())
        first = asyncio.create_task(transport.fetch(MINE, chunk_of(source, [1]), [1], soon()))
        await started.wait()
        with pytest.raises(KVTransferError, match="no free connection"):
            await transport.fetch(MINE, chunk_of(source, [2]), [2], time.monotonic() + 0.05)
        resume.set()
        await first
        await transport.close()
        await exporter.close()


async def test_the_owner_can_close_while_it_serves(source):
    with pool(20_000) as large:  # more than the socket buffers hold
        exporter = TcpExporter(large, SECRET, "127.0.0.1", lambda *_: True)
        blocks = tuple(range(20_000))
        sock = await dial(await exporter.start())
        asked = request(block_ids=blocks, generations=tuple(_generations(large, blocks)))
        await asyncio.get_running_loop().sock_sendall(sock, asked)
        first = await asyncio.get_running_loop().sock_recv(sock, 4096)  # it serves, and waits for us
        await exporter.close()
        assert len(first + await answer(sock)) < 20_000 * LAYOUT.block_nbytes


@pytest.mark.parametrize("capability", [b"", b"short", b"l" * 33])
async def test_a_capability_of_the_wrong_length_is_not_sent(source, address, neighbour, capability):
    with pytest.raises(KVTransferError, match="capability"):
        await neighbour.fetch(capability, chunk_of(source, [1, 2, 5]), [0, 1, 2], soon())


async def test_ipv6_addresses_work(source):
    with pool() as target:
        try:
            exporter = TcpExporter(source, SECRET, "::1", lambda *_: True)
            address = await exporter.start()
        except OSError:
            await exporter.close()
            pytest.skip("no IPv6 here")
        assert address.startswith("[::1]:")
        transport = TcpTransport(target, SECRET, 1)
        await transport.connect(endpoint(tcp_address=address), soon())
        await transport.fetch(MINE, chunk_of(source, [3]), [4], soon())
        assert bytes_of(target, [4]) == bytes_of(source, [3])
        await transport.close()
        await exporter.close()


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:notaport", "127.0.0.1:1"])
async def test_an_address_that_leads_nowhere_is_an_error(source, address):
    transport = TcpTransport(source, SECRET, 1)
    with pytest.raises(KVTransferError, match="tcp"):
        await transport.connect(endpoint(tcp_address=address), soon())
    await transport.close()
