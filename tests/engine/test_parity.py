"""The engine against transformers, on seeded tiny models of every family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.loader import LoadedModel, load_model
from engine.scheduler import schedule
from engine.spec import RopeSpec
from tandem.types import Sampling
from tests.support.engine_runs import (
    BLOCK,
    CHUNK,
    assert_equals_oracle,
    attempt_key,
    generate,
    greedy,
    make_row,
    poisoned_runner,
    run_to_end,
)
from tests.support.tiny_models import FAMILIES, TinyModel, prompt_ids, write_tiny_model

LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]
Tiny = Callable[[str], TinyModel]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_alone_gives_the_tokens_and_logits_of_transformers(tiny: Tiny, family: str) -> None:
    model = load_model(tiny(family).files, "float32")
    for num_tokens in LENGTHS:
        assert_equals_oracle(model, tiny(family), [prompt_ids(num_tokens)], 12)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_beside_seven_others_gives_the_tokens_and_logits_of_transformers(tiny: Tiny, family: str) -> None:
    model = load_model(tiny(family).files, "float32")
    assert_equals_oracle(model, tiny(family), [prompt_ids(n) for n in LENGTHS], 12)


def test_positions_near_the_end_of_the_context_are_right(tiny: Tiny) -> None:
    model = load_model(tiny("llama3").files, "float32")
    assert_equals_oracle(model, tiny("llama3"), [prompt_ids(model.max_model_len - 8)], 8, tolerance=5e-4)


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_the_block_size_does_not_change_the_answer(tiny: Tiny, block_size: int) -> None:
    model = load_model(tiny("qwen3").files, "float32")
    prompts = [prompt_ids(n) for n in (1, 5, 40)]
    samplings = [greedy(8) for _ in prompts]
    usual = generate(model, prompts, samplings)
    other = generate(model, prompts, samplings, block_size=block_size)
    for ours, theirs in zip(usual.logits, other.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=2e-4)


def test_a_row_over_a_block_that_was_never_written_gets_no_token(tiny: Tiny) -> None:
    model = load_model(tiny("llama3").files, "float32")
    runner, pool = poisoned_runner(model)
    row = make_row(0, prompt_ids(40), pool.allocate(4), greedy(4))
    row.num_computed_tokens = 32  # a lie: blocks 0 and 1 are still NaN
    batch = schedule([row], chunk_size=CHUNK, max_num_seqs=1)
    assert batch is not None and batch.rows[0].samples
    assert runner.execute(batch) == [None]


def test_a_row_never_reads_or_writes_blocks_of_others(tiny: Tiny) -> None:
    model = load_model(tiny("llama3").files, "float32")
    layout = model.kv_layout(BLOCK)
    kv = bytearray(b"\xff" * (64 * layout.block_nbytes))
    from engine.backends.cpu import CpuRunner

    runner = CpuRunner(model, memoryview(kv), 64, layout, 1)
    rows = [make_row(n, prompt_ids(20 + n), [2 * n, 40 + n], greedy(6)) for n in range(3)]
    run_to_end(runner, rows)
    used = {block_id for row in rows for block_id in row.block_table}
    for block_id in range(64):
        block = kv[block_id * layout.block_nbytes : (block_id + 1) * layout.block_nbytes]
        assert (block == b"\xff" * layout.block_nbytes) == (block_id not in used), f"block {block_id}"


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_a_seeded_sampled_row_gives_the_same_tokens_alone_and_in_a_batch(tiny: Tiny, family: str) -> None:
    model = load_model(tiny(family).files, "float32")
    prompts = [prompt_ids(n, seed=5) for n in LENGTHS]
    samplings = [
        Sampling(24, temperature=0.9, top_p=0.95, top_k=60 * (n % 2), min_p=0.01 * (n % 3), seed=n)
        for n in range(len(prompts))
    ]
    together = generate(model, prompts, samplings).answers
    alone = [generate(model, [p], [s]).answers[0] for p, s in zip(prompts, samplings, strict=True)]
    assert together == alone
    reseeded = generate(model, prompts, [replace(s, seed=s.seed + 100) for s in samplings]).answers
    assert all(a != b for a, b in zip(together, reseeded, strict=True))


def test_an_attempt_that_starts_from_delivered_tokens_goes_on_as_the_first_one_would_have(tiny: Tiny) -> None:
    model = load_model(tiny("qwen2").files, "float32")
    sampling = Sampling(20, temperature=1.0, seed=3)
    [whole] = generate(model, [prompt_ids(21)], [sampling]).answers
    runner, pool = poisoned_runner(model)
    row = make_row(0, prompt_ids(21), pool.allocate(3), sampling)
    row.token_ids += whole[:9]
    run_to_end(runner, [row])
    assert row.token_ids[21:] == whole
    assert row.key == attempt_key(0)


def _without_qk_norm(model: LoadedModel) -> LoadedModel:
    return _with_layers(model, query_norm=None, key_norm=None)


def _without_qkv_bias(model: LoadedModel) -> LoadedModel:
    return _with_layers(model, qkv_bias=None)


def _without_output_bias(model: LoadedModel) -> LoadedModel:
    return _with_layers(model, output_bias=None)


def _without_mlp_bias(model: LoadedModel) -> LoadedModel:
    return _with_layers(model, down_bias=None)


def _without_rope_scaling(model: LoadedModel) -> LoadedModel:
    return replace(model, spec=replace(model.spec, rope=RopeSpec(model.spec.rope.theta)))


def _with_another_theta(model: LoadedModel) -> LoadedModel:
    return replace(model, spec=replace(model.spec, rope=RopeSpec(model.spec.rope.theta * 1.05)))


def _with_query_heads_dealt_out_in_turn(model: LoadedModel) -> LoadedModel:
    """Query head i reads KV head i % num_kv_heads instead of i // group."""
    spec = model.spec
    group = spec.num_heads // spec.num_kv_heads
    order = [kv + spec.num_kv_heads * i for kv in range(spec.num_kv_heads) for i in range(group)]
    layers = []
    for layer in model.weights.layers:
        heads = layer.qkv.view(-1, spec.head_dim, spec.hidden_size)
        queries = heads[: spec.num_heads][order]
        qkv = torch.cat((queries, heads[spec.num_heads :])).view_as(layer.qkv)
        output = layer.output.view(spec.hidden_size, spec.num_heads, spec.head_dim)[:, order].reshape_as(layer.output)
        layers.append(replace(layer, qkv=qkv, output=output))
    return replace(model, weights=replace(model.weights, layers=tuple(layers)))


