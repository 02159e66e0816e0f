"""Sampling: what is kept, with which probability, and that a seed repeats it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hrxmp.errors import UsageError
from hrxmp.models.sampling import Sampler, SamplingParams, distribution

RANDOM = np.random.default_rng(5)
LOGITS = RANDOM.normal(0, 3, 1000).astype(np.float32)


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "top_k": 0, "top_p": 1.0} | changes))  # type: ignore[arg-type]


def test_temperature_zero_takes_the_best_and_draws_nothing() -> None:
    sampler = Sampler(params(temperature=0.0, seed=1))
    assert [sampler.choose(LOGITS) for _ in range(3)] == [int(LOGITS.argmax())] * 3
    ties = np.array([1, 7, 7, 0], np.float32)
    assert sampler.choose(ties) == 1


@given(top_k=st.integers(1, 1200))
def test_top_k_keeps_the_k_best_in_order(top_k: int) -> None:
    tokens, probabilities = distribution(LOGITS, params(top_k=top_k))
    assert tokens.tolist() == np.argsort(-LOGITS, kind="stable")[:top_k].tolist()
    assert probabilities.sum() == pytest.approx(1)
    assert (np.diff(probabilities) <= 0).all()


@given(top_p=st.floats(0.01, 0.999))
def test_top_p_keeps_the_fewest_that_reach_the_share(top_p: float) -> None:
    exact = np.exp(LOGITS.astype(np.float64))
    ranked = np.sort(exact / exact.sum())[::-1]
    tokens, _ = distribution(LOGITS, params(top_p=top_p, temperature=2.0))
    assert ranked[: len(tokens)].sum() >= top_p - 1e-9
    assert ranked[: len(tokens) - 1].sum() < top_p


def test_temperature_divides_the_logits() -> None:
    tokens, probabilities = distribution(LOGITS, params(temperature=0.5))
    exact = np.exp(2 * LOGITS.astype(np.float64) - 2 * float(LOGITS.max()))
    assert np.allclose(probabilities, (exact / exact.sum())[tokens], rtol=1e-9)


@pytest.mark.parametrize("temperature", [1e-300, 1e-3, 1e6])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    _, probabilities = distribution(LOGITS, params(temperature=temperature))
    assert np.isfinite(probabilities).all()
    assert probabilities.sum() == pytest.approx(1)


def test_frequencies_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    sampler = Sampler(params(seed=11))
    drawn = np.bincount([sampler.choose(logits) for _ in range(20_000)], minlength=4) / 20_000
    assert np.abs(drawn - [0.5, 0.3, 0.15, 0.05]).max() < 0.015


def test_a_seed_repeats_and_another_differs() -> None:
    draws = [
        [Sampler(params(seed=seed)).choose(LOGITS * 0), *map(Sampler(params(seed=seed)).choose,
         [LOGITS * 0] * 30)] for seed in (3, 3, 4)
    ]  # fmt: skip
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0},
     {"top_p": 1.1}, {"seed": -1}],
)  # fmt: skip
def test_values_that_cannot_be_meant(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"expected"):
        params(**bad)
