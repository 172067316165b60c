"""Real tiny models of every family: disaggregated over shm = over tcp = aggregated = transformers, token for token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from engine.backends.cpu import CpuRunner
from engine.runner import Runner
from engine.scheduler import Batch
from tandem.config import ClusterConfig
from tandem.model_files import ModelFiles
from tandem.types import Role
from tandem.v1 import generation_pb2 as pb
from tests.support.inprocess import InProcessCluster, test_config
from tests.support.tiny_models import FAMILIES, TinyModel, prompt_ids, tiny_model_factory, write_tiny_model
from worker.served_model import ServedModel, load_for_cpu

BLOCK, CHUNK, MAX_TOKENS = 4, 16, 10
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]
ARMS: dict[str, tuple[int, dict[str, object]]] = {
    "aggregated": (0, {}),
    "shm": (1, {"transfer__transport": "shm"}),
    "tcp": (1, {"transfer__transport": "tcp"}),
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    return tiny_model_factory(tmp_path_factory.mktemp("tiny"))


# the others differ from these in what tests/engine compares with transformers, not in what crosses between workers
QUICK_FAMILIES = {"llama3", "qwen2", "qwen3"}


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in QUICK_FAMILIES else pytest.mark.slow) for f in FAMILIES],
)
async def test_every_path_gives_the_tokens_of_transformers(tiny: Callable[[str], TinyModel], family: str) -> None:
    model = tiny(family)
    prompts = [prompt_ids(n) for n in LENGTHS]
    oracle = [model.greedy(prompt, MAX_TOKENS) for prompt in prompts]
    assert sum(num_sure for _, num_sure in oracle) >= 0.8 * MAX_TOKENS * len(LENGTHS), (
        "the oracle is sure of too little"
    )

    for arm, (prefill, settings) in ARMS.items():
        async with InProcessCluster(test_config(**settings), model.files, prefill=prefill) as cluster:

            async def check(number: int, cluster: InProcessCluster = cluster, arm: str = arm) -> None:
                stream = await cluster.generate(prompts[number], max_tokens=MAX_TOKENS, ignore_eos=True)
                token_ids, num_sure = oracle[number]
                assert len(stream.token_ids) == MAX_TOKENS
                assert stream.token_ids[:num_sure] == token_ids[:num_sure], f"{arm}, {LENGTHS[number]} tokens"

            for number in range(len(prompts)):
                await check(number)
            async with asyncio.TaskGroup() as group:
                for number in range(len(prompts)):
                    group.create_task(check(number))
            if prefill:
                assert [s.num_prefill_tokens for s in cluster.stats(Role.DECODE)] == [0]
                assert [s.num_decode_tokens for s in cluster.stats(Role.PREFILL)] == [0]


async def test_a_seeded_sampled_request_is_the_same_alone_in_a_batch_disaggregated_and_aggregated(
    tiny: Callable[[str], TinyModel],
) -> None:
    files = tiny("llama3").files
    prompts = [prompt_ids(19, seed) for seed in range(8)]
    sampling = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "max_tokens": 16, "ignore_eos": True}
    answers: list[Sequence[int]] = []
    for prefill in (0, 1):
        async with InProcessCluster(test_config(), files, prefill=prefill) as cluster:
            answers.append((await cluster.generate(prompts[0], seed=77, **sampling)).token_ids)
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(cluster.generate(prompt, seed=77 + number, **sampling))
                    for number, prompt in enumerate(prompts)
                ]
            answers.append(tasks[0].result().token_ids)
            other = await cluster.generate(prompts[0], seed=78, **sampling)
            assert other.token_ids != answers[0]
    assert all(answer == answers[0] for answer in answers) and len(answers[0]) == 16


async def test_a_first_token_that_is_eos_ends_the_stream_and_is_not_ignored_unless_asked(tmp_path: Path) -> None:
    prompt = prompt_ids(CHUNK + 3)
    first = write_tiny_model(tmp_path / "plain", "llama2").greedy(prompt, 1)[0][0]
    files = write_tiny_model(tmp_path / "eos", "llama2", eos_token_id=first).files
    for prefill in (0, 1):
        async with InProcessCluster(test_config(), files, prefill=prefill) as cluster:
            stream = await cluster.generate(prompt, max_tokens=20)
            assert stream.token_ids == [first]
            assert stream.finish is not None and stream.finish.reason == pb.FINISH_REASON_STOP
            stream = await cluster.generate(prompt, max_tokens=3, ignore_eos=True)
            assert stream.token_ids[0] == first and len(stream.token_ids) == 3


class ByteFlipper:
    """A runner that, once told to, flips one bit in the first block of a row before a step decodes it."""

    def __init__(self, runner: Runner, kv: memoryview, block_nbytes: int) -> None:
        self._runner, self._kv, self._block_nbytes = runner, kv, block_nbytes
        self.enabled = False
        self.num_flipped = 0

    def execute(self, batch: Batch) -> list[int | None]:
        if self.enabled and batch.num_decode_rows:
            self.enabled = False
            self._flip(batch.rows[0].row.block_table[0])
        return self._runner.execute(batch)

    def _flip(self, block_id: int) -> None:
        """Multiply one value of layer 0 by 256: the lowest but two bit of a float32's high byte, where it is unset."""
        start = block_id * self._block_nbytes
        values_of_layer_0 = range(start + self._block_nbytes // 4, start + self._block_nbytes // 2, 4)
        at = next(at + 3 for at in values_of_layer_0 if self._kv[at + 3] in (0x40, 0xC0))
        self._kv[at] ^= 0x04
        self.num_flipped += 1


async def test_one_flipped_byte_of_a_transferred_block_changes_the_output(tiny: Callable[[str], TinyModel]) -> None:
    flippers: list[ByteFlipper] = []

    def load(config: ClusterConfig, files: ModelFiles) -> ServedModel:
        served = load_for_cpu(config, files)

        def make_runner(kv: memoryview, num_blocks: int) -> Runner:
            runner = served.make_runner(kv, num_blocks)
            assert isinstance(runner, CpuRunner)
            flippers.append(ByteFlipper(runner, kv, served.layout.block_nbytes))
            return flippers[-1]

        return ServedModel(served.layout, served.identity, served.vocab_size, served.max_model_len, make_runner)

    files, prompt = tiny("llama2").files, prompt_ids(CHUNK + 3)
    async with InProcessCluster(test_config(transfer__checksum="off"), files, runner_factory=load) as cluster:
        intact = (await cluster.generate(prompt, max_tokens=8, ignore_eos=True)).token_ids
        again = (await cluster.generate(prompt, max_tokens=8, ignore_eos=True)).token_ids
        assert again == intact
        decode = flippers[1]
        decode.enabled = True
        flipped = (await cluster.generate(prompt, max_tokens=8, ignore_eos=True)).token_ids
        assert decode.num_flipped == 1
        assert flipped[0] == intact[0], "token 1 is the prefill worker's"
        assert flipped[1:] != intact[1:]
