"""A worker that says something twice is at fault, not the request: it counts as lost, and the stream goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.messages import Committed, FirstToken
from tandem.states import RequestState
from tandem.types import RequestKey
from tests.support.router_over_fakes import RouterOverFakes, Run, prompt_of
from tests.support.virtual_time import run_virtually

REPEATED: dict[RequestState, Callable[[RequestKey], tuple[str, FirstToken | Committed]]] = {
    RequestState.TRANSFERRING: lambda key: ("prefill-0", FirstToken(key, index=0, token_id=1)),
    RequestState.DECODING: lambda key: ("decode-0", Committed(key)),
}


@pytest.mark.parametrize("state", REPEATED, ids=lambda state: state.value)
def test_a_message_that_comes_twice_costs_an_attempt_and_no_stream(state: RequestState) -> None:
    async def play() -> None:
        async with RouterOverFakes(1) as cluster:

            def on_state(now: RequestState) -> None:
                if now is state and run.life._num_attempts == 1:
                    key = cluster.attempt_key(run).key
                    worker_id, message = REPEATED[state](key)
                    (link,) = [link for link in cluster.links() if link.worker_id == worker_id]
                    link._deliver(key, message)

            run: Run = cluster.start("r0", prompt_of(20), 6, on_state=on_state)
            await run.ended()
            assert run.error is None
            assert run.life.state is RequestState.FINISHED
            assert run.checker.finish is not None and run.checker.finish.timeline.attempts == 2
            await cluster.assert_baseline()

    run_virtually(play())
