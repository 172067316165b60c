"""What routers learn of the pools. Pure; `pools/service.py` sends it, `router/directory.py` receives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pools.pool import DECODE, PREFILL, WORKER_KINDS, MemberState, Pool
from tandem.types import Directory


def directory_of(pools: Mapping[str, Pool], controller_incarnation: int) -> Directory:
    """Workers that serve (those asked to leave marked as draining) and the targets. The sequence is the publisher's."""
    serving = [
        replace(member.info.worker, draining=member.drain.is_set())
        for kind in WORKER_KINDS
        for member in pools[kind].in_state(MemberState.READY, MemberState.DRAINING)
        if member.info is not None and member.info.worker is not None
    ]
    return Directory(
        workers=tuple(serving),
        prefill_target=pools[PREFILL].target,
        decode_target=pools[DECODE].target,
        controller_incarnation=controller_incarnation,
    )
