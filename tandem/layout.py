"""The shape of a KV block and who may exchange blocks with whom. Torch-free, shared by engine and kvtransfer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

WIRE_VERSION = 1
DTYPE_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One KV group's block: `[num_layers, 2, num_kv_heads, block_size, head_dim]` of `dtype`, contiguous.

    A pool is `[num_blocks, *block_shape]`: one read moves a block with all its layers, or several with consecutive ids.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block of all layers."""
        layers, two, heads, size, dim = self.block_shape
        return layers * two * heads * size * dim * DTYPE_NBYTES[self.dtype]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


def compatibility_hash(layout: KVLayout, weights_identity: str) -> bytes:
    """16 bytes that are equal exactly for workers that may be paired: wire version, weights, dtype and layout."""
    text = f"{WIRE_VERSION}|{weights_identity}|{layout.dtype}|{layout.block_shape}"
    return hashlib.sha256(text.encode()).digest()[:16]
