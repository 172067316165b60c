"""Either end of the control channel against a peer that says what it should not; each end alone, on a real channel."""

import asyncio
import random
import threading
from collections import Counter

import grpc
import pytest

from kvtransfer import link as link_module
from kvtransfer import service as service_module
from kvtransfer.transports.shm import ShmExporter
from kvtransfer.transports.tcp import TcpExporter
from tandem.config import TransferConfig
from tandem.messages import FailureReason
from tandem.v1 import worker_pb2 as pb
from tests.support.kv_ends import (
    HASH,
    SIZE,
    attempt,
    decode_end,
    eventually,
    prefill_end,
    scripted_decode,
    scripted_prefill,
    settle,
)
from tests.support.kv_pools import SECRET, bytes_of, chunk_of, pool, unused_shm_name
from tests.support.leaks import nothing_left_behind

A, B = attempt("a"), attempt("b")
CAPABILITY = b"c" * 32
CONFIG = TransferConfig(transport="shm")


@pytest.fixture
async def source():
    async with nothing_left_behind():
        with pool(seed=1) as region:
            yield region


# ---- the prefill end


@pytest.fixture
async def prefill(source):
    async with prefill_end(source, CONFIG) as end:
        yield end


def subscribe(capability: bytes, first_token: int = 0) -> pb.Subscribe:
    return pb.Subscribe(capability=capability, first_token_wanted=first_token)


async def test_a_channel_that_does_not_begin_with_a_hello_is_refused(prefill):
    async with scripted_decode(prefill.peer, hello=False) as decode:
        await decode.say(A, subscribe=subscribe(prefill.sender.open(A)))
        assert await decode.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert prefill.sender._outgoing[A].subscriber is None


async def test_a_channel_that_ends_before_its_hello_is_refused(prefill):
    async with scripted_decode(prefill.peer, hello=False) as decode:
        await decode.call.done_writing()
        assert await decode.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_hello_that_never_comes_is_given_up(prefill, monkeypatch):
    monkeypatch.setattr(service_module, "HELLO_TIMEOUT_S", 0.1)
    async with scripted_decode(prefill.peer, hello=False) as decode:
        assert await decode.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_hello_to_another_incarnation_is_refused(prefill):
    async with scripted_decode(prefill.peer, hello=False) as decode:
        await decode.say(to=prefill.peer.incarnation ^ 1, hello=pb.ChannelHello(compatibility_hash=HASH))
        assert await decode.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("fenced_by", ["our incarnation", "its incarnation"])
async def test_messages_of_other_incarnations_are_dropped_and_counted(prefill, fenced_by):
    capability = prefill.sender.open(A)
    async with scripted_decode(prefill.peer) as decode:
        wrong = (
            {"to": prefill.peer.incarnation ^ 1} if fenced_by == "our incarnation" else {"by": decode.incarnation ^ 1}
        )
        await decode.say(A, subscribe=subscribe(capability), **wrong)
        await decode.say(ping=pb.Ping())
        assert (await decode.hear()).HasField("pong")
        assert prefill.counters == Counter(fenced_channel_messages=1)
        assert prefill.sender._outgoing[A].subscriber is None


async def test_a_ping_is_answered_at_once(prefill):
    async with scripted_decode(prefill.peer) as decode:
        await decode.say(ping=pb.Ping())
        pong = await decode.hear()
        assert pong.HasField("pong") and pong.decode_incarnation == decode.incarnation


@pytest.mark.parametrize(
    "body",
    [{"ack": pb.Ack(chunk=0)}, {"commit_ack": pb.CommitAck()}, {"abort": pb.Abort(reason=1, detail="?")}],
    ids=["ack", "commit_ack", "abort"],
)
@pytest.mark.parametrize("key", [A, B, attempt("a", number=2), attempt("a", router=2)], ids=str)
async def test_whoever_has_not_subscribed_changes_nothing(prefill, body, key):
    prefill.sender.open(A)
    prefill.sender.offer(A, [1], 0, SIZE, True)
    async with scripted_decode(prefill.peer) as decode:
        await decode.say(key, **body)
        await decode.say(ping=pb.Ping())
        await decode.hear()
        assert not prefill.acked and not prefill.committed and not prefill.failed
        assert prefill.counters == Counter({f"fenced_{next(iter(body))}": 1})