def _with_an_interleaved_rope(model: LoadedModel) -> LoadedModel:
    """Q and K rows as a GGUF holds them."""
    spec = model.spec
    num_rotated = spec.num_heads + spec.num_kv_heads
    layers = []
    for layer in model.weights.layers:
        heads = layer.qkv.view(-1, spec.head_dim, spec.hidden_size)
        rotated = heads[:num_rotated].view(num_rotated, 2, spec.head_dim // 2, -1).transpose(1, 2)
        qkv = torch.cat((rotated.reshape(num_rotated, spec.head_dim, -1), heads[num_rotated:])).view_as(layer.qkv)
        layers.append(replace(layer, qkv=qkv))
    return replace(model, weights=replace(model.weights, layers=tuple(layers)))


def _with_a_plain_embedding_as_head(model: LoadedModel) -> LoadedModel:
    return replace(model, weights=replace(model.weights, lm_head=model.weights.embedding))


def _with_another_eps(model: LoadedModel) -> LoadedModel:
    return replace(model, spec=replace(model.spec, norm_eps=1e-2))


def _with_layers(model: LoadedModel, **changes: None) -> LoadedModel:
    layers = tuple(replace(layer, **changes) for layer in model.weights.layers)
    return replace(model, weights=replace(model.weights, layers=layers))


@pytest.mark.parametrize(
    ("family", "mutate"),
    [
        ("qwen3", _without_qk_norm),
        ("qwen2", _without_qkv_bias),
        ("llama-biases", _without_qkv_bias),
        ("llama-biases", _without_output_bias),
        ("llama-biases", _without_mlp_bias),
        ("llama3", _without_rope_scaling),
        ("mistral", _with_another_theta),
        ("llama3", _with_query_heads_dealt_out_in_turn),
        ("smollm2", _with_an_interleaved_rope),
        ("llama2", _with_a_plain_embedding_as_head),
        ("llama2", _with_another_eps),
    ],
)
def test_the_comparison_sees_a_feature_that_is_left_out(
    tiny: Tiny, family: str, mutate: Callable[[LoadedModel], LoadedModel]
) -> None:
    model = load_model(tiny(family).files, "float32")
    assert_equals_oracle(model, tiny(family), [prompt_ids(24)], 8)
    with pytest.raises(AssertionError):
        assert_equals_oracle(mutate(model), tiny(family), [prompt_ids(24)], 8)


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_bfloat16_follows_transformers_as_far_as_its_precision_goes(tmp_path: Path, family: str) -> None:
    oracle = write_tiny_model(tmp_path, family)
    oracle.oracle.to(torch.bfloat16)
    model = load_model(oracle.files, "bfloat16")
    prompts = [prompt_ids(n) for n in (1, 17, 70)]
    run = generate(model, prompts, [greedy(6) for _ in prompts])
    for prompt, answer, logits in zip(prompts, run.answers, run.logits, strict=True):
        expected = oracle.logits([*prompt, *answer[:-1]])[len(prompt) - 1 :].float()
        error = (logits - expected).abs().max() / expected.abs().max()
        assert error < 0.05, f"{float(error):.3f} of the largest logit"
        assert torch.isfinite(logits).all()
