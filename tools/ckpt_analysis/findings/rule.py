"""Rules, their observations, and the findings that these become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .evidence import Evidence

Thresholds = Mapping[str, float]


@dataclass(frozen=True)
class Observation:
    """What a rule saw. `cost_s`: seconds that it cost the operation that it was seen in; it orders the findings.

    `advice` replaces the rule's own where the evidence points to something more particular.
    """

    title: str
    evidence: str
    cost_s: float
    data: dict[str, Any] = field(default_factory=dict)
    advice: str | None = None


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong. `thresholds` are those that `check` is called with."""

    name: str
    thresholds: Thresholds
    advice: str
    check: Callable[[Evidence, Thresholds], list[Observation]]


@dataclass(frozen=True)
class Finding:
    """An observation with the name of its rule and what to do about it."""

    rule: str
    title: str
    evidence: str
    advice: str
    cost_s: float
    data: dict[str, Any]
