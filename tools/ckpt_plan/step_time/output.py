"""A prediction as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from ...common.extrapolation import headline
from ...common.formatting import size
from ...common.tables import text_table, wrapped
from .step import StepTime, TimedPasses

_SHOWN = 16  # passes
NOTES = (
    "a prediction, not a measurement: docs/ckpt_plan.md has its assumptions and their sources",
    "data, logging, evaluation, saves and the first steps are left out",
)


def to_json(step: StepTime, settings: Sequence[StepTime]) -> str:
    """One JSON object; docs/ckpt_plan.md defines its fields."""
    content = {
        "device": step.device.name,
        "device_facts": dataclasses.asdict(step.device),
        "layout": step.layout.as_dict(),
        "micro_batches": step.micro_batches,
        "recomputation": step.recomputation,
        "compiled": step.compiled,
        "step_s": step.seconds,
        "tokens_per_s": step.tokens_per_second,
        "tflops": step.tflops,
        "mfu": step.mfu,
        "extrapolated": None if step.extrapolated is None else list(map(dataclasses.asdict, step.extrapolated)),
        "by_part_s": step.parts,
        "device_bytes_estimate": step.device_bytes,
        "fits": step.fits,
        "passes": [_pass(each) for each in step.passes],
        "settings": [
            {
                "recomputation": each.recomputation,
                "compiled": each.compiled,
                "step_s": each.seconds,
                "mfu": each.mfu,
                "device_bytes_estimate": each.device_bytes,
                "fits": each.fits,
            }
            for each in settings
        ],
        "notes": NOTES,
    }
    return json.dumps(content) + "\n"


def _pass(each: TimedPasses) -> dict[str, object]:
    return {
        "layer": each.layer,
        "direction": _direction(each),
        "name": each.name,
        "shape": each.shape,
        "count": each.count,
        "flops": each.flops,
        "bytes": each.num_bytes,
        "seconds": each.seconds,
    }


def _direction(each: TimedPasses) -> str:
    return "backward" if each.backward else "forward"


def render(step: StepTime, settings: Sequence[StepTime]) -> str:
    """Text for a terminal: the step, its parts, the longest passes, and what other settings would change."""
    device, many = step.device, "" if step.micro_batches == 1 else "es"
    lines = [
        *_reach(step),
        f"{step.layout}, {step.micro_batches} micro batch{many} a step, recomputation {step.recomputation}, "
        f"{_compiled(step)}, on {device.name} ({device.peak_tflops:g} TFLOP/s, {device.memory_GBps:g} GB/s)",
        f"a step takes {step.seconds * 1e3:.1f} ms: MFU {step.mfu:.1%}, {step.tflops:.0f} TFLOP/s and "
        f"{step.tokens_per_second:,.0f} tokens/s per device",
        "",
        *_part_lines(step),
        "",
        *_pass_lines(step.passes),
        "",
        *_setting_lines(step, settings),
        "",
        *(f"note: {note}" for note in NOTES),
    ]
    return "\n".join(lines) + "\n"


def _reach(step: StepTime) -> list[str]:
    """How far the prediction goes beyond measured steps: the headline."""
    if step.extrapolated is None:
        return [f"Prediction, compared with no measured step on {step.device.name}"]
    within = f"for no more ranks and parameters than the measured steps on {step.device.name} had"
    return wrapped(f"Prediction, {headline(step.extrapolated) or within}")


def _compiled(step: StepTime) -> str:
    return "compiled" if step.compiled else "not compiled"


def _part_lines(step: StepTime) -> list[str]:
    rows = [
        (name.replace("_", " "), f"{seconds * 1e3:.1f}", f"{seconds / step.seconds:.1%}")
        for name, seconds in step.parts.items()
        if seconds
    ]
    return text_table(("part", "ms", "of the step"), rows, indent="", left=1)


def _pass_lines(passes: Sequence[TimedPasses]) -> list[str]:
    rows = [
        (
            each.layer,
            _direction(each),
            each.name,
            " x ".join(map(str, each.shape)) or "-",
            str(each.count),
            f"{each.flops / 1e12:.2f}" if each.flops else "-",
            f"{each.num_bytes / 1e9:.2f}",
            f"{each.seconds * 1e3:.2f}",
        )
        for each in passes[:_SHOWN]
    ]
    header = ("layer", "direction", "pass", "m x k x n", "times", "TFLOP", "GB", "ms")
    if others := passes[_SHOWN:]:
        left = f"{sum(each.seconds for each in others) * 1e3:.2f}"
        rows.append(("", "", f"{len(others)} others", "", str(sum(each.count for each in others)), "", "", left))
    title = "passes of a micro batch on the slowest stage, the longest first"
    return [title, *text_table(header, rows, indent="", left=4)]


def _setting_lines(step: StepTime, settings: Sequence[StepTime]) -> list[str]:
    rows = []
    for each in settings:
        is_given = (each.recomputation, each.compiled) == (step.recomputation, step.compiled)
        rows.append(
            (
                each.recomputation + (" *" if is_given else ""), _compiled(each), f"{each.seconds * 1e3:.1f}",
                f"{each.mfu:.1%}", size(each.device_bytes), "yes" if each.fits else "no",
            )
        )  # fmt: skip
    header = ("recomputation", "layer", "ms a step", "MFU", "device memory", "fits")
    return [*text_table(header, rows, indent="", left=2), "(* as given)"]
