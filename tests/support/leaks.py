"""What a process holds, so that a test can show that nothing of it stays behind."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

SETTLE_TIMEOUT_S = 10.0
# gRPC makes them for the whole process, as it needs them
_POLLERS = ("anon_inode:[eventfd]", "anon_inode:[eventpoll]")


def open_fds() -> dict[int, str]:
    """Descriptor -> what it is open on."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:
            continue  # the listing's own descriptor
    return found


def num_memfds() -> int:
    return sum("memfd:" in target for target in open_fds().values())


def num_pool_maps() -> int:
    """Maps of KV pools, ours and other workers'."""
    return sum("memfd:tandem-kv" in line for line in Path("/proc/self/maps").read_text().splitlines())


def transport_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kv-"))


def other_tasks() -> list[str]:
    return sorted(task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task())


def held() -> dict[str, list[str]]:
    """What a test must not add to."""
    return {
        "descriptors": sorted(
            re.sub(r"\[\d+\]", "", target) for target in open_fds().values() if target not in _POLLERS
        ),
        "pool maps": ["pool map"] * num_pool_maps(),
        "transport threads": transport_threads(),
        "tasks": other_tasks(),
    }


def added(before: dict[str, list[str]]) -> dict[str, list[str]]:
    """What is held now and was not held before."""
    now = held()
    return {kind: extra for kind in now if (extra := sorted((Counter(now[kind]) - Counter(before[kind])).elements()))}


@asynccontextmanager
async def nothing_left_behind() -> AsyncIterator[None]:
    """Nothing is held at the end that was not held before. gRPC closes its sockets a little later."""
    before = held()
    yield
    try:
        async with asyncio.timeout(SETTLE_TIMEOUT_S):
            while added(before):
                gc.collect()  # a traceback may hold a view of a pool
                await asyncio.sleep(0.01)
    except TimeoutError:
        left = added(before)
        assert not left, left
