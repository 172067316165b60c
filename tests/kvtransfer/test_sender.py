"""The sender alone: what it says to a subscriber, message by message."""

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest

from kvtransfer.sender import Sender
from tandem.config import TransferConfig
from tandem.messages import FailureReason
from tandem.types import AttemptKey, RequestKey
from tandem.v1 import worker_pb2 as pb
from tandem.wire import attempt_from_wire
from tests.support.kv_pools import LAYOUT, SECRET, pool

SIZE = LAYOUT.block_size
HASH = b"h" * 16
TIMEOUT_S = 20.0
_numbers = itertools.count(1)


def new_attempt(name: str = "request") -> AttemptKey:
    return AttemptKey(5, RequestKey(name, 0, next(_numbers)))


class Events:
    """What callbacks said, in order."""

    def __init__(self):
        self.seen = []
        self._changed = asyncio.Event()

    def note(self, *event):
        self.seen.append(event)
        self._changed.set()

    async def wait(self, what, attempt):
        """The first event of that name for that attempt."""
        async with asyncio.timeout(TIMEOUT_S):
            while not (found := self.of(what, attempt)):
                self._changed.clear()
                await self._changed.wait()
        return found[0]

    def of(self, what, attempt):
        return [event for event in self.seen if event[:2] == (what, attempt)]


@dataclass
class FakeSubscriber:
    worker_id: str = "decode-1"
    sent: list[pb.ChannelResponse] = field(default_factory=list)

    def send(self, response):
        self.sent.append(response)

    def take(self) -> list[tuple[str, object]]:
        messages = [(m.WhichOneof("body"), getattr(m, m.WhichOneof("body"))) for m in self.sent]
        self.sent.clear()
        return messages

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.take()]


@pytest.fixture
def region():
    with pool(seed=1) as made:
        yield made


@pytest.fixture
def events():
    return Events()


def make_sender(region, events, **config):
    return Sender(
        incarnation=3,
        compatibility_hash=HASH,
        region=region,
        secret=SECRET,
        config=TransferConfig(**config),
        counters=Counter(),
        on_acked=lambda *event: events.note("acked", *event),
        on_committed=lambda *event: events.note("committed", *event),
        on_failed=lambda *event: events.note("failed", *event),
    )


@pytest.fixture
async def sender(region, events):
    made = make_sender(region, events)
    yield made
    await made.stop()


@pytest.fixture
def attempt():
    return new_attempt()


@pytest.fixture
def subscriber():
    return FakeSubscriber()


def subscription(capability, first_token_wanted=0, checksum=False):
    return pb.Subscribe(capability=capability, first_token_wanted=first_token_wanted, checksum=checksum)


async def test_offers_are_kept_until_somebody_subscribes_and_sent_at_once_from_then_on(sender, attempt, subscriber):
    capability = sender.open(attempt)
    sender.offer(attempt, [4, 5], 0, 2 * SIZE, last=False)
    sender.offer(attempt, [9], 2 * SIZE, SIZE, last=False)
    sender.subscribe(attempt, subscription(capability), subscriber)
    assert all(attempt_from_wire(message.attempt) == attempt for message in subscriber.sent)
    (_, first), (_, second) = subscriber.take()
    assert (first.chunk, list(first.block_ids), list(first.generations)) == (0, [4, 5], [104, 105])
    assert (first.first_token, first.num_tokens, first.last) == (0, 2 * SIZE, False)
    assert (second.chunk, list(second.block_ids), second.first_token) == (1, [9], 2 * SIZE)
    sender.offer(attempt, [3], 3 * SIZE, 1, last=True)
    ((_, third),) = subscriber.take()
    assert (third.chunk, third.num_tokens, third.last) == (2, 1, True)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
async def test_the_commit_comes_once_after_the_last_ack_in_whatever_order(sender, events, attempt, subscriber, order):
    capability = sender.open(attempt)
    sender.subscribe(attempt, subscription(capability), subscriber)
    for chunk in range(3):
        sender.offer(attempt, [chunk], chunk * SIZE, SIZE, last=chunk == 2)
    sender.ack(attempt, order[0], subscriber)
    sender.commit(attempt, 3 * SIZE, 42, 7)
    assert subscriber.kinds() == ["offer"] * 3
    sender.ack(attempt, order[1], subscriber)
    assert subscriber.take() == []
    sender.ack(attempt, order[2], subscriber)
    ((kind, commit),) = subscriber.take()
    assert kind == "commit"
    assert (commit.compatibility_hash, commit.num_tokens) == (HASH, 3 * SIZE)
    assert (commit.first_token_id, commit.first_token_index) == (42, 7)
    sender.ack(attempt, order[2], subscriber)
    assert subscriber.take() == []
    assert [event[2] for event in events.of("acked", attempt)] == order


