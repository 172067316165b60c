"""Configs to specs: both forms of rope, defaults of the families, and everything that must be refused by name."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest

from engine.spec import FAMILIES, NEUTRAL, RopeSpec, spec_from_config
from tandem.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4096,
}


def config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": [architecture], **changes}


def test_both_forms_of_rope_mean_the_same() -> None:
    old = spec_from_config(config(rope_theta=500000.0, rope_scaling=LLAMA3_SCALING))
    new = spec_from_config(config(rope_parameters={**LLAMA3_SCALING, "rope_theta": 500000.0}))
    assert old == new
    assert old.rope == RopeSpec(500000.0, 8.0, 1.0, 4.0, 4096)


def test_a_rope_without_scaling_is_plain_in_both_forms() -> None:
    assert spec_from_config(config(rope_theta=1e6)).rope == RopeSpec(1e6)
    assert spec_from_config(config(rope_theta=1e6, rope_scaling=None)).rope == RopeSpec(1e6)
    assert spec_from_config(config(rope_parameters={"rope_type": "default", "rope_theta": 1e6})).rope == RopeSpec(1e6)
    assert spec_from_config(config()).rope == RopeSpec(10000.0)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "no-such"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_other_ropes_are_refused_by_name(key: str, kind: str) -> None:
    for name in ("rope_type", "type"):
        with pytest.raises(ModelError, match=f"rope_type '{kind}'"):
            spec_from_config(config(**{key: {name: kind, "factor": 2.0}}))


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_number_that_llama3_scaling_lacks_is_named(key: str) -> None:
    scaling = {k: v for k, v in LLAMA3_SCALING.items() if k != key}
    with pytest.raises(ModelError, match=key):
        spec_from_config(config(rope_scaling=scaling))


NOT_NEUTRAL: dict[str, Any] = {
    "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh",
    "partial_rotary_factor": 0.5,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "attention_multiplier": 0.1,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.2,
    "logits_scaling": 8.0,
    "logit_scale": 0.06,
    "no_rope_layers": [1, 0],
    "rope_interleaved": True,
    "use_qk_norm": True,
    "clip_qkv": 8.0,
    "parallel_residual": True,
    "use_parallel_residual": True,
    "quantization_config": {"quant_method": "gptq"},
    "num_local_experts": 8,
    "num_experts": 64,
    "cross_attention_layers": [3],
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "llama_4_scaling_beta": 0.1,
}


def test_every_key_with_neutral_values_is_tried_below() -> None:
    assert set(NOT_NEUTRAL) == set(NEUTRAL) - {"is_decoder"}


@pytest.mark.parametrize("key", NOT_NEUTRAL)
def test_a_key_that_changes_the_mathematics_is_refused_by_name(key: str) -> None:
    with pytest.raises(ModelError, match=rf"{key} = .* is not implemented for LlamaForCausalLM"):
        spec_from_config(config(**{key: NOT_NEUTRAL[key]}))
    for value in NEUTRAL[key]:
        assert spec_from_config(config(**{key: value})) == spec_from_config(config())


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], "GPT2LMHeadModel", [], None])
def test_an_unknown_architecture_is_named_beside_the_known_ones(architectures: list[str] | str | None) -> None:
    with pytest.raises(ModelError, match=r"(GPT2LMHeadModel|None).*LlamaForCausalLM, MistralForCausalLM"):
        spec_from_config({**LLAMA, "architectures": architectures})


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", [None, 0, -1, "4", 2.5, True, [4, 4]])
def test_a_size_that_is_missing_or_no_size_is_named(key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=key):
        spec_from_config(config(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", 3),
        ("num_key_value_heads", [2, 2]),
        ("head_dim", 5),
        ("head_dim", "16"),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", 0),
        ("rope_theta", "10000"),
        ("rope_scaling", "linear"),
        ("tie_word_embeddings", "false"),
        ("attention_bias", "false"),
        ("mlp_bias", 1),
        ("sliding_window", "4096"),
        ("sliding_window", math.nan),
        ("layer_types", 3),
        ("layer_types", [["full_attention"]]),
    ],
)
def test_a_value_that_cannot_be_is_named(key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=key):
        spec_from_config(config(**{key: value}))


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("key", sorted({*LLAMA, *NEUTRAL, "sliding_window", "use_sliding_window", "layer_types"}))
def test_junk_in_any_key_is_read_or_refused_but_never_crashes(architecture: str, key: str) -> None:
    for junk in (None, True, 0, -1, 2.5, math.nan, math.inf, "x", [], [[1]], {}, {"a": 1}):
        with contextlib.suppress(ModelError):
            spec_from_config(config(architecture) | {"sliding_window": None, key: junk})


def test_a_rope_per_layer_type_is_refused() -> None:
    with pytest.raises(ModelError, match="per layer type"):
        spec_from_config(config(rope_parameters={"full_attention": {"rope_theta": 1e4}}))


@pytest.mark.parametrize(
    ("architecture", "keys", "refused"),
    [
        ("MistralForCausalLM", {"sliding_window": 4096}, True),
        ("MistralForCausalLM", {}, True),  # the family's default is 4096
        ("MistralForCausalLM", {"sliding_window": 4096, "use_sliding_window": False}, True),  # it has no such switch
        ("MistralForCausalLM", {"sliding_window": None}, False),
        ("MistralForCausalLM", {"sliding_window": 8192}, False),
        ("Qwen2ForCausalLM", {"sliding_window": 4096, "use_sliding_window": False}, False),
        ("Qwen2ForCausalLM", {"sliding_window": 4096}, False),  # the switch is off by default
        ("Qwen2ForCausalLM", {"sliding_window": 4096, "use_sliding_window": True}, True),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 4096, "use_sliding_window": True, "layer_types": ["full_attention"] * 2},
            False,
        ),
    ],
)
def test_a_sliding_window_is_refused_exactly_when_it_is_active(
    architecture: str, keys: dict[str, Any], refused: bool
) -> None:
    if refused:
        with pytest.raises(ModelError, match="sliding_window = 4096"):
            spec_from_config(config(architecture, **keys))
    else:
        assert spec_from_config(config(architecture, **keys)).max_model_len == 8192


def test_an_unknown_kind_of_layer_is_named() -> None:
    with pytest.raises(ModelError, match="chunked_attention"):
        spec_from_config(config(layer_types=["full_attention", "chunked_attention"]))


def test_defaults_of_a_silent_config_are_those_of_its_family() -> None:
    silent = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rms_norm_eps")}
    silent |= {"num_attention_heads": 32, "hidden_size": 1024}
    llama = spec_from_config(silent)
    assert (llama.num_kv_heads, llama.head_dim, llama.norm_eps) == (32, 32, 1e-6)
    assert (llama.tie_embeddings, llama.qkv_bias, llama.qk_norm) == (False, False, False)
    qwen3 = spec_from_config({**silent, "architectures": ["Qwen3ForCausalLM"]})
    assert (qwen3.num_kv_heads, qwen3.head_dim, qwen3.qk_norm) == (32, 128, True)
    mistral = spec_from_config({**silent, "architectures": ["MistralForCausalLM"], "sliding_window": None})
    assert (mistral.num_kv_heads, mistral.head_dim) == (8, 32)
    assert spec_from_config({**silent, "architectures": ["Qwen2ForCausalLM"]}).qkv_bias
