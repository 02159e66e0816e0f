"""Choosing the next token from logits: greedy, or temperature with top-k and top-p.

Runs in the executor process, on numpy arrays of one row. Given the same seed and logits it makes
the same choices. It knows nothing of vocabularies or ends of sequence.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from hrxmp.errors import UsageError

Logits = NDArray[np.float32]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 leave all candidates."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature {self.temperature}: expected 0 or more")
        if self.top_k < 0:
            raise UsageError(f"top-k {self.top_k}: expected 0 or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p {self.top_p}: expected more than 0, at most 1")
        if self.seed is not None and self.seed < 0:
            raise UsageError(f"seed {self.seed}: expected 0 or more")


class Sampler:
    """Draws tokens with one generator; `seed` None takes one from the system."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._random = np.random.default_rng(params.seed)

    def choose(self, logits: Logits) -> int:
        """The next token for `logits` [n_vocab], finite float32."""
        if self.params.temperature == 0:
            return int(np.argmax(logits))
        tokens, probabilities = distribution(logits, self.params)
        # One draw against the cumulated weights: the same number of draws for every choice.
        cumulated = np.cumsum(probabilities)
        index = int(np.searchsorted(cumulated, self._random.random() * cumulated[-1], "right"))
        return int(tokens[min(index, len(tokens) - 1)])


def distribution(
    logits: Logits, params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The candidates, best first, and their probabilities after top-k, top-p and temperature.

    As in llama.cpp, top-p looks at the probabilities before the temperature is applied.
    """
    count = min(params.top_k or len(logits), len(logits))
    best = np.argpartition(logits, len(logits) - count)[len(logits) - count :]
    tokens = best[np.argsort(-logits[best], kind="stable")]
    ranked = logits[tokens].astype(np.float64)
    if params.top_p < 1:
        before = np.cumsum(_softmax(ranked))
        kept = int(np.searchsorted(before, params.top_p, "left")) + 1
        tokens, ranked = tokens[:kept], ranked[:kept]
    return tokens, _softmax((ranked - ranked[0]) / params.temperature)


def _softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(values - values.max())
    result: NDArray[np.float64] = weights / weights.sum()
    return result
