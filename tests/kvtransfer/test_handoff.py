"""Sender and Receiver over a real control channel and real sockets: the life of attempts, and every way out."""

import asyncio
import random
from collections import Counter

import pytest

from kvtransfer import link as link_module
from kvtransfer import service as service_module
from kvtransfer.transports.shm import ShmTransport
from tandem.config import TransferConfig
from tandem.messages import FailureReason
from tandem.types import PeerEndpoint
from tests.support.kv_ends import (
    PATIENCE_S,
    SIZE,
    Record,
    attempt,
    decode_end,
    eventually,
    held_copies,
    prefill_end,
    settle,
)
from tests.support.kv_pools import NUM_BLOCKS, bytes_of, flip_a_byte, pool
from tests.support.leaks import nothing_left_behind

A, B = attempt("a"), attempt("b")


@pytest.fixture
async def pools():
    async with nothing_left_behind():
        with pool(seed=1) as source, pool() as target:
            yield source, target


@pytest.fixture(params=["shm", "tcp"])
def config(request):
    return TransferConfig(transport=request.param, checksum="on")


@pytest.fixture
async def ends(pools, config):
    source, target = pools
    async with prefill_end(source, config) as prefill, decode_end(target, config) as decode:
        yield prefill, decode


@pytest.fixture
async def shm_ends(pools):
    config = TransferConfig(transport="shm")
    async with prefill_end(pools[0], config) as prefill, decode_end(pools[1], config) as decode:
        yield prefill, decode


# ---- the path


async def test_a_prompt_moves_chunk_by_chunk_and_is_committed_after_its_last_ack(ends):
    prefill, decode = ends
    blocks, into = [3, 4, 9, 8, 30], [11, 12, 2, 3, 4]
    num_tokens = 5 * SIZE - 1
    capability = prefill.sender.open(A)
    prefill.sender.offer(A, blocks[:2], 0, 2 * SIZE, False)  # before anybody subscribed
    decode.receiver.open(A, prefill.peer, capability, into, 0)
    await prefill.acked.reaches(1)
    prefill.sender.offer(A, blocks[2:4], 2 * SIZE, 2 * SIZE, False)
    prefill.sender.offer(A, blocks[4:], 4 * SIZE, SIZE - 1, True)
    prefill.sender.commit(A, num_tokens, 42, 7)
    assert await prefill.committed.reaches(1) == [A]
    ((key, record),) = decode.committed
    assert bytes_of(decode.region, into) == bytes_of(prefill.region, blocks)
    assert (key, record.num_tokens, record.first_token_id, record.first_token_index) == (A, num_tokens, 42, 7)
    assert record.num_chunks == 3 and record.nbytes == 5 * prefill.region.layout.block_nbytes
    assert record.transport in ("shm", "tcp") and record.transfer_s >= record.exposed_transfer_s >= 0
    assert sorted(chunk for _, chunk in prefill.acked) == [0, 1, 2]
    await decode.close(A)
    await settle()
    assert not prefill.failed and not decode.failed and not prefill.counters and not decode.counters


async def test_all_that_was_offered_and_committed_before_the_subscription_is_kept_for_it(ends):
    prefill, decode = ends
    capability = prefill.sender.open(A)
    prefill.offer_all(A, [5, 6, 7], 3 * SIZE, 1)
    prefill.sender.commit(A, 3 * SIZE, 1, 0)
    await settle()
    assert not prefill.acked
    decode.receiver.open(A, prefill.peer, capability, [0, 1, 2], 0)
    await prefill.committed.reaches(1)
    assert bytes_of(decode.region, [0, 1, 2]) == bytes_of(prefill.region, [5, 6, 7])


