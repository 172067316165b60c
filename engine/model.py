"""The one decoder, in plain torch, configured by a ModelSpec. Attention and the KV pool are the backend's (⑤ and ⑧)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.spec import ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Linear weights are `[out, in]`; q, k and v, and gate and up, are fused along `out`."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embedding, lm_head: `[vocab, hidden]`, one tensor when tied. rope_factors `[head_dim / 2]` divide frequencies."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor
    rope_factors: Tensor | None = None


class Attention(Protocol):
    """What a backend does for one layer of one step."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value in the pool, attend over each row's context.

        query: `[num_tokens, num_heads, head_dim]`; key, value: `[num_tokens, num_kv_heads, head_dim]`, rope applied.
        Returns `[num_tokens, num_heads * head_dim]`.
        """
        ...


def rope_frequencies(rope: RopeSpec, head_dim: int, factors: Tensor | None = None) -> Tensor:
    """Inverse frequencies `[head_dim / 2]` in float32, scaled as the spec (or a GGUF's factors) says."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if factors is not None:
        return frequencies / factors
    if rope.factor is None:
        return frequencies
    # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between are blended
    wavelengths = 2 * math.pi / frequencies
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > low, frequencies / rope.factor, frequencies)
    return torch.where((wavelengths <= low) & (wavelengths >= high), blended, scaled)


def rope_angles(frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin, `[num_tokens, 1, head_dim]` each, computed in float32 as the checkpoints were trained."""
    angles = torch.outer(positions.float(), frequencies).unsqueeze(1)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `[num_tokens, heads, head_dim]` by `cos`, `sin` `[num_tokens, 1, head_dim]` (halves form a pair)."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32. Source: arXiv:1910.07467."""
    if x.dtype is torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    y = x.float()
    return weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class Decoder:
    """The forward pass of one step over the tokens of all its rows, flattened."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights) -> None:
        self._spec = spec
        self._weights = weights
        self._frequencies = rope_frequencies(spec.rope, spec.head_dim, weights.rope_factors)

    def forward(self, token_ids: Tensor, positions: Tensor, sampled: Tensor, attention: Attention) -> Tensor:
        """Compute logits `[num_sampled, vocab]` in float32.

        token_ids, positions: `[num_tokens]` int64; sampled: indices of the tokens whose logits are wanted.
        """
        spec, weights = self._spec, self._weights
        cos, sin = rope_angles(self._frequencies, positions, weights.embedding.dtype)
        x = F.embedding(token_ids, weights.embedding)  # [T, H]
        for i, layer in enumerate(weights.layers):
            x = x + self._attend(i, layer, rms_norm(x, layer.attention_norm, spec.norm_eps), cos, sin, attention)
            y = F.linear(rms_norm(x, layer.mlp_norm, spec.norm_eps), layer.gate_up, layer.gate_up_bias)
            gate, up = y.chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        x = rms_norm(x[sampled], weights.norm, spec.norm_eps)
        return F.linear(x, weights.lm_head).float()

    def _attend(self, i: int, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        spec = self._spec
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, spec.head_dim)
        q = qkv[:, : spec.num_heads]
        k = qkv[:, spec.num_heads : -spec.num_kv_heads]
        v = qkv[:, -spec.num_kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            q = rms_norm(q, layer.query_norm, spec.norm_eps)
            k = rms_norm(k, layer.key_norm, spec.norm_eps)
        y = attention(i, apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)
        return F.linear(y, layer.output, layer.output_bias)
