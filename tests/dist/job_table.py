"""The tables of docs/results/hooks.md that tests write: what hooks see of each kind of job, and of our own trainer.

python -m tests.dist.job_table                                run each job, print the tables
python -m tests.dist.job_table --write docs/results/hooks.md  replace them between their markers

The test of each job compares counts and bytes with its row. What a machine measures is written by this command alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.dist.harness import ROOT, records
from tools.common.marked import between_markers, replaced
from tools.common.tables import markdown_table

DOCUMENT = ROOT / "docs" / "results" / "hooks.md"
JOBS, AGREEMENT = "jobs", "agreement"  # of the markers
ROWS = "JOB_ROWS"  # environment variable: a directory for rows that are to be written, not compared
HINT = "to record the table again: python -m tests.dist.job_table --write docs/results/hooks.md"
TESTS = ("test_any_job.py", "test_hooks.py", "test_other_environments.py")
COUNTED = ("steps", "saves", "loads", "MB saved", "MB on disk", "MB loaded")
MEASURED = ("of saves", "of loads", "clock, ms")
# Program and its arguments -> its name in the table, which is in this order
TITLES = {
    "ddp_snapshot.py path": "DDP, `torch.save` to a path",
    "ddp_snapshot.py file": "DDP, `torch.save` into an open file",
    "ddp_snapshot.py thread": "DDP, `torch.save` in a thread",
    "job.sh ddp_snapshot.py": "DDP, `torchrun` in a shell script",
    "job.sh spawn_checkpoint.py": "DDP, `mp.spawn` in a shell script",
    "fsdp_checkpoint.py save": "FSDP2, `dcp.save`",
    "fsdp_checkpoint.py async_save": "FSDP2, `dcp.async_save`",
    "hf_alone.py": "Trainer",
    "hf_trainer.py 2 1": "Trainer, ZeRO-1",
    "hf_trainer.py 2 3": "Trainer, ZeRO-3",
    "accelerate_alone.py": "Accelerate",
    "accelerate_loop.py 2": "Accelerate, DeepSpeed",
    "lightning_ddp.py": "Lightning, DDP",
    "plain_deepspeed.py ordinary 2": "DeepSpeed",
    "plain_deepspeed.py pipeline 2": "DeepSpeed, PipelineModule",
    "megatron_core.py save": "megatron-core, `dist_checkpointing.save`",
    "megatron_core.py async_save": "megatron-core, asynchronous",
    "titan_checkpoint.py disabled": "torchtitan",
    "titan_checkpoint.py async": "torchtitan, asynchronous",
    "model_export.py deepspeed": "weights: DeepSpeed ZeRO-3, `save_16bit_model`",
    "model_export.py trainer": "weights: Trainer, `save_model`",
    "model_export.py trainer_zero3": "weights: Trainer, ZeRO-3, `save_model`",
    "model_export.py accelerate": "weights: Accelerate, `save_model`",
    "model_export.py pretrained": "weights: `save_pretrained`",
}
# Files that no hook sees: DCP's metadata, settings that Trainer writes itself, DeepSpeed's scripts and `latest`
_UNSEEN = (".metadata", ".json", ".py", "latest")
Logs = Sequence[Sequence[str]]  # of each launch, what each of its ranks printed


def clock(log: str, what: str) -> list[tuple[int, int]]:
    """(begin, end), monotonic ns, that a rank prints of each `what`."""
    return [(int(begin), int(end)) for begin, end in re.findall(rf"^{what} (\d+) (\d+)$", log, re.MULTILINE)]


def operations(trace_dir: Path, kind: str, cycle: int, rank: int) -> list[list[dict[str, Any]]]:
    """The completed records of each operation of this kind."""
    by_op: dict[int, list[dict[str, Any]]] = {}
    for record in records(trace_dir, cycle, rank):
        if record.get("operation") == kind and "op" in record:
            by_op.setdefault(record["op"], []).append(record)
    return list(by_op.values())


def matched(trace_dir: Path, logs: Logs, kind: str) -> list[tuple[int, list[dict[str, Any]]]]:
    """Each operation of a kind that hooks saw, and how many ns longer the job's own clock ran, which was around it.

    Raises AssertionError unless these are all that the job made, each within its own clock.
    """
    found = []
    for cycle, ranks in enumerate(logs):
        for rank, log in enumerate(ranks):
            printed, seen = clock(log, kind), operations(trace_dir, kind, cycle, rank)
            assert len(seen) == len(printed), (kind, cycle, rank)
            for (begin, end), operation in zip(printed, seen, strict=True):
                ended = operation[-1]
                assert ended["outcome"] == "ok"
                assert begin <= ended["start_ns"] and ended["end_ns"] <= end
                found.append((end - begin - (ended["end_ns"] - ended["start_ns"]), operation))
    return found


def covered(trace_dir: Path, kind: str, launches: int, ranks: int = 2) -> float | None:
    """Share of the time of all operations of a kind that at least one span covers; None if there are none."""
    every = [op for run in range(launches) for rank in range(ranks) for op in operations(trace_dir, kind, run, rank)]
    whole_ns = sum(op[-1]["end_ns"] - op[0]["start_ns"] for op in every)
    return sum(map(covered_ns, every)) / whole_ns if every else None


def covered_ns(operation: list[dict[str, Any]]) -> int:
    """Time of an operation that at least one span covers."""
    total, until = 0, 0
    for span in sorted((r for r in operation if r["type"] == "span"), key=lambda span: span["start_ns"]):
        total += max(span["end_ns"] - max(span["start_ns"], until), 0)
        until = max(until, span["end_ns"])
    return total


def enough(shares: Sequence[float | None]) -> bool:
    """Whether phases account for what is promised of saves and loads."""
    return all(share is None or share >= 0.95 for share in shares)


def sizes(path: Path) -> list[int]:
    """Of the files at `path` that hooks see."""
    found = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return [p.stat().st_size for p in found if not p.name.endswith(_UNSEEN)]


def check_row(
    job: str, trace_dir: Path, logs: Logs, report: dict[str, Any], on_disk: int, shares: Sequence[float | None]
) -> None:
    """Compare what was seen of a job with its row; with ROWS in the environment write the row there instead.

    `on_disk`: bytes of the newest save; `shares`: `covered` of saves and loads.
    """
    steps = sum(len(re.findall(r"^step \d+ loss", log, re.MULTILINE)) for ranks in logs for log in ranks)
    seen = sum(record["type"] == "iteration" for record in records(trace_dir))
    assert steps == seen, "steps that the job prints, and those that hooks saw"
    saves, loads = (matched(trace_dir, logs, kind) for kind in ("save", "load"))
    save = (report["saves"] or report["weights"])[-1]
    loaded = sum(load["bytes"] or 0 for load in report["loads"])
    cells = [
        steps, len(saves), len(loads), *(f"{count / 1e6:.2f}" for count in (save["bytes"], on_disk)),
        f"{loaded / 1e6:.2f}" if loads else "–",
        *("–" if share is None else f"{100 * share:.1f} %" for share in shares),
        f"{statistics.median(longer for longer, _ in (*saves, *loads)) / 1e6:.2f}",
    ]  # fmt: skip
    row = {heading: str(cell) for heading, cell in zip((*COUNTED, *MEASURED), cells, strict=True)}
    if ROWS in os.environ:
        Path(os.environ[ROWS], f"{job}.json").write_text(json.dumps(row))
        return
    told = rows(DOCUMENT.read_text()).get(TITLES[job], {})
    assert {name: told.get(name) for name in COUNTED} == {name: row[name] for name in COUNTED}, HINT


def note_agreement(own: dict[str, list[int]], seen: dict[str, list[int]]) -> None:
    """With ROWS in the environment write there how long each kind took, in ns, by our own trainer and by hooks."""
    if ROWS in os.environ:
        found = [
            (kind, str(len(own[kind])), f"{mine / 1e9:.4f}", f"{theirs / 1e9:.4f}", f"{theirs / mine:.4f}")
            for kind, mine, theirs in ((kind, sum(own[kind]), sum(seen[kind])) for kind in sorted(own))
        ]
        Path(os.environ[ROWS], f"{AGREEMENT}.json").write_text(json.dumps(found))


def rows(document: str) -> dict[str, dict[str, str]]:
    """Job -> heading -> cell of the table in a document."""
    head, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in between_markers(document, JOBS).splitlines()
        if line.startswith("|")
    )
    return {job: dict(zip(head[1:], cells, strict=True)) for job, *cells in lines}


def tables(found: dict[str, Any]) -> dict[str, str]:
    """Name -> table in Markdown."""
    jobs = [(title, *found[job].values()) for job, title in TITLES.items()]
    agreement = markdown_table(("", "count", "own trace s", "hooks s", "hooks/own"), found[AGREEMENT])
    return {JOBS: "\n".join(markdown_table(("job", *COUNTED, *MEASURED), jobs)), AGREEMENT: "\n".join(agreement)}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status of pytest."""
    parser = argparse.ArgumentParser(prog="python -m tests.dist.job_table", description="what hooks see of each job")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the tables in this document")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        files = [f"tests/dist/{name}" for name in TESTS]
        command = [sys.executable, "-m", "pytest", "-q", *files, "-k", "row_of_the_table or our_own_trainer"]
        environment = os.environ | {"NIGHTLY": "1", ROWS: directory}
        tested = subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr)
        found = {path.stem: json.loads(path.read_text()) for path in Path(directory).iterdir()}
    if missing := [name for name in (*TITLES, AGREEMENT) if name not in found]:
        print(f"no rows of {', '.join(missing)}: nothing is written", file=sys.stderr)
        return tested.returncode or 1
    for name, table in tables(found).items():
        if asked.write is None:
            print(table, end="\n\n")
        else:
            asked.write.write_text(replaced(asked.write.read_text(), name, table))
    return tested.returncode


if __name__ == "__main__":
    sys.exit(main())
