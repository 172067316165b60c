"""A GGUF file's metadata as a Hugging Face config, so that one reader of configs serves both formats. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.errors import ModelError
from tandem.gguf_metadata import read_gguf_metadata

# GGUF's architecture -> (HF architecture, model_type)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
# keys that change the mathematics, below the architecture's name, and the value that does not
_NEUTRAL: dict[str, Any] = {
    "expert_count": 0,
    "use_parallel_residual": False,
    "rope.scale_linear": 1.0,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.causal": True,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
}
# tokens that end an answer beside EOS, where the file names them
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>")


def read_gguf_config(path: Path) -> dict[str, Any]:
    """Return the config in Hugging Face's terms.

    Raises ModelError naming the architecture or metadata key that is missing or not implemented.
    """
    metadata = read_gguf_metadata(path)
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path}: GGUF architecture {architecture!r} is not implemented; these are: {', '.join(ARCHITECTURES)}"
        )
    hf_architecture, model_type = ARCHITECTURES[architecture]

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    def need(key: str, kind: type = int) -> Any:
        value = get(key)
        if not isinstance(value, kind) or not value:  # a list means that layers differ
            found = "is missing" if value is None else f"= {value!r} is not implemented"
            raise ModelError(f"{path}: metadata key {architecture}.{key} {found}")
        return value

    neutral = dict(_NEUTRAL)
    num_heads = need("attention.head_count")
    head_dim = get("attention.key_length") or need("embedding_length") // num_heads
    for key in ("rope.dimension_count", "attention.value_length"):
        neutral[key] = head_dim
    for key, value in neutral.items():
        if get(key, value) != value:
            raise ModelError(f"{path}: metadata key {architecture}.{key} = {get(key)!r} is not implemented")
    config: dict[str, Any] = {
        "architectures": [hf_architecture],
        "model_type": model_type,
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon", float),
        "rope_theta": get("rope.freq_base", 10000.0),
        "max_position_embeddings": need("context_length"),
        "vocab_size": get("vocab_size") or len(metadata.get("tokenizer.ggml.tokens", [])) or None,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(metadata) or None,
        "sliding_window": get("attention.sliding_window"),
        "hidden_act": "silu",
    }
    # a factor without a type means linear scaling
    scaling = get("rope.scaling.type") or ("none" if get("rope.scaling.factor", 1.0) in (0.0, 1.0) else "linear")
    if scaling != "none":
        config["rope_scaling"] = {"rope_type": scaling, "factor": get("rope.scaling.factor", 1.0)}
    return config


def _end_ids(metadata: dict[str, Any]) -> list[int]:
    ids = [metadata[key] for key in _END_KEYS if metadata.get(key) is not None]
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    control = 3
    if not ids:
        return []
    for text in _END_TOKENS:
        if text in tokens:
            token_id = tokens.index(text)
            if token_id < len(kinds) and kinds[token_id] == control:
                ids.append(token_id)
    return list(dict.fromkeys(ids))
