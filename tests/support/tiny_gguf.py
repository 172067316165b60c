"""Writes a tiny checkpoint as GGUF the way llama.cpp's converter does: names, reordered Q and K, quantized matrices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from tandem.model_files import ModelFiles
from tests.support.tiny_models import TinyModel

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _model, _layers, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """As in llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    return (
        values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
        .swapaxes(1, 2)
        .reshape(values.shape)
    )


def checkpoint(model: TinyModel) -> Iterator[tuple[str, np.ndarray]]:
    tied = model.oracle.config.tie_word_embeddings
    for name, parameter in model.oracle.state_dict().items():
        if not (tied and name == "lm_head.weight"):
            yield name, parameter.float().numpy()


def quantized(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """What is left of a matrix after `kind`."""
    return dequantize(quantize(values, kind), kind) if values.ndim == 2 else values


def write_tiny_gguf(
    path: Path,
    model: TinyModel,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    leave_out: tuple[str, ...] = (),
) -> ModelFiles:
    """Matrices as `kind`, vectors as F32. metadata: keys below the architecture's name; extra: more tensors."""
    config = model.oracle.config
    architecture = ARCHITECTURES[config.model_type]
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else config.hidden_size // 4)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](f"{architecture}.{key}", value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, values in checkpoint(model):
        if name in leave_out:
            continue
        projection = name.split(".")[-2]
        if architecture == "llama" and projection in heads:
            values = permute(values, heads[projection])
        if values.ndim == 2:
            writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles("gguf", path, path.stem)
