"""The spread of samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def interquartile_range(values: Sequence[float]) -> float:
    """Upper minus lower quartile; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return upper - lower
