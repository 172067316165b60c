from __future__ import annotations

from typing import Any

import pytest

from tandem.client import TandemClient
from tandem.errors import InvalidRequest

NOBODY = "127.0.0.1:1"


@pytest.mark.parametrize(
    "request_fields",
    [
        {"token_ids": [-1]},
        {"token_ids": [1 << 32]},
        {"prompt": "x", "max_tokens": 1 << 32},
        {"prompt": "x", "seed": -1},
        {"prompt": "x", "top_k": 1 << 40},
        {"prompt": "x", "temperature": "hot"},
    ],
    ids=str,
)
async def test_what_the_wire_cannot_carry_is_an_invalid_request(request_fields: dict[str, Any]) -> None:
    async with TandemClient(NOBODY) as client:
        with pytest.raises(InvalidRequest):
            await anext(client.generate(**request_fields))


@pytest.mark.parametrize("prompts", [{}, {"prompt": "x", "token_ids": [1]}], ids=str)
async def test_a_request_has_exactly_one_prompt(prompts: dict[str, Any]) -> None:
    async with TandemClient(NOBODY) as client:
        with pytest.raises(InvalidRequest, match="exactly one"):
            await anext(client.generate(**prompts))


async def test_ids_that_the_wire_cannot_carry_have_no_text() -> None:
    async with TandemClient(NOBODY) as client:
        with pytest.raises(InvalidRequest, match="token_ids"):
            await client.detokenize([-1])
