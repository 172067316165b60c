"""Thousands of random messages, steps, copies and clock jumps: nothing leaks, nothing is freed twice or too early."""

from __future__ import annotations

import random

import pytest

from decode_worker.role import DecodeRole
from kvtransfer.receiver import CommitRecord
from prefill_worker.role import PrefillRole
from tandem.messages import (
    Credit,
    FailureReason,
    Heartbeat,
    Prefill,
    PromptSegment,
    Release,
    Reserve,
    Resync,
    RouterMessage,
)
from tandem.types import AttemptKey, FinishReason, PeerEndpoint, RequestKey
from tests.support.fake_parts import LEASE_S, FakeReceiver, FakeSender, Surroundings, greedy, output, step, surroundings

PEER = PeerEndpoint("prefill-0", 77, "127.0.0.1:1", "node")


def some_key(rng: random.Random) -> RequestKey:
    return RequestKey(f"r{rng.randrange(6)}", 0, rng.randrange(1, 4))


def router_message(rng: random.Random) -> RouterMessage:
    key = some_key(rng)
    num_tokens = rng.randrange(0, 12)
    token_ids = tuple(range(num_tokens))
    prompt, sampling = rng.randrange(0, num_tokens + 1), greedy(rng.randrange(1, 12))
    return rng.choice(
        [
            Heartbeat(),
            Resync(tuple(some_key(rng) for _ in range(rng.randrange(12)))),
            PromptSegment(key, 0, (1, 2)),
            Credit(key, num_tokens, solo=rng.random() < 0.2),
            Prefill(key, token_ids, num_tokens, prompt, sampling),
            Prefill(key, token_ids, num_tokens, num_tokens, sampling),
            Reserve(key, token_ids, num_tokens, num_tokens, sampling, PEER, b"c"),
            Reserve(key, token_ids, num_tokens, prompt, sampling, local_prefill=True),
            Release(key),
        ]
    )


def random_step(rng: random.Random, around: Surroundings) -> object:
    """A step over some of the engine's rows, as the step loop would publish it."""
    outputs = []
    for attempt in list(around.engine.rows):
        row = around.engine.rows[attempt]
        if rng.random() < 0.4:
            continue
        started = row.num_computed_tokens == 0
        row.num_computed_tokens = min(len(row.token_ids), row.num_computed_tokens + rng.randrange(1, 6))
        index = token_id = finish = None
        if row.num_computed_tokens == len(row.token_ids):
            index, token_id = row.num_output_tokens, rng.randrange(100)
            row.token_ids.append(token_id)
            finish = row.finish_reason() or (FinishReason.STOP if rng.random() < 0.1 else None)
        if finish or (token_id is not None and row.prefill_only):
            del around.engine.rows[attempt]
        outputs.append(output(attempt, row.num_computed_tokens, index, token_id, finish, started))
    return step(*outputs)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_no_sequence_of_events_leaks_or_frees_twice(kind: str, seed: int) -> None:
    rng = random.Random(f"{kind}{seed}")
    around, sender, receiver = surroundings(num_blocks=10), FakeSender(), FakeReceiver()
    role = PrefillRole(around.parts, sender) if kind == "prefill" else DecodeRole(around.parts, receiver)
    for _ in range(400):
        attempt = AttemptKey(rng.randrange(2), some_key(rng))
        match rng.randrange(10):
            case 0 | 1 | 2 | 3:
                role.receive(rng.randrange(2), router_message(rng))
            case 4 | 5:
                around.engine.in_step = {a for a in around.engine.rows if rng.random() < 0.7}
                for _ in range(rng.randrange(3)):
                    role.receive(rng.randrange(2), router_message(rng))
                role.publish(random_step(rng, around))  # type: ignore[arg-type]
                around.engine.end_step()
            case 6 if isinstance(role, PrefillRole):
                role.on_committed(attempt)
                role.on_acked(attempt, rng.randrange(3))
            case 6 if isinstance(role, DecodeRole):
                receiver.copying |= {a for a in receiver.opened if rng.random() < 0.2}
                held = role._held.get(attempt)
                num_tokens = len(held.token_ids) if held else 4
                index = num_tokens - held.num_prompt_tokens if held else 0
                role.on_committed(attempt, CommitRecord(num_tokens, 5, index, 0.0, 0.0, 0, 1, "shm"))
            case 7:
                role.on_failed(attempt, int(rng.choice(list(FailureReason))), "because", "peer")
            case 8:
                around.clock.now += rng.random() * LEASE_S * 0.6
                role.sweep()
            case 9:
                receiver.end_copies()
        assert around.pool.num_free >= 0 and role.num_leases <= role.num_held
        assert set(around.engine.rows) <= set(role._held)
    for router in range(2):
        role.receive(router, Resync(()))
    receiver.end_copies()
    around.engine.end_step()
    around.assert_baseline(role)
