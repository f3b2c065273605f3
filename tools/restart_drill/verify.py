"""Verifies that a training with faults equals one without: losses of all iterations, restored states, resumed steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from restart_trace.schema import LOCAL_MEMORY, PEER

from .facts import CycleFacts
from .plan import Injection

# Relative, between layouts, which add numbers in different orders; bf16 and fp16 round each sum.
TOLERANCES = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 2e-2}

IDENTICAL, NOT_COMPARED = "identical", "not compared"
EQUAL, DIFFERENT_LAYOUT, MISSING = "equal", "not compared: saved on another layout", "not compared"


@dataclass
class LossCheck:
    """Comparison of the losses of one cycle with the reference run, or with those that earlier launches recorded."""

    compared: int = 0
    within: float = 0.0  # largest tolerance that was used; 0: compared bit for bit
    different: list[str] = field(default_factory=list)

    @property
    def shown(self) -> str:
        if self.compared == 0:
            return NOT_COMPARED
        return IDENTICAL if self.within == 0 else f"within {self.within:g} relative"


def check_losses(
    cycles: dict[int, CycleFacts], reference: CycleFacts | None, tolerance: float, repeated: float = 0.0
) -> dict[int, LossCheck]:
    """Compare the losses of each cycle; returns the comparison by cycle.

    On the layout of the first launch, each loss must equal that of the reference run bit for bit or, without a
    reference run, the loss that an earlier launch recorded for that iteration. On another layout a loss must equal that
    of an earlier launch on the same layout bit for bit; if there is none, it must be within `tolerance` of the loss on
    the first layout. `repeated`: tolerance within one layout, for a training that need not repeat its losses bit for
    bit (--deterministic off on GPUs). Both tolerances are relative.
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
    """What was verified of the restart that followed an injection. `wrong`: every check that failed."""

    resumed_step: int | None
    losses: str
    state_hashes: str
    wrong: list[str]
    tier: str | None = None  # with saves in memory: the tier that was loaded, see `_tier`


def with_last_resume_source(injections: Sequence[Injection], cycles: dict[int, CycleFacts]) -> list[Injection]:
    """The injections, each with what was left to resume from when training continued.

    A fault during the restart may take away more, such as saves in memory.
    """
    found = []
    for injection in injections:
        trained = next((cycle for cycle, facts in cycles.items() if cycle > injection.cycle and facts.losses), 0)
        last = [injection, *(other for other in injections if injection.cycle < other.cycle < trained)][-1]
        left = (last.expected_step, last.expected_tier, last.lost_at_most)
        found.append(replace(injection, expected_step=left[0], expected_tier=left[1], lost_at_most=left[2]))
    return found


def verdicts(
    injections: Sequence[Injection], cycles: dict[int, CycleFacts], losses: dict[int, LossCheck]
) -> list[Verdict]:
    """The verdict on each injection."""
    return [judge(injection, cycles, losses) for injection in with_last_resume_source(injections, cycles)]


