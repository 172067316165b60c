"""GGUF files, dequantized to float32 by the `gguf` package; names and head order as in Hugging Face's Llama."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quant_shape_to_byte_shape
from torch import Tensor

from engine.spec import ModelSpec
from tandem.errors import ModelError
from tandem.gguf_metadata import GGUFHeader, GGUFTensor, read_gguf_header

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
    yield GGUFSource(path, read_gguf_header(path), spec)


class GGUFSource:
    """See TensorSource."""

    def __init__(self, path: Path, header: GGUFHeader, spec: ModelSpec) -> None:
        self._path = path
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
        self._tensors = {_hf_name(t.name): t for t in header.tensors}
        self._read: set[str] = set()
        # the converters of Llama and Mistral reorder the rows of Q and K for an interleaved rope
        permuted = header.metadata.get("general.architecture") == "llama"
        self._heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads} if permuted else {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self._path}: tensor {name} is missing")
        self._read.add(name)
        values = self._dequantize(tensor)
        heads = self._heads.get(name.split(".")[-2])
        if heads is not None:
            values = unpermute(values, heads)
        # a copy where the values still lie in the mapped file: weights must not change with it
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))

    def _dequantize(self, tensor: GGUFTensor) -> np.ndarray:
        kind = next((t for t in READABLE if t == tensor.type_id), None)
        if kind is None:
            known = {t.value: t.name for t in GGMLQuantizationType}
            name, readable = known.get(tensor.type_id, f"type {tensor.type_id}"), ", ".join(t.name for t in READABLE)
            raise ModelError(f"{self._path}: {tensor.name} is {name}; these are read: {readable}")
        try:
            shape = quant_shape_to_byte_shape(tensor.shape, kind)
        except ValueError as exc:
            raise ModelError(f"{self._path}: {tensor.name}: {exc}") from exc
        end = tensor.offset + math.prod(shape)
        if end > len(self._bytes):
            raise ModelError(f"{self._path}: cut short, {tensor.name} ends at byte {end}; fetch the file again")
        # one long row: the package goes over rows by sixteens, in Python
        values: np.ndarray = dequantize(self._bytes[tensor.offset : end].reshape(1, -1), kind).reshape(tensor.shape)
        return values

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
