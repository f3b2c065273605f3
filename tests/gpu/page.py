"""A page of results from the directory that the tier has written: `python -m tests.gpu.page DIR`.

It needs polars and SciPy, to analyse the traces and compare the engines; the machine with the GPU needs neither.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.overhead.report import render
from restart_trace.command_line import CommandParser
from restart_trace.reading import read_records
from restart_trace.schema import PHASES
from tests.gpu.measured import (
    NOT_OBSERVED,
    TestResult,
    device_name,
    device_peak_bytes,
    iterations,
    read_json,
    tests_of,
    timed,
)
from tests.gpu.parts import LADDERS, PARTS, ROOT
from tests.gpu.predictions import DEVIATES, PREDICTIONS, is_of_the_predicted_kind
from tests.gpu.profiles import attention, kernels, profiles_of
from tests.gpu.runner import records, why
from tools.ckpt_replay.answer import sentence
from tools.common.formatting import NOT_RECORDED, number, size
from tools.common.tables import markdown_table

GIB = 1 << 30
_EPILOG = """\
examples:
  python -m tests.gpu.page runs/gpu_tier > docs/results/gpu.md

exit status: 0 printed, 2 the directory cannot be used
"""
# A start-up contains the load.
_START = [*itertools.takewhile("first_step".__ne__, PHASES["startup"]), *PHASES["load"], "first_step"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    parser = CommandParser(
        "python -m tests.gpu.page", description="Make a page of what the GPU tier measured.", epilog=_EPILOG
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="what run.sh has written")
    directory = parser.parse_args(argv).directory
    found = records(directory)
    if not found:
        print(f"{directory}: holds no part that tests/gpu/run.sh has run; give its --out", file=sys.stderr)
        return 2
    print("\n".join(page(directory, found)))
    return 0


def page(out: Path, parts: list[dict[str, Any]]) -> list[str]:
    """The lines of the page. `parts`: what `records` read of `out`."""
    lines = [*_head(out, parts), *_table_of_parts(out, parts)]
    drills = {part["part"]: out / part["part"] / "drill" for part in parts if (out / part["part"] / "drill").is_dir()}
    rehearsal = any(part["rehearsal"] for part in parts)
    sections = (_predictions(out, rehearsal), _step_times(out), _restarts(drills), _losses(out), _engines(out))
    for section in (*sections, _tests(out), _overhead(out), _facts(out)):
        lines += ["", *section] if section else []
    return lines


def _head(out: Path, parts: list[dict[str, Any]]) -> list[str]:
    facts = read_json(out / "machine" / "machine.json")
    lines = ["# On one GPU", ""]
    if any(part["rehearsal"] for part in parts):
        lines += ["**A rehearsal on CPUs with small sizes: no figure on this page means anything.**", ""]
    began = parts[0]["began"][:10]
    lines += [f"`bash tests/gpu/run.sh`, version {parts[0]['version']}, {began}; see [gpu.md](../gpu.md)."]
    if facts is None:
        return [*lines, "The part `machine` has not run: the machine of these figures is not known.", ""]
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    told = [facts["device"], *(f"{name} {value}" for name, value in (facts["nvidia_smi"] or {}).items() if value)]
    told += [f"{facts['processors']} processors", f"{facts['memory_bytes'] / GIB:.0f} GiB of memory"]
    told += [f"Linux {facts['kernel']}", f"Python {facts['python']}", packages, facts["filesystem"]]
    told += [f"CUDA {facts['cuda']}, NCCL {facts['nccl']}"] if facts["nccl"] else []
    return [*lines, "; ".join(told) + ".", ""]


def _table_of_parts(out: Path, parts: list[dict[str, Any]]) -> list[str]:
    rows = []
    for part in parts:
        outcome = part["outcome"] or "not finished"
        rows.append((part["part"], part["shows"], outcome, f"{part['seconds']:.0f}", why(part)))
    known = {part["part"] for part in parts}
    reasons = _reasons(out)
    rows += [
        (part.name, part.shows, "not run", "", reasons.get(part.name, "")) for part in PARTS if part.name not in known
    ]
    return ["## Parts", "", *markdown_table(("part", "what it shows", "outcome", "s", "why"), rows)]


def _reasons(out: Path) -> dict[str, str]:
    """Why parts of a ladder were not run."""
    ladders = [found for number in LADDERS if (found := read_json(out / f"ladder_{number}.json"))]
    told = {name: part["why"] for found in ladders for name, part in found["parts"].items() if part["why"]}
    return {name: _cell(reason) for name, reason in told.items()}


def _predictions(out: Path, rehearsal: bool) -> list[str]:
    """Predicted beside measured. What deviates by half is a finding, but not in a rehearsal."""
    rows = []
    for one in PREDICTIONS:
        measured = one.measured(out)
        said = {None: NOT_OBSERVED, True: "**deviates by half**", False: ""}[one.deviates(measured)]
        said = said if measured is None or not rehearsal else ""
        shown = NOT_RECORDED if measured is None else f"{measured:.3g}"
        rows.append((one.what, f"{one.predicted:.3g} {one.unit}", shown, said, one.why))
    told = "Predicted for an H100 (SXM, 80 GB) before the run. Marked is what differs by "
    told += f"{100 * DEVIATES:.0f} % of the prediction or more."
    device = device_name(out)
    if device is not None and not is_of_the_predicted_kind(device) and not rehearsal:
        told += f" This is {device}, which has another peak: its MFU is not computed."
    head = ("figure", "predicted", "measured", "", "the prediction's reason")
    return ["## Predicted and measured", "", told, "", *markdown_table(head, rows)]


def _step_times(out: Path) -> list[str]:
    lines: list[str] = []
    for part in ("step-time", "step-time-4", "step-time-compiled"):
        times = timed(out, part)
        if not times:
            continue
        seconds = sorted(found.seconds for found in times)
        rates = ", ".join(f"{found.tflops:.4g}" for found in times)
        lines += [f"## Iterations, part `{part}`", ""]
        lines += [f"Seconds of {len(times)} iterations: {', '.join(f'{value:.4f}' for value in seconds)}.", ""]
        lines += [f"TFLOP/s of the model, without recomputation, in their order: {rates}.", ""]
        for path in profiles_of(out, part):
            lines += [_attention(path), "", *_profile(path)]
    return lines[:-1]


def _attention(path: Path) -> str:
    """Which kernel computed attention, and for how long."""
    found = attention(path)
    if found is None:
        return "Attention: not observed; the profile has no call of a backend."
    calls = ", ".join(
        f"`{backend}` (forward calls in an iteration: {number:g})" for backend, number in found.calls.items()
    )
    passes = {"forward": found.forward_s, "backward": found.backward_s}
    times = ", ".join(
        f"{name} {NOT_OBSERVED if seconds is None else f'{seconds:.4f} s'}" for name, seconds in passes.items()
    )
    return f"Attention: {calls}. Its kernels in an iteration: {times}."


def _profile(path: Path) -> list[str]:
    """The kernels that take most of the profiled iterations."""
    found = kernels(path)
    if not found:
        return ["The profile has no kernels of a device.", ""]
    total = sum(seconds for _, seconds, _ in found)
    rows = [
        (f"`{_cell(name)[:90]}`", f"{100 * seconds / total:.1f}", f"{seconds:.4f}", str(number))
        for name, seconds, number in found[:25]
    ]
    head = ("kernel", "%", "s", "number")
    told = f"`{path.name}`: {total:.4f} s of kernels and copies; the 25 that take longest:"
    return [told, "", *markdown_table(head, rows), ""]


def _losses(out: Path) -> list[str]:
    """Of four ranks on one device with --sequence-parallel, beside those of the same ranks without."""
    split = {found.number: found.loss for found in iterations(out, "sequence-parallel")}
    if not split:
        return []
    trace = out / "shared-gpu" / "drill" / "trace"
    plain = {
        record["step"]: record["loss"]
        for path in sorted(trace.glob("rank_*_cycle_000.jsonl"))
        for record in read_records(path)
        if record["type"] == "iteration" and record.get("loss") is not None
    }
    rows = [
        (str(number), f"{loss:.6f}", f"{plain[number]:.6f}" if number in plain else NOT_RECORDED)
        for number, loss in split.items()
    ]
    head = ("iteration", "loss with --sequence-parallel", "loss of `shared-gpu`, without")
    return ["## Losses of TP2 DP2 on one device", "", *markdown_table(head, rows)]


def _facts(out: Path) -> list[str]:
    found = read_json(out / "facts" / "facts.json")
    grown = read_json(out / "grow" / "grow.json")
    if found is None:
        return []
    rows = [(name, _cell(json.dumps(value))) for name, value in found.items() if value is not None]
    rows = [row for row in rows if row[0] != "not_observed"]
    rows += [(name, f"{NOT_OBSERVED}: {_cell(reason)}") for name, reason in found["not_observed"].items()]
    if grown is not None and grown["touched_bytes"]:
        told = f"{grown['touched_bytes'] / GIB:.1f} GiB at {grown['first_GBps']:.1f} GB/s"
        again = NOT_OBSERVED if grown["again_GBps"] is None else f"{grown['again_GBps']:.1f} GB/s"
        rows.append(("memory touched", f"{told}; the second time {again}"))
    return ["## The machine", "", *markdown_table(("fact", "value"), rows)]


def _restarts(drills: dict[str, Path]) -> list[str]:
    """What each drill verified, and where its restart spent its time."""
    rows, phases = [], {}
    for part, directory in drills.items():
        drilled = read_json(directory / "drill.json")
        for cycle in drilled["cycles"] if drilled else ():
            report = _analysed(directory / "trace")
            restart = next((start for start in report["restarts"] if start["cycle"] == cycle["cycle"] + 1), None)
            phases[part] = restart
            save, load = _first(report["saves"]), _first(report["loads"])  # the first launch finds nothing to load
            copies = save["device_copies"] if save is not None else None
            rows.append(
                (
                    part, "yes" if cycle["verified"] else "NO", cycle["losses"], cycle["state_hashes"],
                    _of(save, "bytes", ".2f", 1e9), _of(save, "blocked_s"), _of(save, "durable_s"), _of(load, "load_s"),
                    cycle["cache"], _of(restart, "restart_s"), _of(copies, "slowest_GBps", ".2f"),
                    _of(copies, "bus_share", ".2f"), _of(copies, "overlapped", ".2f"),
                    _gb(device_peak_bytes(directory / "trace")),
                )
            )  # fmt: skip
    if not rows:
        return []
    header = ("part", "verified", "losses", "restored tensors", "GB", "blocked s", "durable s", "load s", "cache")
    header += ("restart s", "copies GB/s", "of the bus", "beside training", "device peak GB")
    told = "SIGKILL after the first checkpoint; figures of the first save, and of the load and the restart after it. "
    told += "Copies to the host as the device measured them, which engine `lazy` records. Device peak: the most memory "
    told += "that torch had given out, steps included; `ckpt_plan` estimates it."
    lines = ["## Killed and resumed", "", told, ""]
    return [*lines, *markdown_table(header, rows), "", *_startups(phases)]


def _startups(restarts: dict[str, dict[str, Any] | None]) -> list[str]:
    """Seconds of each phase of the restart, a column for each drill."""
    known = {part: restart["phases"] for part, restart in restarts.items() if restart is not None}
    names = [name for name in _START if any(name in phases for phases in known.values())]
    names += sorted({name for phases in known.values() for name in phases} - {*names, "caught_up"})
    rows = [
        (name, *(number(phases.get(name, {}).get("at_critical_s"), ".3f") for phases in known.values()))
        for name in names
    ]
    title = ["## Start-up phases of the restarts", "", "Seconds on the critical rank.", ""]
    return [*title, *markdown_table(("phase", *known), rows, numbers=True)]


def _engines(out: Path) -> list[str]:
    lines: list[str] = []
    for part in ("engines", "engines-others"):
        figures = read_json(out / part / "replay.json")
        if figures is None:
            continue
        gib = figures["bytes_per_rank"] / GIB
        rows = [
            (
                f"`{name}`", *(_spread(found[key]) for key in ("blocked_s", "durable_s", "load_cold_s", "load_warm_s")),
                *(_of(found[key], "median", ".3f", gib) for key in ("blocked_s", "durable_s", "load_cold_s")),
                _cell(found["failed"] or ""),
            )
            for name, found in figures["engines"].items()
        ]  # fmt: skip
        header = ("engine", "blocked s", "durable s", "cold load s", "warm load s")
        header += ("blocked s/GiB", "durable s/GiB", "cold load s/GiB", "failed")
        storage = {key: value for key, value in figures["storage"].items() if key.endswith("_gbps") and value}
        lines += [f"## Engines, part `{part}`", "", sentence(figures), ""]
        told = f"{size(figures['bytes_per_rank'])} on the device, repeats: {figures['repeat']}"
        lines += [f"{told}, interleaved: median [least, most].", ""]
        lines += [*markdown_table(header, rows), "", "Storage, GB/s: " + _listed(storage) + ".", ""]
    return lines[:-1]


def _tests(out: Path) -> list[str]:
    rows = [_test_row(result) for part in ("copies", "tests") for result in tests_of(out, part)]
    if not rows:
        return []
    return ["## Tests marked gpu", "", *markdown_table(("test", "outcome", "measured, or why not"), rows)]


def _test_row(result: TestResult) -> tuple[str, str, str]:
    said = [f"{name} {_short(value)}" for name, value in result.recorded.items()]
    return f"`{result.name}`", result.outcome, _cell(", ".join([*said, result.message[:300]]).strip(", "))


def _short(value: str) -> str:
    """A number in four digits; what is none, as it is."""
    try:
        return f"{float(value):.4g}"
    except ValueError:
        return value


def _overhead(out: Path) -> list[str]:
    path = out / "overhead" / "overhead.json"
    text = path.read_text().strip() if path.exists() else ""
    if not text:
        return []
    measured = json.loads(text.splitlines()[-1])["measurements"]
    return ["## What the trace costs", "", "```text", render(measured).rstrip(), "```"]


def _analysed(trace_dir: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.ckpt_analysis", str(trace_dir), "--format", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the analysis of {trace_dir} could not run: {done.stderr.strip()}")
    return json.loads(done.stdout)


def _first(operations: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((found for found in operations if found["outcome"] == "ok" and found["bytes"]), None)


def _of(found: dict[str, Any] | None, key: str, spec: str = ".3f", scale: float = 1.0) -> str:
    value = found[key] if found is not None else None
    return NOT_RECORDED if value is None else format(value / scale, spec)


def _gb(value: float | None) -> str:
    return NOT_RECORDED if value is None else format(value / 1e9, ".2f")


def _spread(found: dict[str, Any] | None) -> str:
    return NOT_RECORDED if found is None else f"{found['median']:.3f} [{found['min']:.3f}, {found['max']:.3f}]"


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name.removesuffix('_gbps').replace('_', ' ')} {value:.2f}" for name, value in values.items())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


if __name__ == "__main__":
    sys.exit(main())
