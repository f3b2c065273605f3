"""From raw samples to medians, spreads and ratios with confidence intervals."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_RESAMPLES = 2000
_CONFIDENCE = 0.95
_FEWEST_ROUNDS = 10  # below, a bootstrap interval says little


@dataclass(frozen=True)
class Ratio:
    """A ratio and its 95 % confidence interval."""

    value: float
    low: float
    high: float


def ratio_of_medians(numerators: Sequence[float], denominators: Sequence[Sequence[float]]) -> Ratio:
    """Median of `numerators` over the median of all `denominators`, each a list with one value per round.

    The interval is the percentile bootstrap (Efron and Tibshirani 1993, chapter 13) over rounds: what was
    measured in one round is drawn together, so noise that a round's variants share cancels in the ratio.
    Raises ValueError if the lists are empty or of different lengths.
    """
    rounds = len(numerators)
    if not rounds or any(len(values) != rounds for values in denominators):
        raise ValueError(f"one value per round and variant is needed, {rounds} rounds were given")

    def ratio(chosen: Sequence[int]) -> float:
        below = [values[i] for values in denominators for i in chosen]
        return statistics.median(numerators[i] for i in chosen) / statistics.median(below)

    generator = random.Random(0)  # the same samples give the same interval
    found = sorted(ratio(generator.choices(range(rounds), k=rounds)) for _ in range(_RESAMPLES))
    tail = (1 - _CONFIDENCE) / 2
    low, high = found[int(tail * _RESAMPLES)], found[int((1 - tail) * _RESAMPLES) - 1]
    return Ratio(ratio(range(rounds)), low, high)


def median_of_ratios(numerators: Sequence[float], denominators: Sequence[Sequence[float]]) -> Ratio:
    """Median over rounds of (value / mean of the round's denominators), with a bootstrap interval.

    Slow changes of the machine's speed cancel within each round.
    """
    per_round = [value / statistics.fmean(below) for value, *below in zip(numerators, *denominators, strict=True)]
    return ratio_of_medians(per_round, [[1.0] * len(per_round)])


def verdict(ratio: Ratio, control: Ratio, target: float, rounds: int) -> str:
    """Whether the overhead `ratio` - 1 is below `target`, as far as the samples can tell."""
    if rounds < _FEWEST_ROUNDS:
        return f"undecided: fewer than {_FEWEST_ROUNDS} rounds (--repeat)"
    if not control.low <= 1 <= control.high:
        return f"undecided: the baseline differs from its own repetition by {control.value - 1:+.1%}"
    if ratio.high - 1 < target:
        return "met"
    if ratio.low - 1 > target:
        return "not met"
    noise = f"{control.low - 1:+.1%} to {control.high - 1:+.1%}"
    return f"undecided: the interval reaches beyond it, and the noise is {noise}"
