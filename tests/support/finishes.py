"""A finished answer's last event, for tests of what is shown of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.client import Finish, Timeline, Usage, WorkerRef
from tandem.types import FinishReason

_TIMELINE = Timeline(
    mode="disaggregated",
    queue_s=0.001,
    reserve_s=0.002,
    prefill_s=0.008,
    ttft_s=0.0123,
    transfer_s=0.0,
    exposed_transfer_s=0.0,
    commit_s=0.0,
    first_decode_s=0.003,
    total_s=0.02,
    itl_mean_s=0.0021,
    attempts=1,
    prefill_worker=None,
    decode_worker=WorkerRef("decode-0", 11, "node"),
    history=(),
    transfer_nbytes=0,
    num_chunks=1,
    num_overlapped_chunks=0,
    transport="",
)


def make_finish(
    reason: FinishReason, *, index: int = 4, token_ids: tuple[int, ...] = (), text: str = "", **timeline: Any
) -> Finish:
    return Finish(0, reason, index, token_ids, text, Usage(10, 4, 0), replace(_TIMELINE, **timeline))
