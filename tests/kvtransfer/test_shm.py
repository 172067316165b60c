import asyncio
import fcntl
import mmap
import os
import socket
import time
from types import SimpleNamespace

import pytest

from kvtransfer.transports import shm
from kvtransfer.transports.handshake import prove_as_owner, prove_as_reader
from kvtransfer.transports.shm import ShmExporter, ShmTransport, pair_runs
from tandem.errors import CorruptBlock, KVTransferError, LayoutMismatch
from tests.support.kv_pools import LAYOUT, NUM_BLOCKS, SECRET, bytes_of, chunk_of, endpoint, pool, unused_shm_name
from tests.support.leaks import nothing_left_behind


def soon():
    return time.monotonic() + 20


@pytest.fixture
async def source():
    async with nothing_left_behind():
        with pool(seed=1) as region:
            yield region


@pytest.fixture
def target(source):
    with pool() as region:
        yield region


@pytest.mark.parametrize(
    "source_ids, target_ids, max_count, runs",
    [
        ([1, 2, 3], [7, 8, 9], 10, [(1, 7, 3)]),
        ([1, 2, 3], [7, 9, 8], 10, [(1, 7, 1), (2, 9, 1), (3, 8, 1)]),
        ([1, 2, 4, 5], [7, 8, 9, 10], 10, [(1, 7, 2), (4, 9, 2)]),
        ([1, 2, 3, 4, 5], [0, 1, 2, 3, 4], 2, [(1, 0, 2), (3, 2, 2), (5, 4, 1)]),
        ([], [], 1, []),
    ],
)
def test_stretches_that_are_consecutive_on_both_sides_are_one_move(source_ids, target_ids, max_count, runs):
    assert pair_runs(source_ids, target_ids, max_count) == runs


async def test_a_reader_is_handed_a_descriptor_that_can_only_read(source):
    exporter = ShmExporter(source, SECRET, unused_shm_name())
    name = await exporter.start()
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, f"\0{name}")
        await prove_as_reader(sock, SECRET)
        await shm._readable(sock)
        _, (fd,), _, _ = socket.recv_fds(sock, 64, 4)
    try:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(OSError):
            os.write(fd, b"x")
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_WRITE)
    finally:
        os.close(fd)
        await exporter.close()


async def test_the_descriptor_is_not_inherited_by_children_and_not_kept(source, target, monkeypatch):
    inheritable = []
    attach = ShmTransport._attach

    def noted(self, header, fds):
        inheritable.extend(os.get_inheritable(fd) for fd in fds)
        attach(self, header, fds)

    monkeypatch.setattr(ShmTransport, "_attach", noted)
    exporter = ShmExporter(source, SECRET, unused_shm_name())
    transport = ShmTransport(target, SECRET, 1)
    await transport.connect(endpoint(shm_name=await exporter.start()), soon())
    assert inheritable == [False]
    await transport.close()
    await exporter.close()


@pytest.fixture
def as_another_user(monkeypatch):
    """Whatever connects from now on looks like user 4242 to the other end."""
    credentials = SimpleNamespace(size=shm._CREDENTIALS.size, unpack=lambda _: (1, 4242, 1))
    monkeypatch.setattr(shm, "_CREDENTIALS", credentials)


async def test_a_reader_of_another_user_is_handed_nothing_though_it_knows_the_secret(source, as_another_user):
    exporter = ShmExporter(source, SECRET, unused_shm_name())
    name, loop = await exporter.start(), asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, f"\0{name}")
        await prove_as_reader(sock, SECRET)
        async with asyncio.timeout(20):
            await shm._readable(sock)
        assert shm.receive_fds(sock, 64) == (b"", [])
    await exporter.close()


async def test_an_owner_of_another_user_is_not_believed(source, target, as_another_user):
    exporter = ShmExporter(source, SECRET, unused_shm_name())
    transport = ShmTransport(target, SECRET, 1)
    with pytest.raises(KVTransferError, match="user 4242"):
        await transport.connect(endpoint(shm_name=await exporter.start()), soon())
    await transport.close()
    await exporter.close()


