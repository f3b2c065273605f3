"""The verdict on variants side by side, in a sentence: which takes the least time for what, if any.

No difference is shown in a goal if none exceeds the noise: by the rank sum test where variants have enough repeats
for it, else because the ranges of their values overlap. A difference that could not be tested is told apart from
those that are shown, with how few values it stands on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from .formatting import listed

Samples = Mapping[str, Sequence[float]]  # variant -> seconds, one value per repeat


@dataclass(frozen=True)
class Goal:
    """A time that is to be short: "lazy `does` 4 times `better` than torch", "no difference shown in `name`"."""

    does: str
    better: str
    name: str


BLOCKED = Goal("blocks training", "shorter", "blocked times")
DURABLE = Goal("is durable", "sooner", "times until durable")
LOAD = Goal("loads", "faster", "loads")
COLD_LOAD = Goal("loads cold", "faster", "cold loads")
WARM_LOAD = Goal("loads warm", "faster", "warm loads")
RESTART = Goal("restarts", "faster", "restarts")
LAUNCH = Goal("launches", "faster", "launches")
STEP = Goal("trains a step", "faster", "steps")


@dataclass(frozen=True)
class Standing:
    """Who leads in a goal: one variant, or several that are not shown to differ; `after` is the best of the others."""

    leaders: tuple[str, ...]
    after: str | None  # None: no difference is shown
    times: float | None  # median of `after` over that of the best; None if the best takes no time at all
    values: tuple[int, int]  # of the best and of `after`
    tested: bool


def standing(samples: Samples) -> Standing:
    """Compare all variants with the one of the shortest median. Raises ValueError if one has no values."""
    ranked = sorted(samples, key=lambda name: median(samples[name]))
    best = samples[ranked[0]]
    leaders = [name for name in ranked if _alike(best, samples[name])]
    others = [name for name in ranked if name not in leaders]
    if not others:
        return Standing(tuple(leaders), None, None, (len(best), 0), tested=False)
    after = samples[others[0]]
    shortest = median(best)
    times = median(after) / shortest if shortest > 0 else None
    return Standing(tuple(leaders), others[0], times, (len(best), len(after)), _testable(best, after))


TOO_FEW = "too few repeats to tell"
NOTHING = "No time was measured in two of them: there is nothing to compare."


def verdict(goals: Iterable[tuple[Goal, Samples]]) -> str:
    """All of `sentences`."""
    return " ".join(sentences(goals))


def sentences(goals: Iterable[tuple[Goal, Samples]]) -> list[str]:
    """A sentence over all goals that two variants at least have values of, and one over those with too few repeats."""
    differing: list[str] = []
    untested: list[tuple[str, str]] = []  # clause, how many values it stands on
    alike: list[str] = []
    for goal, found, known, of_some in _standings(goals):
        if found.after is None:
            alike.append(f"{goal.name}{of_some}")
        elif found.tested:
            differing.append(clause(goal, found, of_two=known == 2))
        else:
            untested.append((clause(goal, found, of_two=known == 2), f" ({_values(found)})"))
    told = []
    if shown := "; ".join([*differing, *([f"no difference shown in {listed(alike)}"] if alike else [])]):
        told.append(f"{shown}." if differing else f"{shown[0].upper()}{shown[1:]}.")
    if untested:
        counts = {count for _, count in untested}
        common = counts.pop() if len(counts) == 1 else ""  # once, after the last one
        parts = [of_goal + ("" if common else count) for of_goal, count in untested]
        told.append(f"{TOO_FEW.capitalize()}: {'; '.join(parts)}{common}.")
    return told or [NOTHING]


def in_brief(goals: Iterable[tuple[Goal, Samples]]) -> str:
    """The verdict in one sentence: who leads in which times by how much, and in which there is none.

    "lazy leads in blocked times (4.0 times shorter); too few repeats to tell in loads (lazy ahead)."
    """
    leading: dict[str, list[str]] = {}
    ahead: dict[str, list[str]] = {}
    alike: list[str] = []
    for goal, found, _, of_some in _standings(goals):
        leaders, by = listed(found.leaders), f"{factor(found.times)} " if found.times is not None else ""
        if found.after is None:
            alike.append(f"{goal.name}{of_some}")
        elif found.tested:
            lead = "leads" if len(found.leaders) == 1 else "lead"
            leading.setdefault(f"{leaders} {lead}", []).append(f"{goal.name} ({by}{goal.better})")
        else:
            ahead.setdefault(leaders, []).append(goal.name)
    told = [f"{leaders} in {listed(names)}" for leaders, names in leading.items()]
    told += [f"no difference shown in {listed(alike)}"] if alike else []
    open_ = [f"in {listed(names)} ({leaders} ahead)" for leaders, names in ahead.items()]
    told += [f"{TOO_FEW} {listed(open_)}"] if ahead else []
    return f"{'; '.join(told)}." if told else NOTHING


def _standings(goals: Iterable[tuple[Goal, Samples]]) -> Iterator[tuple[Goal, Standing, int, str]]:
    """Goal, standing, how many variants have values, and " of a and b" if not all have, of goals that two have."""
    for goal, samples in goals:
        known = {name: values for name, values in samples.items() if values}
        if len(known) > 1:
            yield goal, standing(known), len(known), "" if len(known) == len(samples) else f" of {listed(list(known))}"


def clause(goal: Goal, found: Standing, *, of_two: bool) -> str:
    """ "lazy blocks training 4.0 times shorter than torch". `found.after` must not be None."""
    after = f"{'' if of_two else 'the next, '}{found.after}"
    by = f"{factor(found.times)} " if found.times is not None else ""
    if len(found.leaders) == 1:
        return f"{found.leaders[0]} {goal.does} {by}{goal.better} than {after}"
    return f"{goal.name} of {listed(found.leaders)} show no difference, and are {by}{goal.better} than {after}"


def factor(times: float) -> str:
    """ "4.0 times"; what is hardly more than once as the share of the time that is saved."""
    if times < 1.1:
        return f"{100 * (1 - 1 / times):.1f} %"
    return f"{times:.0f} times" if times >= 10 else f"{times:.1f} times"


def caveat(found: Standing) -> str:
    """How few values a difference stands on that was not tested; else nothing."""
    return "" if found.tested else f" ({_values(found)}, too few to tell)"


def _values(found: Standing) -> str:
    first, second = found.values
    if first == second:
        return "one value each" if first == 1 else f"{first} values each"
    return f"{first} and {second} values"


def with_load(said: str, loads: Sequence[float], processors: int | None) -> str:
    """A verdict, and the load of the machine that it was measured under, if a difference in it was not tested."""
    text = load_before(loads, processors) if TOO_FEW in said.lower() else ""
    return f"{said} {text}" if text else said


def load_before(loads: Sequence[float], processors: int | None) -> str:
    """The load of the machine before what was measured; nothing if it is not known."""
    if not loads:
        return ""
    least, most = f"{min(loads):.1f}", f"{max(loads):.1f}"
    load = least if least == most else f"{least} to {most}"
    return f"Load of the machine before: {load}{f', of {processors} processors' if processors else ''}."


def _alike(first: Sequence[float], second: Sequence[float]) -> bool:
    if min(first) == max(first) == min(second) == max(second):
        return True
    if _testable(first, second):
        from .statistics import ALPHA, p_value

        return p_value(first, second) >= ALPHA
    return min(first) <= max(second) and min(second) <= max(first)


def _testable(first: Sequence[float], second: Sequence[float]) -> bool:
    from .statistics import can_tell  # it imports SciPy, which takes long

    return can_tell(len(first), len(second))
