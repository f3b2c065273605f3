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

from .drills import Drill, Place

START, CROWD, ROUNDS, PAIRS = "start", "ranks per core", "ranks per core x log2(ranks)", "pairs of ranks per core"
HOPS, BYTES, FILES, NAMES = "hops around a tensor-parallel ring", "bytes", "files per core", "files"
TERMS: dict[str, Callable[[Place, float], float]] = {
    START: lambda place, hidden: 1.0,
    CROWD: lambda place, hidden: max(place.ranks_per_core - hidden, 0.0),
    ROUNDS: lambda place, hidden: place.ranks_per_core * math.log2(max(place.ranks, 1.0)),
    PAIRS: lambda place, hidden: place.ranks_per_core * place.ranks,
    HOPS: lambda place, hidden: place.tp - 1.0,
    BYTES: lambda place, hidden: place.bytes,
    FILES: lambda place, hidden: place.files / place.cores,
    NAMES: lambda place, hidden: place.files,
}
# Part -> what it may grow with; any other part with each rank's own work, which a core does for several ranks.
GROWS_WITH: dict[str, tuple[str, ...]] = {
    # Every rank looks up, and connects to, every other.
    "rendezvous": (START, PAIRS),
    # Ranks meet in rounds whose number grows with the logarithm, and each round takes all that share a core.
    "communicators": (START, ROUNDS),
    # The state: its bytes, and a call or more per file.
    "serialize": (START, CROWD, BYTES, FILES),
    "device_to_host": (START, CROWD, BYTES),
    "flush": (START, CROWD, BYTES, FILES),
    "load": (START, CROWD, BYTES, FILES),
    "redistribute": (START, CROWD, BYTES),
    "barrier": (START, CROWD, BYTES, FILES),  # waiting for the last to be done with its part of the state
    "commit": (START, NAMES),  # by rank 0 alone, while the others wait: the manifest names every file
    "engine_init": (START, CROWD, BYTES),
    # A layer's collectives go round a ring of the ranks that hold its parts, one layer after another.
    "first_step": (START, CROWD, HOPS, BYTES),
}
_USUAL = (START, CROWD)
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

    def parts(self, place: Place) -> dict[str, float]:
        """Seconds of every part at `place`."""
        return {
            part: sum(rate * TERMS[term](place, self.hidden) for term, rate in rates.items())
            for part, rates in self.rates.items()
        }

    def seconds(self, place: Place) -> float:
        return sum(self.parts(place).values())


def choose_hidden(drills: Mapping[str, Sequence[Drill]]) -> float:
    """The one of HIDDEN with which the drills of a quantity predict one another best, over all quantities.

    Left out are all drills with the same ranks per core at a time: what is asked of the costs is to hold elsewhere.
    """

    def error(hidden: float) -> float:
        return sum(_mean_error(name, known, hidden, _crowd) for name, known in drills.items())

    return min(HIDDEN, key=lambda hidden: round(error(hidden), 6))  # of equals, as in drills without noise, the least


def _crowd(place: Place) -> float:
    return place.ranks_per_core


def learn(quantity: str, drills: Sequence[Drill], hidden: float) -> Model:
    """The model of a quantity, and its error. `drills` must have the quantity, at several numbers of ranks."""
    error = _mean_error(quantity, drills, hidden, lambda place: place.ranks)
    return replace(fit(quantity, drills, hidden), error=error)


def _mean_error(quantity: str, drills: Sequence[Drill], hidden: float, group: Callable[[Place], float]) -> float:
    """Mean |log(predicted / measured)|, the drills of each group predicted from the others; 0 of a single group."""
    errors = []
    for left_out in {group(drill.place) for drill in drills}:
        others = [drill for drill in drills if group(drill.place) != left_out]
        if not others:
            return 0.0
        without = fit(quantity, others, hidden)
        errors += [
            abs(math.log(max(without.seconds(drill.place), 1e-9) / drill.total_s(quantity)))
            for drill in drills
            if group(drill.place) == left_out
        ]
    return sum(errors) / len(errors)


def fit(quantity: str, drills: Sequence[Drill], hidden: float) -> Model:
    """The rates with the least squared error over the root of the whole quantity, none negative."""
    grows_with = GROWS_WITH | _IMPORTED_ONCE if all(drill.imported_once for drill in drills) else GROWS_WITH
    names = list(dict.fromkeys(part for drill in drills for part in drill.seconds[quantity]))
    return Model(quantity, {part: _rates(quantity, part, drills, hidden, grows_with) for part in names}, hidden)


def alike(places: Sequence[Place], asked: Place) -> dict[str, list[str]]:
    """Term -> the terms before it that make it up in all `places`, but not in the one asked for.

    What such a term costs cannot be told from what those do: it is not fitted.
    """
    found: dict[str, list[str]] = {}
    kept: list[str] = []
    for term in (START, CROWD, HOPS, BYTES, FILES):
        if _tells(places, [*kept, term]):
            kept.append(term)
        elif _tells([*places, asked], [*kept, term]):
            pairs = [other for other in kept if not _tells(places, [other, term])]
            found[term] = pairs or list(kept)
    return found


def _rates(
    quantity: str, part: str, drills: Sequence[Drill], hidden: float, grows_with: Mapping[str, tuple[str, ...]]
) -> dict[str, float]:
    from scipy.optimize import nnls  # see tools/common/statistics.py

    terms: list[str] = []
    places = [drill.place for drill in drills]
    for term in grows_with.get(part, _USUAL):
        if all(_tells(places, [*terms, term], known) for known in (hidden, 0.0)):
            terms.append(term)
    weights = np.array([drill.total_s(quantity) for drill in drills]) ** -0.5
    columns = _columns(places, terms, hidden)
    scale = np.max(np.abs(columns), axis=0)
    measured = np.array([drill.seconds[quantity].get(part, 0.0) for drill in drills])
    solution, _ = nnls(columns / scale * weights[:, None], measured * weights)
    solution[solution < _NOTHING_S] = 0.0
    return {term: float(value) for term, value in zip(terms, solution / scale, strict=True)}


def _tells(places: Sequence[Place], terms: Sequence[str], hidden: float = 0.0) -> bool:
    """Whether these places tell the terms apart. One that is 0 in all of them is not told."""
    columns = _columns(places, terms, hidden)
    lengths = np.linalg.norm(columns, axis=0)
    return bool(lengths.all()) and int(np.linalg.matrix_rank(columns / lengths, tol=_ALIKE)) == len(terms)


def _columns(places: Sequence[Place], terms: Sequence[str], hidden: float) -> np.ndarray:
    return np.array([[TERMS[term](place, hidden) for term in terms] for place in places], dtype=float)
