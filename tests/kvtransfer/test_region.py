import ctypes
import ctypes.util
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.region import (
    F_ADD_SEALS,
    F_GET_SEALS,
    F_SEAL_FUTURE_WRITE,
    F_SEAL_GROW,
    F_SEAL_SEAL,
    F_SEAL_SHRINK,
    PoolRegion,
    coalesce,
    generations_offset,
    region_nbytes,
)
from tandem.layout import KVLayout
from tests.support.kv_pools import LAYOUT, NUM_BLOCKS, bytes_of, pool
from tests.support.leaks import num_memfds, num_pool_maps

ODD = KVLayout(num_layers=1, num_kv_heads=1, head_dim=3, block_size=1, dtype="bfloat16")  # 12 bytes a block
NBYTES = region_nbytes(NUM_BLOCKS, LAYOUT.block_nbytes)


@pytest.fixture
def region():
    with pool(seed=1) as made:
        yield made


@pytest.fixture
def peer_fd(region):
    fd = region.open_read_only()
    yield fd
    os.close(fd)


def test_the_pool_is_sealed_against_everything_but_its_owners_map(peer_fd):
    seals = fcntl.fcntl(peer_fd, F_GET_SEALS)
    assert seals == F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL


def test_whoever_is_handed_the_pool_reads_what_the_owner_writes_after_the_sealing(region, peer_fd):
    with mmap.mmap(peer_fd, NBYTES, mmap.MAP_SHARED, mmap.PROT_READ) as seen:
        region.block(3)[:] = b"\x77" * LAYOUT.block_nbytes
        assert seen[3 * LAYOUT.block_nbytes : 4 * LAYOUT.block_nbytes] == bytes_of(region, [3])
        region.generations[2] = 0x0102030405060708
        offset = generations_offset(NUM_BLOCKS, LAYOUT.block_nbytes) + 16
        assert int.from_bytes(seen[offset : offset + 8], "little") == 0x0102030405060708


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_nobody_else_can_map_the_pool_writable(peer_fd, flags):
    fd = os.open(f"/proc/self/fd/{peer_fd}", flags)  # a peer may open it anew, even for writing: the seals hold
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, NBYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def test_nobody_else_can_write_or_resize_the_pool_through_a_descriptor(peer_fd):
    fd = os.open(f"/proc/self/fd/{peer_fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        for nbytes in (0, NBYTES - 1, NBYTES + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, nbytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, F_ADD_SEALS, 0)
    finally:
        os.close(fd)


def test_a_read_only_map_cannot_be_made_writable(peer_fd):
    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    with mmap.mmap(peer_fd, NBYTES, mmap.MAP_SHARED, mmap.PROT_READ) as seen:
        view = np.frombuffer(seen, np.uint8)
        address = view.ctypes.data
        del view
        writable = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(NBYTES), mmap.PROT_READ | mmap.PROT_WRITE)
        assert writable == -1


def test_a_new_pool_is_zero_and_wholly_in_memory():
    with pool() as region:
        assert not any(region.buffer) and not region.generations.any()
        resident = next(
            int(line.split()[1])
            for entry in Path("/proc/self/smaps").read_text().split("VmFlags")
            if "memfd:tandem-kv" in entry
            for line in entry.splitlines()
            if line.startswith("Rss:")
        )
        assert resident * 1024 >= NBYTES


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7])
def test_generations_are_aligned_behind_blocks_of_any_size(num_blocks):
    with pool(num_blocks, ODD, seed=1) as region:
        assert region.generations.ctypes.data % 8 == 0
        before = bytes_of(region, range(num_blocks))
        region.generations[:] = np.uint64(2**64 - 1)
        assert bytes_of(region, range(num_blocks)) == before
        assert len(region.buffer) == num_blocks * ODD.block_nbytes


def test_blocks_are_views_of_the_pool(region):
    assert b"".join(region.runs([5, 6, 7, 2])) == bytes_of(region, [5, 6, 7, 2])
    assert len(region.runs([5, 6, 7, 2])) == 2
    region.runs([5, 6])[0][LAYOUT.block_nbytes] = 0xEE
    assert region.block(6)[0] == 0xEE


@pytest.mark.parametrize(
    "block_ids, runs",
    [
        ([], []),
        ([3], [(3, 1)]),
        ([3, 4, 5, 9], [(3, 3), (9, 1)]),
        ([5, 4, 3], [(5, 1), (4, 1), (3, 1)]),
        ([1, 1, 2], [(1, 1), (1, 2)]),
    ],
)
def test_consecutive_ids_join(block_ids, runs):
    assert coalesce(block_ids) == runs


def test_close_is_idempotent_and_leaves_neither_descriptor_nor_map():
    before = num_memfds(), num_pool_maps()
    region = PoolRegion.create(LAYOUT, 3)
    assert num_memfds() > before[0] and num_pool_maps() == before[1] + 1
    region.close()
    region.close()
    assert (num_memfds(), num_pool_maps()) == before


def test_a_view_that_is_still_held_keeps_the_map_but_does_not_break_close():
    before = num_pool_maps()
    region = PoolRegion.create(LAYOUT, 3)
    view = np.frombuffer(region.buffer, np.uint8)
    region.close()
    assert not view.any(), "still readable"
    del view, region
    assert num_pool_maps() == before


def test_a_failed_creation_leaves_no_descriptor(monkeypatch):
    before = num_memfds(), num_pool_maps()

    def refuse(*_):
        raise OSError("no seals in this kernel")

    monkeypatch.setattr("kvtransfer.region.fcntl.fcntl", refuse)
    with pytest.raises(OSError, match="no seals"):
        PoolRegion.create(LAYOUT, 3)
    assert (num_memfds(), num_pool_maps()) == before
