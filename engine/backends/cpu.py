"""The CPU backend: the decoder in plain torch, attention over the pool's blocks (⑤ and ⑧).

The pool is `[num_blocks, layers, 2, kv_heads, block_size, head_dim]` over the caller's bytes. Seen as rows of head_dim
numbers, a token's key in a layer and a head is one row; so storing is index_copy_ and gathering a context is
index_select, with indices that are computed once per step and shifted per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.loader import LoadedModel
from engine.model import Decoder
from engine.sampler import sample, uniform
from engine.scheduler import Batch, ScheduledRow
from engine.torch_dtypes import torch_dtype
from tandem.layout import KVLayout


class CpuRunner:
    """Runs steps of one model over one pool; see engine.runner.Runner."""

    def __init__(self, model: LoadedModel, kv: memoryview, num_blocks: int, layout: KVLayout, num_threads: int) -> None:
        """`kv`: at least num_blocks * layout.block_nbytes writable bytes, which must outlive the runner."""
        self._decoder = Decoder(model.spec, model.weights)
        self._layout = layout
        self._num_threads = num_threads
        num_elements = num_blocks * layout.block_nbytes // torch_dtype(layout.dtype).itemsize
        pool = torch.frombuffer(kv, dtype=torch_dtype(layout.dtype), count=num_elements)
        self._rows = pool.view(-1, layout.head_dim)
        self._threads_set = False

    def execute(self, batch: Batch) -> list[int | None]:
        """Compute the batch; see Runner."""
        if not self._threads_set:
            # per thread in OpenMP: must be said in the thread that computes
            torch.set_num_threads(self._num_threads)
            self._threads_set = True
        with torch.inference_mode():
            return self._execute(batch)

    def _execute(self, batch: Batch) -> list[int | None]:
        token_ids = [t for s in batch.rows for t in s.row.token_ids[s.start : s.end]]
        positions = [p for s in batch.rows for p in range(s.start, s.end)]
        sampled, ends = [], -1
        sampling_rows: list[ScheduledRow] = []
        for s in batch.rows:
            ends += s.num_tokens
            if s.samples:
                sampled.append(ends)
                sampling_rows.append(s)
        attention = PagedAttention(self._rows, self._layout, batch)
        logits = self._decoder.forward(
            torch.tensor(token_ids), torch.tensor(positions), torch.tensor(sampled, dtype=torch.int64), attention
        )
        if not sampling_rows:
            return [None] * len(batch.rows)
        params = [(s.row.sampling, uniform(s.row.sampling.seed, s.row.key.key.choice, s.end)) for s in sampling_rows]
        chosen = iter(sample(logits, params))
        return [next(chosen) if s.samples else None for s in batch.rows]


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that attend together: token span [start, end) of the step, gather indices, and who sees what."""

    start: int
    end: int
    num_rows: int
    num_queries: int  # per row
    context_len: int
    gather: Tensor  # [num_rows * 2 * kv_heads * context_len], of layer 0
    mask: Tensor | None  # [num_rows, 1, num_queries, context_len] bool, True where visible


class PagedAttention:
    """Attention of one step over the pool. Decoding rows form one padded group, each prompt chunk one of its own."""

    def __init__(self, rows: Tensor, layout: KVLayout, batch: Batch) -> None:
        """rows: the pool as `[num_blocks * layers * 2 * kv_heads * block_size, head_dim]`."""
        self._pool = rows
        self._layout = layout
        self._layer_stride = 2 * layout.num_kv_heads * layout.block_size
        self._block_stride = layout.num_layers * self._layer_stride
        heads = torch.arange(layout.num_kv_heads) * layout.block_size
        halves = torch.tensor([0, layout.num_kv_heads * layout.block_size])
        self._head_offsets = (halves.unsqueeze(1) + heads).unsqueeze(-1)  # [2, kv_heads, 1]
        slots = torch.cat([self._slots(s)[s.start : s.end] for s in batch.rows])  # [T]
        self._store = (slots.view(-1, 1, 1) + self._head_offsets.squeeze(-1)).flatten()  # [T * 2 * kv_heads]
        self._groups = self._make_groups(batch)

    def _slots(self, s: ScheduledRow) -> Tensor:
        """Pool row of key head 0, layer 0, for each token up to the span's end: `[end]`."""
        size = self._layout.block_size
        blocks = torch.tensor(s.row.block_table[: self._layout.num_blocks_for(s.end)]) * self._block_stride
        return (blocks.unsqueeze(1) + torch.arange(size)).flatten()[: s.end]

    def _make_groups(self, batch: Batch) -> list[_Group]:
        groups = []
        n = batch.num_decode_rows
        if n:
            lengths = [s.end for s in batch.rows[:n]]
            longest = max(lengths)
            # padding repeats the row's first slot: never an uncomputed one, whatever bytes those hold
            slots = torch.stack(
                [F.pad(x, (0, longest - len(x)), value=int(x[0])) for x in map(self._slots, batch.rows[:n])]
            )
            mask = None
            if min(lengths) < longest:
                mask = (torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)).view(n, 1, 1, longest)
            groups.append(_Group(0, n, n, 1, longest, self._gather_index(slots), mask))
        start = n
        for s in batch.rows[n:]:
            mask = None
            if s.num_tokens > 1:
                visible = torch.arange(s.end) <= torch.arange(s.start, s.end).unsqueeze(1)
                mask = visible.view(1, 1, s.num_tokens, s.end)
            index = self._gather_index(self._slots(s).unsqueeze(0))
            groups.append(_Group(start, start + s.num_tokens, 1, s.num_tokens, s.end, index, mask))
            start += s.num_tokens
        return groups

    def _gather_index(self, slots: Tensor) -> Tensor:
        """From `[num_rows, context_len]` to flat `[num_rows, 2, kv_heads, context_len]`."""
        return (slots.view(len(slots), 1, 1, -1) + self._head_offsets).flatten()

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store and attend; see engine.model.Attention."""
        layout, shift = self._layout, layer * self._layer_stride
        new = torch.stack((key, value), dim=1)  # [T, 2, kv_heads, D]
        self._pool.index_copy_(0, self._store + shift, new.view(-1, layout.head_dim))
        parts = []
        for g in self._groups:
            context = self._pool.index_select(0, g.gather + shift)
            context = context.view(g.num_rows, 2, layout.num_kv_heads, g.context_len, layout.head_dim)
            q = query[g.start : g.end].view(g.num_rows, g.num_queries, -1, layout.head_dim).transpose(1, 2)
            y = F.scaled_dot_product_attention(
                q, context[:, 0], context[:, 1], attn_mask=g.mask, enable_gqa=q.shape[1] != layout.num_kv_heads
            )
            parts.append(y.transpose(1, 2).reshape(g.end - g.start, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
