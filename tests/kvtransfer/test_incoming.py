"""What the receiver refuses of what a peer says, before a byte moves."""

import pytest

from kvtransfer.incoming import Incoming, problem_with_commit, problem_with_offer
from kvtransfer.reasons import reason_from_wire, reason_of
from tandem.errors import CorruptBlock, KVTransferError, LayoutMismatch
from tandem.messages import FailureReason
from tandem.v1 import worker_pb2 as pb
from tests.support.kv_ends import attempt
from tests.support.kv_pools import LAYOUT, endpoint

SIZE = LAYOUT.block_size


def incoming(num_blocks=4, first_token_wanted=0, **state):
    made = Incoming(
        attempt=attempt(),
        peer=endpoint(),
        capability=b"c" * 32,
        block_ids=tuple(range(num_blocks)),
        first_token_wanted=first_token_wanted,
        link=None,
        next_token=first_token_wanted,
    )
    for name, value in state.items():
        setattr(made, name, value)
    return made


def offer(num_blocks=2, first_token=0, num_tokens=None, last=False, num_generations=None):
    return pb.Offer(
        block_ids=range(num_blocks),
        generations=range(num_blocks if num_generations is None else num_generations),
        first_token=first_token,
        num_tokens=num_blocks * SIZE if num_tokens is None else num_tokens,
        last=last,
    )


@pytest.mark.parametrize(
    "state, offered",
    [
        ({}, offer(2)),
        ({}, offer(4, last=True)),
        ({}, offer(2, num_tokens=SIZE + 1, last=True)),
        ({"next_token": 2 * SIZE}, offer(2, first_token=2 * SIZE)),
        ({"first_token_wanted": 3 * SIZE}, offer(1, first_token=3 * SIZE, num_tokens=1, last=True)),
    ],
)
def test_a_fitting_offer_has_no_problem(state, offered):
    assert problem_with_offer(incoming(**state), offered, LAYOUT) is None


@pytest.mark.parametrize(
    "state, offered, problem",
    [
        ({"saw_last": True}, offer(), "after the last"),
        ({}, offer(first_token=SIZE), "was due"),
        ({"next_token": 2 * SIZE}, offer(first_token=0), "was due"),
        ({"first_token_wanted": 2 * SIZE}, offer(first_token=0), "was due"),
        ({"next_token": 1}, offer(first_token=1), "was due"),
        ({}, offer(0, num_tokens=0), "0 tokens"),
        ({}, offer(2, num_tokens=SIZE + 1), "not the last"),
        ({}, offer(1, num_tokens=2 * SIZE), "1 blocks"),
        ({}, offer(3, num_tokens=2 * SIZE), "3 blocks"),
        ({}, offer(2, num_generations=1), "blocks for"),
        ({}, offer(2, num_generations=3), "blocks for"),
        ({}, offer(5), "larger than the reservation"),
        ({"next_token": 3 * SIZE}, offer(2, first_token=3 * SIZE), "larger than the reservation"),
        ({}, offer(1, num_tokens=2**32 - 1, last=True), "1 blocks"),
    ],
)
def test_an_offer_that_does_not_fit_is_named(state, offered, problem):
    assert problem in problem_with_offer(incoming(**state), offered, LAYOUT)


def test_a_commit_fits_exactly_what_was_copied():
    done = incoming(num_copied_tokens=9, saw_last=True)
    assert problem_with_commit(done, pb.Commit(num_tokens=9)) is None
    for num_tokens in (0, 8, 10, 2**32 - 1):
        assert "9 are here" in problem_with_commit(done, pb.Commit(num_tokens=num_tokens))


def test_a_commit_counts_the_cached_prefix():
    half = incoming(first_token_wanted=8, num_copied_tokens=3, saw_last=True)
    assert problem_with_commit(half, pb.Commit(num_tokens=11)) is None
    assert problem_with_commit(half, pb.Commit(num_tokens=3)) is not None
    assert problem_with_commit(incoming(first_token_wanted=8), pb.Commit(num_tokens=8)) is None


def test_a_commit_before_the_last_chunk_or_during_a_copy_is_a_problem():
    assert "before the last" in problem_with_commit(incoming(num_copied_tokens=8), pb.Commit(num_tokens=8))
    copying = incoming(num_copied_tokens=8, saw_last=True, copies={object()})
    assert "in flight" in problem_with_commit(copying, pb.Commit(num_tokens=8))
    assert problem_with_commit(incoming(), pb.Commit(num_tokens=8)) is not None


@pytest.mark.parametrize(
    "error, reason",
    [
        (CorruptBlock("p", ""), FailureReason.CORRUPT),
        (LayoutMismatch("p", ""), FailureReason.LAYOUT_MISMATCH),
        (KVTransferError("p", ""), FailureReason.TRANSFER),
    ],
)
def test_the_router_is_told_what_failed(error, reason):
    assert reason_of(error) is reason
    assert reason_from_wire(int(reason)) is reason
