"""Whether two sets of repeats differ beyond their noise, for few repeats of a skewed quantity.

The test is Wilcoxon's rank sum in the form of Mann and Whitney, two-sided: it asks whether values of one run tend to
be larger, assumes no distribution, and one outlier moves it by one rank. Its distribution is exact for small samples,
by enumeration (Mann and Whitney, "On a Test of Whether one of Two Random Variables is Stochastically Larger than the
Other", 1947); with ties in small samples by permutation. The interval is the percentile bootstrap of the ratio of
medians (Efron, "Bootstrap Methods: Another Look at the Jackknife", 1979). SciPy computes both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

ALPHA = 0.05
LEAST_REPEATS = 3  # of each run; below, a bootstrap draws from next to nothing
_EXACT_UP_TO = 8  # repeats of the smaller run: above, SciPy's normal approximation is good to the third digit
_RESAMPLES = 9_999
_SEED = 20_240_229  # fixed: the same logs give the same answer


@dataclass(frozen=True)
class Difference:
    """Second sample against the first. `ratio` is of medians; [low, high] covers it with 95 %."""

    ratio: float | None
    low: float | None
    high: float | None
    p_value: float | None  # None: too few values for the test to find a difference at all


def difference(first: list[float], second: list[float]) -> Difference:
    """Compare two samples of at least one value each. A ratio to a median of 0 is None."""
    base = float(np.median(first))
    ratio = float(np.median(second)) / base if base > 0 else None
    if not can_tell(len(first), len(second)):
        return Difference(ratio, None, None, None)
    low, high = _interval(first, second) if ratio is not None and min(first) > 0 else (None, None)
    return Difference(ratio, low, high, p_value(first, second))


def can_tell(first: int, second: int) -> bool:
    """Whether samples of these sizes could give a p value below ALPHA, had they nothing in common."""
    smallest_p = 2 / comb(first + second, first)
    return min(first, second) >= LEAST_REPEATS and smallest_p < ALPHA


def p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Of the rank sum test, two-sided. Samples of which all values are the same are for the caller to know."""
    from scipy import stats  # takes longer to import than a report of a small run to write

    pooled = np.array([*first, *second])
    tied = len(np.unique(pooled)) < len(pooled)
    if tied and min(len(first), len(second)) <= _EXACT_UP_TO:
        ranks = stats.rankdata(pooled)
        test = stats.permutation_test(
            (ranks[: len(first)], ranks[len(first) :]),
            lambda x, y, axis: np.sum(x, axis=axis),
            permutation_type="independent",
            vectorized=True,
            n_resamples=_RESAMPLES,
            rng=np.random.default_rng(_SEED),
        )
    else:
        test = stats.mannwhitneyu(first, second, alternative="two-sided")
    return float(test.pvalue)


def _interval(first: list[float], second: list[float]) -> tuple[float, float]:
    """Percentile interval of the ratio of medians; each run is resampled on its own."""
    generator = np.random.default_rng(_SEED)
    resampled = [
        np.median(generator.choice(values, size=(_RESAMPLES, len(values))), axis=1)
        for values in (np.array(first), np.array(second))
    ]
    low, high = np.percentile(resampled[1] / resampled[0], [100 * ALPHA / 2, 100 * (1 - ALPHA / 2)])
    return float(low), float(high)
