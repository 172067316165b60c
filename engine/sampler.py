"""From logits to a token: greedy or one seeded draw per (seed, choice, position), whatever else is in the batch.

Order of the filters: temperature, top_k, top_p, min_p. The draw walks the remaining tokens from the most likely one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.types import Sampling

_MASK = (1 << 64) - 1


def uniform(seed: int, choice: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to (seed, choice, position): three rounds of splitmix64.

    position: of the token to draw, prompt included. Source: Steele, Lea, Flood, OOPSLA 2014.
    """
    state = 0
    for part in (seed, choice, position):
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


def sample(logits: Tensor, params: Sequence[tuple[Sampling, float]]) -> list[int]:
    """Choose one token per row of `logits` `[num_rows, vocab]` float32; params: its Sampling and its uniform number.

    Ties go to the smaller id. Raises ValueError when a row's logits are not finite: then its KV was not what it
    should have been, and any token would be a lie.
    """
    best = logits.argmax(dim=-1)
    peaks = logits.gather(1, best.unsqueeze(1)).squeeze(1)
    if not bool(torch.isfinite(peaks).all()):
        raise ValueError("logits are not finite")
    greedy: list[int] = best.tolist()
    return [
        token_id if s.temperature == 0 else draw(row, s, u)
        for token_id, row, (s, u) in zip(greedy, logits, params, strict=True)
    ]


def draw(logits: Tensor, sampling: Sampling, u: float) -> int:
    """Draw from one row `[vocab]` by inverting the cumulative distribution of what the filters leave."""
    # shifted by the maximum first: a tiny temperature then gives -inf beside 0, never inf - inf
    scaled = (logits.double() - logits.max()) / max(sampling.temperature, 1e-30)
    if 0 < sampling.top_k < scaled.numel():
        # a stable sort by value alone would not do for topk: it may break ties in any order
        values, ids = scaled.sort(descending=True, stable=True)
        values, ids = values[: sampling.top_k], ids[: sampling.top_k]
    else:
        values, ids = scaled.sort(descending=True, stable=True)
    probabilities = values.softmax(dim=0)
    if sampling.top_p < 1:
        # keep the smallest set whose mass reaches top_p: a token stays while the mass before it is below
        before = probabilities.cumsum(dim=0) - probabilities
        probabilities = probabilities.where(before < sampling.top_p, 0.0)
        probabilities[0] = probabilities[0].clamp_min(1e-300)
    if sampling.min_p > 0:
        probabilities = probabilities.where(probabilities >= sampling.min_p * probabilities[0], 0.0)
    cumulative = probabilities.cumsum(dim=0)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    # u < 1, but the product may round up to the last sum: step back to the last token with any mass
    last = int(probabilities.nonzero()[-1])
    return int(ids[min(index, last)])
