import itertools
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.transports.frames import (
    CAPABILITY_NBYTES,
    MAX_BLOCKS_PER_FETCH,
    MAX_IOVECS,
    REQUEST,
    REQUEST_MAGIC,
    MalformedRequest,
    decode_header,
    is_open,
    receive_into,
    send_all,
)

CAPABILITY = bytes(range(CAPABILITY_NBYTES))


@pytest.fixture
def ends():
    one, two = socket.socketpair()
    with one, two:
        yield one, two


def soon():
    return time.monotonic() + 20


@given(st.integers(1, MAX_BLOCKS_PER_FETCH), st.integers(0, 2**64 - 1), st.binary(min_size=32, max_size=32))
def test_a_header_comes_back_as_it_was_packed(num_blocks, block_nbytes, capability):
    header = REQUEST.pack(REQUEST_MAGIC, num_blocks, block_nbytes, capability)
    assert decode_header(header) == (num_blocks, block_nbytes, capability)


@given(st.binary(max_size=3 * REQUEST.size) | st.binary(min_size=REQUEST.size, max_size=REQUEST.size))
def test_any_bytes_decode_to_something_within_bounds_or_are_malformed(header):
    try:
        num_blocks, _, capability = decode_header(header)
    except MalformedRequest:
        return
    assert header.startswith(REQUEST_MAGIC) and len(header) == REQUEST.size
    assert 0 < num_blocks <= MAX_BLOCKS_PER_FETCH and len(capability) == CAPABILITY_NBYTES


@given(st.integers(0, REQUEST.size * 8 - 1))
def test_a_flipped_bit_never_escapes_the_bounds(bit):
    header = bytearray(REQUEST.pack(REQUEST_MAGIC, 5, 4096, CAPABILITY))
    header[bit // 8] ^= 1 << bit % 8
    if bit < 8 * len(REQUEST_MAGIC):
        with pytest.raises(MalformedRequest):
            decode_header(header)
        return
    try:
        assert 0 < decode_header(header)[0] <= MAX_BLOCKS_PER_FETCH
    except MalformedRequest:
        assert 32 <= bit < 64, "only a number of blocks can be out of bounds"


@pytest.mark.parametrize("num_blocks", [0, MAX_BLOCKS_PER_FETCH + 1, 2**32 - 1])
def test_a_number_of_blocks_out_of_bounds_is_malformed_before_anything_is_allocated(num_blocks):
    with pytest.raises(MalformedRequest, match=str(num_blocks)):
        decode_header(REQUEST.pack(REQUEST_MAGIC, num_blocks, 4096, CAPABILITY))


@pytest.mark.parametrize("num_views", [1, 7, MAX_IOVECS, 2 * MAX_IOVECS + 5])
def test_more_views_than_a_call_takes_arrive_in_order_through_small_buffers(ends, num_views):
    sender, receiver = ends
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # partial sends and receives
    data = b"".join(i.to_bytes(4, "little") * (i % 7) for i in range(num_views)) + b"the end"
    cuts = [0, *sorted({i * len(data) // num_views for i in range(1, num_views)}), len(data)]
    outgoing = [memoryview(data)[a:b] for a, b in itertools.pairwise(cuts)]
    into = bytearray(len(data))
    incoming = [memoryview(into)[a : a + 3] for a in range(0, len(data), 3)]
    thread = threading.Thread(target=send_all, args=(sender, [memoryview(b""), *outgoing], soon()))
    thread.start()
    receive_into(receiver, incoming, soon())
    thread.join()
    assert into == data


def test_an_end_in_the_middle_is_an_error(ends):
    sender, receiver = ends
    sender.sendall(b"half")
    sender.close()
    with pytest.raises(ConnectionResetError):
        receive_into(receiver, [memoryview(bytearray(8))], soon())


def test_receiving_and_sending_stop_at_the_deadline_though_bytes_trickle(ends):
    sender, receiver = ends
    stop = threading.Event()

    def trickle():
        while not stop.wait(0.005):
            sender.send(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(TimeoutError):
        receive_into(receiver, [memoryview(bytearray(1 << 20))], time.monotonic() + 0.1)
    stop.set()
    thread.join()
    with pytest.raises(TimeoutError):
        send_all(sender, [memoryview(bytearray(64 << 20))], time.monotonic() + 0.1)


def test_an_idle_connection_is_open_until_its_peer_ends_it_or_speaks_out_of_turn(ends):
    one, two = ends
    assert is_open(one) and is_open(one)
    two.sendall(b"?")
    assert not is_open(one)
    one.recv(1)
    assert is_open(one)
    two.close()
    assert not is_open(one)
