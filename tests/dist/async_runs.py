"""Runs with the asynchronous engine of scripts/slow_async_engine.py, and what of their saves is on record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.parallel.topology import Layout
from tests.dist.harness import LLAMA_STYLE, Run, records
from tests.dist.test_commit_protocol import TINY
from tests.dist.tiny_runs import DROPOUT, TRAINING, Launcher

SCRIPT = str(Path(__file__).with_name("scripts") / "slow_async_engine.py")
TINY_RUN = [*LLAMA_STYLE, *TINY, *TRAINING, *DROPOUT]
ASYNC = ["--checkpoint-engine", "slow-async"]


def run(job: Launcher, layout: Layout, *flags: str | Path, env: dict[str, str] | None = None, **options: Any) -> Run:
    """A launch whose checkpoint engine is slow-async; `env` says how it behaves."""
    return job.run(layout, *flags, *ASYNC, script=SCRIPT, env=env or {}, **options)


def train(launcher: Launcher, layout: Layout, *flags: str | Path, **options: Any) -> Run:
    """`run` that must succeed."""
    finished = run(launcher, layout, *flags, **options)
    assert finished.ok, f"exit codes {finished.exit_codes}:\n{finished.output[-6000:]}"
    return finished


def save_ends(save: Path, rank: int = 0, cycle: int | None = None) -> list[dict[str, Any]]:
    """Closing records of the saves of a rank, in order."""
    mine = records(save / "restart_trace", cycle, rank)
    return [r for r in mine if r["type"] == "operation_end" and r["operation"] == "save"]


def committed(save: Path) -> list[str]:
    return sorted(path.name for path in save.glob("global_step*"))


def spans_of(save: Path, end: dict[str, Any]) -> list[dict[str, Any]]:
    """Spans of the operation that `end` closes."""
    mine = records(save / "restart_trace", end["cycle"], end["rank"])
    return [r for r in mine if r["type"] == "span" and r["op"] == end["op"] and r["operation"] == "save"]
