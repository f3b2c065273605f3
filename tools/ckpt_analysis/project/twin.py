"""Predicts saves, loads and restarts in another place, with intervals, and lists what is extrapolated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...common.extrapolation import Extrapolation, extrapolation
from ..common.errors import CouldNotRunError
from .costs import Model, alike, choose_hidden, fit, learn
from .drills import FEATURES, QUANTITIES, Deployment, Drill

LEAST_RANKS = 3  # different numbers of ranks that a cost is learnt from


@dataclass(frozen=True)
class Predicted:
    """One quantity at the place asked for, in seconds. `low` to `high` is the interval; `parts` add up to `seconds`.

    `floor_s`: the storage ceiling allows no less, and `seconds` is that.
    """

    quantity: str
    seconds: float
    low: float
    high: float
    parts: dict[str, float]
    terms: list[str]
    error: float  # mean relative error when each number of ranks is predicted from the others
    floor_s: float | None = None


@dataclass(frozen=True)
class Prediction:
    """What was asked, from which drills, the quantities, and what no trace had."""

    kind: str
    engine: str
    deployment: Deployment
    drills: list[Drill]
    hidden: float  # ranks per core that hide in one another's waits
    predicted: list[Predicted]
    extrapolated: list[Extrapolation] = field(default_factory=list)  # to more ranks, and to what is too far
    not_in_traces: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)


ASSUMPTIONS = [
    "a cost is a sum of the terms that docs/metrics.md lists for it, none of them negative; each drill counts with the "
    "medians of its run",
    "the interval is jackknife+ (Barber et al. 2021) with relative residuals: from the least to the most that the fit "
    "without each layout makes of it, off by as much as that layout was off. It holds for places like those of the "
    "traces; beyond them it says how much the drills disagree, not how wrong the terms may be",
    "launcher, software, network and storage are those of the traces",
]


def predict(
    drills: Sequence[Drill],
    deployment: Deployment,
    engine: str | None = None,
    ceilings: Mapping[str, float] | None = None,
    factors: Mapping[str, float] | None = None,
) -> Prediction:
    """Blocked, durable, load and restart time at `deployment`.

    `ceilings` may hold "write_GBps" and "read_GBps" of the storage: no save is durable, and no load done, before its
    bytes are through. `factors`: part of a restart, load or save -> what its time is multiplied with. Raises
    CouldNotRunError where the drills cannot answer, naming what they lack.
    """
    engine = _engine(drills, engine)
    of_engine = [drill for drill in drills if drill.engine == engine]
    if len({drill.imported_once for drill in of_engine}) > 1:
        raise CouldNotRunError("some traces are of a launcher that imports once for all ranks, some not: give one kind")
    known = {name: [drill for drill in of_engine if name in drill.seconds] for name in QUANTITIES}
    known = {name: having for name, having in known.items() if having}
    if not known:
        raise CouldNotRunError(f"no trace with engine {engine} has a complete save, a load or a restart")
    for quantity, having in known.items():
        _check_sizes(quantity, engine, having)
    hidden = choose_hidden(known)
    predicted = [_predicted(name, having, deployment, hidden, factors or {}) for name, having in known.items()]
    unused = set(factors or {}) - {part for entry in predicted for part in entry.parts}
    if unused:
        raise CouldNotRunError(f"--what-if {min(unused)}: no part of a restart, load or save in these traces")
    return Prediction(
        "prediction", engine, deployment, of_engine, hidden, _above_floor(predicted, deployment, ceilings or {}),
        _extrapolated(of_engine, deployment), _not_in_traces(of_engine, deployment), ASSUMPTIONS,
    )  # fmt: skip


def _engine(drills: Sequence[Drill], engine: str | None) -> str:
    engines = sorted({drill.engine for drill in drills})
    if engine is None and len(engines) > 1:
        raise CouldNotRunError(f"the traces have several engines ({', '.join(engines)}): name one with --engine")
    if engine is not None and engine not in engines:
        raise CouldNotRunError(f"--engine {engine}: none of the traces has it; they have {', '.join(engines)}")
    return engine or engines[0]


def _check_sizes(quantity: str, engine: str, drills: Sequence[Drill]) -> None:
    sizes = sorted({int(drill.deployment.ranks) for drill in drills})
    if len(sizes) < LEAST_RANKS:
        raise CouldNotRunError(
            f"{quantity} with engine {engine} is recorded for {', '.join(map(str, sizes))} ranks: give traces of at "
            f"least {LEAST_RANKS} different numbers of ranks"
        )


def _predicted(
    quantity: str, drills: Sequence[Drill], deployment: Deployment, hidden: float, factors: Mapping[str, float]
) -> Predicted:
    model = learn(quantity, drills, hidden)
    parts = {part: seconds * factors.get(part, 1.0) for part, seconds in model.parts(deployment).items()}
    seconds = sum(parts.values())
    scale = seconds / max(model.seconds(deployment), 1e-12)
    ends = [seconds, *(scale * end for end in _jackknife(model, drills, deployment))]
    return Predicted(quantity, seconds, min(ends), max(ends), parts, model.terms, model.error)


def _jackknife(model: Model, drills: Sequence[Drill], deployment: Deployment) -> list[float]:
    """What `deployment` would take by the fit without each layout, times what that layout took over its own prediction.

    Barber, Candes, Ramdas and Tibshirani, "Predictive inference with the jackknife+", Annals of Statistics 49(1), 2021,
    with ratios in place of differences and a layout in place of a sample.
    """
    ends = []
    for left_out in {drill.deployment for drill in drills}:
        rest = [drill for drill in drills if drill.deployment != left_out]
        without = fit(model.quantity, rest, model.hidden)
        at_left_out = max(without.seconds(left_out), 1e-9)
        ends += [
            without.seconds(deployment) * drill.total_s(model.quantity) / at_left_out
            for drill in drills
            if drill.deployment == left_out
        ]
    return ends


def _above_floor(
    predicted: Sequence[Predicted], deployment: Deployment, ceilings: Mapping[str, float]
) -> list[Predicted]:
    """The quantities with the least that the storage ceiling allows."""
    floors = {
        "durable_s": deployment.bytes / 1e9 / ceilings["write_GBps"] if "write_GBps" in ceilings else 0.0,
        "load_s": deployment.bytes / 1e9 / ceilings["read_GBps"] if "read_GBps" in ceilings else 0.0,
    }
    waiting = {entry.quantity: max(0.0, floors.get(entry.quantity, 0.0) - entry.seconds) for entry in predicted}
    found = []
    for entry in predicted:
        extra = waiting["load_s"] if entry.quantity == "restart_s" and "load_s" in waiting else waiting[entry.quantity]
        if extra > 0:
            floor_s = floors.get(entry.quantity)
            parts = entry.parts | {"storage ceiling": extra}
            low, high = (max(end, entry.seconds) + extra if floor_s else end + extra for end in (entry.low, entry.high))
            entry = Predicted(
                entry.quantity, entry.seconds + extra, low, high, parts, entry.terms, entry.error, floor_s
            )
        found.append(entry)
    return found


def _extrapolated(drills: Sequence[Drill], deployment: Deployment) -> list[Extrapolation]:
    """To more ranks than the drills had, and to too much more of anything else."""
    found = []
    for name, feature in FEATURES.items():
        reach = extrapolation(name, max(feature(drill.deployment) for drill in drills), feature(deployment))
        if reach is not None and (name == "ranks" or reach.too_far):
            found.append(reach)
    return found


def _not_in_traces(drills: Sequence[Drill], deployment: Deployment) -> list[str]:
    """A sentence for everything about `deployment` that lies outside of what the drills had."""
    said = []
    for name, feature in FEATURES.items():
        values = [feature(drill.deployment) for drill in drills]
        low, high, asked = min(values), max(values), feature(deployment)
        had = f"{name} {asked:.6g}: the traces have {low:.6g}" + (f" to {high:.6g}" if high > low else "")
        if asked > high * (1 + 1e-9):
            said.append(f"{had}; this is {asked / high:.3g} times the most")
        elif asked < low * (1 - 1e-9):
            said.append(f"{had}; this is less than any")
    if len({drill.deployment.cores for drill in drills}) == 1 and deployment.cores != drills[0].deployment.cores:
        said.append(
            f"cores {deployment.cores:.6g}: all traces have {drills[0].deployment.cores:.6g}, so what grows with ranks "
            "and what grows with ranks per core cannot be told apart; it counts as the latter"
        )
    said += [
        f"{term} apart from {' and '.join(others)}: in all traces they go together, and what either costs counts as "
        "the latter"
        for term, others in alike([drill.deployment for drill in drills], deployment).items()
    ]
    return said
