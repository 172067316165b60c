"""From logits to a token: greedy or one seeded draw per (seed, choice, position), whatever else is in the batch.

Order of the filters: temperature, top_k, top_p, min_p. The draw walks the remaining tokens in order of their ids: in
order of likelihood, a last bit of rounding between two batches would swap neighbours, and so the token that is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.types import Sampling

_MASK = (1 << 64) - 1
_LEAST_TEMPERATURE = 1e-30
_FEW = 256


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


def sample(logits: Tensor, params: Sequence[tuple[Sampling, float]]) -> list[int | None]:
    """Choose one token per row of `logits` `[num_rows, vocab]` float32; params: its Sampling and its uniform number.

    Ties go to the smaller id. None where a row's logits are not finite: its KV was not what it should have been, or
    its numbers overflowed, and any token would be a lie.
    """
    best = logits.argmax(dim=-1)
    finite: list[bool] = logits.gather(1, best.unsqueeze(1)).squeeze(1).isfinite().tolist()
    greedy: list[int] = best.tolist()
    return [
        None if not sound else token_id if s.temperature == 0 else draw(row, s, u)
        for sound, token_id, row, (s, u) in zip(finite, greedy, logits, params, strict=True)
    ]


def draw(logits: Tensor, sampling: Sampling, u: float) -> int:
    """Draw from one row `[vocab]` by inverting the cumulative distribution of what the filters leave."""
    # shifted by the maximum first: a tiny temperature then gives -inf beside 0, never inf - inf
    weights = ((logits.double() - logits.max()) / max(sampling.temperature, _LEAST_TEMPERATURE)).exp()
    ids = _kept(weights, sampling)
    kept = weights[ids] if ids is not None else weights
    if sampling.min_p > 0:
        kept = kept.where(kept >= sampling.min_p, 0.0)  # the likeliest token weighs 1
    cumulative = kept.cumsum(dim=0)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    # u < 1, but the product may round up to the last sum: step back to the last token with any weight
    index = min(index, int(kept.nonzero()[-1]))
    return index if ids is None else int(ids[index])


def _kept(weights: Tensor, sampling: Sampling) -> Tensor | None:
    """Return the ids that top_k and top_p leave, ascending; None for all."""
    top_k = sampling.top_k if 0 < sampling.top_k < len(weights) else len(weights)
    if sampling.top_p >= 1:
        return None if top_k == len(weights) else _likeliest(weights, top_k).sort().values
    mass = weights[_likeliest(weights, top_k)].sum() if top_k < len(weights) else weights.sum()
    # the smallest set whose mass reaches top_p; it is nearly always small, so the whole vocabulary is rarely sorted
    ids = _likeliest(weights, min(_FEW, top_k))
    if weights[ids].sum() < sampling.top_p * mass:
        ids = _likeliest(weights, top_k)
    num_kept = int((weights[ids].cumsum(dim=0) < sampling.top_p * mass).sum()) + 1
    return ids[:num_kept].sort().values


def _likeliest(weights: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest weights, largest first, ties by the smaller id (which topk does not promise)."""
    least = weights.topk(count).values[-1]
    ids = (weights >= least).nonzero().squeeze(1)
    return ids[weights[ids].sort(descending=True, stable=True).indices][:count]
