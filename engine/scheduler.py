"""What the next step computes: all decoding rows, then prompt chunks in order of arrival, within one token budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.row import Row


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """A row and the span of its tokens to compute: positions [start, end)."""

    row: Row
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return self.end - self.start

    @property
    def samples(self) -> bool:
        """Whether the span ends with the row's newest token, so that the next one is sampled."""
        return self.end == len(self.row.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: rows that compute one token first (`num_decode_rows` of them), then prompt chunks."""

    rows: tuple[ScheduledRow, ...]
    num_decode_rows: int

    @property
    def num_tokens(self) -> int:
        """Tokens to compute in the step."""
        return sum(s.num_tokens for s in self.rows)


def schedule(rows: Iterable[Row], *, chunk_size: int, max_num_seqs: int) -> Batch | None:
    """Choose the next step's batch from rows in order of arrival; None when there is nothing to do.

    Decoding rows come first, so that a long prompt delays them by one chunk at most. Prompts share what is left of
    `chunk_size` tokens, and have one token even when as many rows decode, so that they still move. With `max_num_seqs`
    rows decoding, prompts wait for one of them to end.
    """
    decoding: list[ScheduledRow] = []
    prompts: list[Row] = []
    for row in rows:
        if not row.decoding:
            prompts.append(row)
        elif len(decoding) < max_num_seqs:
            decoding.append(ScheduledRow(row, row.num_computed_tokens, len(row.token_ids)))
    budget = max(chunk_size - len(decoding), 1)
    chunks: list[ScheduledRow] = []
    for row in prompts:
        if budget == 0 or len(decoding) + len(chunks) >= max_num_seqs:
            break
        num_tokens = min(row.num_uncomputed_tokens, budget)
        chunks.append(ScheduledRow(row, row.num_computed_tokens, row.num_computed_tokens + num_tokens))
        budget -= num_tokens
    if not decoding and not chunks:
        return None
    return Batch((*decoding, *chunks), len(decoding))
