"""A prefill end in a process of its own, for tests that stop or kill it.

Prints its endpoint and a capability for the attempt `a` as JSON, offers and commits all its blocks, then prints how
that ended. Run as `python -m tests.support.kv_prefill_process TRANSPORT`; it ends with its stdin.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys

from tandem.config import TransferConfig
from tests.support.kv_ends import SIZE, attempt, prefill_end
from tests.support.kv_pools import NUM_BLOCKS, pool

SEED = 11


async def serve(transport: str) -> None:
    key = attempt("a")
    with pool(seed=SEED) as region:
        async with prefill_end(region, TransferConfig(transport=transport, checksum="on")) as end:
            capability = end.sender.open(key)
            print(json.dumps(dataclasses.asdict(end.peer) | {"capability": capability.hex()}), flush=True)
            end.offer_all(key, range(NUM_BLOCKS), NUM_BLOCKS * SIZE, 8)
            end.sender.commit(key, NUM_BLOCKS * SIZE, 42, 0)
            stdin = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
            ended = asyncio.create_task(end.committed.reaches(1))
            await asyncio.wait([stdin, ended], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                print("committed", flush=True)
            ended.cancel()
            await stdin
            await asyncio.gather(ended, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
