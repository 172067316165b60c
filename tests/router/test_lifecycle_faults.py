"""HANDOFF's table of ways out, state by state, against fake workers over lossy links on a virtual clock.

Two tables drive it. LOSSES says in which states of the request each message is sent: it is lost in each of them, and a
message that is sent in a state where the table has no cell fails the test, so that a missing cell shows. FAULTS are
what befalls a party; each strikes in each state, at once and at random moments of it.

After every run: tokens in order, each once, equal to the undisturbed run (I1, I4), one terminal event (I2), usage (I3),
nothing held by any worker, no inbox, nobody in line (I5); the fakes assert that no block is decoded that was not copied
(I6). A bystander runs along and must finish, undisturbed or re-run.
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
from tests.support.fake_network import request_id_of
from tests.support.router_over_fakes import RouterOverFakes, Run, prompt_of
from tests.support.virtual_time import run_virtually

S = RequestState
QUEUED, RESERVED, PREFILLING = S.QUEUED, S.RESERVED, S.PREFILLING
TRANSFERRING, DECODING, FINISHED = S.TRANSFERRING, S.DECODING, S.FINISHED
LIVE = [state for state in S if state not in TERMINAL]
PROMPT_TOKENS, MAX_TOKENS = 20, 6
PATIENCE_S = 300.0
# how long a state lasts, roughly, for strikes in the middle of it
STATE_S = {QUEUED: 0.008, RESERVED: 0.001, PREFILLING: 0.06, TRANSFERRING: 0.01, DECODING: 0.06}

Strike = Callable[[RouterOverFakes, Run], None]


# ---- what befalls a party


def after(delay_s: float, act: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(delay_s, act)


def kill(*names: str) -> Strike:
    def strike(cluster: RouterOverFakes, run: Run) -> None:
        for name in names:
            cluster.kill(cluster.workers[name])

    return strike


def pause(name: str) -> Strike:
    def strike(cluster: RouterOverFakes, run: Run) -> None:
        cluster.workers[name].pause()
        after(12.0, cluster.workers[name].resume)

    return strike


def wedge(name: str) -> Strike:
    def strike(cluster: RouterOverFakes, run: Run) -> None:
        cluster.workers[name].wedge()
        after(9.0, cluster.workers[name].unwedge)

    return strike


def break_session(name: str) -> Strike:
    return lambda cluster, run: cluster.workers[name].break_sessions()


def break_pair(cluster: RouterOverFakes, run: Run) -> None:
    for pair in list(cluster.decode.pairs.values()):
        pair.break_off()


def stall_pair(cluster: RouterOverFakes, run: Run) -> None:
    for pair in list(cluster.decode.pairs.values()):
        pair.stall()


def stall_pair_of_an_impatient_sender(cluster: RouterOverFakes, run: Run) -> None:
    cluster.prefill.offer_timeout_s = 1.0 * cluster.prefill.pace
    stall_pair(cluster, run)


def corrupt(cluster: RouterOverFakes, run: Run) -> None:
    cluster.decode.corrupts = "r0"


def preempt(cluster: RouterOverFakes, run: Run) -> None:
    cluster.decode.preempt(cluster.attempt_key(run))


def drain(name: str) -> Strike:
    def strike(cluster: RouterOverFakes, run: Run) -> None:
        cluster.workers[name].drain()
        after(2.0, cluster.workers[name].undrain)

    return strike


def fill(name: str) -> Strike:
    return lambda cluster, run: cluster.workers[name].occupy(64, 2.0)


def unlist(name: str) -> Strike:
    def strike(cluster: RouterOverFakes, run: Run) -> None:
        cluster.publish(unlisted={name})
        after(2.0, lambda: cluster.publish(unlisted=set()))

    return strike


def scale_prefill_to_zero(cluster: RouterOverFakes, run: Run) -> None:
    cluster.publish(prefill_target=0)


def scale_prefill_up(cluster: RouterOverFakes, run: Run) -> None:
    cluster.publish(prefill_target=1)


FAULTS: dict[str, Strike] = {
    "prefill worker dies": kill("prefill-0"),
    "decode worker dies": kill("decode-0"),
    "both workers die": kill("prefill-0", "decode-0"),
    "prefill worker hangs": pause("prefill-0"),
    "decode worker hangs": pause("decode-0"),
    "step loop of prefill worker wedges": wedge("prefill-0"),
    "step loop of decode worker wedges": wedge("decode-0"),
    "session to prefill worker breaks": break_session("prefill-0"),
    "session to decode worker breaks": break_session("decode-0"),
    "pair channel breaks": break_pair,
    "pair channel stalls": stall_pair,
    "pair channel stalls, offers expire": stall_pair_of_an_impatient_sender,
    "a block is corrupted": corrupt,
    "decode worker preempts": preempt,
    "prefill worker drains": drain("prefill-0"),
    "decode worker drains": drain("decode-0"),
    "prefill pool is full": fill("prefill-0"),
    "decode pool is full": fill("decode-0"),
    "prefill worker leaves the directory": unlist("prefill-0"),
    "decode worker leaves the directory": unlist("decode-0"),
    "prefill pool is scaled to zero": scale_prefill_to_zero,
    "prefill pool is scaled up": scale_prefill_up,
}


# ---- scenarios: what happens besides a lost message


@dataclass(frozen=True)
class Scenario:
    """How a run is set up; `strike` happens when the request enters `in_state`.

    early: the request comes while the bystander, who came first, still holds its blocks.
    """

    max_tokens: int = MAX_TOKENS
    prefill_target: int = 1
    prefill_blocks: int = 64
    decode_blocks: int = 64
    early: bool = False
    in_state: RequestState | None = None
    strike: Strike | None = None


SCENARIOS = {
    "plain": Scenario(),
    "one token": Scenario(max_tokens=1),
    "aggregated": Scenario(prefill_target=0),
    "prefill pool full": Scenario(prefill_blocks=6, early=True),
    "decode pool full": Scenario(decode_blocks=8, early=True),
    "corrupted block": Scenario(in_state=PREFILLING, strike=corrupt),
    "preempted": Scenario(in_state=DECODING, strike=preempt),
    "session to P broken": Scenario(in_state=PREFILLING, strike=break_session("prefill-0")),
    "session to D broken": Scenario(in_state=PREFILLING, strike=break_session("decode-0")),
    "offers expire": Scenario(in_state=PREFILLING, strike=stall_pair_of_an_impatient_sender),
}

Cells = dict[str, set[RequestState]]
_KEYLESS_STATES = {QUEUED, PREFILLING, TRANSFERRING, DECODING, FINISHED}
# RESERVED lasts no time in the router: what follows from it leaves while PREFILLING.
# Tables of other scenarios than "plain" have only what "plain" has not.
LOSSES: dict[str, Cells] = {
    "plain": {
        "rp Heartbeat": _KEYLESS_STATES,
        "rp Credit": {QUEUED},
        "rp Prefill": {PREFILLING},
        "rp Release": {DECODING},
        "rd Heartbeat": _KEYLESS_STATES,
        "rd Reserve": {QUEUED},
        "rd Release": {FINISHED},
        "pr LoadReport": _KEYLESS_STATES,
        "pr CreditGranted": {QUEUED},
        "pr FirstToken": {PREFILLING},
        "dr LoadReport": _KEYLESS_STATES,
        "dr ReservationGranted": {QUEUED},
        "dr Committed": {TRANSFERRING},
        "dr Step": {TRANSFERRING, DECODING},
        "dr Finished": {DECODING},
        "dp Subscribe": {QUEUED},
        "dp Ack": {PREFILLING, TRANSFERRING},
        "dp CommitAck": {TRANSFERRING},
        "pd Offer": {PREFILLING},
        "pd Commit": {PREFILLING, TRANSFERRING},
    },
    "one token": {"rp Release": {FINISHED}},
    "aggregated": {"dr Step": {PREFILLING}},
    "prefill pool full": {"pr Refused": {QUEUED}, "rp Release": {QUEUED}},
    "decode pool full": {"dr Refused": {QUEUED}, "rd Release": {QUEUED}, "rp Release": {QUEUED}},
    "corrupted block": {
        "dp Abort": {PREFILLING},
        "dr Failed": {PREFILLING},
        "pr Failed": {QUEUED, PREFILLING, TRANSFERRING},
        "pr FirstToken": {QUEUED},
        "pd Offer": {QUEUED},
        "rp Release": {QUEUED},
        "rd Release": {QUEUED},
    },
    "preempted": {
        "dr Preempted": {DECODING},
        "dr Finished": {TRANSFERRING},
        "rd Release": {QUEUED},
    },
    "session to P broken": {"rp Resync": {QUEUED}, "rd Release": {QUEUED}},
    "session to D broken": {
        "rd Resync": {QUEUED},
        "rp Release": {QUEUED},
        "pd Offer": {QUEUED},
    },
    "offers expire": {
        "pr Failed": {TRANSFERRING},
        "rp Release": {QUEUED},
        "rd Release": {QUEUED},
    },
}


def test_every_message_of_the_wires_is_in_the_table() -> None:
    wires = {"to worker": pb.SessionRequest, "to router": pb.SessionResponse}
    wires |= {"dp": pb.ChannelRequest, "pd": pb.ChannelResponse}
    named: dict[str, set[str]] = {wire: set() for wire in wires}
    for channel, kind in (message.split() for cells in LOSSES.values() for message in cells):
        wire = {"rp": "to worker", "rd": "to worker", "pr": "to router", "dr": "to router"}.get(channel, channel)
        named[wire].add(kind)
    for wire, envelope in wires.items():
        kinds = {field.message_type.name for field in envelope.DESCRIPTOR.oneofs_by_name["body"].fields}
        # segments carry a Reserve's or Prefill's ids; hello and ping belong to no attempt; P never aborts
        kinds -= {"PromptSegment", "ChannelHello", "Ping", "Pong"} | ({"Abort"} if wire == "pd" else set())
        assert named[wire] == kinds


# ---- one run


Entered = Callable[[RouterOverFakes, Run, RequestState], None]


async def play(
    scenario: Scenario,
    seed: int,
    *,
    loses: Callable[[Run, str, Any], bool] = lambda run, name, message: False,
    entered: Entered = lambda cluster, run, state: None,
    slow: bool = False,
    deadline_s: float = PATIENCE_S,
) -> Run:
    """Run a request and a bystander under a fault; check everything that must hold of both."""
    async with RouterOverFakes(
        seed,
        prefill_target=scenario.prefill_target,
        prefill_blocks=scenario.prefill_blocks,
        decode_blocks=scenario.decode_blocks,
    ) as cluster:
        for worker in cluster.workers.values():
            worker.pace = 20.0 if slow else 1.0
        cluster.network.most_delay_s = 0.5 if slow else 0.003
        bystander = cluster.start("bystander", prompt_of(PROMPT_TOKENS, seed=1), 4)
        await asyncio.sleep(0.02 if scenario.early else cluster.rng.uniform(0.02, 0.5))
        struck = False

        def on_state(state: RequestState) -> None:
            nonlocal struck
            if state is scenario.in_state and scenario.strike is not None and not struck:
                struck = True
                scenario.strike(cluster, run)
            entered(cluster, run, state)

        run = cluster.start("r0", prompt_of(PROMPT_TOKENS), scenario.max_tokens, deadline_s, on_state)
        cluster.network.loses = lambda name, message: loses(run, name, message)
        await asyncio.sleep(0)  # it lives
        entered(cluster, run, QUEUED)
        async with asyncio.timeout(2 * PATIENCE_S):
            await run.ended()
            await bystander.ended()
        assert bystander.error is None, f"the bystander: {bystander.error}"
        await cluster.assert_baseline()
        return run


# ---- every message lost in every state in which it is sent

KEYLESS = ("Resync", "Heartbeat", "LoadReport")
# (seed, slow): heartbeats are rare, slow workers make every state long enough for some
PLAYS = [(seed, slow) for seed in range(40) for slow in (False, True)]
NUM_WATCHED = 10
ENOUGH_LOSSES = 3
ENOUGH_PLAYS = 10


def is_about(message: Any, request_id: str) -> bool:
    return request_id_of(message) in (None, request_id)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_table_has_a_cell_for_every_state_in_which_a_message_is_sent(name: str) -> None:
    found: Cells = {}

    def watch(run: Run, sent: str, message: Any) -> bool:
        if is_about(message, "r0"):
            found.setdefault(sent, set()).add(run.life.state)
        return False

    for seed, slow in PLAYS[:NUM_WATCHED]:
        run_virtually(play(SCENARIOS[name], seed, loses=watch, slow=slow))
    for message, states in found.items():
        known = LOSSES[name].get(message, set()) | LOSSES["plain"].get(message, set())
        assert states <= known, f"{message} has no cell for {[state.value for state in states - known]}"


def cells() -> list[Any]:
    return [
        pytest.param(name, message, state, id=f"{name}: {message} while {state.value}")
        for name, table in LOSSES.items()
        for message, states in table.items()
        for state in sorted(states, key=list(S).index)
    ]


@pytest.mark.parametrize(("name", "message", "state"), cells())
def test_a_lost_message_has_a_way_out(name: str, message: str, state: RequestState) -> None:
    num_losses = 0
    for number, (seed, slow) in enumerate(PLAYS):
        lost = False

        def lose_once(run: Run, sent: str, body: Any) -> bool:
            nonlocal lost
            if lost or sent != message or run.life.state is not state or not is_about(body, "r0"):
                return False
            lost = True
            return True

        if slow < (message.split()[1] in KEYLESS):
            continue
        run = run_virtually(play(SCENARIOS[name], seed, loses=lose_once, slow=slow))
        assert run.error is None, f"seed {seed}: {run.error}"
        assert run.life.state is FINISHED
        num_losses += lost
        if num_losses >= ENOUGH_LOSSES or (num_losses and number >= ENOUGH_PLAYS):
            break
    assert num_losses, "the cell is in the table, but no such message is sent in that state"


# ---- every party's faults in every state


def strike_once(state: RequestState, strike: Strike, at_once: bool) -> Entered:
    """Strike when the request first enters the state, or at a random moment after that."""
    struck = False

    def entered(cluster: RouterOverFakes, run: Run, now: RequestState) -> None:
        nonlocal struck
        if now is not state or struck:
            return
        struck = True
        if at_once:
            strike(cluster, run)
        else:
            after(cluster.rng.uniform(0, 1.5 * STATE_S[state]), lambda: strike(cluster, run))

    return entered


FAULT_SEEDS = range(3)


@pytest.mark.parametrize("state", LIVE, ids=lambda state: state.value)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_a_way_out(fault: str, state: RequestState) -> None:
    for seed in FAULT_SEEDS:
        entered = strike_once(state, FAULTS[fault], at_once=seed == 0)
        run = run_virtually(play(Scenario(), seed, entered=entered))
        assert run.error is None, f"seed {seed}: {run.error}"
        assert run.life.state is FINISHED


@pytest.mark.parametrize("name", ["one token", "aggregated"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_a_way_out_of_the_variants_too(fault: str, name: str) -> None:
    for seed, state in enumerate([QUEUED, PREFILLING, DECODING]):
        entered = strike_once(state, FAULTS[fault], at_once=seed == 0)
        run = run_virtually(play(SCENARIOS[name], seed, entered=entered))
        assert run.error is None, f"seed {seed}: {run.error}"


@pytest.mark.parametrize("state", LIVE, ids=lambda state: state.value)
def test_two_faults_at_once_have_a_way_out(state: RequestState) -> None:
    for number, first in enumerate(FAULTS):
        second = list(FAULTS)[(5 * number + 3) % len(FAULTS)]

        def both(cluster: RouterOverFakes, run: Run, first: str = first, second: str = second) -> None:
            FAULTS[first](cluster, run)
            after(cluster.rng.uniform(0, 0.1), lambda: FAULTS[second](cluster, run))

        run = run_virtually(play(Scenario(), number, entered=strike_once(state, both, at_once=number % 2 == 0)))
        assert run.error is None, f"{first}, then {second}: {run.error}"


@pytest.mark.parametrize("name", ["plain", "aggregated", "decode pool full"])
@pytest.mark.parametrize("state", LIVE, ids=lambda state: state.value)
def test_a_cancel_gives_everything_back(state: RequestState, name: str) -> None:
    for seed in FAULT_SEEDS:
        entered = strike_once(state, lambda cluster, run: run.task.cancel(), at_once=seed == 0)
        run = run_virtually(play(SCENARIOS[name], seed, entered=entered))
        if run.life.state is not FINISHED:  # it was faster
            assert run.life.state is S.ABORTED
            assert isinstance(run.error, Cancelled)


@pytest.mark.parametrize("name", ["plain", "aggregated", "decode pool full"])
@pytest.mark.parametrize("state", LIVE, ids=lambda state: state.value)
def test_a_deadline_gives_everything_back(state: RequestState, name: str) -> None:
    for seed in FAULT_SEEDS:
        entered_at: list[float] = []

        def note(cluster: RouterOverFakes, run: Run, now: RequestState, entered_at: list[float] = entered_at) -> None:
            if now is state:
                entered_at.append(asyncio.get_running_loop().time() - run.request.arrived_at)

        run_virtually(play(SCENARIOS[name], seed, entered=note))
        if not entered_at:
            continue  # the variant leaves this state out
        deadline_s = entered_at[0] + (1e-9 if seed == 0 else STATE_S[state] * seed / 5)
        run = run_virtually(play(SCENARIOS[name], seed, deadline_s=deadline_s))
        if run.life.state is not FINISHED:
            assert run.life.state is S.ABORTED
            assert isinstance(run.error, DeadlineExceeded)


@pytest.mark.parametrize("state", LIVE, ids=lambda state: state.value)
def test_what_a_dead_router_held_is_free_after_the_lease(state: RequestState) -> None:
    async def die_in_state(seed: int) -> None:
        async with RouterOverFakes(seed) as cluster:
            dead = asyncio.Event()

            def entered(cluster: RouterOverFakes, run: Run, now: RequestState) -> None:
                strike_once(state, lambda cluster, run: dead.set(), at_once=seed == 0)(cluster, run, now)

            run = cluster.start(
                "r0", prompt_of(PROMPT_TOKENS), MAX_TOKENS, PATIENCE_S, lambda s: entered(cluster, run, s)
            )
            entered(cluster, run, QUEUED)
            async with asyncio.timeout(PATIENCE_S):
                await dead.wait()
            await cluster.kill_router()
            await cluster.assert_baseline()

    for seed in FAULT_SEEDS:
        run_virtually(die_in_state(seed))