async def test_a_block_that_was_reused_before_the_copy_costs_no_copy(source, target):
    exporter = ShmExporter(source, SECRET, unused_shm_name())
    transport = ShmTransport(target, SECRET, 1)
    await transport.connect(endpoint(shm_name=await exporter.start()), soon())
    chunk = chunk_of(source, [1, 2])
    source.generations[2] += 1
    with pytest.raises(CorruptBlock, match="before the copy"):
        await transport.fetch(b"", chunk, [5, 6], soon())
    assert not any(target.buffer)
    await transport.close()
    await exporter.close()


class Owner:
    """Something that knows the secret and hands over what the test says."""

    def __init__(self, payload: bytes, fds: list[int]) -> None:
        self._payload, self._fds = payload, fds
        self.name = unused_shm_name()
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.bind(f"\0{self.name}")
        self._sock.listen()
        self._sock.setblocking(False)

    async def serve(self) -> None:
        connection, _ = await asyncio.get_running_loop().sock_accept(self._sock)
        with connection, self._sock:
            await prove_as_owner(connection, SECRET)
            if self._fds:
                socket.send_fds(connection, [self._payload], self._fds)
            else:
                connection.sendall(self._payload)


async def refused(owner: Owner, target, error: type[Exception], match: str) -> None:
    transport = ShmTransport(target, SECRET, 1)
    serving = asyncio.create_task(owner.serve())
    with pytest.raises(error, match=match):
        await transport.connect(endpoint(shm_name=owner.name), soon())
    await serving
    await transport.close()


async def test_an_owner_that_hands_no_descriptor_over_is_refused(target):
    await refused(Owner(shm._HEADER.pack(4, LAYOUT.block_nbytes), []), target, KVTransferError, "no pool")


async def test_an_owner_that_hangs_up_after_the_handshake_is_refused(target):
    await refused(Owner(b"", []), target, KVTransferError, "no pool")


@pytest.mark.parametrize("num_blocks", [0, NUM_BLOCKS - 1, NUM_BLOCKS + 1, 1 << 60])
async def test_a_pool_that_is_not_as_large_as_announced_is_refused(source, target, num_blocks):
    fd = source.open_read_only()
    await refused(Owner(shm._HEADER.pack(num_blocks, LAYOUT.block_nbytes), [fd]), target, LayoutMismatch, "announced")
    os.close(fd)


async def test_a_pool_that_could_shrink_under_the_reader_is_refused(target):
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4 * (LAYOUT.block_nbytes + 8))
    await refused(Owner(shm._HEADER.pack(4, LAYOUT.block_nbytes), [fd]), target, KVTransferError, "not sealed")
    os.close(fd)


async def test_a_file_that_cannot_be_sealed_at_all_is_refused(target, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * (LAYOUT.block_nbytes + 8)))
    fd = os.open(path, os.O_RDONLY)
    owner = Owner(shm._HEADER.pack(4, LAYOUT.block_nbytes), [fd])
    await refused(owner, target, KVTransferError, "cannot be mapped|not sealed")
    os.close(fd)


async def test_what_a_reader_has_mapped_outlives_the_exporter_and_the_pool(target):
    exporter_name = unused_shm_name()
    with pool(seed=3) as source:
        expected, chunk = bytes_of(source, [1, 2]), chunk_of(source, [1, 2])
        exporter = ShmExporter(source, SECRET, exporter_name)
        transport = ShmTransport(target, SECRET, 1)
        await transport.connect(endpoint(shm_name=await exporter.start()), soon())
        await exporter.close()
    await transport.fetch(b"", chunk, [5, 6], soon())  # the owner's death is seen by the control channel, not here
    assert bytes_of(target, [5, 6]) == expected
    await transport.close()


async def test_two_exporters_cannot_share_a_name(source):
    exporter = ShmExporter(source, SECRET, unused_shm_name())
    name = await exporter.start()
    with pytest.raises(OSError):
        await ShmExporter(source, SECRET, name).start()
    await exporter.close()
    again = ShmExporter(source, SECRET, name)  # free at once
    await again.start()
    await again.close()
