"""What the analysis says of a real drill, against drill.json, the records themselves and the files on disk.

All processes of these drills run on one host and share its monotonic clock, and every time is a difference of integer
nanoseconds. So times are equal but for the last bits of a float in seconds: `EXACT`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from restart_trace.mounts import mount_of
from restart_trace.reading import read_records
from restart_trace.schema import PHASES
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.metrics.restart_parts import OUTSIDE, UNNAMED, parts_of
from tools.ckpt_analysis.metrics.results import StartStats
from tools.ckpt_analysis.report import Report, analyse

EXACT = 1e-9  # seconds
LEAST_ACCOUNTED = 0.9  # 0.98 on a quiet machine: what else runs here takes its time between two spans, too
_MANIFEST = "manifest.json"  # written by the commit: in no engine's bytes (docs/metrics.md)


def report_of(out: Path) -> Report:
    return analyse(load_trace(out / "trace")).report


def assert_report_agrees(out: Path) -> None:
    """Everything below, for the drill that left `out`."""
    report = report_of(out)
    assert_restarts_agree(out, report)
    assert assert_timeline_agrees(out, report), "no save of this drill finished"
    assert_saves_agree(out, report)


def restarts_of(out: Path, report: Report) -> list[tuple[dict[str, Any], StartStats]]:
    """(entry of drill.json, restart of the report) of every restart that no further fault ended."""
    drill = json.loads((out / "drill.json").read_text())
    by_cycle = {restart.cycle: restart for restart in report.restarts}
    found = [(e, by_cycle[e["cycle"] + 1]) for e in drill["cycles"] if e["restart_s"] is not None]
    assert found, "no restart of this drill reached its first step"
    return found


def assert_restarts_agree(out: Path, report: Report) -> None:
    """restart_s and every phase of every restart, as drill.json has them and as the records add up to."""
    records = list(_records(out / "trace"))
    for entry, restart in restarts_of(out, report):
        assert restart.restart_s is not None and restart.wall is not None
        assert restart.restart_s == pytest.approx(entry["restart_s"], abs=EXACT)
        assert restart.restart_s == pytest.approx(_restart_s(records, restart.cycle), abs=EXACT)
        parts, told = parts_of(restart), dict(entry["phases"])
        assert sum(parts.values()) == pytest.approx(restart.restart_s, abs=EXACT)
        assert 1 - parts[UNNAMED] / restart.restart_s >= LEAST_ACCOUNTED
        told["relaunch"] += told.pop("drill")  # what the drill did itself comes before it relaunches
        assert _longer_than_none(parts) == pytest.approx(_longer_than_none(told), abs=EXACT)
        others = {*OUTSIDE, *PHASES["load"], UNNAMED}
        phases = {name: took for name, took in parts.items() if name not in others}
        rank = restart.critical_rank
        own = [r for r in records if (r["cycle"], r["rank"], r["type"]) == (restart.cycle, rank, "span")]
        expected = _summed(own)
        expected["first_step"] += _last_step_s(records, restart.cycle, rank)
        assert phases == pytest.approx(expected, abs=EXACT)


def _longer_than_none(parts: dict[str, float]) -> dict[str, float]:
    """The parts that took time; what is left of a subtraction of floats that are equal is none."""
    return {name: took for name, took in parts.items() if abs(took) > EXACT / 2}


def _restart_s(records: list[dict[str, Any]], cycle: int) -> float:
    """Failure to the end of the last first step, by the records alone."""
    injected = max(
        r["time_ns"] for r in records if (r["type"], r.get("phase"), r["cycle"]) == ("event", "injected", cycle - 1)
    )
    ends = [r["end_ns"] for r in records if (r["type"], r.get("phase"), r["cycle"]) == ("span", "first_step", cycle)]
    return (max(ends) - injected) / 1e9


def _last_step_s(records: list[dict[str, Any]], cycle: int, critical: int | None) -> float:
    """Of the last rank's first step the part after the critical rank's, which is part of first_step, too."""
    steps = [r for r in records if (r["type"], r.get("phase"), r["cycle"]) == ("span", "first_step", cycle)]
    own = max(r["end_ns"] for r in steps if r["rank"] == critical)
    last = max(steps, key=lambda step: step["end_ns"])
    return min(last["end_ns"] - own, last["duration_ns"]) / 1e9


def _summed(spans: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by phase of a start-up's own spans on one rank; in this trainer none of them surrounds the load."""
    seconds: dict[str, int] = defaultdict(int)
    for span in spans:
        if span["operation"] == "startup" and span["phase"] != "caught_up":
            seconds[span["phase"]] += span["duration_ns"]
    return {phase: duration_ns / 1e9 for phase, duration_ns in seconds.items() if duration_ns}


