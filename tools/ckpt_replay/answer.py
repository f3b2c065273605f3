"""The answer of a replay: the best engine for each goal, what was measured, and the estimate for unlimited ranks."""

from __future__ import annotations

from statistics import median
from typing import Any

from ..common import verdict
from ..common.extrapolation import MOST_TIMES, too_far
from ..common.formatting import listed
from ..common.tables import wrapped
from ..common.verdict import Goal, Standing, factor, standing

GOALS: tuple[tuple[str, Goal, str], ...] = (  # label, goal, figure
    ("training blocked", verdict.BLOCKED, "blocked_s"),
    ("durable", verdict.DURABLE, "durable_s"),
    ("load, cold files", verdict.COLD_LOAD, "load_cold_s"),
    ("load, warm files", verdict.WARM_LOAD, "load_warm_s"),
)
_Samples = dict[str, list[float]]


def sentence(figures: dict[str, Any]) -> str:
    """The verdict over all goals."""
    if sum(not found["failed"] for found in figures["engines"].values()) < 2:
        return "Fewer than two engines were measured: there is nothing to compare."
    machine = figures["machine"]
    loads = [machine["load_average_1_min"]] if "load_average_1_min" in machine else []
    said = verdict.verdict((goal, _samples(figures, name)) for _, goal, name in GOALS)
    said = verdict.with_load(said, loads, machine.get("processors"))
    if too_far(times := _whole(figures)):
        said += f" This ran 1/{times:.0f} of a rank's bytes: too little to tell the times of whole ranks."
    return said


def answer(figures: dict[str, Any]) -> list[str]:
    """The last lines of the output: what was measured, then a paragraph per goal."""
    lines = [f"Answer for {what(figures)} on {figures['directory']} ({figures['machine']['filesystem']})"]
    lines += _paragraph("measured", _measured(figures))
    if too_far(_whole(figures)):
        lines += _paragraph("not extrapolated", _refused(figures))
    elif figures["limited"]:
        lines += _paragraph("extrapolated", _extrapolated(figures))
    for label, goal, name in GOALS:
        if samples := _samples(figures, name):
            lines += _paragraph(label, _best(goal, samples, _scale(figures)))
        else:
            lines += _paragraph(label, "not measured")
    return lines


def what(figures: dict[str, Any]) -> str:
    """The model and its layout, or the small tensors."""
    if figures["small_tensors"] is not None:
        return f"{figures['small_tensors']} small tensors"
    layout = " ".join(f"{name.upper()}{size}" for name, size in figures["layout"].items())
    return f"{figures['model']} {layout}"


def _samples(figures: dict[str, Any], name: str) -> _Samples:
    """Engine -> seconds of each repeat, if it has any; engines that failed are left out."""
    engines = figures["engines"].items()
    return {engine: found[name]["samples"] for engine, found in engines if found[name] and not found["failed"]}


def _whole(figures: dict[str, Any]) -> float:
    """Bytes of an unlimited rank divided by the replayed bytes; 1 if the rank was not limited."""
    return figures["limited"]["full_bytes_per_rank"] / figures["bytes_per_rank"] if figures["limited"] else 1.0


def _scale(figures: dict[str, Any]) -> float | None:
    """What times are multiplied by for a whole rank; None if it was not limited, or by too much to tell."""
    return _whole(figures) if figures["limited"] and not too_far(_whole(figures)) else None


def _refused(figures: dict[str, Any]) -> str:
    enough = figures["limited"]["full_bytes_per_rank"] / MOST_TIMES
    return (
        f"a whole rank has {_whole(figures):.0f} times the bytes that ran, more than {MOST_TIMES} times. "
        f"--limit-bytes {enough / 2**20:.0f}MiB or more gives an estimate, none measures it."
    )


def _measured(figures: dict[str, Any]) -> str:
    ranks, size, steps = figures["ranks"], figures["bytes_per_rank"], figures["steps"]
    whole = figures["limited"]["full_bytes_per_rank"] if figures["limited"] else None
    text = f"{f'{len(ranks)} ranks at once' if len(ranks) > 1 else '1 rank'}, {size / 1e9:.2f} GB"
    text += f" of the {whole / 1e9:.2f} GB that such a rank holds" if whole else ", whole"
    text += f"; {figures['repeat']} repeats"
    if steps["total_s"]:
        text += f"; the state changes {steps['step_s']:g} s after a save began, at the end of a training step"
    else:
        text += "; the state changes as soon as a save has begun"
    tp, pp, dp = figures["layout"].values()
    if len(ranks) == 1 and tp * pp * dp > 1:
        text += ". The ranks of a node share its storage: --ranks 0-7 measures eight at once"
    return f"{text}."


def _extrapolated(figures: dict[str, Any]) -> str:
    scale, steps = _scale(figures) or 1.0, figures["steps"]
    text = f'"about" is for a whole rank, in proportion to its bytes (x {scale:.1f})'
    text += f", with steps of {steps['step_s'] * scale:.3g} s" if steps["total_s"] else ""
    return f"{text}. Costs that do not grow with the bytes make it too long; --limit-bytes none measures it."


def _best(goal: Goal, samples: _Samples, scale: float | None) -> str:
    found = standing(samples)
    best = found.leaders[0]
    times = sorted(samples[best])
    took = median(times)
    text = f"{listed(found.leaders)}{' show no difference' if len(found.leaders) > 1 else ''}: "
    text += f"{took:.3g} s [{times[0]:.3g} to {times[-1]:.3g}]"
    text += f", about {took * scale:.3g} s" if scale else ""
    return text + _ahead(goal, found)


def _ahead(goal: Goal, found: Standing) -> str:
    if found.after is None:
        return ""
    by = f"{factor(found.times)} " if found.times is not None else ""
    return f"; {by}{goal.better} than the next, {found.after}{verdict.caveat(found)}"


def _paragraph(label: str, text: str) -> list[str]:
    return wrapped(f"{label + ':':<18}{text}", begin="  ", rest=" " * 20)
