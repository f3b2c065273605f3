"""The report as JSON. The keys are a public contract: docs/metrics.md defines each of them."""

from __future__ import annotations

import json
from typing import Any

from ..common.problems import Problem
from ..findings import Finding
from ..metrics.results import (
    FailureTimes,
    OperationStats,
    PhaseStats,
    RankStats,
    Spread,
    StartStats,
)
from ..model.run_info import CycleInfo
from ..report import Report


def to_json(report: Report) -> str:
    """The report as indented JSON text. Numbers that are not known are null."""
    return json.dumps(to_dict(report), indent=2, allow_nan=False) + "\n"


def to_dict(report: Report) -> dict[str, Any]:
    """The report as JSON types."""
    # The cycle with the most missing ranks, the newest of equals: its numbers are the least complete.
    worst = max(report.cycles, key=lambda info: (len(info.missing), info.cycle))
    return {
        "run_id": report.run_id,
        "ranks": {"expected": worst.expected, "present": worst.present},
        "cycles": [_cycle(info) for info in report.cycles],
        "saves": [_operation(stats) for stats in report.saves],
        "loads": [_operation(stats) for stats in report.loads],
        "restarts": [_start(start) for start in report.restarts],
        "launches": [_start(start) for start in report.first_launches],
        "problems": [_problem(problem) for problem in report.problems],
        "findings": [_finding(finding) for finding in report.findings],
        "model": report.model,
    }


def _cycle(info: CycleInfo) -> dict[str, Any]:
    return {
        "cycle": info.cycle,
        "expected": info.expected,
        "present": info.present,
        "missing": info.missing,
        "layout": info.layout,
        "hosts": info.hosts,
        "engine_asked": info.engine_asked,
        "engine_used": info.engine_used,
        "durability": info.durability,
        "versions": info.versions,
    }


def _operation(stats: OperationStats) -> dict[str, Any]:
    result: dict[str, Any] = {
        "tag": stats.tag,
        "step": stats.step,
        "cycle": stats.cycle,
        "engine": stats.engine,
        "outcome": stats.outcome,
        "error": stats.error,
        "ranks": stats.ranks,
        "finished_ranks": stats.finished_ranks,
        "bytes": stats.bytes,
        "num_files": stats.num_files,
        "slowest_rank": stats.wall.slowest_rank if stats.wall else None,
        "wall": _spread(stats.wall),
        "io_GBps": stats.io_GBps,
        "coverage_min": stats.coverage_min,
        "coverage_rank": stats.coverage_rank,
        "unattributed_s": stats.unattributed.max_s if stats.unattributed else None,
        "phases": _phases(stats.phases),
        "per_rank": [_rank(rank) for rank in stats.per_rank],
    }
    if stats.operation == "save":
        result["blocked_s"] = stats.blocked_s
        result["drain_s"] = stats.drain_s
        result["blocked_GBps"] = stats.blocked_GBps
        result["committed_s"] = stats.committed_s
        result["durable_s"] = stats.durable_s
    else:
        result["load_s"] = stats.wall.max_s if stats.wall else None
    return result


def _start(start: StartStats) -> dict[str, Any]:
    first = start.time_to_first_step
    return {
        "cycle": start.cycle,
        "ranks": start.ranks,
        "finished_ranks": start.finished_ranks,
        "time_to_first_step_s": first.max_s if first else None,
        "slowest_rank": first.slowest_rank if first else None,
        "wall": _spread(first),
        "caught_up_s": start.caught_up_s,
        "resumed_step": start.resumed_step,
        "reached_step": start.reached_step,
        "lost_steps": start.lost_steps,
        "lost_work_s": start.lost_work_s,
        "repeated_steps": start.repeated_steps,
        "equal_losses": start.equal_losses,
        "down_s": start.down_s,
        "restart_s": start.restart_s,
        "failure_to_caught_up_s": start.failure_to_caught_up_s,
        "failure": _failure(start.failure),
        "coverage_min": start.coverage_min,
        "coverage_rank": start.coverage_rank,
        "unattributed_s": start.unattributed.max_s if start.unattributed else None,
        "phases": _phases(start.phases),
        "per_rank": [_rank(rank) for rank in start.per_rank],
    }


def _failure(failure: FailureTimes | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {
        "fault": failure.fault,
        "detected_s": failure.detected_s,
        "stopped_s": failure.stopped_s,
        "relaunched_s": failure.relaunched_s,
    }


def _spread(spread: Spread | None) -> dict[str, Any] | None:
    if spread is None:
        return None
    return {
        "max_s": spread.max_s,
        "median_s": spread.median_s,
        "min_s": spread.min_s,
        "spread_s": spread.spread_s,
        "slowest_rank": spread.slowest_rank,
    }


def _phases(phases: list[PhaseStats]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for phase in phases:
        entry = _spread(phase.time) or {}
        entry |= {
            "at_critical_s": phase.time.at_critical_s,
            "ranks": phase.ranks,
            "bytes": phase.bytes,
            "num_files": phase.num_files,
            "GBps": phase.GBps,
            "blocking": phase.blocking,
        }
        if phase.details:
            entry["details"] = _phases(phase.details)
        result[phase.name] = entry
    return result


def _rank(rank: RankStats) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "wall_s": rank.wall_s,
        "blocked_s": rank.blocked_s,
        "coverage": rank.coverage,
        "unattributed_s": rank.unattributed_s,
        "phases": rank.phases,
    }


def _problem(problem: Problem) -> dict[str, Any]:
    return {
        "kind": problem.kind,
        "severity": problem.severity,
        "message": problem.message,
        "data": problem.data,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "title": finding.title,
        "evidence": finding.evidence,
        "advice": finding.advice,
        "cost_s": finding.cost_s,
        "data": finding.data,
    }