async def test_many_attempts_share_one_channel_and_each_gets_its_own_blocks(ends):
    prefill, decode = ends
    rng = random.Random(5)
    order = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    into = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    keys = [attempt(f"request-{i}") for i in range(NUM_BLOCKS // 4)]
    for i, key in enumerate(keys):
        mine = slice(4 * i, 4 * i + 4)
        capability = prefill.sender.open(key)
        if i % 2:
            prefill.offer_all(key, order[mine], 4 * SIZE, 1 + i % 3)
        decode.receiver.open(key, prefill.peer, capability, into[mine], 0)
        if not i % 2:
            prefill.offer_all(key, order[mine], 4 * SIZE, 1 + i % 3)
        prefill.sender.commit(key, 4 * SIZE, i, 0)
    assert set(await prefill.committed.reaches(len(keys))) == set(keys)
    assert {key: record.first_token_id for key, record in decode.committed} == {k: i for i, k in enumerate(keys)}
    assert bytes_of(decode.region, into) == bytes_of(prefill.region, order)
    assert len(decode.receiver._links) == 1


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3, 5])
@pytest.mark.parametrize("num_cached_blocks", [1, 2, 3, 4])
async def test_what_the_decode_side_has_cached_is_neither_offered_nor_moved(
    shm_ends, num_cached_blocks, blocks_per_chunk
):
    prefill, decode = shm_ends
    blocks, into, num_tokens = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 5 * SIZE - 2
    capability = prefill.sender.open(A)
    decode.receiver.open(A, prefill.peer, capability, into, num_cached_blocks * SIZE)
    prefill.offer_all(A, blocks, num_tokens, blocks_per_chunk)
    prefill.sender.commit(A, num_tokens, 1, 0)
    await prefill.committed.reaches(1)
    assert not any(bytes_of(decode.region, into[:num_cached_blocks]))
    assert bytes_of(decode.region, into[num_cached_blocks:]) == bytes_of(prefill.region, blocks[num_cached_blocks:])
    assert len(prefill.acked) == -(-5 // blocks_per_chunk), "skipped chunks count as acknowledged"
    assert decode.committed[0][1].num_chunks == -(-5 // blocks_per_chunk) - num_cached_blocks // blocks_per_chunk


@pytest.mark.parametrize("subscribed_first", [True, False])
async def test_a_prompt_that_is_cached_as_a_whole_is_committed_without_a_copy(shm_ends, subscribed_first):
    prefill, decode = shm_ends
    capability = prefill.sender.open(A)
    if subscribed_first:
        decode.receiver.open(A, prefill.peer, capability, [6, 7], 2 * SIZE)
        await eventually(lambda: prefill.sender._outgoing[A].subscriber)
    prefill.offer_all(A, [1, 2], 2 * SIZE, 1)
    prefill.sender.commit(A, 2 * SIZE, 5, 0)
    if not subscribed_first:
        decode.receiver.open(A, prefill.peer, capability, [6, 7], 2 * SIZE)
    await prefill.committed.reaches(1)
    ((_, record),) = decode.committed
    assert (record.num_chunks, record.nbytes, record.transfer_s, record.exposed_transfer_s) == (0, 0, 0.0, 0.0)
    assert len(prefill.acked) == 2


async def test_nothing_is_committed_while_a_chunk_is_not_acknowledged(ends, monkeypatch):
    prefill, decode = ends
    with held_copies(monkeypatch) as gate:
        capability = prefill.sender.open(A)
        decode.receiver.open(A, prefill.peer, capability, [0, 1], 0)
        prefill.offer_all(A, [1, 2], 2 * SIZE, 1)
        prefill.sender.commit(A, 2 * SIZE, 1, 0)
        await gate.is_reached()
        await settle()
        assert not prefill.acked and not decode.committed and decode.receiver.num_copies_in_flight == 2
    await prefill.committed.reaches(1)


# ---- integrity


async def test_a_block_reused_after_its_offer_fails_the_attempt_as_corrupt_on_both_sides(ends):
    prefill, decode = ends
    capability = prefill.sender.open(A)
    prefill.offer_all(A, [1, 2, 3], 3 * SIZE, 3)
    prefill.region.generations[2] += 1
    decode.receiver.open(A, prefill.peer, capability, [0, 1, 2], 0)
    ((key, reason, detail, peer),) = await decode.failed.reaches(1)
    assert (key, reason, peer) == (A, FailureReason.CORRUPT, "prefill-1") and "reused" in detail
    ((key, reason, _, peer),) = await prefill.failed.reaches(1)
    assert (key, reason, peer) == (A, FailureReason.CORRUPT, "decode-1")
    assert decode.counters["transfer_corrupt"] == 1


@pytest.mark.parametrize("checksum, noticed", [("on", True), ("off", False)])
async def test_a_flipped_bit_is_noticed_exactly_when_checksums_are_on(pools, monkeypatch, checksum, noticed):
    config = TransferConfig(transport="tcp", checksum=checksum)
    async with prefill_end(pools[0], config) as prefill, decode_end(pools[1], config) as decode:
        with held_copies(monkeypatch) as gate:
            capability = prefill.sender.open(A)
            decode.receiver.open(A, prefill.peer, capability, [0], 0)
            prefill.offer_all(A, [1], SIZE, 1)
            prefill.sender.commit(A, SIZE, 1, 0)
            await gate.is_reached()
            flip_a_byte(prefill.region, 1)
        if noticed:
            ((_, reason, detail, _),) = await decode.failed.reaches(1)
            assert reason is FailureReason.CORRUPT and "checksum" in detail
        else:
            await prefill.committed.reaches(1)


@pytest.mark.parametrize("transport, expected", [("shm", False), ("tcp", True)])
async def test_checksums_are_sent_on_tcp_and_not_on_shm_unless_told(pools, transport, expected):
    config = TransferConfig(transport=transport)
    async with prefill_end(pools[0], config) as prefill, decode_end(pools[1], config) as decode:
        capability = prefill.sender.open(A)
        decode.receiver.open(A, prefill.peer, capability, [0], 0)
        await eventually(lambda: prefill.sender._outgoing[A].subscriber)
        assert prefill.sender._outgoing[A].wants_checksum is expected


# ---- deadlines


async def test_an_offer_that_nobody_subscribes_to_fails_at_its_deadline_without_a_peer(pools):
    config = TransferConfig(offer_timeout_s=0.1)
    async with prefill_end(pools[0], config) as prefill:
        prefill.sender.open(A)
        prefill.sender.open(B)  # nothing offered: nothing is overdue
        prefill.sender.offer(A, [1], 0, SIZE, False)
        ((key, reason, detail, peer),) = await prefill.failed.reaches(1)
        assert (key, reason, peer) == (A, FailureReason.TRANSFER, "") and "never subscribed" in detail
        await settle()
        assert len(prefill.failed) == 1 and prefill.counters["overdue_offers"] == 1


async def test_an_offer_that_a_subscriber_does_not_acknowledge_fails_at_its_deadline_and_names_it(pools, monkeypatch):
    slow, patient = TransferConfig(transport="shm", offer_timeout_s=0.2), TransferConfig(transport="shm")
    async with prefill_end(pools[0], slow) as prefill, decode_end(pools[1], patient) as decode:
        with held_copies(monkeypatch) as gate:
            capability = prefill.sender.open(A)
            decode.receiver.open(A, prefill.peer, capability, [0], 0)
            await eventually(lambda: prefill.sender._outgoing[A].subscriber)
            prefill.sender.offer(A, [1], 0, SIZE, True)
            await gate.is_reached()
            ((_, reason, detail, peer),) = await prefill.failed.reaches(1)
            assert (reason, peer) == (FailureReason.TRANSFER, "decode-1") and "chunk 0" in detail
            ((_, reason, _, peer),) = await decode.failed.reaches(1)  # it was told
            assert (reason, peer) == (FailureReason.TRANSFER, "prefill-1")
        await decode.close(A)


async def test_an_acknowledged_offer_has_no_deadline_any_more(shm_ends):
    prefill, decode = shm_ends
    capability = prefill.sender.open(A)
    decode.receiver.open(A, prefill.peer, capability, [0, 1], 0)
    prefill.sender.offer(A, [1], 0, SIZE, False)
    timer = prefill.sender._outgoing[A].deadlines[0]
    await prefill.acked.reaches(1)
    assert timer.cancelled() and not prefill.sender._outgoing[A].deadlines


# ---- aborts and closes


async def test_a_close_by_the_prefill_side_fails_the_decode_side(ends):
    prefill, decode = ends
    capability = prefill.sender.open(A)
    decode.receiver.open(A, prefill.peer, capability, [0], 0)
    await eventually(lambda: prefill.sender._outgoing[A].subscriber)
    prefill.sender.close(A)
    prefill.sender.close(A)
    ((key, reason, detail, peer),) = await decode.failed.reaches(1)
    assert (key, reason, peer) == (A, FailureReason.TRANSFER, "prefill-1") and "gave the attempt up" in detail
    for late in (lambda: prefill.sender.offer(A, [1], 0, SIZE, True), lambda: prefill.sender.commit(A, SIZE, 1, 0)):
        late()
    await settle()
    assert not prefill.failed and len(decode.failed) == 1


async def test_a_close_by_the_decode_side_fails_the_prefill_side(ends):
    prefill, decode = ends
    capability = prefill.sender.open(A)
    decode.receiver.open(A, prefill.peer, capability, [0], 0)
    await eventually(lambda: prefill.sender._outgoing[A].subscriber)
    await decode.close(A)
    await decode.close(A)
    ((key, reason, _, peer),) = await prefill.failed.reaches(1)
    assert (key, reason, peer) == (A, FailureReason.TRANSFER, "decode-1")
    await settle()
    assert not decode.failed


async def test_a_close_in_the_middle_of_copies_answers_only_when_none_writes_any_more(ends, monkeypatch):
    prefill, decode = ends
    answered = []
    with held_copies(monkeypatch) as gate:
        capability = prefill.sender.open(A)
        decode.receiver.open(A, prefill.peer, capability, [0, 1], 0)
        prefill.offer_all(A, [1, 2], 2 * SIZE, 1)
        await gate.is_reached()
        decode.receiver.close(A, lambda: answered.append(decode.receiver.num_copies_in_flight))
        decode.receiver.close(A, lambda: answered.append("again"))  # unknown by now: at once
        await settle()
        assert answered == ["again"] and decode.receiver.num_copies_in_flight >= 1
    await eventually(lambda: len(answered) == 2)
    assert answered[1] == 0
    decode.region.buffer[:] = bytes(len(decode.region.buffer))  # somebody else's by now
    await settle()
    assert not any(decode.region.buffer), "a late write landed"
    await prefill.failed.reaches(1)
    assert not decode.failed


async def test_an_unknown_attempt_is_closed_at_once(shm_ends):
    answered = []
    shm_ends[1].receiver.close(A, lambda: answered.append(1))
    assert answered == [1]


async def test_stop_waits_for_the_copies_in_flight(ends, monkeypatch):
    prefill, decode = ends
    with held_copies(monkeypatch) as gate:
        capability = prefill.sender.open(A)
        decode.receiver.open(A, prefill.peer, capability, [0], 0)
        prefill.offer_all(A, [1], SIZE, 1)
        await gate.is_reached()
        stopping = asyncio.create_task(decode.receiver.stop())
        done, _ = await asyncio.wait([stopping], timeout=0.1)
        assert not done
    async with asyncio.timeout(PATIENCE_S):
        await stopping
    assert decode.receiver.num_copies_in_flight == 0
    await decode.receiver.stop()


# ---- the channel breaks


async def test_a_break_before_the_commit_fails_the_attempt_on_both_sides(ends):
    prefill, decode = ends
    capability = prefill.sender.open(A)
    decode.receiver.open(A, prefill.peer, capability, [0, 1], 0)
    prefill.sender.offer(A, [1], 0, SIZE, False)
    await prefill.acked.reaches(1)
    await prefill.stop_serving()
    ((_, reason, detail, peer),) = await prefill.failed.reaches(1)
    assert (reason, peer) == (FailureReason.TRANSFER, "decode-1") and "broke" in detail
    ((_, reason, _, peer),) = await decode.failed.reaches(1)
    assert (reason, peer) == (FailureReason.TRANSFER, "prefill-1")
    await eventually(lambda: not decode.receiver._links)


async def test_a_break_after_the_commit_fails_nothing(ends):
    prefill, decode = ends
    capability = prefill.sender.open(A)
    decode.receiver.open(A, prefill.peer, capability, [0], 0)
    prefill.offer_all(A, [1], SIZE, 1)
    prefill.sender.commit(A, SIZE, 1, 0)
    await decode.committed.reaches(1)
    await prefill.stop_serving()
    await eventually(lambda: not decode.receiver._links)
    assert not decode.failed and not prefill.failed


async def test_a_channel_that_broke_is_dialled_anew_by_the_next_reservation_and_not_before(ends):
    prefill, decode = ends
    decode.receiver.open(A, prefill.peer, prefill.sender.open(A), [0], 0)
    await eventually(lambda: prefill.sender._outgoing[A].subscriber)
    await prefill.stop_serving()
    await decode.failed.reaches(1)
    await prefill.serve(prefill.peer.address)  # the same incarnation is back
    await settle()
    assert not decode.receiver._links
    capability = prefill.sender.open(B)
    prefill.offer_all(B, [1, 2], 2 * SIZE, 2)
    prefill.sender.commit(B, 2 * SIZE, 1, 0)
    decode.receiver.open(B, prefill.peer, capability, [4, 5], 0)
    assert await prefill.committed.reaches(1) == [B]
    assert bytes_of(decode.region, [4, 5]) == bytes_of(prefill.region, [1, 2])


async def test_a_peer_restarted_at_the_same_address_works_at_once_and_its_predecessor_is_refused(pools, config):
    async with decode_end(pools[1], config) as decode:
        async with prefill_end(pools[0], config) as first:
            decode.receiver.open(A, first.peer, first.sender.open(A), [0], 0)
            await eventually(lambda: first.sender._outgoing[A].subscriber)
        await decode.failed.reaches(1)
        async with prefill_end(pools[0], config) as second:
            await second.stop_serving()
            address = await second.serve(first.peer.address)
            peer = PeerEndpoint(
                "prefill-2", second.sender.incarnation, address, "node", second.peer.shm_name, second.peer.tcp_address
            )
            capability = second.sender.open(B)
            second.offer_all(B, [1], SIZE, 1)
            second.sender.commit(B, SIZE, 1, 0)
            decode.receiver.open(B, peer, capability, [4], 0)
            assert await second.committed.reaches(1) == [B]
            decode.receiver.open(attempt("late"), first.peer, b"x" * 32, [5], 0)
            *_, (key, reason, detail, _) = await decode.failed.reaches(2)
            assert key == attempt("late") and reason is FailureReason.TRANSFER and "another incarnation" in detail


async def test_a_pool_that_cannot_be_reached_fails_the_attempt_and_not_the_channel(pools):
    config = TransferConfig(transport="tcp")
    async with prefill_end(pools[0], config) as prefill, decode_end(pools[1], config) as decode:
        await prefill.sender._exporters[0].close()
        for key in (A, B):
            decode.receiver.open(key, prefill.peer, prefill.sender.open(key), [0], 0)
            prefill.offer_all(key, [1], SIZE, 1)
        failed = await decode.failed.reaches(2)
        assert {(key, reason) for key, reason, *_ in failed} == {(k, FailureReason.TRANSFER) for k in (A, B)}
        await prefill.failed.reaches(2)
        assert len(decode.receiver._links) == 1


# ---- refusals


async def test_an_incompatible_peer_is_refused_as_a_layout_mismatch(pools):
    config = TransferConfig()
    async with (
        prefill_end(pools[0], config) as prefill,
        decode_end(pools[1], config, compatibility_hash=b"o" * 16) as decode,
    ):
        decode.receiver.open(A, prefill.peer, prefill.sender.open(A), [0], 0)
        ((key, reason, detail, peer),) = await decode.failed.reaches(1)
        assert (key, reason, peer) == (A, FailureReason.LAYOUT_MISMATCH, "prefill-1") and "differ" in detail
        assert prefill.counters == Counter(refused_incompatible_peer=1)
        assert decode.counters["transfer_layout_mismatch"] == 1
        assert prefill.sender._outgoing[A].subscriber is None


async def test_a_decode_worker_without_the_secret_is_refused(pools):
    config = TransferConfig()
    async with prefill_end(pools[0], config) as prefill, decode_end(pools[1], config, secret="a guess") as decode:
        decode.receiver.open(A, prefill.peer, prefill.sender.open(A), [0], 0)
        ((_, reason, detail, _),) = await decode.failed.reaches(1)
        assert reason is FailureReason.TRANSFER and "UNAUTHENTICATED" in detail


@pytest.mark.parametrize("capability", [b"", b"f" * 32], ids=["none", "forged"])
async def test_a_subscription_without_the_capability_is_refused_and_counted(ends, capability):
    prefill, decode = ends
    prefill.sender.open(A)
    decode.receiver.open(A, prefill.peer, capability, [0], 0)
    ((_, reason, detail, _),) = await decode.failed.reaches(1)
    assert reason is FailureReason.TRANSFER and "capability" in detail
    assert prefill.counters["fenced_subscribe"] == 1 and not prefill.failed


async def test_an_address_where_nobody_listens_fails_the_attempt(pools):
    config = TransferConfig()
    async with prefill_end(pools[0], config) as prefill, decode_end(pools[1], config) as decode:
        await prefill.stop_serving()
        decode.receiver.open(A, prefill.peer, b"c" * 32, [0], 0)
        ((_, reason, detail, _),) = await decode.failed.reaches(1)
        assert reason is FailureReason.TRANSFER and "UNAVAILABLE" in detail


async def test_a_listener_that_never_speaks_is_given_up_after_the_dial_timeout(pools, monkeypatch):
    monkeypatch.setattr(link_module, "DIAL_TIMEOUT_S", 0.2)
    gone = asyncio.Event()

    async def be_silent(_reader, writer):
        await gone.wait()
        writer.close()

    server = await asyncio.start_server(be_silent, "127.0.0.1", 0)
    async with server, decode_end(pools[1], TransferConfig()) as decode:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        peer = PeerEndpoint("prefill-1", 1, address, "node")
        decode.receiver.open(A, peer, b"c" * 32, [0], 0)
        ((_, reason, detail, _),) = await decode.failed.reaches(1)
        assert reason is FailureReason.TRANSFER and "no answer" in detail
        gone.set()


# ---- overflow, bugs of ours


async def test_a_prefill_outbox_that_overflows_ends_its_channel_and_fails_what_is_on_it(shm_ends, monkeypatch):
    monkeypatch.setattr(service_module, "MAX_QUEUED_MESSAGES", 4)
    prefill, decode = shm_ends
    capability = prefill.sender.open(A)
    decode.receiver.open(A, prefill.peer, capability, list(range(20)), 0)
    await eventually(lambda: prefill.sender._outgoing[A].subscriber)
    prefill.offer_all(A, list(range(20)), 20 * SIZE, 1)
    ((_, reason, _, _),) = await prefill.failed.reaches(1)
    assert reason is FailureReason.TRANSFER
    await decode.failed.reaches(1)
    await decode.close(A)
    await eventually(lambda: not decode.receiver._links)
    capability = prefill.sender.open(B)
    decode.receiver.open(B, prefill.peer, capability, [1], 0)
    prefill.offer_all(B, [1], SIZE, 1)
    prefill.sender.commit(B, SIZE, 1, 0)
    assert await prefill.committed.reaches(1) == [B]


async def test_a_decode_outbox_that_overflows_breaks_the_link_and_fails_what_is_on_it(shm_ends, monkeypatch):
    monkeypatch.setattr(link_module, "MAX_QUEUED_MESSAGES", 4)
    prefill, decode = shm_ends
    keys = [attempt(f"r{i}") for i in range(8)]
    for key in keys:  # without letting the writer run
        decode.receiver.open(key, prefill.peer, prefill.sender.open(key), [0], 0)
    failed = await decode.failed.reaches(4)
    assert {reason for _, reason, *_ in failed} == {FailureReason.TRANSFER} and "outbox is full" in failed[0][2]
    survivors = [key for key in keys if key not in {k for k, *_ in decode.failed}]
    await eventually(lambda: all(prefill.sender._outgoing[k].subscriber for k in survivors))
    for key in keys:
        await decode.close(key)


async def test_an_error_in_a_callback_of_the_decode_side_fails_the_link_and_is_logged(shm_ends, caplog):
    prefill, decode = shm_ends

    def explode(*_):
        raise RuntimeError("a bug of ours")

    decode.receiver._on_committed = explode
    decode.receiver.open(B, prefill.peer, prefill.sender.open(B), [1], 0)
    capability = prefill.sender.open(A)
    prefill.offer_all(A, [1], SIZE, 1)
    prefill.sender.commit(A, SIZE, 1, 0)
    decode.receiver.open(A, prefill.peer, capability, [0], 0)
    ((key, reason, detail, _),) = await decode.failed.reaches(1)
    assert (key, reason) == (B, FailureReason.INTERNAL) and "a bug of ours" in detail
    assert "a bug of ours" in caplog.text
    caplog.clear()  # its traceback holds the channel


async def test_an_error_in_a_callback_of_the_prefill_side_ends_the_channel_and_is_logged(shm_ends, caplog):
    prefill, decode = shm_ends

    def explode(*_):
        raise RuntimeError("a bug of ours")

    prefill.sender._on_acked = explode
    capability = prefill.sender.open(A)
    decode.receiver.open(A, prefill.peer, capability, [0], 0)
    prefill.sender.offer(A, [1], 0, SIZE, False)
    await decode.failed.reaches(1)
    await prefill.failed.reaches(1)
    assert "a bug of ours" in caplog.text
    caplog.clear()  # its traceback holds the channel


async def test_an_unexpected_error_in_a_copy_fails_its_attempt_as_internal_and_is_logged(shm_ends, caplog, monkeypatch):
    prefill, decode = shm_ends

    def explode(*_):
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(ShmTransport, "_copy", explode)
    decode.receiver.open(A, prefill.peer, prefill.sender.open(A), [0], 0)
    prefill.offer_all(A, [1], SIZE, 1)
    ((_, reason, detail, _),) = await decode.failed.reaches(1)
    assert reason is FailureReason.INTERNAL and "a bug of ours" in detail and "a bug of ours" in caplog.text


async def test_a_failed_callback_while_the_link_breaks_is_logged_by_its_close(shm_ends, caplog):
    prefill, decode = shm_ends
    seen = Record()

    def explode(*call):
        seen.note(call)
        raise RuntimeError("a bug of ours")

    decode.receiver._on_failed = explode
    decode.receiver.open(A, prefill.peer, prefill.sender.open(A), [0], 0)
    await eventually(lambda: prefill.sender._outgoing[A].subscriber)
    await prefill.stop_serving()
    await seen.reaches(1)
    await decode.receiver.stop()
    assert "a bug of ours" in caplog.text
    caplog.clear()
