"""Token 1 does not wait for the KV: the client has it while the last chunk is still on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtransfer.transports.base import Chunk, FetchResult
from kvtransfer.transports.shm import ShmTransport
from tandem.types import Role
from tests.support.fake_cluster import CHUNK, cluster, prompt_of, references


async def test_the_first_token_reaches_the_client_before_the_last_chunk_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(2 * CHUNK + 3)
    (expected,) = await references(tmp_path, [prompt], max_tokens=8)
    may_move = asyncio.Event()
    may_move.set()
    fetch_now = ShmTransport.fetch

    async def fetch(
        self: ShmTransport, capability: bytes, chunk: Chunk, into_block_ids: Sequence[int], deadline: float
    ) -> FetchResult:
        if chunk.last:
            await may_move.wait()
        return await fetch_now(self, capability, chunk, into_block_ids, deadline)

    monkeypatch.setattr(ShmTransport, "fetch", fetch)
    settings = {"timing__commit_overdue_s": 60.0, "transfer__offer_timeout_s": 60.0}
    async with cluster(tmp_path, transfer__transport="shm", **settings) as split:
        (before,) = split.stats(Role.DECODE)
        may_move.clear()
        responses = aiter(split.call(split.request(prompt, max_tokens=8, ignore_eos=True)))
        first = await anext(responses)
        assert list(first.chunk.token_ids) == expected[:1]
        # token 1 may even overtake the last chunk's offer; the chunk stays in flight once that has come
        async with asyncio.timeout(20.0):
            while [s.num_copies_in_flight for s in split.stats(Role.DECODE)] != [1]:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.01)
        (now,) = split.stats(Role.DECODE)
        assert now.num_copies_in_flight == 1
        assert now.num_forward_calls == before.num_forward_calls
        may_move.set()
        token_ids = list(first.chunk.token_ids)
        async for response in responses:
            token_ids += response.chunk.token_ids or response.finish.token_ids
        assert token_ids == expected
        assert response.finish.timeline.attempts == 1
