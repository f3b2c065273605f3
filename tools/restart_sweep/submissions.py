"""Jobs of earlier submissions: a file beside --out says which cells each has, and squeue which are left."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from glob import escape
from pathlib import Path
from typing import Any

from ..common.sweep_files import Cell, write_json
from .directory import SweepError


class UnknownJobsError(SweepError):
    """Nothing tells which jobs are left."""


_ENDING = "COMPLETING"  # the state of a job that has ended, and that some node still cleans up after


def note(out: Path, job: str, cells: Sequence[Cell], *, retries: bool) -> None:
    """Record which cells a job has. `job`: as sbatch prints it, NUMBER or NUMBER;CLUSTER; `retries`: failed ones."""
    number, _, cluster = job.partition(";")
    found = {"job": number, "cluster": cluster, "retries": retries, "cells": [cell.name for cell in cells]}
    write_json(Path(f"{out}.slurm-{number}.json"), found)


def jobs_of(out: Path, failed: Sequence[Cell]) -> dict[str, str]:
    """Name of a cell -> number of the job that waits or runs and will measure it.

    `failed`: cells that only a job which repeats failures will measure. Raises SweepError for a file that `note` has
    not written, and UnknownJobsError if squeue fails.
    """
    noted = [_read(path) for path in out.parent.glob(f"{escape(out.name)}.slurm-*.json")]
    left = {cluster: _left(cluster) for cluster in {job["cluster"] for job in noted}}
    passed_over = {cell.name for cell in failed}
    return {
        cell: job["job"]
        for job in noted
        if job["job"] in left[job["cluster"]]
        for cell in job["cells"]
        if job["retries"] or cell not in passed_over
    }


def _read(path: Path) -> dict[str, Any]:
    """What `note` wrote. Raises SweepError."""
    try:
        noted = json.loads(path.read_text())
        return {name: noted[name] for name in ("job", "cluster", "retries", "cells")}
    except (ValueError, KeyError, TypeError) as exc:
        raise SweepError(
            f"{path}: says not which cells its job has ({exc}); remove it once that job has ended"
        ) from None


def _left(cluster: str) -> set[str]:
    """Numbers of jobs that have not ended, of all users: --out may be shared. Raises UnknownJobsError."""
    of = [f"--clusters={cluster}"] if cluster else []
    command = ["squeue", *of, "--all", "--noheader", "--format=%i %T"]
    # The user's settings of squeue may leave jobs out.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
        problem = done.stderr.strip() if done.returncode else None
    except OSError as exc:
        problem = exc.strerror or str(exc)
    if problem is not None:
        raise UnknownJobsError(
            f"--submit: squeue cannot tell which jobs of earlier submissions are left: {problem}; submit where it can"
        )
    rows = [line.split() for line in done.stdout.splitlines()]
    return {row[0] for row in rows if len(row) == 2 and row[1] != _ENDING}