async def test_a_second_subscriber_is_refused_and_the_first_is_served(prefill):
    capability = prefill.sender.open(A)
    async with scripted_decode(prefill.peer) as first, scripted_decode(prefill.peer) as second:
        await first.say(A, subscribe=subscribe(capability))
        await eventually(lambda: prefill.sender._outgoing[A].subscriber)
        await second.say(A, subscribe=subscribe(capability))
        assert "already" in (await second.hear()).abort.detail
        await second.say(A, ack=pb.Ack(chunk=0))
        prefill.sender.offer(A, [1], 0, SIZE, True)
        assert (await first.hear()).offer.block_ids == [1]
        second.call.cancel()
        await settle()
        assert not prefill.failed and not prefill.acked
        await first.say(A, ack=pb.Ack(chunk=0))
        assert await prefill.acked.reaches(1) == [(A, 0)]


async def test_a_subscription_in_the_middle_of_a_block_is_refused(prefill):
    capability = prefill.sender.open(A)
    async with scripted_decode(prefill.peer) as decode:
        await decode.say(A, subscribe=subscribe(capability, SIZE + 1))
        assert "first of a block" in (await decode.hear()).abort.detail


async def test_acks_of_chunks_that_do_not_exist_and_repeated_acks_change_nothing(prefill):
    capability = prefill.sender.open(A)
    async with scripted_decode(prefill.peer) as decode:
        await decode.say(A, subscribe=subscribe(capability))
        prefill.sender.offer(A, [1], 0, SIZE, False)
        prefill.sender.offer(A, [2], SIZE, SIZE, True)
        prefill.sender.commit(A, 2 * SIZE, 1, 0)
        for chunk in (7, 0, 0, 2**32 - 1):
            await decode.say(A, ack=pb.Ack(chunk=chunk))
        await decode.say(A, commit_ack=pb.CommitAck())  # of a commit that was not sent
        await settle()
        assert prefill.acked == [(A, 0)] and not prefill.committed and not prefill.sender._outgoing[A].commit_sent


async def test_the_commit_follows_the_last_ack_and_a_break_after_it_is_the_routers_to_judge(prefill):
    capability = prefill.sender.open(A)
    async with scripted_decode(prefill.peer) as decode:
        await decode.say(A, subscribe=subscribe(capability))
        prefill.offer_all(A, [1, 2], 2 * SIZE, 1)
        prefill.sender.commit(A, 2 * SIZE, 5, 3)
        assert [(await decode.hear()).offer.chunk for _ in range(2)] == [0, 1]
        await decode.say(A, ack=pb.Ack(chunk=1))
        await decode.say(A, ack=pb.Ack(chunk=0))  # in any order
        commit = (await decode.hear()).commit
        assert (commit.num_tokens, commit.first_token_id, commit.first_token_index) == (2 * SIZE, 5, 3)
        assert commit.compatibility_hash == HASH and not prefill.committed
    await settle()
    assert not prefill.failed and not prefill.committed, "it may have arrived"
    prefill.sender.close(A)


async def test_a_subscriber_that_breaks_off_before_the_commit_fails_the_attempt(prefill):
    capability = prefill.sender.open(A)
    prefill.sender.open(B)
    async with scripted_decode(prefill.peer) as decode:
        await decode.say(A, subscribe=subscribe(capability))
        await eventually(lambda: prefill.sender._outgoing[A].subscriber)
    ((key, reason, detail, peer),) = await prefill.failed.reaches(1)
    assert (key, reason, peer) == (A, FailureReason.TRANSFER, "decode-9") and "broke" in detail


@pytest.mark.parametrize(
    "sent, told",
    [
        (1, FailureReason.TRANSFER),
        (2, FailureReason.CORRUPT),
        (0, FailureReason.TRANSFER),
        (77, FailureReason.TRANSFER),
    ],
)
async def test_an_abort_fails_the_attempt_with_its_reason(prefill, sent, told):
    capability = prefill.sender.open(A)
    async with scripted_decode(prefill.peer) as decode:
        await decode.say(A, subscribe=subscribe(capability))
        await decode.say(A, abort=pb.Abort(reason=sent, detail="why"))
        assert await prefill.failed.reaches(1) == [(A, told, "why", "decode-9")]


