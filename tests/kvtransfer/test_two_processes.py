"""The pair as it runs: two processes. One is stopped or killed in the middle of a hand-off."""

import asyncio
import json
import signal
import sys
from contextlib import asynccontextmanager

import pytest

from tandem.config import TransferConfig
from tandem.messages import FailureReason
from tandem.types import PeerEndpoint
from tests.support.kv_ends import SIZE, attempt, decode_end, held_copies
from tests.support.kv_pools import NUM_BLOCKS, bytes_of, pool
from tests.support.kv_prefill_process import SEED
from tests.support.leaks import nothing_left_behind

A, B = attempt("a"), attempt("b")
START_TIMEOUT_S = 60.0


@asynccontextmanager
async def prefill_process(transport):
    """(process, its endpoint, the capability for A)"""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.kv_prefill_process",
        transport,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            told = json.loads(await process.stdout.readline())
        capability = bytes.fromhex(told.pop("capability"))
        yield process, PeerEndpoint(**told), capability
    finally:
        if process.returncode is None:
            process.kill()
        process.stdin.close()
        await process.wait()


@pytest.fixture
async def target():
    async with nothing_left_behind():
        with pool() as region:
            yield region


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_prompt_moves_between_processes_and_the_bytes_outlive_the_sender(target, transport):
    config = TransferConfig(transport=transport, checksum="on")
    into = list(reversed(range(NUM_BLOCKS)))
    async with prefill_process(transport) as (process, peer, capability), decode_end(target, config) as decode:
        decode.receiver.open(A, peer, capability, into, 0)
        ((_, record),) = await decode.committed.reaches(1)
        async with asyncio.timeout(START_TIMEOUT_S):
            assert (await process.stdout.readline()).strip() == b"committed"
        assert record.transport == transport and record.num_tokens == NUM_BLOCKS * SIZE
        process.kill()
        await process.wait()
        with pool(seed=SEED) as expected:
            assert bytes_of(target, into) == bytes(expected.buffer)
        assert not decode.failed


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_peer_that_is_killed_in_the_middle_of_a_copy_fails_the_attempt(target, transport, monkeypatch):
    config = TransferConfig(transport=transport)
    async with prefill_process(transport) as (process, peer, capability), decode_end(target, config) as decode:
        with held_copies(monkeypatch) as gate:
            decode.receiver.open(A, peer, capability, list(range(NUM_BLOCKS)), 0)
            await gate.is_reached()
            process.kill()
            ((key, reason, _, peer_id),) = await decode.failed.reaches(1)
            assert (key, reason, peer_id) == (A, FailureReason.TRANSFER, peer.worker_id)
        await decode.close(A)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_peer_that_is_stopped_is_noticed_by_keepalive_and_its_link_breaks(target, transport):
    """SIGSTOP: the kernel goes on accepting and acknowledging, the process answers nothing."""
    config = TransferConfig(transport=transport, offer_timeout_s=600)
    async with prefill_process(transport) as (process, peer, _), decode_end(target, config) as decode:
        decode.receiver.open(B, peer, b"c" * 32, [0], 0)
        await decode.failed.reaches(1)  # an unknown attempt: the channel stands
        process.send_signal(signal.SIGSTOP)
        decode.receiver.open(A, peer, b"c" * 32, [0], 0)
        *_, (key, reason, detail, _) = await decode.failed.reaches(2)
        assert (key, reason) == (A, FailureReason.TRANSFER) and "UNAVAILABLE" in detail


@pytest.mark.slow
async def test_a_fetch_from_a_peer_that_is_stopped_ends_when_its_attempt_is_closed(target, monkeypatch):
    config = TransferConfig(transport="tcp", offer_timeout_s=600)
    async with prefill_process("tcp") as (process, peer, capability), decode_end(target, config) as decode:
        with held_copies(monkeypatch) as gate:
            decode.receiver.open(A, peer, capability, list(range(NUM_BLOCKS)), 0)
            await gate.is_reached()
            process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.2)
        assert decode.receiver.num_copies_in_flight
        await decode.close(A)
        assert decode.receiver.num_copies_in_flight == 0
