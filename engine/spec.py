"""A model's architecture as data, read from a Hugging Face config. A new dense family is a few lines here.

A config key that changes the mathematics and is not implemented is refused by name: NEUTRAL lists such keys with the
values that leave the decoder of `engine/model.py` right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem.errors import ModelError


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base theta; the llama3 scaling when `factor` is set. Source: arXiv:2104.09864, Llama 3.1."""

    theta: float
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A pre-norm decoder with RMSNorm, rope, grouped-query attention and a gated SiLU MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    max_model_len: int
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False


def _llama(config: dict[str, Any]) -> dict[str, Any]:
    bias = _flag(config, "attention_bias")
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": _flag(config, "mlp_bias")}


def _qwen2(config: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True}


def _qwen3(config: dict[str, Any]) -> dict[str, Any]:
    bias = _flag(config, "attention_bias")
    return {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}


def _mistral(config: dict[str, Any]) -> dict[str, Any]:
    return {}


FAMILIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "MistralForCausalLM": _mistral,
}

# what the classes of Hugging Face assume where a config is silent, beside what is the same for all of them
DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "use_sliding_window": False},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "use_sliding_window": False, "head_dim": 128},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
}

# key -> values that change nothing; a missing key is neutral, too
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": ("silu", None),
    "partial_rotary_factor": (1, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "logits_scaling": (1, None),
    "logit_scale": (1, None),
    "no_rope_layers": (None, []),
    "rope_interleaved": (False, None),
    "use_qk_norm": (False, None),
    "clip_qkv": (None,),
    "parallel_residual": (False, None),
    "use_parallel_residual": (False, None),
    "quantization_config": (None,),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
    "is_decoder": (True, False, None),
    "cross_attention_layers": (None, []),
    "attention_chunk_size": (None,),
    "attn_temperature_tuning": (False, None),
    "llama_4_scaling_beta": (None,),
}


def spec_from_config(config: dict[str, Any]) -> ModelSpec:
    """Read a config in either of Hugging Face's forms (rope_theta + rope_scaling, or rope_parameters).

    Raises ModelError naming the architecture or the key that is not implemented, or the key that is missing.
    """
    architectures = config.get("architectures") or [None]
    architecture = architectures[0] if isinstance(architectures, list) else architectures
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise ModelError(f"architecture {architecture!r} is not implemented; these are: {', '.join(sorted(FAMILIES))}")
    config = DEFAULTS.get(architecture, {}) | config
    for key, neutral in NEUTRAL.items():
        if key in config and config[key] not in neutral:
            raise ModelError(f"config key {key} = {config[key]!r} is not implemented for {architecture}")
    max_model_len = _positive(config, "max_position_embeddings")
    _refuse_sliding_window(config, max_model_len, switched="use_sliding_window" in DEFAULTS.get(architecture, {}))
    num_heads = _positive(config, "num_attention_heads")
    hidden_size = _positive(config, "hidden_size")
    num_kv_heads = _positive(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"num_attention_heads = {num_heads} is no multiple of num_key_value_heads = {num_kv_heads}")
    head_dim = _positive(config, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"head_dim = {head_dim} is odd: rope needs pairs")
    return ModelSpec(
        architecture=architecture,
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=_positive(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope=_rope(config, max_model_len),
        max_model_len=max_model_len,
        tie_embeddings=_flag(config, "tie_word_embeddings"),
        **FAMILIES[architecture](config),
    )


def _refuse_sliding_window(config: dict[str, Any], max_model_len: int, *, switched: bool) -> None:
    """`switched`: whether the family has a key that turns the window on."""
    window = config.get("sliding_window") if not switched or _flag(config, "use_sliding_window") else None
    active = window is not None and _positive(config, "sliding_window") < max_model_len
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            raise ModelError(f"config key layer_types: expected a list, found {layer_types!r}")
        unknown = {str(t) for t in layer_types} - {"full_attention", "sliding_attention"}
        if unknown:
            raise ModelError(f"config key layer_types: {', '.join(sorted(unknown))} is not implemented")
        active = active and "sliding_attention" in layer_types
    if active:
        raise ModelError(
            f"config key sliding_window = {window} (below max_position_embeddings = {max_model_len}) is not implemented"
        )


def _rope(config: dict[str, Any], max_model_len: int) -> RopeSpec:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError(f"config key rope_scaling: expected an object, found {scaling!r}")
    if any(isinstance(v, dict) for v in scaling.values()):
        raise ModelError("config key rope_parameters: a rope per layer type is not implemented")
    theta = _number(scaling, "rope_theta", _number(config, "rope_theta", 10000.0))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if scaling.get("partial_rotary_factor", 1) not in (1, None):
        raise ModelError(f"config key partial_rotary_factor = {scaling['partial_rotary_factor']} is not implemented")
    if kind == "default":
        return RopeSpec(theta)
    if kind == "llama3":
        return RopeSpec(
            theta,
            factor=_number(scaling, "factor"),
            low_freq_factor=_number(scaling, "low_freq_factor"),
            high_freq_factor=_number(scaling, "high_freq_factor"),
            original_max_position=_positive(scaling, "original_max_position_embeddings", max_model_len),
        )
    raise ModelError(f"config key rope_scaling: rope_type {kind!r} is not implemented (default and llama3 are)")


def _positive(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"config key {key}: expected a positive integer, found {value!r}")
    return value


def _flag(config: dict[str, Any], key: str) -> bool:
    value = config.get(key)
    if not isinstance(value, bool | None):
        raise ModelError(f"config key {key}: expected true or false, found {value!r}")
    return bool(value)


def _number(config: dict[str, Any], key: str, default: float | None = None) -> float:
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"config key {key}: expected a positive number, found {value!r}")
    return float(value)
