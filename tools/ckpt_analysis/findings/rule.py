"""Rules, observations and findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..metrics.results import NO_GROUP
from .evidence import Evidence

Thresholds = Mapping[str, float]


@dataclass(frozen=True)
class Advice:
    """What helps: `remedy` in one short imperative, without a full stop; `text` in full sentences."""

    remedy: str
    text: str


@dataclass(frozen=True)
class Observation:
    """A problem that a rule has found. `cost_s`: seconds that it cost its operation; findings are ordered by it.

    `phase`: the "phase" or "phase/detail" that is too long, if it is one; `group`: that of its operation.
    `advice` replaces the advice of the rule if the evidence allows a more specific one; `advice_for_hooks` does so for
    a job that was traced by hooks.
    """

    title: str
    evidence: str
    cost_s: float
    data: dict[str, Any] = field(default_factory=dict)
    phase: str | None = None
    group: int = NO_GROUP
    advice: Advice | None = None
    advice_for_hooks: Advice | None = None


@dataclass(frozen=True)
class Rule:
    """A check for one kind of problem. `thresholds` are passed to `check`; `figure` of a run's page shows its findings.

    `advice` may name flags of this project; `advice_for_hooks` is for a job that was traced by hooks (None: `advice`).
    """

    name: str
    figure: str
    thresholds: Thresholds
    advice: Advice
    advice_for_hooks: Advice | None
    check: Callable[[Evidence, Thresholds], list[Observation]]


@dataclass(frozen=True)
class Finding:
    """Observations of one rule with the same advice: the costliest, with the others named in its evidence.

    `cost_s`: sum of the costliest observation of each kind of operation. `data`, `phase` and `group` are those of the
    costliest; the key "others" of `data` has the data of the others.
    """

    rule: str
    title: str
    evidence: str
    advice: str
    cost_s: float
    data: dict[str, Any]
    phase: str | None = None
    group: int = NO_GROUP
    remedy: str = ""  # the advice in one short imperative