async def test_no_commit_before_the_prompt_is_done_though_everything_offered_is_acknowledged(
    sender, attempt, subscriber
):
    capability = sender.open(attempt)
    sender.subscribe(attempt, subscription(capability), subscriber)
    sender.offer(attempt, [1], 0, SIZE, last=False)
    sender.ack(attempt, 0, subscriber)
    assert subscriber.kinds() == ["offer"]


async def test_the_commit_ack_is_reported_and_only_after_a_commit(sender, events, attempt, subscriber):
    capability = sender.open(attempt)
    sender.subscribe(attempt, subscription(capability), subscriber)
    sender.offer(attempt, [1], 0, SIZE, last=True)
    sender.commit_ack(attempt, subscriber)
    assert events.of("committed", attempt) == []
    sender.commit(attempt, SIZE, 42, 0)
    sender.ack(attempt, 0, subscriber)
    sender.commit_ack(attempt, subscriber)
    assert len(events.of("committed", attempt)) == 1
    sender.close(attempt)
    assert subscriber.kinds() == ["offer", "commit"], "no abort after a commit"


# ---- the decode side holds a prefix


async def test_chunks_below_the_wanted_token_are_acknowledged_by_the_sender_itself(sender, events, attempt, subscriber):
    capability = sender.open(attempt)
    sender.offer(attempt, [1, 2], 0, 2 * SIZE, last=False)
    sender.subscribe(attempt, subscription(capability, first_token_wanted=3 * SIZE), subscriber)
    assert subscriber.take() == [] and [e[2] for e in events.of("acked", attempt)] == [0]
    sender.offer(attempt, [3, 4], 2 * SIZE, 2 * SIZE, last=False)  # half of it is wanted
    ((_, offer),) = subscriber.take()
    assert (list(offer.block_ids), list(offer.generations)) == ([4], [104])
    assert (offer.chunk, offer.first_token, offer.num_tokens) == (1, 3 * SIZE, SIZE)
    assert sender.authorize(capability, [4], [104])
    assert not sender.authorize(capability, [3, 4], [103, 104]), "what is not wanted is not served"


@pytest.mark.parametrize("num_tokens", [2 * SIZE, 2 * SIZE - 1])
@pytest.mark.parametrize("when", ["before", "between", "after"])
async def test_a_prompt_that_is_wholly_held_is_committed_without_an_offer(
    sender, events, attempt, subscriber, num_tokens, when
):
    capability = sender.open(attempt)
    wanted = subscription(capability, first_token_wanted=2 * SIZE)
    if when == "before":
        sender.subscribe(attempt, wanted, subscriber)
    sender.offer(attempt, [1, 2], 0, num_tokens, last=True)
    if when == "between":
        sender.subscribe(attempt, wanted, subscriber)
    sender.commit(attempt, num_tokens, 42, 0)
    if when == "after":
        sender.subscribe(attempt, wanted, subscriber)
    assert subscriber.kinds() == ["commit"]
    assert [e[2] for e in events.of("acked", attempt)] == [0]


async def test_a_wanted_token_in_the_middle_of_a_block_is_refused(sender, attempt, subscriber):
    capability = sender.open(attempt)
    sender.subscribe(attempt, subscription(capability, first_token_wanted=SIZE + 1), subscriber)
    ((kind, abort),) = subscriber.take()
    assert kind == "abort" and "first of a block" in abort.detail


# ---- fencing


async def test_a_subscription_without_the_capability_is_refused_and_counted(sender, attempt, subscriber):
    capability = sender.open(attempt)
    sender.offer(attempt, [1], 0, SIZE, last=False)
    for forged in (b"", b"x" * 32, capability[:-1], capability + b"x"):
        sender.subscribe(attempt, subscription(forged), subscriber)
        assert subscriber.kinds() == ["abort"]
    sender.subscribe(new_attempt(), subscription(capability), subscriber)
    assert subscriber.kinds() == ["abort"]
    assert sender.counters["fenced_subscribe"] == 5


