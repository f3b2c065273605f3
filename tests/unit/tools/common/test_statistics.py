"""The test and the interval of comparisons, against samples whose truth is known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.common.statistics import ALPHA, can_tell, difference


def exact_p(first: list[float], second: list[float]) -> float:
    """Two-sided p value of the rank sum by enumerating every split of the pooled sample."""
    pooled = sorted([*first, *second])
    rank = {value: float(np.mean([i for i, v in enumerate(pooled) if v == value])) for value in pooled}
    everything = [rank[value] for value in [*first, *second]]
    sums = [sum(part) for part in itertools.combinations(everything, len(first))]
    seen = sum(everything[: len(first)])
    below = sum(total <= seen + 1e-9 for total in sums) / len(sums)
    above = sum(total >= seen - 1e-9 for total in sums) / len(sums)
    return min(1.0, 2 * min(below, above))


@pytest.mark.slow
@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 6) | st.integers(1, 999), min_size=3, max_size=5),
    st.lists(st.integers(1, 6) | st.integers(1, 999), min_size=4, max_size=5),
)
def test_the_p_value_of_few_repeats_is_exact(first: list[int], second: list[int]) -> None:
    """With and without ties, by counting all splits."""
    if len({*first, *second}) == 1:
        return
    a, b = [float(value) for value in first], [float(value) for value in second]
    found = difference(a, b)
    if can_tell(len(a), len(b)):
        assert found.p_value == pytest.approx(exact_p(a, b), abs=1e-9)


@pytest.mark.parametrize(
    ("first", "second", "enough"),
    [(1, 1, False), (1, 100, False), (2, 50, False), (3, 3, False), (3, 4, False), (4, 4, True), (3, 5, True)],
)
def test_too_few_repeats_is_what_counting_says(first: int, second: int, enough: bool) -> None:
    assert can_tell(first, second) is enough
    if min(first, second) >= 3:
        apart = exact_p([float(n) for n in range(first)], [100.0 + n for n in range(second)])
        assert (apart < ALPHA) is enough  # even without any overlap


@pytest.mark.slow
def test_it_does_not_see_differences_in_noise() -> None:
    """Of many comparisons of like with like about one in twenty may be called different (fixed seed)."""
    generator = np.random.default_rng(7)
    called = sum(
        (difference(list(generator.lognormal(0, 0.3, 8)), list(generator.lognormal(0, 0.3, 8))).p_value or 1) < ALPHA
        for _ in range(200)
    )
    assert called <= 20  # 10 expected at most; 20 are exceeded once in a thousand
    slower = [
        difference(list(generator.lognormal(0, 0.1, 12)), list(generator.lognormal(0.5, 0.1, 12))) for _ in range(20)
    ]
    assert all(found.p_value is not None and found.p_value < ALPHA for found in slower)


@pytest.mark.slow
def test_the_interval_covers_the_true_ratio() -> None:
    """95 % intervals of samples with a known ratio of 1.5 hold it in at least 85 of 100 cases (fixed seed)."""
    generator = np.random.default_rng(11)
    held = 0
    for _ in range(100):
        found = difference(list(generator.lognormal(0, 0.2, 15)), list(1.5 * generator.lognormal(0, 0.2, 15)))
        assert found.low is not None and found.high is not None
        held += found.low <= 1.5 <= found.high
    assert held >= 85


def test_the_same_samples_give_the_same_answer() -> None:
    first, second = [1.0, 1.1, 1.2, 1.3, 1.1], [1.2, 1.3, 1.4, 1.5, 1.1]
    assert difference(first, second) == difference(first, second)
    forth, back = difference(first, second), difference(second, first)
    assert forth.ratio is not None and back.ratio is not None
    assert forth.ratio * back.ratio == pytest.approx(1) and forth.p_value == pytest.approx(back.p_value)


def test_a_median_of_zero_has_no_ratio() -> None:
    found = difference([0.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.ratio is None and found.low is None and found.p_value is not None and found.p_value < ALPHA
