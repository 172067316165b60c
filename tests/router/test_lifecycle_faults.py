"""HANDOFF's table of ways out, state by state, against fake workers over lossy links on a virtual clock.

Two tables drive it. LOSSES says in which states of the request each message is sent: every message is lost in every
state, and a message that is lost in a state where the table has none (or the other way round) fails the test, so that
a missing cell shows. FAULTS are what befalls a party; each strikes in each state, at once and at random moments.

After every run: tokens in order, each once, equal to the undisturbed run (I1, I4), one terminal event (I2), usage (I3),
nothing held by any worker, no inbox, nobody in line (I5); the fakes assert that no block is decoded that was not copied
(I6). A bystander runs along and must finish undisturbed or re-run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tandem.errors import Cancelled, DeadlineExceeded
from tandem.states import TERMINAL, RequestState
from tandem.v1 import worker_pb2 as pb
from tests.support.fake_cluster import FakeCluster, Run, prompt_of
from tests.support.fake_network import request_id_of
from tests.support.virtual_time import run_virtually

S = RequestState
QUEUED, RESERVED, PREFILLING = S.QUEUED, S.RESERVED, S.PREFILLING
TRANSFERRING, DECODING, FINISHED = S.TRANSFERRING, S.DECODING, S.FINISHED
LIVE = [state for state in S if state not in TERMINAL]
SEEDS = range(4)
PROMPT_TOKENS, MAX_TOKENS = 20, 6
PATIENCE_S = 300.0


# ---- scenarios: what happens besides the fault


@dataclass(frozen=True)
class Scenario:
    """How a run is set up; `strike` happens when the request enters `in_state`."""

    max_tokens: int = MAX_TOKENS
    prefill_target: int = 1
    prefill_blocks: int = 64
    decode_blocks: int = 64
    in_state: RequestState | None = None
    strike: Callable[[FakeCluster, Run], None] | None = None
    # only the messages that this scenario is there for
    only: tuple[str, ...] = ()


def corrupt(cluster: FakeCluster, run: Run) -> None:
    cluster.decode.corrupt_next = True


def preempt(cluster: FakeCluster, run: Run) -> None:
    cluster.decode.preempt(cluster.attempt_key(run))


def break_session(letter: str) -> Callable[[FakeCluster, Run], None]:
    return lambda cluster, run: (cluster.prefill if letter == "p" else cluster.decode).break_sessions()


def stall_pair(cluster: FakeCluster, run: Run) -> None:
    for pair in list(cluster.decode.pairs.values()):
        pair.stall()


def break_pair(cluster: FakeCluster, run: Run) -> None:
    for pair in list(cluster.decode.pairs.values()):
        pair.break_off()


SCENARIOS = {
    "plain": Scenario(),
    "one token": Scenario(max_tokens=1),
    "aggregated": Scenario(prefill_target=0),
    # the bystander, who comes first, fills the pool
    "prefill pool full": Scenario(prefill_blocks=6, only=("pr Refused",)),
    "decode pool full": Scenario(decode_blocks=8, only=("dr Refused", "rp Release")),
    "corrupted block": Scenario(in_state=PREFILLING, strike=corrupt, only=("dp Abort", "pr Failed", "dr Failed")),
    "preempted": Scenario(in_state=DECODING, strike=preempt, only=("dr Preempted",)),
    "session to P broken": Scenario(in_state=PREFILLING, strike=break_session("p"), only=("rp Resync", "rd Release")),
    "session to D broken": Scenario(in_state=DECODING, strike=break_session("d"), only=("rd Resync", "rp Release")),
    "pair stalled": Scenario(in_state=PREFILLING, strike=stall_pair, only=("pr Failed", "dp Subscribe")),
}

MESSAGES = [
    *("rp Resync", "rp Heartbeat", "rp Credit", "rp Prefill", "rp Release"),
    *("rd Resync", "rd Heartbeat", "rd Reserve", "rd Release"),
    *("pr LoadReport", "pr CreditGranted", "pr Refused", "pr FirstToken", "pr Failed"),
    *("dr LoadReport", "dr ReservationGranted", "dr Refused", "dr Committed", "dr Step", "dr Finished", "dr Failed"),
    *("dr Preempted", "dp Subscribe", "dp Ack", "dp CommitAck", "dp Abort", "pd Offer", "pd Commit"),
]
LOSSES: dict[str, dict[str, set[RequestState]]] = {}


def test_every_message_of_the_wires_is_in_the_table() -> None:
    wires = {
        "r": pb.SessionRequest,
        "w": pb.SessionResponse,
        "dp": pb.ChannelRequest,
        "pd": pb.ChannelResponse,
    }
    named = {(channel if channel in ("dp", "pd") else channel[0] if channel[0] == "r" else "w", kind)
             for channel, kind in (message.split() for message in MESSAGES)}
    for channel, envelope in wires.items():
        kinds = {field.message_type.name for field in envelope.DESCRIPTOR.oneofs_by_name["body"].fields}
        # segments carry a Reserve's or Prefill's ids; the hello opens a channel before any attempt; P never aborts
        kinds -= {"PromptSegment", "ChannelHello"} | ({"Abort"} if channel == "pd" else set())
        assert kinds == {kind for where, kind in named if where == channel}


# ---- one run


async def play(
    scenario: Scenario,
    seed: int,
    prepare: Callable[[FakeCluster, Run], None],
    *,
    on_state: Callable[[FakeCluster, Run, RequestState], None] = lambda cluster, run, state: None,
    most_delay_s: float = 0.003,
    deadline_s: float = PATIENCE_S,
) -> Run:
    """Run a request and a bystander under a fault; check everything that must hold of both."""
    async with FakeCluster(
        seed,
        prefill_target=scenario.prefill_target,
        prefill_blocks=scenario.prefill_blocks,
        decode_blocks=scenario.decode_blocks,
    ) as cluster:
        cluster.network.most_delay_s = most_delay_s
        bystander = cluster.start("bystander", prompt_of(PROMPT_TOKENS, seed=1), 4)
        await asyncio.sleep(cluster.network.rng.uniform(0.02, 0.5) if not scenario.only else 0.02)
        struck = False

        def entered(state: RequestState) -> None:
            nonlocal struck
            if state is scenario.in_state and scenario.strike is not None and not struck:
                struck = True
                scenario.strike(cluster, run)
            on_state(cluster, run, state)

        run = cluster.start("r0", prompt_of(PROMPT_TOKENS), scenario.max_tokens, deadline_s, entered)
        prepare(cluster, run)
        on_state(cluster, run, QUEUED)
        if cluster.runs:  # unless the router has died already
            await run.ended()
            await bystander.ended()
            assert bystander.error is None, f"the bystander: {bystander.error}"
        await cluster.assert_baseline()
        return run


# ---- every message lost in every state


def lose_once(name: str, state: RequestState, fired: list[str]) -> Callable[[FakeCluster, Run], None]:
    """Lose the first message of that name that is sent while the request is in that state."""

    def prepare(cluster: FakeCluster, run: Run) -> None:
        def loses(sent: str, message: Any) -> bool:
            about = request_id_of(message)
            if sent != name or fired or run.life.state is not state or about not in (None, "r0"):
                return False
            fired.append(name)
            return True

        cluster.network.loses = loses

    return prepare


KEYLESS = ("Resync", "Heartbeat", "LoadReport")


def lost_states(scenario_name: str, message: str) -> set[RequestState]:
    """The states in which the message was sent, and lost without harm."""
    scenario = SCENARIOS[scenario_name]
    found = set()
    for state in [*LIVE, FINISHED]:
        for seed in SEEDS:
            fired: list[str] = []
            # heartbeats are rare: a slow network makes every state long enough for some
            slow = message.split()[1] in KEYLESS
            run = run_virtually(
                play(scenario, seed, lose_once(message, state, fired), most_delay_s=0.5 if slow else 0.003)
            )
            assert run.error is None, f"{message} lost while {state.value}, seed {seed}: {run.error}"
            assert run.life.state is FINISHED
            if fired:
                found.add(state)
    return found
