"""The layout, hosts and storage that a prediction is asked for: from flags, a plan, and the traces."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..common.errors import CouldNotRunError
from .drills import Deployment, Drill


@dataclass(frozen=True)
class PlannedCheckpoint:
    """A layout of `ranks` ranks, `tp` of them to a layer; its checkpoint with `engine` is `bytes` in `files` files."""

    engine: str
    ranks: int
    bytes: int
    files: int
    tp: int


def read_plan(path: Path) -> PlannedCheckpoint:
    """What `ckpt-plan --format json` wrote. Raises CouldNotRunError naming the file if it is no such plan."""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        layout, files = plan["layout"], plan["files"]
        return PlannedCheckpoint(
            engine=str(plan["engine"]),
            ranks=int(layout["tp"]) * int(layout["pp"]) * int(layout["dp"]),
            bytes=sum(int(file["bytes"]) for file in files),
            files=len(files),
            tp=int(layout["tp"]),
        )
    except OSError as exc:
        raise CouldNotRunError(f"--plan {path}: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise CouldNotRunError(f"--plan {path}: not what `ckpt-plan --format json` writes ({exc})") from exc


def asked_deployment(flags: Namespace, drills: Sequence[Drill]) -> tuple[Deployment, str | None]:
    """The place that the flags describe, and the engine (None: the traces').

    Hosts, cores and tp that are not given are those of the traces, if all have the same. Raises CouldNotRunError naming
    the flag that is wrong or missing.
    """
    planned = read_plan(flags.plan) if flags.plan else None
    for name in ("ranks", "tp", "checkpoint_bytes", "checkpoint_files", "engine"):
        if planned and getattr(flags, name) is not None:
            raise CouldNotRunError(f"--{name.replace('_', '-')}: --plan {flags.plan} says it already; leave one out")
    hosts = _of_traces(flags.hosts, "--hosts", {drill.deployment.hosts for drill in drills})
    per_host = {drill.deployment.cores / drill.deployment.hosts for drill in drills}
    deployment = Deployment(
        ranks=planned.ranks if planned else _at_least_one(flags.ranks, "--ranks"),
        hosts=hosts,
        cores=_of_traces(flags.cores, "--cores", {cores * hosts for cores in per_host}),
        bytes=planned.bytes if planned else _at_least_one(flags.checkpoint_bytes, "--checkpoint-bytes"),
        files=planned.files if planned else _at_least_one(flags.checkpoint_files, "--checkpoint-files"),
        tp=planned.tp if planned else _of_traces(flags.tp, "--tp", {drill.deployment.tp for drill in drills}),
    )
    return deployment, planned.engine if planned else flags.engine


def ceilings(flags: Namespace) -> dict[str, float]:
    """The storage ceilings given, as `twin.predict` takes them. Raises CouldNotRunError for one that is not above 0."""
    found = {}
    for name in ("write_GBps", "read_GBps"):
        value = getattr(flags, name)
        if value is not None:
            if not (math.isfinite(value) and value > 0):
                raise CouldNotRunError(f"--{name.replace('_', '-')} {value:g}: give GB/s above 0")
            found[name] = value
    return found


def _of_traces(given: float | None, flag: str, of_traces: set[float]) -> float:
    if given is not None:
        return _at_least_one(given, flag)
    if len(of_traces) > 1:
        raise CouldNotRunError(f"{flag} is missing: the traces have {', '.join(f'{v:g}' for v in sorted(of_traces))}")
    return next(iter(of_traces))


def _at_least_one(given: float | None, flag: str) -> float:
    if given is None:
        raise CouldNotRunError(f"{flag} is missing: give it, or --plan with what `ckpt-plan --format json` wrote")
    if not (math.isfinite(given) and given >= 1):
        raise CouldNotRunError(f"{flag} {given:g}: give a number of 1 or more")
    return given
