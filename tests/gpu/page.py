"""A page of results from the directory that the tier has written: `python -m tests.gpu.page DIR`.

It needs polars and SciPy, to analyse the traces and compare the engines; the machine with the GPU needs neither.
"""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.overhead.report import render
from restart_trace.command_line import CommandParser
from restart_trace.reading import read_records
from tests.gpu.parts import PARTS, ROOT
from tests.gpu.runner import records
from tools.ckpt_replay.answer import sentence
from tools.common.formatting import NOT_RECORDED, number, size
from tools.common.tables import markdown_table

GIB = 1 << 30
_EPILOG = """\
examples:
  python -m tests.gpu.page runs/gpu_tier > docs/results/h200.md

exit status: 0 printed, 2 the directory cannot be used
"""
_START = ("process_start", "imports", "cuda_context", "name_lookup", "rendezvous", "communicators", "model_build")
_START += ("data_build", "engine_init", "host_memory", "warmup", "discover", "load", "redistribute", "barrier")
_START += ("first_step",)


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
    lines = [*_head(out, parts), *_table_of_parts(parts)]
    drills = {part["part"]: out / part["part"] / "drill" for part in parts if (out / part["part"] / "drill").is_dir()}
    for section in (_restarts(drills), _engines(out), _tests(out), _overhead(out)):
        lines += ["", *section] if section else []
    return lines


def _head(out: Path, parts: list[dict[str, Any]]) -> list[str]:
    facts = _json(out / "machine" / "machine.json")
    lines = ["# On one GPU", ""]
    if any(part["rehearsal"] for part in parts):
        lines += ["**A rehearsal on CPUs with small sizes: no figure on this page means anything.**", ""]
    began = parts[0]["began"][:10]
    lines += [f"`bash tests/gpu/run.sh`, version {parts[0]['version']}, {began}; see [gpu.md](../gpu.md)."]
    if facts is None:
        return [*lines, "The part `machine` has not run: the machine of these figures is not known.", ""]
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    told = [facts["device"], *(f"{name} {value}" for name, value in (facts["nvidia_smi"] or {}).items())]
    told += [f"{facts['processors']} processors", f"{facts['memory_bytes'] / GIB:.0f} GiB of memory"]
    told += [f"Linux {facts['kernel']}", f"Python {facts['python']}", packages, facts["filesystem"]]
    told += [f"CUDA {facts['cuda']}, NCCL {facts['nccl']}"] if facts["nccl"] else []
    return [*lines, "; ".join(told) + ".", ""]


def _table_of_parts(parts: list[dict[str, Any]]) -> list[str]:
    rows = []
    for part in parts:
        why = [f"{step['step']}: {step['why']}" for step in part["steps"] if step["why"]]
        why += [f"{problem}" for step in part["steps"] for problem in (step.get("left_out") or {}).values()]
        rows.append((part["part"], part["shows"], part["outcome"], f"{part['seconds']:.0f}", _cell("; ".join(why))))
    known = {part["part"] for part in parts}
    rows += [(part.name, part.shows, "not run", "", "") for part in PARTS if part.name not in known]
    return ["## Parts", "", *markdown_table(("part", "what it shows", "outcome", "s", "why"), rows)]


def _restarts(drills: dict[str, Path]) -> list[str]:
    """What each drill verified, and where its restart spent its time."""
    rows, phases = [], {}
    for part, directory in drills.items():
        drilled = _json(directory / "drill.json")
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
                    _device_peak(directory / "trace"),
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


def _device_peak(trace_dir: Path) -> str:
    """GB that torch had given out at most, on the rank and in the launch that had most."""
    records = (record for path in trace_dir.glob("rank_*.jsonl") for record in read_records(path))
    probes = [record["values"] for record in records if record["type"] == "probe"]
    peaks = [values["device_peak_allocated_bytes"] for values in probes if "device_peak_allocated_bytes" in values]
    return format(max(peaks) / 1e9, ".2f") if peaks else NOT_RECORDED


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
        figures = _json(out / part / "replay.json")
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
    path = out / "tests" / "junit.xml"
    if not path.exists():
        return []
    rows = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '').removeprefix('tests.gpu.')}.{case.get('name')}"
        told = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if told is None else told.tag
        said = [f"{p.get('name')} {float(p.get('value') or 0):.4g}" for p in case.iter("property")]
        said += [(told.get("message") or "")[:300]] if told is not None else []
        rows.append((f"`{name}`", outcome, _cell(", ".join(said))))
    return ["## Tests marked gpu", "", *markdown_table(("test", "outcome", "measured, or why not"), rows)]


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
    if done.returncode > 1:  # 1: it has findings
        raise SystemExit(f"the analysis of {trace_dir} could not run: {done.stderr.strip()}")
    return json.loads(done.stdout)


def _json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _first(operations: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((found for found in operations if found["outcome"] == "ok" and found["bytes"]), None)


def _of(found: dict[str, Any] | None, key: str, spec: str = ".3f", scale: float = 1.0) -> str:
    value = found[key] if found is not None else None
    return NOT_RECORDED if value is None else format(value / scale, spec)


def _spread(found: dict[str, Any] | None) -> str:
    return NOT_RECORDED if found is None else f"{found['median']:.3f} [{found['min']:.3f}, {found['max']:.3f}]"


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name.removesuffix('_gbps').replace('_', ' ')} {value:.2f}" for name, value in values.items())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


if __name__ == "__main__":
    sys.exit(main())
