"""The scoreboard as a table for people and as JSON for programs, which has every sample."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from benchmarks.launchers.variants import BASELINE, Setting
from benchmarks.restart_scoreboard.contestants import ALL, CONTESTANTS, LEFT_OUT, NODE, ONE, TORCHRUN_NODES
from benchmarks.restart_scoreboard.training import Trained
from tools.common.tables import markdown_table


@dataclass
class Result:
    """What a contestant did in each round. `not_run`: why it could not be run, or not to the end."""

    rounds: list[Trained] = field(default_factory=list)
    not_run: str | None = None


def wrong_losses(rounds: Sequence[Trained], reference: Mapping[int, str]) -> int:
    """How many losses differ from those of the same script without a fault, in any digit that it prints."""
    return sum(reference.get(iteration) != loss for trained in rounds for iteration, loss in trained.losses)


def analyse(
    results: Mapping[str, Result], references: Mapping[str, Mapping[int, str]], setting: Setting,
    machine: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The scoreboard. `references`: the losses of each trainer without a fault; times in seconds."""
    rows = {name: _row(name, result, references) for name, result in results.items()}
    base = {kind: rows.get(name, {}).get("restart_s", {}).get(kind) for kind, name in _BASES.items()}
    for row in rows.values():
        row["ratio"] = {
            kind: found["median"] / base[kind]["median"] if found and base[kind] else None
            for kind, found in row.get("restart_s", {}).items()
        }
    return {
        "machine": dict(machine) | {name: metadata.version(name) for name in ("torch", "deepspeed")},
        "ranks": setting.world_size,
        "layout": {"tp": setting.tp, "pp": setting.pp, "dp": setting.dp},
        "dtype": setting.dtype,
        "contestants": rows,
        "left_out": LEFT_OUT,
    }


def _row(name: str, result: Result, references: Mapping[str, Mapping[int, str]]) -> dict[str, Any]:
    contestant = CONTESTANTS[name]
    package = contestant.package
    row: dict[str, Any] = {
        "what": contestant.what,
        "docs": contestant.docs,
        "package": None if package is None or contestant.missing else f"{package} {metadata.version(package)}",
        "lines": contestant.lines,
        "not_run": result.not_run,
    }
    faults = [fault for trained in result.rounds for fault in trained.faults]
    if not faults:
        return row
    reference = references.get(contestant.trainer)
    return row | {
        "restart_s": {kind: _spread([f.restart_s for f in faults if f.kind == kind]) for kind in contestant.kinds},
        "lost_steps": {kind: _spread([f.lost_steps for f in faults if f.kind == kind]) for kind in contestant.kinds},
        "wasted_s": sum(fault.wasted_s for fault in faults),
        "faults": [asdict(fault) for fault in faults],
        "iteration_s": statistics.median(trained.iteration_s for trained in result.rounds),
        "losses": sum(len(trained.losses) for trained in result.rounds),
        "wrong_losses": None if reference is None else wrong_losses(result.rounds, reference),
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None


_BASES = {ONE: BASELINE, ALL: BASELINE, NODE: TORCHRUN_NODES}  # what is compared with, by kind of fault
_KILLED = {ONE: "one rank killed", ALL: "all killed", NODE: "an agent and its ranks killed"}


def render(found: Mapping[str, Any]) -> str:
    """The table, in Markdown: seconds to the end of the next step with lowest and highest, and what it cost."""
    layout = " ".join(f"{name.upper()}{size}" for name, size in found["layout"].items())
    lines = [f"{found['ranks']} ranks, {layout}, {found['dtype']}"]
    measured = {name: row for name, row in found["contestants"].items() if "faults" in row}
    for kinds in dict.fromkeys(CONTESTANTS[name].kinds for name in measured):
        head = [text for kind in kinds for text in (_KILLED[kind], f"of {_BASES[kind]}")]
        head = ["contestant", *head, "lost steps", "wasted", "losses", "lines"]
        rows = [[name, *_cells(row)] for name, row in measured.items() if CONTESTANTS[name].kinds == kinds]
        lines += ["", *markdown_table(head, rows)]
    lines += ["", *(f"- {name}: {row['what']}" for name, row in found["contestants"].items())]
    lines += [f"- {name} did not run: {row['not_run']}" for name, row in found["contestants"].items() if row["not_run"]]
    return "\n".join(lines + [f"- left out: {what}, as {why}" for what, why in found["left_out"].items()])


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = []
    for kind, took in row["restart_s"].items():
        ratio = row["ratio"][kind]
        cells.append("-" if took is None else f"{took['median']:.2f} s ({took['min']:.2f} to {took['max']:.2f})")
        cells.append("-" if ratio is None else f"{ratio:.3f}")
    lost = [f"{of['median']:g}" if of else "-" for of in row["lost_steps"].values()]
    wrong = row["wrong_losses"]
    right = "not compared" if wrong is None else "equal" if wrong == 0 else f"{wrong} of {row['losses']} differ"
    written = "another trainer" if row["lines"] is None else str(row["lines"])
    return [*cells, ", ".join(lost), f"{row['wasted_s']:.0f} s in {len(row['faults'])} faults", right, written]