def judge(injection: Injection, cycles: dict[int, CycleFacts], losses: dict[int, LossCheck]) -> Verdict:
    """The verdict on one injection, by the first later cycle that trained: a fault may have ended others before."""
    trained = [cycle for cycle, facts in cycles.items() if cycle > injection.cycle and facts.losses]
    wrong = list(losses[injection.cycle].different) if injection.cycle in losses else []
    if not trained:
        return Verdict(None, NOT_COMPARED, MISSING, [*wrong, "no iteration was trained after it"])
    following = trained[0]
    facts, check = cycles[following], losses[following]
    wrong += [line for cycle in range(injection.cycle + 1, following + 1) if cycle in losses
              for line in losses[cycle].different]  # fmt: skip
    wrong += injection.unnamed
    steps = set(facts.resumed.values())
    if len(facts.resumed) != facts.world_size or steps != {injection.expected_step}:
        wrong.append(f"resumed from {_shown(steps)}, expected iteration {injection.expected_step} on all ranks")
    tier = _tier(set(facts.tiers.values()))
    if injection.expected_tier is not None and tier != injection.expected_tier:
        read = ", ".join(sorted(set(facts.tiers.values()))) or "a tier that was not recorded"
        wrong.append(f"loaded from {read}, expected {injection.expected_tier}")
    wrong += _lost_too_much(injection, facts, cycles)
    hashes = _hashes(injection, facts, cycles)
    # Where a fault came right after a save no iteration is repeated: then the hashes of the whole state are the proof.
    if check.compared == 0 and hashes != EQUAL:
        wrong.append("no iteration was repeated, so no loss was compared; compare with a reference run")
    if hashes == MISSING:
        wrong.append(f"only {len(facts.hashed)} of {facts.world_size} ranks compared the state with its hashes")
    if injection.damaged is not None:
        reported = [line for cycle in range(injection.cycle + 1, following + 1) if cycle in cycles
                    for line in cycles[cycle].rejected]  # fmt: skip
        if not any(injection.damaged in line for line in reported):
            wrong.append(f"no launch reported that {injection.damaged} is damaged")
    return Verdict(min(steps) if steps else None, check.shown, hashes, wrong, tier)


def _tier(tiers: set[str]) -> str | None:
    """The tier that all ranks loaded from; PEER if some ranks did and the others had the save on their own host."""
    return PEER if tiers == {LOCAL_MEMORY, PEER} else tiers.copy().pop() if len(tiers) == 1 else None


def _lost_too_much(injection: Injection, facts: CycleFacts, cycles: dict[int, CycleFacts]) -> list[str]:
    """With saves in memory: an error if more finished steps were lost than lie between two saves.

    Not checked after damage or a failed save, since an earlier save than the newest is then used.
    """
    if injection.expected_tier not in (LOCAL_MEMORY, PEER) or injection.lost_at_most is None:
        return []
    if injection.damaged is not None or injection.failed_save is not None:
        return []
    finished = max(cycles[injection.cycle].losses, default=0)
    lost = finished - min(facts.resumed.values(), default=0)
    if lost <= injection.lost_at_most:
        return []
    return [f"{lost} finished steps were lost, but there are only {injection.lost_at_most} between two saves"]


def _hashes(injection: Injection, facts: CycleFacts, cycles: dict[int, CycleFacts]) -> str:
    """Whether all ranks compared their restored state with the saved one. If one differs, the launch itself ends."""
    if len(facts.hashed) == facts.world_size:
        return EQUAL
    layouts = {before.layout for cycle, before in cycles.items() if cycle <= injection.cycle}
    return DIFFERENT_LAYOUT if layouts - {facts.layout} and not facts.hashed else MISSING


def _shown(steps: set[int]) -> str:
    return "iteration " + ", ".join(map(str, sorted(steps))) if steps else "no checkpoint"


def repeated(cycles: dict[int, CycleFacts]) -> list[tuple[int, list[float]]]:
    """(iteration, its losses in the order of the launches) for each iteration that several launches trained."""
    found: dict[int, list[float]] = {}
    for facts in cycles.values():
        for step, loss in facts.losses.items():
            found.setdefault(step, []).append(loss)
    return sorted((step, losses) for step, losses in found.items() if len(losses) > 1)


def repetition_table(pairs: Sequence[tuple[int, list[float]]]) -> str:
    """A line for each repeated iteration, and a conclusion."""
    lines = [f"{'iteration':>10}  losses of the launches that trained it"]
    for step, losses in pairs:
        same = "identical" if len(set(losses)) == 1 else "DIFFERENT"
        lines.append(f"{step:>10}  " + "  ".join(f"{loss:.9E}" for loss in losses) + f"  {same}")
    if not pairs:
        return "No iteration was repeated."
    if all(len(set(losses)) == 1 for _, losses in pairs):
        return "\n".join([*lines, "The repeated iterations are identical, to the last bit."])
    return "\n".join([*lines, "THE REPEATED ITERATIONS DIFFER: the resumed run is not the run that failed."])