async def test_a_second_subscriber_is_refused_and_the_first_goes_on(sender, attempt, subscriber):
    capability, other = sender.open(attempt), FakeSubscriber("decode-2")
    sender.subscribe(attempt, subscription(capability), subscriber)
    sender.subscribe(attempt, subscription(capability), other)
    assert other.kinds() == ["abort"]
    sender.offer(attempt, [1], 0, SIZE, last=True)
    assert subscriber.kinds() == ["offer"] and other.sent == []


async def test_messages_of_others_and_of_closed_attempts_are_dropped_and_counted(sender, events, attempt, subscriber):
    capability, other = sender.open(attempt), FakeSubscriber("decode-2")
    sender.subscribe(attempt, subscription(capability), subscriber)
    sender.offer(attempt, [1], 0, SIZE, last=True)
    sender.commit(attempt, SIZE, 42, 0)
    sender.ack(attempt, 0, other)
    sender.abort(attempt, 1, "not yours", other)
    assert events.seen == [] and subscriber.kinds() == ["offer"]
    sender.close(attempt)
    for late in (sender.ack, sender.abort):
        late(attempt, 0, *(["late"] if late == sender.abort else []), subscriber)
    sender.commit_ack(attempt, subscriber)
    assert events.seen == []
    assert sender.counters == {"fenced_ack": 2, "fenced_abort": 2, "fenced_commit_ack": 1}


async def test_acks_of_chunks_that_were_never_offered_change_nothing(sender, events, attempt, subscriber):
    capability = sender.open(attempt)
    sender.subscribe(attempt, subscription(capability), subscriber)
    sender.offer(attempt, [1], 0, SIZE, last=False)
    for chunk in (1, 7, 2**32 - 1):
        sender.ack(attempt, chunk, subscriber)
    assert events.seen == [] and sender.authorize(capability, [1], [101])


async def test_exactly_what_is_offered_and_not_acknowledged_may_be_read(sender, attempt, subscriber):
    capability, other_capability = sender.open(attempt), sender.open(new_attempt("other"))
    sender.subscribe(attempt, subscription(capability), subscriber)
    sender.offer(attempt, [1, 2], 0, 2 * SIZE, last=False)
    sender.offer(attempt, [3], 2 * SIZE, SIZE, last=True)
    assert sender.authorize(capability, (1, 2), (101, 102)) and sender.authorize(capability, (3,), (103,))
    for capability_, block_ids, generations in [
        (other_capability, (1, 2), (101, 102)),
        (b"x" * 32, (1, 2), (101, 102)),
        (capability, (1,), (101,)),
        (capability, (2, 1), (102, 101)),
        (capability, (1, 2, 3), (101, 102, 103)),
        (capability, (1, 2), (101, 101)),
        (capability, (1, 2), (101,)),
        (capability, (), ()),
    ]:
        assert not sender.authorize(capability_, block_ids, generations)
    sender.ack(attempt, 0, subscriber)
    assert not sender.authorize(capability, (1, 2), (101, 102)) and sender.authorize(capability, (3,), (103,))
    sender.close(attempt)
    assert not sender.authorize(capability, (3,), (103,))


async def test_capabilities_are_long_random_and_never_repeated(sender):
    capabilities = {sender.open(new_attempt()) for _ in range(50)}
    assert len(capabilities) == 50 and {len(c) for c in capabilities} == {32}


async def test_an_offer_carries_the_checksum_that_was_asked_for(sender, region, subscriber):
    plain, checked = new_attempt(), new_attempt()
    for attempt, checksum in ((plain, False), (checked, True)):
        sender.subscribe(attempt, subscription(sender.open(attempt), checksum=checksum), subscriber)
        sender.offer(attempt, [1, 2, 8], 0, 3 * SIZE, last=True)
    (_, without), (_, with_checksum) = subscriber.take()
    assert not without.HasField("checksum")
    import xxhash

    data = b"".join(bytes(region.block(i)) for i in (1, 2, 8))
    assert with_checksum.checksum == xxhash.xxh3_64_intdigest(data)


# ---- ways out


