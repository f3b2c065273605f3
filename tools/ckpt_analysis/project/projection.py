"""Computes the rows of a projection from its inputs and ranges. No row was measured at its scale."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from ...common.extrapolation import Extrapolation, extrapolation, too_far
from .inputs import Inputs
from .model import Costs, daly_work_s, optimal_work_s, outcome, young_work_s

HOUR_S = 3600.0
NEARLY = 0.001  # of the wall time
_HOPELESS = 0.01  # of it


@dataclass(frozen=True)
class Row:
    """One projected combination. `rule`: "given", or the rule that chose the interval: young, daly, optimum.

    Shares are parts of the wall time. Intervals are the steps, and the seconds of training, between two saves.
    `times_what_ran`: nodes over those that the measured inputs ran on. It and `too_far` are None if these are not
    known.
    """

    nodes: int
    node_mtbf_hours: float
    job_mtbf_hours: float
    rule: str
    interval_steps: float
    interval_s: float
    period_s: float
    goodput: float
    saving_share: float
    wasted_share: float
    restarting_share: float
    steps_per_hour: float
    failures_per_day: float
    lost_work_s: float
    lost_steps: float
    waits_for_previous: bool
    needed_GBps: float | None
    needed_GBps_per_node: float | None
    times_what_ran: float | None
    too_far: bool | None


@dataclass(frozen=True)
class Answer:
    """The interval to choose at one scale, in whole steps, and between which intervals little more is lost.

    `goodput`: with `interval_steps`. From `least_steps` to `most_steps` it is at most NEARLY below that; both are
    `interval_steps` where goodput is so low that no interval is a good one.
    """

    nodes: int
    node_mtbf_hours: float
    interval_steps: int
    interval_s: float
    goodput: float
    least_steps: int
    most_steps: int


@dataclass(frozen=True)
class Projection:
    """What was put in, the answers, the rows, and what they rest on. `kind` is always "projection".

    `extrapolated`: to the most nodes asked for, from those that the measured inputs ran on.
    """

    kind: str
    inputs: Inputs
    answers: list[Answer]
    rows: list[Row]
    extrapolated: list[Extrapolation]
    assumptions: list[str]


ASSUMPTIONS = [
    "failures of nodes are independent and exponential; any of them stops the whole job",
    "a save blocks and becomes durable in the measured times at every number of nodes: storage must give the needed "
    "GB/s, and the bandwidth of the save itself, at that scale",
    "a restart takes the measured time at every number of nodes, and a failure during it starts it again",
    "no time is spent waiting for a spare node, and no step is slowed by a save in the background",
    "goodput counts steps that were kept, at the step time of the input",
]


def project(inputs: Inputs, nodes: list[int], node_mtbf_hours: list[float], interval_steps: list[int]) -> Projection:
    """Rows for every number of nodes and every MTBF of a node: the given intervals, then the three rules."""
    costs = Costs(inputs.blocked_s.value, inputs.durable_s.value, inputs.restart_s.value)
    rows = []
    answers = []
    for count in nodes:
        for hours in node_mtbf_hours:
            mtbf_s = hours * HOUR_S / count
            answers.append(_answer(costs, mtbf_s, inputs.step_s.value, count, hours))
            chosen = [("given", steps * inputs.step_s.value) for steps in interval_steps]
            chosen += [
                (rule, work_s)
                for rule, work_of in _RULES.items()
                if (work_s := work_of(costs, mtbf_s)) >= _LEAST_WORK_S
            ]
            rows += [_row(inputs, costs, count, hours, rule, work_s) for rule, work_s in chosen]
    return Projection("projection", inputs, answers, rows, _extrapolated(inputs, max(nodes)), ASSUMPTIONS)


def _extrapolated(inputs: Inputs, nodes: int) -> list[Extrapolation]:
    """In ranks, or in nodes if it is not known how many ranks a node has."""
    if inputs.ran is None:
        return []
    if inputs.ran.ranks is None:
        reach = extrapolation("nodes", inputs.ran.nodes, nodes)
    else:
        reach = extrapolation("ranks", inputs.ran.ranks, inputs.ran.ranks * nodes / inputs.ran.nodes)
    return [] if reach is None else [reach]


_LEAST_WORK_S = 1e-6  # a save that costs next to nothing has no best interval
_RULES = {"young": young_work_s, "daly": daly_work_s, "optimum": optimal_work_s}


def _answer(costs: Costs, mtbf_s: float, step_s: float, nodes: int, hours: float) -> Answer:
    """By bisection in whole steps: up to the best interval the goodput rises, beyond it it falls."""

    def goodput(steps: int) -> float:
        return outcome(costs, mtbf_s, steps * step_s).goodput

    near = optimal_work_s(costs, mtbf_s) / step_s
    best = max({max(1, math.floor(near)), max(1, math.ceil(near))}, key=goodput)
    enough = goodput(best) - NEARLY
    if enough <= _HOPELESS:
        return Answer(nodes, hours, best, best * step_s, goodput(best), best, best)
    too_many = best + 1
    while goodput(too_many) >= enough:
        too_many *= 2
    least = bisect_left(range(1, best), True, key=lambda steps: goodput(steps) >= enough) + 1
    most = bisect_left(range(best, too_many), True, key=lambda steps: goodput(steps) < enough) + best - 1
    return Answer(nodes, hours, best, best * step_s, goodput(best), least, most)


def _row(inputs: Inputs, costs: Costs, nodes: int, hours: float, rule: str, work_s: float) -> Row:
    mtbf_s = hours * HOUR_S / nodes
    found = outcome(costs, mtbf_s, work_s)
    step_s = inputs.step_s.value
    times = None if inputs.ran is None else nodes / inputs.ran.nodes
    needed = None
    if inputs.checkpoint_bytes is not None:
        needed = inputs.checkpoint_bytes.value / 1e9 / found.period_s
    return Row(
        nodes=nodes,
        node_mtbf_hours=hours,
        job_mtbf_hours=hours / nodes,
        rule=rule,
        interval_steps=work_s / step_s,
        interval_s=work_s,
        period_s=found.period_s,
        goodput=found.goodput,
        saving_share=found.saving_share,
        wasted_share=found.wasted_share,
        restarting_share=found.restarting_share,
        steps_per_hour=found.goodput * HOUR_S / step_s,
        failures_per_day=24 * HOUR_S / mtbf_s,
        lost_work_s=found.lost_work_s,
        lost_steps=found.lost_work_s / step_s,
        waits_for_previous=work_s < costs.lag_s and not math.isclose(work_s, costs.lag_s),
        needed_GBps=needed,
        needed_GBps_per_node=None if needed is None else needed / nodes,
        times_what_ran=times,
        too_far=None if times is None else too_far(times),
    )


def save_GBps(inputs: Inputs) -> float | None:
    """Bandwidth of the save itself: bytes over the time until it is durable, in GB/s."""
    if inputs.checkpoint_bytes is None or inputs.durable_s.value <= 0:
        return None
    return inputs.checkpoint_bytes.value / 1e9 / inputs.durable_s.value
