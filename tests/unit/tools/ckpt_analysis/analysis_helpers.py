"""What the tests of the analysis share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.render.json_output import to_dict
from tools.ckpt_analysis.report import analyse

ROOT = Path(__file__).resolve().parents[4]


def result(directory: Path, **asked: Any) -> dict[str, Any]:
    """The JSON report of a trace directory, decoded."""
    return to_dict(analyse(load_trace(directory), **asked).report)


def kinds(report: dict[str, Any]) -> list[str]:
    return [problem["kind"] for problem in report["problems"]]


def problem(report: dict[str, Any], kind: str) -> dict[str, Any]:
    """The one problem of this kind."""
    found = [p for p in report["problems"] if p["kind"] == kind]
    assert len(found) == 1, report["problems"]
    return found[0]


def file_of(directory: Path, rank: int, cycle: int) -> Path:
    return directory / f"rank_{rank:05d}_cycle_{cycle:03d}.jsonl"
