"""The CPU backend: the decoder in plain torch, attention over the pool's blocks (⑤ and ⑧).

The pool is `[num_blocks, layers, 2, kv_heads, block_size, head_dim]` over the caller's bytes. Seen as rows of head_dim
numbers, a token's key in a layer and a head is one row, and storing is index_copy_; seen as rows of block_size *
head_dim numbers, a block's keys in a layer and a head are one, and gathering a context is index_select. The indices
are computed once per step and shifted per layer.
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
    """Rows that attend together: token span [start, end) of the step, what to gather, and who sees what."""

    start: int
    end: int
    num_rows: int
    num_queries: int  # per row
    context_len: int  # of the longest row
    gather: Tensor  # [num_rows * 2 * kv_heads * num_blocks], of layer 0
    stale: Tensor | None  # gathered slots below context_len that are not the row's
    mask: Tensor | None  # [num_rows, 1, num_queries or 1, context_len] bool, True where visible
    causal: bool  # the whole context is new: no mask, but each token sees those before it


class PagedAttention:
    """Attention of one step over the pool. Decoding rows form one padded group, each prompt chunk one of its own."""

    def __init__(self, rows: Tensor, layout: KVLayout, batch: Batch) -> None:
        """rows: the pool as `[num_blocks * layers * 2 * kv_heads * block_size, head_dim]`."""
        self._tokens = rows
        self._blocks = rows.view(-1, layout.block_size * layout.head_dim)  # one layer, half and head of a block each
        self._layout = layout
        self._heads = 2 * layout.num_kv_heads
        slots = torch.cat([self._slots(s) for s in batch.rows])  # [T]
        heads = torch.arange(self._heads) * layout.block_size
        self._store = (slots.unsqueeze(1) + heads).flatten()  # [T * 2 * kv_heads]
        n = batch.num_decode_rows
        spans = [batch.rows[:n]] if n else []
        spans += [(s,) for s in batch.rows[n:]]
        self._groups: list[_Group] = []
        start = 0
        for rows_together in spans:
            self._groups.append(self._group(start, rows_together))
            start = self._groups[-1].end

    def _slots(self, s: ScheduledRow) -> Tensor:
        """Row of `_tokens` of the first head in layer 0, for each token of the span."""
        size, layout = self._layout.block_size, self._layout
        positions = torch.arange(s.start, s.end)
        blocks = torch.tensor(s.row.block_table[: layout.num_blocks_for(s.end)])[positions // size]
        return blocks * (layout.num_layers * self._heads * size) + positions % size

    def _group(self, start: int, rows: tuple[ScheduledRow, ...]) -> _Group:
        """Rows with one token each, or one row with a chunk."""
        layout, num_rows, num_queries = self._layout, len(rows), rows[0].num_tokens
        lengths = [s.end for s in rows]
        longest = max(lengths)
        num_blocks = layout.num_blocks_for(longest)
        tables = torch.zeros(num_rows, 1, num_blocks, dtype=torch.int64)
        for table, s in zip(tables, rows, strict=True):
            own = s.row.block_table[: layout.num_blocks_for(s.end)]
            table[0] = own[0]  # pads, as long as the row is not the longest
            table[0, : len(own)] = torch.tensor(own)
        heads = torch.arange(self._heads).unsqueeze(1)
        gather = (tables * (layout.num_layers * self._heads) + heads).flatten()
        stale = mask = None
        causal = num_queries > 1 and rows[0].start == 0
        if num_queries > 1 and not causal:
            visible = torch.arange(longest) <= torch.arange(rows[0].start, longest).unsqueeze(1)
            mask = visible.view(1, 1, num_queries, longest)
        elif min(lengths) < longest:
            own_slots = torch.arange(num_blocks * layout.block_size) < torch.tensor(lengths).unsqueeze(1)
            mask = own_slots[:, :longest].view(num_rows, 1, 1, longest)
            stale = (~own_slots).unsqueeze(1).expand(-1, self._heads, -1).flatten().nonzero().squeeze(1)
        end = start + num_rows * num_queries
        return _Group(start, end, num_rows, num_queries, longest, gather, stale, mask, causal)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store and attend; see engine.model.Attention."""
        layout = self._layout
        new = torch.stack((key, value), dim=1).view(-1, layout.head_dim)  # [T * 2 * kv_heads, D]
        self._tokens.index_copy_(0, self._store + layer * self._heads * layout.block_size, new)
        parts = []
        for g in self._groups:
            context = self._blocks.index_select(0, g.gather + layer * self._heads)
            if g.stale is not None:
                # masking is not enough: whatever lies there may be NaN
                context.view(-1, layout.head_dim).index_fill_(0, g.stale, 0.0)
            context = context.view(g.num_rows, 2, layout.num_kv_heads, -1, layout.head_dim)[..., : g.context_len, :]
            q = query[g.start : g.end].view(g.num_rows, g.num_queries, -1, layout.head_dim).transpose(1, 2)
            y = F.scaled_dot_product_attention(
                q,
                context[:, 0],
                context[:, 1],
                attn_mask=g.mask,
                is_causal=g.causal,
                enable_gqa=q.shape[1] != layout.num_kv_heads,
            )
            parts.append(y.transpose(1, 2).reshape(g.end - g.start, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
