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

    `advice` replaces the rule's own where the evidence points to something more particular, `advice_for_hooks` what
    the rule says to a job that is not this project's.
    """

    title: str
    evidence: str
    cost_s: float
    data: dict[str, Any] = field(default_factory=dict)
    advice: str | None = None
    advice_for_hooks: str | None = None


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong. `thresholds` are those that `check` is called with.

    `advice` may name flags of this project, `advice_for_hooks` helps a job that was traced by hooks; None: `advice`
    does, too.
    """

    name: str
    thresholds: Thresholds
    advice: str
    advice_for_hooks: str | None
    check: Callable[[Evidence, Thresholds], list[Observation]]


@dataclass(frozen=True)
class Finding:
    """Observations of one rule, for which one advice holds: the costliest, with the others named in its evidence.

    `cost_s`: of each kind of operation the costliest, added up. `data` is of the costliest; its "others" are those of
    the others.
    """

    rule: str
    title: str
    evidence: str
    advice: str
    cost_s: float
    data: dict[str, Any]