@pytest.mark.parametrize("seed", range(6))
async def test_any_order_of_messages_leaves_the_sender_consistent(prefill, seed):
    """Two channels say valid and invalid things about three attempts; what must hold in the end does."""
    rng = random.Random(seed)
    keys = [attempt(f"r{i}") for i in range(3)]
    capabilities = {key: prefill.sender.open(key) for key in keys}
    prompts_done = set()
    async with scripted_decode(prefill.peer) as one, scripted_decode(prefill.peer) as two:
        for _ in range(60):
            key, decode = rng.choice(keys), rng.choice([one, two])
            match rng.randrange(7):
                case 0:
                    await decode.say(key, subscribe=subscribe(capabilities[key], SIZE * rng.randrange(3)))
                case 1 if key not in prompts_done:  # the role offers nothing after its commit
                    prefill.sender.offer(key, [rng.randrange(40)], SIZE * rng.randrange(3), SIZE, False)
                case 2 | 3:
                    await decode.say(key, ack=pb.Ack(chunk=rng.randrange(4)))
                case 4:
                    prompts_done.add(key)
                    prefill.sender.commit(key, SIZE, 1, 0)
                case 5:
                    await decode.say(key, commit_ack=pb.CommitAck())
                case 6 if rng.random() < 0.3:
                    await decode.say(key, abort=pb.Abort(reason=1))
            await asyncio.sleep(0)
        await settle()
    await settle()
    assert len(set(prefill.committed)) == len(prefill.committed) and len(set(prefill.acked)) == len(prefill.acked)
    assert not {key for key, *_ in prefill.failed} & set(prefill.committed), "ended twice"
    for outgoing in prefill.sender._outgoing.values():
        assert set(outgoing.offers) == set(outgoing.deadlines)
        assert not (outgoing.commit_sent and outgoing.offers), "committed before the last ack"


# ---- the decode end


async def test_a_close_ends_a_fetch_whose_owner_never_answers(source):
    asked, answer = threading.Event(), threading.Event()

    def never(*_):
        asked.set()
        return answer.wait(60)

    config = TransferConfig(transport="tcp", offer_timeout_s=600)
    exporter = TcpExporter(source, SECRET, "127.0.0.1", never)
    address = await exporter.start()
    with pool() as target:
        async with scripted_prefill(tcp_address=address) as (prefill, peer), decode_end(target, config) as decode:
            decode.receiver.open(A, peer, CAPABILITY, [0], 0)
            await heard(prefill, "subscribe")
            await prefill.say(decode.receiver.incarnation, A, offer=offer(source, [1], last=True))
            assert await asyncio.to_thread(asked.wait, 20)
            await decode.close(A)
            assert decode.receiver.num_copies_in_flight == 0 and not answer.is_set()
        answer.set()
    await exporter.close()


@pytest.fixture
async def pair(source):
    """(scripted prefill end, its endpoint, decode end, say): `say` speaks to the decode end about A."""
    exporter = ShmExporter(source, SECRET, unused_shm_name())
    name = await exporter.start()
    with pool() as target:
        async with scripted_prefill(shm_name=name) as (prefill, peer), decode_end(target, CONFIG) as decode:

            async def say(key=A, **body):
                await prefill.say(decode.receiver.incarnation, key, **body)

            yield prefill, peer, decode, say
    await exporter.close()


def offer(region, blocks, first_token=0, num_tokens=None, *, chunk=0, last=False) -> pb.Offer:
    made = chunk_of(region, blocks)
    return pb.Offer(
        chunk=chunk,
        block_ids=made.block_ids,
        generations=made.generations,
        first_token=first_token,
        num_tokens=len(blocks) * SIZE if num_tokens is None else num_tokens,
        last=last,
    )


async def heard(prefill, field: str):
    """The first request with this body."""
    await eventually(lambda: any(request.HasField(field) for request in prefill.requests))
    return next(request for request in prefill.requests if request.HasField(field))


async def opened(pair, into=(0, 1, 2, 3), first_token_wanted=0):
    prefill, peer, decode, say = pair
    decode.receiver.open(A, peer, CAPABILITY, into, first_token_wanted)
    await heard(prefill, "subscribe")
    return prefill, decode, say


async def test_a_subscription_says_what_is_wanted(pair):
    prefill, decode, _ = await opened(pair, first_token_wanted=SIZE)
    hello, request = prefill.requests
    assert hello.hello.compatibility_hash == HASH and hello.hello.decode_worker_id == "decode-1"
    assert request.subscribe == pb.Subscribe(capability=CAPABILITY, first_token_wanted=SIZE, checksum=False)
    assert request.decode_incarnation == decode.receiver.incarnation


BAD_OFFERS = {
    "a gap": dict(blocks=[1], first_token=SIZE),
    "not at a block's first token": dict(blocks=[1], first_token=1),
    "too large": dict(blocks=[1, 2, 3, 4, 5]),
    "no blocks": dict(blocks=[], num_tokens=SIZE),
    "no tokens": dict(blocks=[1], num_tokens=0),
    "fewer blocks than tokens": dict(blocks=[1], num_tokens=2 * SIZE),
    "more blocks than tokens": dict(blocks=[1, 2], num_tokens=SIZE),
    "partial and not the last": dict(blocks=[1], num_tokens=SIZE - 1),
    "an absurd number of tokens": dict(blocks=[1], num_tokens=2**32 - 1, last=True),
}


