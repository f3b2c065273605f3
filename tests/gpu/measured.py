"""Reads figures from the directory that the tier has written. What was not observed is None."""

from __future__ import annotations

import json
import re
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from restart_trace.reading import read_records
from tests.gpu.parts import TIMED_ITERATIONS

WARM = 4  # the first iteration whose time counts: kernels are loaded, and the allocator has its memory
_LINE = re.compile(
    r"^ iteration +(?P<number>\d+)/.*\(ms\): (?P<ms>[\d.]+) .*lm loss: (?P<loss>\S+) .*TFLOPs: (?P<tflops>[\d.]+) \|$"
)
NOT_OBSERVED = "not observed"
_PEAK = "device_peak_allocated_bytes"


@dataclass(frozen=True)
class Iteration:
    """A line of the training log. `tflops`: as printed, in TFLOP/s of a device, without recomputation."""

    number: int
    seconds: float
    loss: float
    tflops: float


@dataclass(frozen=True)
class TestResult:
    """A test of the tier: `outcome` is passed, failure, error or skipped; `said`: why, or what it recorded."""

    name: str
    outcome: str
    recorded: dict[str, str]
    message: str


def read_json(path: Path) -> Any:
    """None if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else None


def device_name(out: Path) -> str | None:
    """As the driver calls it; None if the part `machine` has not run."""
    facts = read_json(out / "machine" / "machine.json")
    return None if facts is None else str(facts["device"])


def iterations(out: Path, part: str) -> list[Iteration]:
    """All that the log of a training has."""
    log = out / part / "training.log"
    found = map(_LINE.match, log.read_text(errors="replace").splitlines() if log.exists() else [])
    return [Iteration(int(m["number"]), float(m["ms"]) / 1e3, float(m["loss"]), float(m["tflops"])) for m in found if m]


def timed(out: Path, part: str) -> list[Iteration]:
    """Those whose time counts: warm, and not profiled."""
    return [found for found in iterations(out, part) if WARM <= found.number <= TIMED_ITERATIONS]


def iteration_s(out: Path, part: str) -> float | None:
    """Median seconds."""
    found = [iteration.seconds for iteration in timed(out, part)]
    return statistics.median(found) if found else None


def tflops(out: Path, part: str) -> float | None:
    """Median TFLOP/s of a device."""
    found = [iteration.tflops for iteration in timed(out, part)]
    return statistics.median(found) if found else None


def device_peak_bytes(trace_dir: Path) -> float | None:
    """Bytes that torch had given out at most, on the rank and in the launch that had most."""
    probes = [record["values"] for record in _records(trace_dir) if record["type"] == "probe"]
    return max((values[_PEAK] for values in probes if _PEAK in values), default=None)


def _records(trace_dir: Path) -> Iterator[dict[str, Any]]:
    return (record for path in sorted(trace_dir.glob("rank_*.jsonl")) for record in read_records(path))


def tests_of(out: Path, part: str) -> list[TestResult]:
    """What pytest wrote of the tests of a part."""
    path = out / part / "junit.xml"
    if not path.exists():
        return []
    results = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '').removeprefix('tests.gpu.')}.{case.get('name')}"
        told = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        recorded = {p.get("name") or "": p.get("value") or "" for p in case.iter("property")}
        message = (told.get("message") or "") if told is not None else ""
        results.append(TestResult(name, "passed" if told is None else told.tag, recorded, message))
    return results


def recorded(out: Path, part: str, name: str) -> float | None:
    """A number that a test recorded under this name."""
    values = [result.recorded[name] for result in tests_of(out, part) if name in result.recorded]
    return None if not values or values[0].startswith(NOT_OBSERVED) else float(values[0])
