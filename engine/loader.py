"""From model files to weights in memory. Never pickle: safetensors and GGUF only. Formats are in engine/weights/."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.model import LayerWeights, ModelWeights
from engine.spec import ModelSpec, spec_from_config
from engine.torch_dtypes import torch_dtype
from engine.weights.gguf import open_gguf
from engine.weights.safetensors import open_safetensors, weight_files
from engine.weights.source import TensorSource
from tandem.errors import ModelError
from tandem.layout import KVLayout
from tandem.model_files import ModelFiles

_FINGERPRINT_NBYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. `dtype`: float32 or bfloat16; `identity`: equal exactly for the same weights files."""

    spec: ModelSpec
    weights: ModelWeights
    dtype: str
    identity: str

    @property
    def max_model_len(self) -> int:
        """The model's own context in tokens."""
        return self.spec.max_model_len

    def kv_layout(self, block_size: int) -> KVLayout:
        """The shape of a block of this model's KV cache."""
        return KVLayout(self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim, block_size, self.dtype)


def load_model(files: ModelFiles, dtype: str) -> LoadedModel:
    """Read the weights into `dtype` (auto: float32). Blocks for as long as reading takes.

    Raises ModelError naming the file, tensor or config key that is missing, wrong or not implemented.
    """
    spec = spec_from_config(files.config())
    dtype = "float32" if dtype == "auto" else dtype
    paths = [files.path] if files.kind == "gguf" else weight_files(files.path)
    opened = open_gguf(files.path, spec) if files.kind == "gguf" else open_safetensors(files.path, paths)
    with opened as source:
        if spec.tie_embeddings is False and "lm_head.weight" not in source:
            if files.kind == "gguf":  # a GGUF has no key for it: the missing tensor says so
                spec = replace(spec, tie_embeddings=True)
            else:
                raise ModelError(f"{files.path}: lm_head.weight is missing and tie_word_embeddings is false")
        weights = _build(spec, source, torch_dtype(dtype), files.path)
    return LoadedModel(spec, weights, dtype, fingerprint(paths))


def fingerprint(paths: list[Path]) -> str:
    """Identify weights files without reading them whole: sizes, and the first and last 64 KiB of each.

    The head of a safetensors or GGUF file names every tensor's type, shape and place.
    """
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{size}|".encode())
        with path.open("rb") as file:
            digest.update(file.read(_FINGERPRINT_NBYTES))
            file.seek(max(0, size - _FINGERPRINT_NBYTES))
            digest.update(file.read(_FINGERPRINT_NBYTES))
    return digest.hexdigest()


def _build(spec: ModelSpec, source: TensorSource, dtype: torch.dtype, path: Path) -> ModelWeights:
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size

    def get(name: str, *shape: int) -> Tensor:
        tensor = source.get(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{path}: {name} has shape {tuple(tensor.shape)}, the config says {shape}")
        return tensor.to(dtype).contiguous()

    def fuse(names_rows: list[tuple[str, int]], *columns: int) -> Tensor:
        return torch.cat([get(name, rows, *columns) for name, rows in names_rows])

    def optional(wanted: bool, make: Callable[[], Tensor]) -> Tensor | None:
        return make() if wanted else None

    def layer(i: int) -> LayerWeights:
        a, m = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        qkv = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
        gate_up = [("gate_proj", inner), ("up_proj", inner)]
        return LayerWeights(
            attention_norm=get(f"model.layers.{i}.input_layernorm.weight", hidden),
            qkv=fuse([(f"{a}.{n}.weight", r) for n, r in qkv], hidden),
            qkv_bias=optional(spec.qkv_bias, lambda: fuse([(f"{a}.{n}.bias", r) for n, r in qkv])),
            query_norm=optional(spec.qk_norm, lambda: get(f"{a}.q_norm.weight", spec.head_dim)),
            key_norm=optional(spec.qk_norm, lambda: get(f"{a}.k_norm.weight", spec.head_dim)),
            output=get(f"{a}.o_proj.weight", hidden, q),
            output_bias=optional(spec.output_bias, lambda: get(f"{a}.o_proj.bias", hidden)),
            mlp_norm=get(f"model.layers.{i}.post_attention_layernorm.weight", hidden),
            gate_up=fuse([(f"{m}.{n}.weight", r) for n, r in gate_up], hidden),
            gate_up_bias=optional(spec.mlp_bias, lambda: fuse([(f"{m}.{n}.bias", r) for n, r in gate_up])),
            down=get(f"{m}.down_proj.weight", hidden, inner),
            down_bias=optional(spec.mlp_bias, lambda: get(f"{m}.down_proj.bias", hidden)),
        )

    embedding = get("model.embed_tokens.weight", spec.vocab_size, hidden)
    weights = ModelWeights(
        embedding=embedding,
        layers=tuple(layer(i) for i in range(spec.num_layers)),
        norm=get("model.norm.weight", hidden),
        lm_head=embedding if spec.tie_embeddings else get("lm_head.weight", spec.vocab_size, hidden),
        rope_factors=optional(
            "rope_freqs.weight" in source, lambda: get("rope_freqs.weight", spec.head_dim // 2).float()
        ),
    )
    unused = sorted(name for name in source.unread() if not name.endswith("rotary_emb.inv_freq"))
    if spec.tie_embeddings:
        unused = [name for name in unused if name != "lm_head.weight"]
    if unused:
        known = f"{spec.architecture} as implemented here"
        raise ModelError(f"{path}: {len(unused)} tensors are not part of {known}, such as {unused[0]}")
    return weights