@pytest.mark.parametrize("name", BAD_OFFERS)
async def test_an_offer_that_does_not_fit_fails_the_attempt_and_moves_nothing(pair, source, name):
    prefill, decode, say = await opened(pair)
    await say(offer=offer(source, **BAD_OFFERS[name]))
    ((key, reason, _, peer),) = await decode.failed.reaches(1)
    assert (key, reason, peer) == (A, FailureReason.TRANSFER, "prefill-1")
    assert (await heard(prefill, "abort")).abort.reason == pb.FAILURE_REASON_TRANSFER
    assert not any(decode.region.buffer)


async def test_too_few_generations_fail_the_attempt(pair, source):
    _, decode, say = await opened(pair)
    bad = offer(source, [1, 2])
    del bad.generations[1:]
    await say(offer=bad)
    await decode.failed.reaches(1)
    assert not any(decode.region.buffer)


async def test_a_block_outside_of_the_peers_pool_fails_the_attempt(pair, source):
    _, decode, say = await opened(pair)
    bad = offer(source, [1])
    bad.block_ids[0] = 2**32 - 1
    await say(offer=bad)
    ((_, reason, detail, _),) = await decode.failed.reaches(1)
    assert reason is FailureReason.TRANSFER and "does not have" in detail


@pytest.mark.parametrize("second", ["repeated", "overlapping", "after the last"])
async def test_a_second_offer_out_of_order_fails_the_attempt(pair, source, second):
    prefill, decode, say = await opened(pair)
    await say(offer=offer(source, [1, 2], last=second == "after the last"))
    await heard(prefill, "ack")
    bad = {
        "repeated": offer(source, [1, 2]),
        "overlapping": offer(source, [2], SIZE, chunk=1),
        "after the last": offer(source, [3], 2 * SIZE, chunk=1),
    }[second]
    await say(offer=bad)
    await decode.failed.reaches(1)
    await say(offer=offer(source, [3], 2 * SIZE, chunk=2))
    await eventually(lambda: decode.counters["fenced_offer"])
    assert len(decode.failed) == 1


GOOD_COMMIT = dict(compatibility_hash=HASH, num_tokens=2 * SIZE, first_token_id=1)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"compatibility_hash": b"o" * 16}, FailureReason.LAYOUT_MISMATCH),
        ({"compatibility_hash": b""}, FailureReason.LAYOUT_MISMATCH),
        ({"num_tokens": 2 * SIZE - 1}, FailureReason.TRANSFER),
        ({"num_tokens": 2 * SIZE + 1}, FailureReason.TRANSFER),
        ({"num_tokens": 0}, FailureReason.TRANSFER),
    ],
    ids=str,
)
async def test_a_commit_that_does_not_speak_of_what_was_copied_fails_the_attempt(pair, source, change, reason):
    prefill, decode, say = await opened(pair)
    await say(offer=offer(source, [1, 2], last=True))
    await heard(prefill, "ack")
    await say(commit=pb.Commit(**{**GOOD_COMMIT, **change}))
    assert (await decode.failed.reaches(1))[0][1] is reason
    assert not decode.committed and not any(request.HasField("commit_ack") for request in prefill.requests)


@pytest.mark.parametrize("offered", [0, 1], ids=["nothing", "not the last chunk"])
async def test_a_commit_before_the_last_chunk_fails_the_attempt(pair, source, offered):
    prefill, decode, say = await opened(pair)
    if offered:
        await say(offer=offer(source, [1, 2]))
        await heard(prefill, "ack")
    await say(commit=pb.Commit(**GOOD_COMMIT))
    await decode.failed.reaches(1)
    assert not decode.committed


async def test_a_commit_is_taken_once(pair, source):
    prefill, decode, say = await opened(pair)
    await say(offer=offer(source, [1, 2], last=True))
    await heard(prefill, "ack")
    for _ in range(2):
        await say(commit=pb.Commit(**GOOD_COMMIT))
    await say(abort=pb.Abort(reason=1))
    await eventually(lambda: decode.counters["fenced_abort"])
    assert len(decode.committed) == 1 and not decode.failed
    assert decode.counters == Counter(fenced_commit=1, fenced_abort=1)
    assert bytes_of(decode.region, [0, 1]) == bytes_of(source, [1, 2])


