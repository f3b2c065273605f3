"""Costs learnt from drills: seconds as a sum of a few named terms, none of which is negative.

What a part may grow with is not chosen by the data, which a few small runs on a busy machine would mislead: GROWS_WITH
says it, with the reason. The rates are fitted by non-negative least squares (Lawson and Hanson, "Solving Least Squares
Problems", 1974, chapter 23). What disturbs a drill adds up over its time, so that its variance goes with the time: each
drill's row is divided by the root of its whole quantity.

One number is chosen by the data, for all quantities together: how many ranks a core serves before they hold one another
up (`hidden`). A rank that uses its core for D seconds and waits for Z, for files and for other ranks, shares it with
others for nothing; from N* = (D + Z) / D ranks on, each further one adds D. These are the asymptotic bounds of closed
queueing networks (Lazowska, Zahorjan, Graham, Sevcik, "Quantitative System Performance", 1984, chapter 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .drills import Deployment, Drill

START, RANKS_PER_CORE, ROUNDS, PAIRS = (
    "start",
    "ranks per core",
    "ranks per core x log2(ranks)",
    "pairs of ranks per core",
)
HOPS, BYTES, FILES, NAMES = "hops around a tensor-parallel ring", "bytes", "files per core", "files"
TERMS: dict[str, Callable[[Deployment, float], float]] = {
    START: lambda deployment, hidden: 1.0,
    RANKS_PER_CORE: lambda deployment, hidden: max(deployment.ranks_per_core - hidden, 0.0),
    ROUNDS: lambda deployment, hidden: deployment.ranks_per_core * math.log2(max(deployment.ranks, 1.0)),
    PAIRS: lambda deployment, hidden: deployment.ranks_per_core * deployment.ranks,
    HOPS: lambda deployment, hidden: deployment.tp - 1.0,
    BYTES: lambda deployment, hidden: deployment.bytes,
    FILES: lambda deployment, hidden: deployment.files / deployment.cores,
    NAMES: lambda deployment, hidden: deployment.files,
}
# Part -> what it may grow with; any other part with each rank's own work, which a core does for several ranks.
GROWS_WITH: dict[str, tuple[str, ...]] = {
    # Every rank looks up, and connects to, every other.
    "rendezvous": (START, PAIRS),
    # Ranks meet in rounds whose number grows with the logarithm, and each round takes all that share a core.
    "communicators": (START, ROUNDS),
    # The state: its bytes, and a call or more per file.
    "serialize": (START, RANKS_PER_CORE, BYTES, FILES),
    "device_to_host": (START, RANKS_PER_CORE, BYTES),
    "flush": (START, RANKS_PER_CORE, BYTES, FILES),
    "load": (START, RANKS_PER_CORE, BYTES, FILES),
    "redistribute": (START, RANKS_PER_CORE, BYTES),
    # Waiting for the last rank's part of the state, then agreements, which go up and down the levels of a tree.
    "barrier": (START, ROUNDS, BYTES, FILES),
    "commit": (START, NAMES),  # by rank 0 alone, while the others wait: the manifest names every file
    "engine_init": (START, RANKS_PER_CORE, BYTES),
    # A layer's collectives go round a ring of the ranks that hold its parts, one layer after another: each piece is
    # passed on tp - 1 times (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
    "first_step": (START, RANKS_PER_CORE, HOPS, BYTES),
}
_USUAL = (START, RANKS_PER_CORE)
_IMPORTED_ONCE = {"imports": (START,)}  # by the launcher, for all ranks
HIDDEN = (0.0, 1.0, 2.0, 3.0, 4.0)  # ranks per core that may hide in one another's waits
_NOTHING_S = 1e-9  # a term that costs less at its largest is rounding
_ALIKE = 1e-6  # of a column's length: less than this left over is the same as what the others make up


@dataclass(frozen=True)
class Model:
    """Part -> term -> seconds per unit of the term; `hidden` ranks per core cost nothing.

    `error`: mean |log(predicted / measured)| of the whole quantity, each number of ranks predicted from the others.
    """

    quantity: str
    rates: dict[str, dict[str, float]]
    hidden: float
    error: float = 0.0

    @property
    def terms(self) -> list[str]:
        """Terms that some part grows with."""
        used = {term for rates in self.rates.values() for term, rate in rates.items() if rate > 0}
        return [term for term in TERMS if term in used]

    def parts(self, deployment: Deployment) -> dict[str, float]:
        """Seconds of every part at `deployment`."""
        return {
            part: sum(rate * TERMS[term](deployment, self.hidden) for term, rate in rates.items())
            for part, rates in self.rates.items()
        }

    def seconds(self, deployment: Deployment) -> float:
        return sum(self.parts(deployment).values())


def choose_hidden(drills: Mapping[str, Sequence[Drill]]) -> float:
    """The one of HIDDEN with which the drills of a quantity predict one another best, over all quantities.

    Left out are all drills with the same ranks per core at a time: what is asked of the costs is to hold elsewhere.
    """

    def error(hidden: float) -> float:
        return sum(_mean_error(name, known, hidden, _ranks_per_core) for name, known in drills.items())

    return min(HIDDEN, key=lambda hidden: round(error(hidden), 6))  # of equals, as in drills without noise, the least


def _ranks_per_core(deployment: Deployment) -> float:
    return deployment.ranks_per_core


def learn(quantity: str, drills: Sequence[Drill], hidden: float) -> Model:
    """The model of a quantity, and its error. `drills` must have the quantity, at several numbers of ranks."""
    error = _mean_error(quantity, drills, hidden, lambda deployment: deployment.ranks)
    return replace(fit(quantity, drills, hidden), error=error)


def _mean_error(quantity: str, drills: Sequence[Drill], hidden: float, group: Callable[[Deployment], float]) -> float:
    """Mean |log(predicted / measured)|, the drills of each group predicted from the others; 0 of a single group."""
    errors = []
    for left_out in {group(drill.deployment) for drill in drills}:
        others = [drill for drill in drills if group(drill.deployment) != left_out]
        if not others:
            return 0.0
        without = fit(quantity, others, hidden)
        errors += [
            abs(math.log(max(without.seconds(drill.deployment), 1e-9) / drill.total_s(quantity)))
            for drill in drills
            if group(drill.deployment) == left_out
        ]
    return sum(errors) / len(errors)


def fit(quantity: str, drills: Sequence[Drill], hidden: float) -> Model:
    """The rates with the least squared error over the root of the whole quantity, none negative."""
    grows_with = GROWS_WITH | _IMPORTED_ONCE if all(drill.imported_once for drill in drills) else GROWS_WITH
    names = list(dict.fromkeys(part for drill in drills for part in drill.seconds[quantity]))
    return Model(quantity, {part: _rates(quantity, part, drills, hidden, grows_with) for part in names}, hidden)


def alike(deployments: Sequence[Deployment], asked: Deployment) -> dict[str, list[str]]:
    """Term -> the terms before it that make it up in all `deployments`, but not in the one asked for.

    What such a term costs cannot be told from what those do: it is not fitted.
    """
    found: dict[str, list[str]] = {}
    kept: list[str] = []
    for term in (START, RANKS_PER_CORE, HOPS, BYTES, FILES):
        if _tells(deployments, [*kept, term]):
            kept.append(term)
        elif _tells([*deployments, asked], [*kept, term]):
            pairs = [other for other in kept if not _tells(deployments, [other, term])]
            found[term] = pairs or list(kept)
    return found


def _rates(
    quantity: str, part: str, drills: Sequence[Drill], hidden: float, grows_with: Mapping[str, tuple[str, ...]]
) -> dict[str, float]:
    from scipy.optimize import nnls  # see tools/common/statistics.py

    terms: list[str] = []
    deployments = [drill.deployment for drill in drills]
    for term in grows_with.get(part, _USUAL):
        if all(_tells(deployments, [*terms, term], known) for known in (hidden, 0.0)):
            terms.append(term)
    weights = np.array([drill.total_s(quantity) for drill in drills]) ** -0.5
    columns = _columns(deployments, terms, hidden)
    scale = np.max(np.abs(columns), axis=0)
    measured = np.array([drill.seconds[quantity].get(part, 0.0) for drill in drills])
    solution, _ = nnls(columns / scale * weights[:, None], measured * weights)
    solution[solution < _NOTHING_S] = 0.0
    return {term: float(value) for term, value in zip(terms, solution / scale, strict=True)}


def _tells(deployments: Sequence[Deployment], terms: Sequence[str], hidden: float = 0.0) -> bool:
    """Whether these places tell the terms apart. One that is 0 in all of them is not told."""
    columns = _columns(deployments, terms, hidden)
    lengths = np.linalg.norm(columns, axis=0)
    return bool(lengths.all()) and int(np.linalg.matrix_rank(columns / lengths, tol=_ALIKE)) == len(terms)


def _columns(deployments: Sequence[Deployment], terms: Sequence[str], hidden: float) -> np.ndarray:
    return np.array([[TERMS[term](deployment, hidden) for term in terms] for deployment in deployments], dtype=float)
