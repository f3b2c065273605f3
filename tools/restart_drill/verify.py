"""Is the training that was struck the one that was not? Losses of all iterations, restored states, what was resumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from restart_trace.schema import LOCAL_MEMORY, PEER

from .facts import CycleFacts
from .plan import Strike

# Relative, between layouts: sums are in another order there, and bf16 and fp16 round each of them.
TOLERANCES = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 2e-2}

IDENTICAL, NOT_COMPARED = "identical", "not compared"
EQUAL, DIFFERENT_LAYOUT, MISSING = "equal", "not compared: saved on another layout", "not compared"


@dataclass
class LossCheck:
    """Losses of one cycle against the reference run, or against what earlier launches recorded."""

    compared: int = 0
    within: float = 0.0  # largest tolerance that was used; 0: all bits
    different: list[str] = field(default_factory=list)

    @property
    def shown(self) -> str:
        if self.compared == 0:
            return NOT_COMPARED
        return IDENTICAL if self.within == 0 else f"within {self.within:g} relative"


def check_losses(
    cycles: dict[int, CycleFacts], reference: CycleFacts | None, tolerance: float, repeated: float = 0.0
) -> dict[int, LossCheck]:
    """Cycle -> comparison of its losses.

    On the layout of the first launch every loss must have the bits of the reference run's; without a reference, of
    those that an earlier launch recorded. On another layout a loss must have the bits that an earlier launch on that
    layout recorded, else be within `tolerance` of the first layout's. `repeated`: how far losses of one layout may be
    apart where a training does not repeat them to the last bit (--deterministic off on GPUs). Both are relative.
    """
    first = next(iter(cycles.values())).layout if cycles else (0, 0, 0)
    by_layout: dict[tuple[int, int, int], dict[int, float]] = {}
    expected = dict(reference.losses) if reference is not None else by_layout.setdefault(first, {})
    found: dict[int, LossCheck] = {}
    for cycle, facts in cycles.items():
        check = found[cycle] = LossCheck()
        earlier = by_layout.setdefault(facts.layout, {})
        same = facts.layout == first
        for step, loss in facts.losses.items():
            if step in earlier:
                _compare(check, step, loss, earlier[step], repeated, "in an earlier launch")
            elif reference is not None or step in expected:
                where = "in the reference run" if reference is not None else "in an earlier launch"
                _compare(check, step, loss, expected.get(step), repeated if same else tolerance, where)
            earlier.setdefault(step, loss)
    return found


def _compare(check: LossCheck, step: int, loss: float, expected: float | None, tolerance: float, where: str) -> None:
    check.compared += 1
    check.within = max(check.within, tolerance)
    if loss == expected:
        return
    if expected is not None and tolerance > 0 and math.isclose(loss, expected, rel_tol=tolerance):
        return
    check.different.append(f"iteration {step}: loss {loss!r}, and {expected!r} {where}")


@dataclass(frozen=True)
class Verdict:
    """What was verified of the restart that followed a strike. `wrong`: everything that was not as it must be."""

    resumed_step: int | None
    losses: str
    state_hashes: str
    wrong: list[str]
    tier: str | None = None  # where it was loaded from, if saves are kept in memory, too: see `_tier`


def judge(strike: Strike, cycles: dict[int, CycleFacts], losses: dict[int, LossCheck]) -> Verdict:
    """The verdict on one strike: by the first later cycle that trained, since others may have been struck before."""
    trained = [cycle for cycle, facts in cycles.items() if cycle > strike.cycle and facts.losses]
    wrong = list(losses[strike.cycle].different) if strike.cycle in losses else []
    if not trained:
        return Verdict(None, NOT_COMPARED, MISSING, [*wrong, "no iteration was trained after it"])
    following = trained[0]
    facts, check = cycles[following], losses[following]
    wrong += [line for cycle in range(strike.cycle + 1, following + 1) if cycle in losses
              for line in losses[cycle].different]  # fmt: skip
    if check.compared == 0:
        wrong.append("no iteration was repeated, so no loss was compared; compare with a reference run")
    wrong += strike.unnamed
    steps = set(facts.resumed.values())
    if len(facts.resumed) != facts.world_size or steps != {strike.expected_step}:
        wrong.append(f"resumed from {_shown(steps)}, and not from iteration {strike.expected_step}, on all ranks")
    tier = _tier(set(facts.tiers.values()))
    if strike.expected_tier is not None and tier != strike.expected_tier:
        read = ", ".join(sorted(set(facts.tiers.values()))) or "a place that is not on record"
        wrong.append(f"loaded from {read}, and not from {strike.expected_tier}")
    wrong += _lost_too_much(strike, facts, cycles)
    hashes = _hashes(strike, facts, cycles)
    if hashes == MISSING:
        wrong.append(f"only {len(facts.hashed)} of {facts.world_size} ranks compared the state with its hashes")
    if strike.damaged is not None:
        told = [line for cycle in range(strike.cycle + 1, following + 1) if cycle in cycles
                for line in cycles[cycle].rejected]  # fmt: skip
        if not any(strike.damaged in line for line in told):
            wrong.append(f"no launch told that {strike.damaged} is damaged")
    return Verdict(min(steps) if steps else None, check.shown, hashes, wrong, tier)


def _tier(tiers: set[str]) -> str | None:
    """Where all ranks have loaded from; from peers if those did that had it not in the memory of their own host."""
    return PEER if tiers == {LOCAL_MEMORY, PEER} else tiers.copy().pop() if len(tiers) == 1 else None


def _lost_too_much(strike: Strike, facts: CycleFacts, cycles: dict[int, CycleFacts]) -> list[str]:
    """Of saves in memory: whether more finished steps were lost than lie between two saves.

    Damage takes the newest save away, and what fails a save leaves the one before as the newest.
    """
    in_memory = strike.expected_tier in (LOCAL_MEMORY, PEER)
    if not in_memory or strike.lost_at_most is None or strike.damaged is not None or strike.failed_save is not None:
        return []
    finished = max(cycles[strike.cycle].losses, default=0)
    lost = finished - min(facts.resumed.values(), default=0)
    if lost <= strike.lost_at_most:
        return []
    return [f"{lost} finished steps were lost, of which {strike.lost_at_most} lie between two saves"]


def _hashes(strike: Strike, facts: CycleFacts, cycles: dict[int, CycleFacts]) -> str:
    """Whether all ranks found their restored state to be what was saved. A load with a difference ends the launch."""
    if len(facts.hashed) == facts.world_size:
        return EQUAL
    saved_elsewhere = any(facts.layout != before.layout for cycle, before in cycles.items() if cycle <= strike.cycle)
    return DIFFERENT_LAYOUT if saved_elsewhere and not facts.hashed else MISSING


def _shown(steps: set[int]) -> str:
    return "iteration " + ", ".join(map(str, sorted(steps))) if steps else "no checkpoint"


def repeated(cycles: dict[int, CycleFacts]) -> list[tuple[int, list[float]]]:
    """(iteration, its losses in the order of launches) of those that several launches did."""
    found: dict[int, list[float]] = {}
    for facts in cycles.values():
        for step, loss in facts.losses.items():
            found.setdefault(step, []).append(loss)
    return sorted((step, losses) for step, losses in found.items() if len(losses) > 1)


def repetition_table(pairs: Sequence[tuple[int, list[float]]]) -> str:
    """A line for each iteration that was repeated, and what to conclude."""
    lines = [f"{'iteration':>10}  losses of the launches that did it"]
    for step, losses in pairs:
        same = "identical" if len(set(losses)) == 1 else "DIFFERENT"
        lines.append(f"{step:>10}  " + "  ".join(f"{loss:.9E}" for loss in losses) + f"  {same}")
    if not pairs:
        return "No iteration was repeated."
    if all(len(set(losses)) == 1 for _, losses in pairs):
        return "\n".join([*lines, "The repeated iterations are identical, to the last bit."])
    return "\n".join([*lines, "THE REPEATED ITERATIONS DIFFER: the resumed run is not the run that failed."])
