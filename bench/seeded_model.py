"""A Llama with seeded random weights, written as a Hugging Face folder: real arithmetic without a download."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

# 45 M parameters: 512 tokens take most of a second on one core, so that fixed costs do not hide or dominate
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def write_seeded_llama(folder: Path, seed: int = 0) -> Path:
    """Write config.json and model.safetensors of SHAPE into `folder`; return it."""
    rng = np.random.default_rng(seed)
    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    kv = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]  # type: ignore[operator]

    def matrix(rows: object, columns: object) -> np.ndarray:
        return (rng.standard_normal((rows, columns), dtype=np.float32)) * np.float32(0.02)  # type: ignore[call-overload,no-any-return]

    tensors = {"model.embed_tokens.weight": matrix(SHAPE["vocab_size"], hidden)}
    ones = np.ones(hidden, dtype=np.float32)  # type: ignore[call-overload]
    for i in range(SHAPE["num_hidden_layers"]):  # type: ignore[call-overload]
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.self_attn.q_proj.weight": matrix(hidden, hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(kv, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(kv, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, hidden),
            f"{layer}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, inner),
            f"{layer}.input_layernorm.weight": ones.copy(),
            f"{layer}.post_attention_layernorm.weight": ones.copy(),
        }
    tensors["model.norm.weight"] = ones.copy()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE, indent=1))
    save_file(tensors, folder / "model.safetensors")
    return folder
