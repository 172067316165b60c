"""The sampler against a plain reference, and what its one uniform number per draw promises."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampler import draw, sample, uniform
from tandem.types import Sampling


def reference_kept(logits: list[float], sampling: Sampling) -> np.ndarray:
    """Probabilities after the filters, in plain loops: temperature, top_k, top_p, min_p."""
    shifted = (np.array(logits, dtype=np.float64) - max(logits)) / sampling.temperature
    probabilities = np.exp(shifted) / np.exp(shifted).sum()
    order = sorted(range(len(logits)), key=lambda i: (-probabilities[i], i))
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    mass = sum(probabilities[i] for i in order)
    kept, before = [], 0.0
    for i in order:
        if before >= sampling.top_p * mass and kept and sampling.top_p < 1:
            break
        kept.append(i)
        before += probabilities[i]
    result = np.zeros(len(logits))
    for i in kept:
        if probabilities[i] >= sampling.min_p * probabilities.max():
            result[i] = probabilities[i]
    return result / result.sum()


# whole tenths: ties happen, and rounding does not decide about a filter's edge
tenths = st.integers(-80, 80).map(lambda n: n / 10)
samplings = st.builds(
    Sampling,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_p=st.sampled_from([0.0001, 0.13, 0.501, 0.877, 0.9903, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 7, 1000]),
    min_p=st.sampled_from([0.0, 0.0117, 0.0531, 0.3117]),
)


@given(logits=st.lists(tenths, min_size=1, max_size=40), sampling=samplings, u=st.floats(0, 1, exclude_max=True))
def test_a_draw_inverts_the_reference_distribution(logits: list[float], sampling: Sampling, u: float) -> None:
    probabilities = reference_kept(logits, sampling)
    token_id = draw(torch.tensor(logits), sampling, u)
    assert probabilities[token_id] > 0
    below = probabilities[:token_id].sum()
    assert below - 1e-6 <= u <= below + probabilities[token_id] + 1e-6


@pytest.mark.parametrize("size", [255, 256, 257, 3000])
@pytest.mark.parametrize("top_p", [0.3, 0.95, 0.9999])
def test_a_flat_distribution_needs_more_than_the_few_likeliest_tokens(size: int, top_p: float) -> None:
    logits = torch.linspace(0.0, 0.5, size)
    kept = reference_kept(logits.tolist(), Sampling(1, top_p=top_p)) > 0
    for u in (0.0, 0.25, 0.5, 0.75, 1 - 2**-53):
        assert kept[draw(logits, Sampling(1, top_p=top_p), u)]
    # ids ascend with likelihood, so u = 0 finds the least likely token of the set
    assert abs(draw(logits, Sampling(1, top_p=top_p), 0.0) - int(kept.argmax())) <= 1


@given(
    logits=st.lists(tenths, min_size=2, max_size=30, unique=True),
    u=st.floats(0, 1, exclude_max=True),
    sampling=st.sampled_from(
        [
            Sampling(1, temperature=1e-6),
            Sampling(1, temperature=5e-324),
            Sampling(1, top_p=1e-9),
            Sampling(1, top_p=0.0),
            Sampling(1, top_k=1),
            Sampling(1, min_p=1.0),
        ]
    ),
)
def test_the_narrowest_settings_equal_greedy(logits: list[float], u: float, sampling: Sampling) -> None:
    row = torch.tensor(logits)
    assert sample(row.unsqueeze(0), [(sampling, u)]) == [int(row.argmax())]
    assert sample(row.unsqueeze(0), [(Sampling(1, temperature=0.0), u)]) == [int(row.argmax())]


def test_ties_go_to_the_smaller_id() -> None:
    row = torch.tensor([1.0, 5.0, 5.0, 5.0])
    assert sample(row.unsqueeze(0), [(Sampling(1, temperature=0.0), 0.9)]) == [1]
    assert {draw(row, Sampling(1, top_k=2), u / 100) for u in range(100)} == {1, 2}


def test_tokens_that_are_ruled_out_are_never_drawn() -> None:
    row = torch.tensor([0.0, -torch.inf, 0.0, -torch.inf])
    assert {draw(row, Sampling(1), u) for u in np.linspace(0, 1 - 2**-53, 50)} == {0, 2}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_logits_are_not_finite_gets_no_token_and_the_others_do(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 5] = bad
    chosen = sample(logits, [(Sampling(1, temperature=temperature), 0.5)] * 3)
    assert chosen[1] is None
    assert chosen[0] == chosen[2] is not None


def test_a_row_is_sampled_alike_whatever_is_in_the_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, 500, generator=generator) * 3
    params = [
        (Sampling(1, temperature=t, top_p=p, top_k=k), uniform(n, 0, 7))
        for n, (t, p, k) in enumerate(itertools.product((0.0, 1.3), (0.9, 1.0), (0, 40)))
    ]
    together = sample(logits, params)
    assert together == [sample(logits[n : n + 1], params[n : n + 1])[0] for n in range(8)]
    assert together == sample(logits.flip(0), params[::-1])[::-1]


def test_rounding_between_batches_rarely_changes_a_draw() -> None:
    generator = torch.Generator().manual_seed(2)
    changed = 0
    for n in range(400):
        row = torch.randn(5000, generator=generator)
        noise = torch.randn(5000, generator=generator) * 1e-6
        changed += draw(row, Sampling(1), uniform(n, 0, 0)) != draw(row + noise, Sampling(1), uniform(n, 0, 0))
    assert changed <= 2


def test_uniform_numbers_are_uniform_and_keyed_by_all_three_parts() -> None:
    keys = list(itertools.product((0, 1, 2**63, -1), (0, 1, 2), range(500)))
    numbers = [uniform(*key) for key in keys]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    assert numbers == [uniform(*key) for key in keys]
    counts = np.bincount((np.array(numbers) * 20).astype(int), minlength=20)
    expected = len(numbers) / 20
    assert ((counts - expected) ** 2 / expected).sum() < 43.8  # chi-square, 19 degrees, p = 0.001
    streams = np.array(numbers).reshape(12, 500)
    neighbours = np.corrcoef(streams)[np.triu_indices(12, 1)]
    assert np.abs(neighbours).max() < 0.2
    assert np.abs([np.corrcoef(s[:-1], s[1:])[0, 1] for s in streams]).max() < 0.2


@pytest.mark.parametrize("sampling", [Sampling(1), Sampling(1, temperature=0.7, top_k=12, top_p=0.9, min_p=0.05)])
def test_drawn_tokens_follow_the_distribution(sampling: Sampling) -> None:
    row = torch.randn(30, generator=torch.Generator().manual_seed(3))
    probabilities = reference_kept(row.tolist(), sampling)
    num_draws = 4000
    counts = np.bincount([draw(row, sampling, uniform(9, 0, p)) for p in range(num_draws)], minlength=30)
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * num_draws
    degrees = int(possible.sum()) - 1
    chi_square = float(((counts[possible] - expected) ** 2 / expected).sum())
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)
