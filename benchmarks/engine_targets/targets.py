"""The performance that engine `lazy` is to reach, judged from the figures of one replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

OURS, BASELINE = "lazy", "torch"
_FEWEST_REPEATS = 5
MET, NOT_MET = "met", "not met"


@dataclass(frozen=True)
class Target:
    """One line: what is wanted, what was measured, and the verdict: met, not met, or why it cannot be judged."""

    measure: str
    target: str
    measured: str
    verdict: str


def judge(figures: dict[str, Any]) -> list[dict[str, str]]:
    """The targets that this replay can say something about; [] unless both `lazy` and `torch` took part."""
    engines = figures["engines"]
    if OURS not in engines or BASELINE not in engines:
        return []
    rules = _SMALL_RULES if figures["small_tensors"] is not None else _RULES
    found = [target for rule in rules for target in rule(figures)]
    if figures["repeat"] < _FEWEST_REPEATS:
        few = f" (of {figures['repeat']} repeats only, {_FEWEST_REPEATS} are wanted)"
        found = [Target(t.measure, t.target, t.measured, t.verdict + few) for t in found]
    return [asdict(target) for target in found]


def _median(figures: dict[str, Any], engine: str, name: str) -> float | None:
    found = figures["engines"][engine][name]
    return found["median"] if found else None


def _verdict(holds: bool) -> str:
    return MET if holds else NOT_MET


def _at_least(measure: str, target: float, ours: float | None, other: float | None, of: str) -> Target:
    """`ours` must be at least `target` times `other`; both are throughputs or inverse times."""
    wanted = f"at least {target:g} x {of}"
    if not ours or not other:
        return Target(measure, wanted, "-", "not judged: one of the two was not measured")
    return Target(measure, wanted, f"{ours / other:.2f} x", _verdict(ours >= target * other))


def _inverse(seconds: float | None) -> float | None:
    return 1 / seconds if seconds else None


def _against_all(figures: dict[str, Any], measure: str, name: str) -> Target:
    """Our time `name` must be below that of every other engine of this run."""
    ours = _median(figures, OURS, name)
    others = {engine: _median(figures, engine, name) for engine in figures["engines"] if engine != OURS}
    known = {engine: value for engine, value in others.items() if value is not None}
    wanted = "below every other engine"
    if ours is None or not known:
        return Target(measure, wanted, "-", "not judged: not measured")
    best = min(known, key=lambda engine: known[engine])
    missing = sorted(set(others) - set(known))
    note = f" (without {', '.join(missing)}: not measured)" if missing else ""
    return Target(measure, wanted, f"{ours:.3f} s, {best} {known[best]:.3f} s", _verdict(ours < known[best]) + note)


def _blocked(figures: dict[str, Any]) -> list[Target]:
    if not figures["steps"]["total_s"]:
        return []
    measure, wanted = "lazy blocked_s", "at most 1/20 of torch"
    flush, step = _median(figures, OURS, "durable_s"), figures["steps"]["step_s"]
    torch, mine = _median(figures, BASELINE, "blocked_s"), _median(figures, OURS, "blocked_s")
    if mine is None or torch is None or flush is None:
        return [Target(measure, wanted, "-", "not judged: not measured")]
    if flush > step:
        why = f"not judged: steps of {step:g} s, flush of {flush:.2f} s; give --step-seconds that cover the flush"
        return [Target(measure, wanted, "-", why)]
    measured = f"{mine:.4f} s, torch {torch:.3f} s: 1/{torch / max(mine, 1e-9):.0f}"
    return [
        Target(measure, wanted, measured, _verdict(mine <= torch / 20)),
        _against_all(figures, measure, "blocked_s"),
    ]


def _durable(figures: dict[str, Any]) -> list[Target]:
    ours, torch = figures["engines"][OURS]["durable_GBps"], figures["engines"][BASELINE]["durable_GBps"]
    storage = figures["storage"]["write_direct_gbps"]
    steps = figures["steps"]
    busy = ", steps on the processors" if steps["total_s"] and steps["work"] == "matmul" else ""
    found = []
    if storage:
        found.append(_at_least(f"lazy durable GB/s{busy}", 0.9, ours, storage, "the best raw direct write"))
    if len(figures["ranks"]) == 1:
        found.append(_at_least(f"lazy durable GB/s, 1 rank{busy}", 2, ours, torch, "torch + fsync"))
    return found


def _cold(figures: dict[str, Any]) -> list[Target]:
    if not figures["cold_asked"]:
        return []
    ours, torch = figures["engines"][OURS]["load_cold_GBps"], figures["engines"][BASELINE]["load_cold_GBps"]
    storage = figures["storage"]["read_direct_gbps"]
    found = [_at_least("lazy cold load GB/s", 0.9, ours, storage, "the best raw direct read")] if storage else []
    if len(figures["ranks"]) == 1:
        found.append(_at_least("lazy cold load GB/s, 1 rank", 2, ours, torch, "torch.load"))
    return [*found, _against_all(figures, "lazy cold load", "load_cold_s")]


def _warm(figures: dict[str, Any]) -> list[Target]:
    found = []
    for name, what in (("load_warm_s", "fresh process"), ("load_warm_again_s", "second load of a process")):
        ours, torch = (_inverse(_median(figures, engine, name)) for engine in (OURS, BASELINE))
        found.append(_at_least(f"lazy warm load, {what}", 5, ours, torch, "torch.load"))
    return found


def _interference(figures: dict[str, Any]) -> list[Target]:
    if not figures["steps"]["total_s"] or figures["steps"]["work"] != "matmul":
        return []
    measure, wanted = "step time while flushing", "at most 5 % above no checkpoint, with a core to spare"
    found = _median(figures, OURS, "step_interference")
    if found is None:
        return [Target(measure, wanted, "-", "not judged: no piece of a step ran whole during a flush")]
    cores, ranks = figures["machine"]["processors"], len(figures["ranks"])
    verdict = _verdict(found <= 0.05) if cores > ranks else f"not judged: {ranks} ranks on {cores} cores"
    return [Target(measure, wanted, f"{found:+.1%}", verdict)]


def _small(figures: dict[str, Any]) -> list[Target]:
    ours, torch = (_inverse(_median(figures, engine, "durable_s")) for engine in (OURS, BASELINE))
    measure = f"lazy durable_s, {figures['small_tensors']} small tensors"
    return [_at_least(measure, 1, ours, torch, "torch.save + fsync (speed)")]


Rule = Callable[[dict[str, Any]], list[Target]]
_RULES: tuple[Rule, ...] = (_blocked, _durable, _cold, _warm, _interference)
_SMALL_RULES: tuple[Rule, ...] = (_small,)
