"""Drives a runner by hand over a poisoned pool, and judges what it sampled by the oracle's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch

from engine.backends import cpu
from engine.block_pool import BlockPool
from engine.loader import LoadedModel
from engine.row import Row
from engine.runner import Runner
from engine.scheduler import schedule
from tandem.types import AttemptKey, RequestKey, Sampling
from tests.support.tiny_models import MARGIN, TinyModel

BLOCK, CHUNK = 16, 32


def attempt_key(number: int, choice: int = 0) -> AttemptKey:
    return AttemptKey(1, RequestKey(f"r{number}", choice, 1))


def make_row(number: int, prompt: Sequence[int], block_table: list[int], sampling: Sampling) -> Row:
    return Row(attempt_key(number), list(prompt), len(prompt), sampling, block_table)


def run_to_end(runner: Runner, rows: list[Row], *, chunk_size: int = CHUNK, max_num_seqs: int = 64) -> int:
    """Step until every row has finished; returns the number of steps."""
    num_steps, live = 0, list(rows)
    while live:
        batch = schedule(live, chunk_size=chunk_size, max_num_seqs=max_num_seqs)
        assert batch is not None
        for scheduled, token_id in zip(batch.rows, runner.execute(batch), strict=True):
            scheduled.row.num_computed_tokens = scheduled.end
            if token_id is not None:
                scheduled.row.token_ids.append(token_id)
        live = [row for row in live if row.finish_reason() is None]
        num_steps += 1
    return num_steps


def poisoned_runner(
    model: LoadedModel, *, num_blocks: int = 128, block_size: int = BLOCK
) -> tuple[cpu.CpuRunner, BlockPool]:
    """A CpuRunner over a pool whose every number is NaN."""
    layout = model.kv_layout(block_size)
    kv = memoryview(bytearray(b"\xff" * (num_blocks * layout.block_nbytes)))
    return cpu.CpuRunner(model, kv, num_blocks, layout, num_threads=1), BlockPool(num_blocks)


@dataclass(slots=True)
class Run:
    """Answers, and each answer token's logits."""

    answers: list[list[int]]
    logits: list[torch.Tensor] = field(default_factory=list)  # [max_tokens, vocab] each


def generate(
    model: LoadedModel, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], *, block_size: int = BLOCK
) -> Run:
    """Answer all prompts together."""
    runner, pool = poisoned_runner(model, block_size=block_size)
    layout = model.kv_layout(block_size)
    rows = []
    for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        # every second row's blocks come from the far end, so that no table is a plain range
        block_table = pool.allocate(layout.num_blocks_for(len(prompt) + sampling.max_tokens))
        rows.append(make_row(number, prompt, block_table[::-1] if number % 2 else block_table, sampling))
    seen: dict[int, list[torch.Tensor]] = {number: [] for number in range(len(rows))}
    sample, order = cpu.sample, {id(row.sampling): number for number, row in enumerate(rows)}

    def recording(logits: torch.Tensor, params: Sequence[tuple[Sampling, float]]) -> list[int]:
        for one, (sampling, _) in zip(logits, params, strict=True):
            seen[order[id(sampling)]].append(one.clone())
        return sample(logits, params)

    cpu.sample = recording
    try:
        run_to_end(runner, rows)
    finally:
        cpu.sample = sample
    answers = [row.token_ids[row.num_prompt_tokens :] for row in rows]
    return Run(answers, [torch.stack(one) for one in seen.values()])


def greedy(max_tokens: int) -> Sampling:
    return Sampling(max_tokens, temperature=0.0)


def assert_equals_oracle(
    model: LoadedModel, oracle: TinyModel, prompts: Sequence[Sequence[int]], max_tokens: int, tolerance: float = 2e-4
) -> None:
    """All prompts together: logits within tolerance, tokens equal wherever the oracle's margin is above MARGIN.

    The oracle is asked about the engine's own tokens, so that a token it was not sure of does not end the comparison.
    """
    run = generate(model, prompts, [greedy(max_tokens) for _ in prompts])
    num_sure = 0
    for prompt, answer, logits in zip(prompts, run.answers, run.logits, strict=True):
        assert len(answer) == max_tokens
        expected = oracle.logits([*prompt, *answer[:-1]])[len(prompt) - 1 :]
        torch.testing.assert_close(logits, expected, rtol=0.0, atol=tolerance)
        best = expected.topk(2, dim=-1)
        sure = best.values[:, 0] - best.values[:, 1] > MARGIN
        num_sure += int(sure.sum())
        assert torch.equal(torch.tensor(answer)[sure], best.indices[:, 0][sure]), f"prompt of {len(prompt)} tokens"
    assert num_sure > 0.8 * max_tokens * len(prompts), f"the oracle is sure of {num_sure} tokens only"


def assert_equal_weights(ours: LoadedModel, theirs: LoadedModel) -> None:
    """Bit for bit."""
    assert ours.spec.tie_embeddings == theirs.spec.tie_embeddings
    for name in ("embedding", "norm", "lm_head"):
        assert torch.equal(getattr(ours.weights, name), getattr(theirs.weights, name)), name
    for i, (a, b) in enumerate(zip(ours.weights.layers, theirs.weights.layers, strict=True)):
        for weight in fields(a):
            one, other = getattr(a, weight.name), getattr(b, weight.name)
            same = one is other if one is None or other is None else torch.equal(one, other)
            assert same, f"layer {i}, {weight.name}"
