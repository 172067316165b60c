"""In-process clusters around the fake engine, their prompts, and the undisturbed run to compare with."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.fake_model import fake_files, fake_runner_factory
from tests.support.inprocess import InProcessCluster, test_config

BLOCK, CHUNK = 4, 16


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{seed}/{num_tokens}")
    return [rng.randrange(3, 200) for _ in range(num_tokens)]


def cluster(
    folder: Path, *, prefill: int = 1, decode: int = 1, step_s: float = 0.0, **settings: object
) -> InProcessCluster:
    return InProcessCluster(
        test_config(**settings),
        fake_files(folder),
        prefill=prefill,
        decode=decode,
        runner_factory=fake_runner_factory(step_s),
    )


async def references(folder: Path, prompts: list[list[int]], **sampling: object) -> list[list[int]]:
    """The undisturbed aggregated run, one request at a time."""
    async with cluster(folder, prefill=0) as aggregated:
        streams = [await aggregated.generate(prompt, ignore_eos=True, **sampling) for prompt in prompts]
    return [stream.token_ids for stream in streams]