async def test_what_does_not_match_the_attempt_or_the_incarnations_is_dropped_and_counted(pair, source):
    prefill, decode, say = await opened(pair)
    good = offer(source, [1])
    for key in (B, attempt("a", number=2), attempt("a", router=2)):
        await say(key, offer=good)
    await say(incarnation=prefill.incarnation ^ 1, offer=good)
    await prefill.say(decode.receiver.incarnation ^ 1, A, offer=good)
    await eventually(lambda: decode.counters == Counter(fenced_offer=3, fenced_channel_messages=2))
    assert not any(decode.region.buffer) and not decode.failed


async def test_an_attempt_is_not_served_through_another_peers_channel(pair, source):
    _, decode, _ = await opened(pair)
    async with scripted_prefill() as (other, other_peer):
        decode.receiver.open(B, other_peer, CAPABILITY, [4], 0)
        await heard(other, "subscribe")
        await other.say(decode.receiver.incarnation, A, abort=pb.Abort(reason=1))
        await eventually(lambda: decode.counters["fenced_abort"])
        assert not decode.failed
        await decode.close(B)


@pytest.mark.parametrize("sent, told", [(2, FailureReason.CORRUPT), (99, FailureReason.TRANSFER)])
async def test_an_abort_by_the_prefill_side_fails_the_attempt_and_is_not_answered(pair, sent, told):
    prefill, decode, say = await opened(pair)
    await say(abort=pb.Abort(reason=sent, detail="why"))
    assert await decode.failed.reaches(1) == [(A, told, "why", "prefill-1")]
    await settle()
    assert not any(request.HasField("abort") for request in prefill.requests)


async def test_a_silent_channel_is_dialled_anew_by_a_later_reservation_and_never_within_an_attempt(pair, monkeypatch):
    monkeypatch.setattr(link_module, "STALLED_AFTER_S", 0.2)
    prefill, peer, decode, _ = pair
    prefill.answers_pings = False
    await opened(pair)
    await asyncio.sleep(0.3)
    assert prefill.num_channels == 1 and not decode.failed, "the attempt itself goes on waiting"
    decode.receiver.open(B, peer, CAPABILITY, [4], 0)
    ((key, reason, detail, _),) = await decode.failed.reaches(1)
    assert (key, reason) == (A, FailureReason.TRANSFER) and "anew" in detail
    await eventually(lambda: prefill.num_channels == 2)
    assert decode.counters["redialled_links"] == 1
    await decode.close(B)


async def test_a_channel_that_answers_is_kept(pair, monkeypatch):
    monkeypatch.setattr(link_module, "STALLED_AFTER_S", 0.1)
    prefill, peer, decode, _ = pair
    await opened(pair)
    await eventually(lambda: decode.receiver._links[peer.incarnation]._pinged_at is None)
    await asyncio.sleep(0.2)
    decode.receiver.open(B, peer, CAPABILITY, [4], 0)
    await settle()
    assert prefill.num_channels == 1 and not decode.failed


@pytest.mark.parametrize("seed", range(6))
async def test_random_offers_and_commits_never_write_outside_of_the_reservation(pair, source, seed):
    rng = random.Random(seed)
    prefill, peer, decode, say = pair
    keys = [attempt(f"r{i}") for i in range(8)]
    for i, key in enumerate(keys):
        decode.receiver.open(key, peer, CAPABILITY, [2 * i, 2 * i + 1], 0)
    await heard(prefill, "subscribe")
    for _ in range(80):
        blocks = [rng.randrange(40) for _ in range(rng.randint(1, 3))]
        message = offer(
            source,
            blocks,
            rng.choice([0, 0, SIZE, 2 * SIZE, rng.randrange(20), 2**32 - 16]),
            rng.choice([None, None, rng.randrange(3 * SIZE)]),
            chunk=rng.randrange(3),
            last=rng.random() < 0.4,
        )
        if rng.random() < 0.2:
            await say(rng.choice(keys), commit=pb.Commit(compatibility_hash=HASH, num_tokens=rng.randrange(3 * SIZE)))
        else:
            await say(rng.choice(keys), offer=message)
    await settle()
    await eventually(lambda: decode.receiver.num_copies_in_flight == 0)
    assert not any(bytes_of(decode.region, range(16, 40)))
    ended = [key for key, *_ in decode.failed] + [key for key, _ in decode.committed]
    assert len(set(ended)) == len(ended), "an attempt ended twice"