async def test_close_is_idempotent_and_tells_a_subscriber_that_waits(sender, attempt, subscriber):
    capability = sender.open(attempt)
    sender.subscribe(attempt, subscription(capability), subscriber)
    sender.close(attempt)
    sender.close(attempt)
    assert subscriber.kinds() == ["abort"]
    sender.offer(attempt, [1], 0, SIZE, last=True)
    sender.commit(attempt, SIZE, 42, 0)
    assert subscriber.sent == [], "a closed attempt offers and commits nothing"
    sender.close(new_attempt())


async def test_the_subscribers_abort_fails_the_attempt_with_its_reason(sender, events, attempt, subscriber):
    sender.subscribe(attempt, subscription(sender.open(attempt)), subscriber)
    sender.abort(attempt, int(FailureReason.CORRUPT), "checksum", subscriber)
    assert events.seen == [("failed", attempt, FailureReason.CORRUPT, "checksum", "decode-1")]


@pytest.mark.parametrize("number", [0, 99])
async def test_a_reason_that_this_build_does_not_know_is_a_failed_transfer(sender, events, attempt, subscriber, number):
    sender.subscribe(attempt, subscription(sender.open(attempt)), subscriber)
    sender.abort(attempt, number, "", subscriber)
    assert events.seen[0][2] is FailureReason.TRANSFER


async def test_a_broken_channel_fails_its_attempts_that_are_not_committed_and_no_others(sender, events):
    mine, others, unsubscribed, committed = (new_attempt(name) for name in ("mine", "others", "none", "committed"))
    one, two = FakeSubscriber("decode-1"), FakeSubscriber("decode-2")
    for attempt, subscriber in ((mine, one), (others, two), (committed, one)):
        sender.subscribe(attempt, subscription(sender.open(attempt)), subscriber)
    sender.open(unsubscribed)
    sender.offer(committed, [1], 0, SIZE, last=True)
    sender.commit(committed, SIZE, 42, 0)
    sender.ack(committed, 0, one)
    sender.channel_broken(one)
    failed = [event[1] for event in events.seen if event[0] == "failed"]
    assert failed == [mine], "after the commit was sent the router decides: it may have arrived"


@pytest.mark.parametrize("subscribed", [True, False])
async def test_an_offers_deadline_runs_from_its_completion_subscribed_or_not(region, events, attempt, subscribed):
    sender = make_sender(region, events, offer_timeout_s=0.05)
    capability, subscriber = sender.open(attempt), FakeSubscriber()
    if subscribed:
        sender.subscribe(attempt, subscription(capability), subscriber)
    sender.offer(attempt, [1], 0, SIZE, last=False)
    _, _, reason, detail, peer = await events.wait("failed", attempt)
    assert reason is FailureReason.TRANSFER and "chunk 0" in detail and "0.05 s" in detail
    assert peer == ("decode-1" if subscribed else "")
    assert sender.counters["overdue_offers"] == 1
    await sender.stop()


async def test_acknowledged_and_closed_offers_never_become_overdue(region, events):
    sender, subscriber = make_sender(region, events, offer_timeout_s=0.05), FakeSubscriber()
    acked, closed, witness = new_attempt("acked"), new_attempt("closed"), new_attempt("witness")
    for attempt in (acked, closed, witness):
        sender.subscribe(attempt, subscription(sender.open(attempt)), subscriber)
        sender.offer(attempt, [1], 0, SIZE, last=False)
    sender.ack(acked, 0, subscriber)
    sender.close(closed)
    await events.wait("failed", witness)  # all three timers were due by now
    assert [event[1] for event in events.seen if event[0] == "failed"] == [witness]
    await sender.stop()


async def test_an_attempt_without_offers_has_no_deadline_of_its_own(region, events, attempt):
    sender, witness = make_sender(region, events, offer_timeout_s=0.02), new_attempt("witness")
    sender.open(attempt)
    sender.open(witness)
    sender.offer(witness, [1], 0, SIZE, last=False)
    await events.wait("failed", witness)
    await asyncio.sleep(0)
    assert events.of("failed", attempt) == []
    await sender.stop()


async def test_opening_an_attempt_twice_is_a_bug_of_the_caller(sender, attempt):
    sender.open(attempt)
    with pytest.raises(AssertionError):
        sender.open(attempt)
