"""GGUF files through the `gguf` package: dequantized to float32, names and head order as in Hugging Face's Llama."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from torch import Tensor

from engine.spec import ModelSpec
from tandem.errors import ModelError

READABLE = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
)
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@contextmanager
def open_gguf(path: Path, spec: ModelSpec) -> Iterator[GGUFSource]:
    """Map the file. Raises ModelError when it is damaged."""
    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as exc:
        raise ModelError(f"{path}: not a readable GGUF file ({exc})") from exc
    yield GGUFSource(path, reader, spec)


class GGUFSource:
    """See TensorSource."""

    def __init__(self, path: Path, reader: GGUFReader, spec: ModelSpec) -> None:
        self._path = path
        self._tensors: dict[str, ReaderTensor] = {_hf_name(t.name): t for t in reader.tensors}
        self._read: set[str] = set()
        architecture = reader.get_field("general.architecture")
        # the converters of Llama and Mistral reorder the rows of Q and K for an interleaved rope
        permuted = architecture is not None and architecture.contents() == "llama"
        self._heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads} if permuted else {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self._path}: tensor {name} is missing")
        if tensor.tensor_type not in READABLE:
            readable = ", ".join(t.name for t in READABLE)
            raise ModelError(f"{self._path}: {tensor.name} is {tensor.tensor_type.name}; these are read: {readable}")
        self._read.add(name)
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        heads = self._heads.get(name.split(".")[-2])
        if heads is not None:
            values = unpermute(values, heads)
        return torch.from_numpy(np.ascontiguousarray(values))

    def unread(self) -> list[str]:
        return [self._tensors[name].name for name in self._tensors if name not in self._read]


def unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the converters' reordering of Q's or K's rows: pairs (2i, 2i+1) of a head become halves (i, i + D/2)."""
    rows = values.shape[0]
    return values.reshape(num_heads, rows // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)


def _hf_name(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return name
