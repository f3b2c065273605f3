"""Training with periodic checkpoints under failures, in closed form. Formulas: docs/metrics.md.

Failures of a node are exponential and independent, so those of N nodes together are exponential with mean M =
MTBF / N. A period is `work_s` of training (tau), then `blocked_s` in which a save blocks it (C). The checkpoint counts
from `durable_s` after the start of its save (D): for an asynchronous save that is while training goes on. A restart
takes `restart_s` (R) and may fail itself. All times are in seconds.

After a restart the k-th save begins at tau + (k-1) P, and its checkpoint is usable D later. The time X to the next
failure is exponential with mean M, so the expected number of usable checkpoints is the sum over k of
P(X >= tau + D + (k-1) P), which is exp(-(tau + D)/M) / (1 - exp(-P/M)); each preserves tau of work. Between two
failures the job runs for M on average and restarts for M (exp(R/M) - 1). Training runs from 0 to tau, and then for tau
from each tau + C + j P on; weighting both with P(X > t) gives L, the training from a restart to the next failure. An
asynchronous save (D > C) costs exp(-(D - C)/M) of the goodput and does not move the optimum, unless saves would wait
for each other there: below tau = D - C the goodput is proportional to tau exp(-tau/M), which rises up to M.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """What one save and one restart cost. Raises ValueError where the numbers cannot be."""

    blocked_s: float  # C
    durable_s: float  # D, from the start of the save
    restart_s: float  # R, from the failure to the first step

    def __post_init__(self) -> None:
        for name in ("blocked_s", "durable_s", "restart_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; it must be a time of 0 s or more")

    @property
    def lag_s(self) -> float:
        """Time from when training goes on until the checkpoint counts; below 0 if it counts while still blocked."""
        return self.durable_s - self.blocked_s


@dataclass(frozen=True)
class Outcome:
    """The long run at one interval. The four shares are of wall time and add up to 1.

    `goodput`: share in which steps were trained that were kept. `lost_work_s`: training undone per failure, on average.
    """

    period_s: float  # from one save to the next, without failures
    goodput: float
    saving_share: float
    wasted_share: float
    restarting_share: float
    lost_work_s: float


def young_work_s(costs: Costs, mtbf_s: float) -> float:
    """Work between saves by Young, "A first order approximation to the optimum checkpoint interval", Communications of
    the ACM 17(9), 1974: sqrt(2 C M), in seconds.
    """
    return math.sqrt(2 * costs.blocked_s * mtbf_s)


def daly_work_s(costs: Costs, mtbf_s: float) -> float:
    """Work between saves by the closed form of Daly, "A higher order estimate of the optimum checkpoint interval for
    restart dumps", Future Generation Computer Systems 22(3), 2006; M where C is 2 M or more. In seconds.
    """
    if costs.blocked_s >= 2 * mtbf_s:
        return mtbf_s
    x = costs.blocked_s / (2 * mtbf_s)
    return math.sqrt(2 * costs.blocked_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - costs.blocked_s


def optimal_work_s(costs: Costs, mtbf_s: float) -> float:
    """Work between saves that maximises `goodput`, in seconds.

    Where Daly's run time M exp(R/M) (exp((tau + C)/M) - 1) T_s / tau has its minimum: tau = M (1 + W0(-exp(-C/M - 1))),
    W0 the principal branch of Lambert's function. How late a checkpoint counts scales the goodput by a constant: it
    does not move the optimum, unless saves would wait for each other there. Then it is the shortest work at which they
    do not, D - C, or M if that is less.
    """
    free = 0.0
    if costs.blocked_s > 0:
        # Near its branch point W0 is -1 + p - p^2/3 + 11/72 p^3 - ... (Corless et al., "On the Lambert W function",
        # 1996, 4.22): the sum of 1 and W0 would have few digits there.
        p = math.sqrt(-2 * math.expm1(-costs.blocked_s / mtbf_s))
        if p < 1e-3:
            free = mtbf_s * (p - p**2 / 3 + 11 / 72 * p**3)
        else:
            from scipy.special import lambertw  # see tools/common/statistics.py

            free = mtbf_s * (1 + float(lambertw(-math.exp(-costs.blocked_s / mtbf_s - 1)).real))
    return free if free >= costs.lag_s else min(costs.lag_s, mtbf_s)


def outcome(costs: Costs, mtbf_s: float, work_s: float) -> Outcome:
    """The long run with `work_s` of training between saves and a mean time between failures of `mtbf_s`.

    Raises ValueError if either is not above 0.
    """
    if not (work_s > 0 and mtbf_s > 0):
        raise ValueError(f"work between saves ({work_s} s) and time between failures ({mtbf_s} s) must be above 0")
    # A save begins when the one before is durable at the earliest: else training waits (wait_previous).
    period_s = max(work_s + costs.blocked_s, costs.durable_s)
    # From one restart to the next failure: checkpoints that counted (the first after work and D, then one a period)
    # and training done (the first stretch at once, the next after the first save's C, then one a period).
    lag_s = work_s + costs.durable_s - period_s
    periods = 1 / -math.expm1(-period_s / mtbf_s)  # 1 + exp(-P/M) + exp(-2 P/M) + ...
    counted = math.exp(-(lag_s + period_s) / mtbf_s) * periods
    after_first = math.exp(-(work_s + costs.blocked_s) / mtbf_s) * periods
    trained_s = -mtbf_s * math.expm1(-work_s / mtbf_s) * (1 + after_first)
    kept_s = work_s * counted
    up = math.exp(-costs.restart_s / mtbf_s)  # share of wall time that is not spent restarting
    return Outcome(
        period_s=period_s,
        goodput=up * kept_s / mtbf_s,
        saving_share=up * (1 - trained_s / mtbf_s),
        wasted_share=up * (trained_s - kept_s) / mtbf_s,
        restarting_share=-math.expm1(-costs.restart_s / mtbf_s),
        lost_work_s=trained_s - kept_s,
    )