def _records(trace: Path) -> Iterator[dict[str, Any]]:
    """All records, completed, but the last line of a file that a kill has torn."""
    for path in sorted(trace.glob("*.jsonl")):
        yield from read_records(path)


def assert_timeline_agrees(out: Path, report: Report) -> int:
    """Events of `timeline -o`: of each restart's critical rank phase by phase, and what each save wrote that finished;
    how many did. One whose last record a kill has lost counts as unfinished, though it was committed."""
    path = out / "timeline.json"
    assert main(["timeline", str(out / "trace"), "-o", str(path), "--quiet", "--no-cache"]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    path.unlink()
    drawn = [event for event in events if event["ph"] == "X"]
    for _, restart in restarts_of(out, report):
        assert restart.wall is not None
        rank, phases = restart.critical_rank, _critical(restart)
        own = [e for e in drawn if (e["pid"], e["args"]["cycle"], e["cat"]) == (rank, restart.cycle, "startup")]
        seconds: dict[str, int] = defaultdict(int)
        for event in own:
            seconds[event["name"].partition("/")[0]] += event["args"]["busy_ns"]  # a phase's details
        assert _loaded_s(events, rank, restart.cycle) == pytest.approx(phases.pop("load"), abs=EXACT)
        assert {name: ns / 1e9 for name, ns in seconds.items() if ns} == pytest.approx(phases, abs=EXACT)
    written: dict[tuple[int, str], int] = defaultdict(int)
    for event in drawn:
        if event["cat"] == "save" and event["name"] == "flush/write":
            written[event["args"]["cycle"], event["args"]["tag"]] += event["args"].get("bytes", 0)
    finished = {(save.cycle, save.tag): save.bytes for save in report.saves if save.outcome == "ok"}
    assert {key: written.get(key) for key in finished} == finished  # type: ignore[arg-type]
    return len(finished)


def _critical(restart: StartStats) -> dict[str, float]:
    """Phases in which the critical rank was."""
    return {phase.name: took for phase in restart.phases if (took := phase.time.at_critical_s)}


def _loaded_s(events: list[dict[str, Any]], rank: int | None, cycle: int) -> float:
    """Length of the load of a cycle on a rank, whose begin and end are events of their own."""
    ends = {
        event["ph"]: event["ts"]
        for event in events
        if (event.get("cat"), event["name"], event["pid"]) == ("operation", "load", rank)
        and event["id"].split(".")[1] == str(cycle)
    }
    return (ends["e"] - ends["b"]) / 1e6


def assert_saves_agree(out: Path, report: Report) -> None:
    """Bytes and number of files of every checkpoint that is still there, as the save that wrote it last has them."""
    ((save_dir, save_mount),) = {
        (r["save_dir"], r["save_mount"]) for r in _records(out / "trace") if r["type"] == "runtime"
    }
    checkpoints = Path(save_dir)
    assert save_mount == str(mount_of(checkpoints))
    newest = {save.tag: save for save in report.saves if save.outcome == "ok" and save.tag}
    there = {tag: save for tag, save in newest.items() if (checkpoints / tag / _MANIFEST).is_file()}
    assert there, f"no checkpoint of this drill is left in {checkpoints}"
    for tag, save in there.items():
        files = [path for path in (checkpoints / tag).rglob("*") if path.is_file() and path.name != _MANIFEST]
        sizes = sum(path.stat().st_size for path in files)
        assert (save.bytes, save.num_files) == (sizes, len(files)), tag
        (flush,) = [phase for phase in save.phases if phase.name == "flush"]
        assert (flush.bytes, flush.num_files) == (sizes, len(files)), tag
