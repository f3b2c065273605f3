"""Command line: what hooks cost the programs of users, in Markdown. Exit status: 0 measured, 2 could not run."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import socket
import statistics
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.program import printed
from benchmarks.common.ranks import ROOT, MeasurementError, own_directory
from benchmarks.common.rounds import add_directory, add_repeat
from benchmarks.overhead import client
from benchmarks.overhead.report import TARGET, spread, table_of
from restart_trace.reading import read_records
from tools.common.cli import make_parser
from tools.common.machine import machine

RANKS = 2
# Client -> its program and arguments, and the last argument of each launch: the step up to which it trains, or none.
CLIENTS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "DDP, torch.save to a path": (["ddp_snapshot.py", "path"], ("6", "10")),
    "DDP, torch.save into an open file": (["ddp_snapshot.py", "file"], ("6", "10")),
    "DDP, torch.save in a thread": (["ddp_snapshot.py", "thread"], ("6",)),
    "FSDP2, dcp.save": (["fsdp_checkpoint.py", "save"], ("6", "6")),
    "FSDP2, dcp.async_save": (["fsdp_checkpoint.py", "async_save"], ("6",)),
    "Trainer": (["hf_alone.py"], ("6", "10")),
    "Trainer, ZeRO-1": (["hf_trainer.py", "4"], ("1",)),
    "Trainer, ZeRO-3": (["hf_trainer.py", "4"], ("3",)),
    "Accelerate": (["accelerate_alone.py"], ("6", "10")),
    "Accelerate, DeepSpeed": (["accelerate_loop.py"], ("6",)),
    "Lightning, DDP": (["lightning_ddp.py"], ("6", "10")),
    "DeepSpeed": (["plain_deepspeed.py", "ordinary"], ("6",)),
    "DeepSpeed, PipelineModule": (["plain_deepspeed.py", "pipeline"], ("6",)),
}
# Imported once, before ranks are forked: they begin with the hooks, or without
_LIBRARIES = (
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo", "deepspeed", "transformers.trainer",
    "transformers.models.llama.modeling_llama", "accelerate", "lightning.pytorch",
)  # fmt: skip
_LAST_WORDS = 2000  # characters
_PROGRAMS = ROOT / "tests" / "dist" / "scripts" / "clients"
_HEAD = [
    "client", "untraced s", "traced s", "untraced processor s", "traced processor s", "in steps, saves, loads s",
    "hooked calls", "ms within hooks", "of steps, saves, loads", "of processor time",
]  # fmt: skip
_EPILOG = f"""\
clients: {", ".join(CLIENTS)}

examples:
  %(prog)s                                            all clients, 5 rounds
  %(prog)s --only "FSDP2, dcp.save" --repeat 1        a first look, in a minute

Each value is the median over the rounds, of the rank where it is largest, with the interquartile range after +-. A
round runs each client twice, traced and not, in processes that have imported the libraries. `within hooks` is processor
time, to which other programs on the machine add little. It is divided by the time in steps, saves and loads, which is
longer on a busy machine, and by the processor time of the untraced run, which is not.

exit status: 0 measured, 2 could not run
"""
Sample = dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    parser = make_parser(
        "python -m benchmarks.overhead.clients",
        "Measure what tracing by hooks costs jobs that do not use this project's trainer.",
        _EPILOG,
    )
    parser.add_argument(
        "--only", nargs="+", choices=CLIENTS, default=list(CLIENTS), metavar="CLIENT", help="(default: all)"
    )
    add_repeat(parser)
    parser.add_argument("--width", type=int, default=2048, metavar="N", help="of the models' layers (default: 2048)")
    add_directory(parser)
    parser.add_argument("--samples", type=Path, metavar="FILE", help="also write every sample there, as JSON")
    arguments = parser.parse_args(argv)
    for flag in ("repeat", "width"):
        if getattr(arguments, flag) < 1:
            parser.error(f"--{flag} {getattr(arguments, flag)}: must be at least 1")
    return printed("overhead", lambda: _measured(arguments), ValueError)


def _measured(arguments: argparse.Namespace) -> str:
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    for library in _LIBRARIES:
        importlib.import_module(library)
    found_at = machine()
    samples: dict[str, dict[str, list[Sample]]] = {name: {"untraced": [], "traced": []} for name in arguments.only}
    for number in range(arguments.repeat):
        for name in arguments.only:
            for traced in (False, True) if number % 2 else (True, False):  # neither is always the second
                with own_directory(arguments.dir, "overhead_") as directory:
                    of = samples[name]["traced" if traced else "untraced"]
                    of.append(measure(name, directory, arguments.width, traced=traced))
            print(f"round {number + 1} of {arguments.repeat}: {name}", file=sys.stderr)
    if arguments.samples is not None:
        arguments.samples.write_text(json.dumps({"machine": found_at, "samples": samples}) + "\n")
    return table({name: (of["untraced"], of["traced"]) for name, of in samples.items()})


def measure(name: str, directory: Path, width: int, *, traced: bool) -> Sample:
    """All launches of a client once. Raises MeasurementError if one fails."""
    (script, *words), launches = CLIENTS[name]
    total: Sample = {}
    (directory / "work").mkdir()
    for number, last in enumerate(launches):
        notes = directory / str(number)
        notes.mkdir()
        plan = {
            "script": str(_PROGRAMS / script), "arguments": [*words, last], "directory": str(directory / "work"),
            "trace": str(directory / "trace") if traced else None, "output": str(notes / "sample"),
            "environment": {"WIDTH": str(width)},
        }  # fmt: skip
        _run(name, plan, notes)
        ranks = [json.loads((notes / f"sample.{rank}").read_text()) for rank in range(RANKS)]
        for key in ranks[0]:
            total[key] = total.get(key, 0.0) + max(rank[key] for rank in ranks)
    if traced:
        total["worked_s"] = _worked_s(directory / "trace")
    return total


def _run(name: str, plan: dict[str, Any], notes: Path) -> None:
    """Fork the ranks of a client and wait for them. Raises MeasurementError if one fails, or a hook does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plan["environment"] |= {
        "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "LOCAL_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    sys.stdout.flush()
    logs = [notes / f"rank_{rank}.log" for rank in range(RANKS)]
    pids = [_forked(rank, plan, log) for rank, log in enumerate(logs)]
    codes = _ended(pids)
    text = "".join(log.read_text(errors="replace") for log in logs)
    if any(codes) or "switched off" in text:
        raise MeasurementError(f"{name}: the ranks ended with exit codes {codes}:\n{text[-_LAST_WORDS:]}")


def _ended(pids: list[int]) -> list[int]:
    """The exit codes of the ranks. When one fails, or this process is told to end, the others are killed."""
    codes: dict[int, int] = {}
    try:
        while len(codes) < len(pids):
            pid, status = os.wait()
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid]:
                _kill(set(pids) - codes.keys())
    except BaseException:
        _kill(set(pids) - codes.keys())
        raise
    return [codes[pid] for pid in pids]


def _kill(pids: set[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _forked(rank: int, plan: dict[str, Any], log: Path) -> int:
    """The process of a rank, which does not return from here."""
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1
    try:
        with log.open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        client.run(plan)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _worked_s(trace: Path) -> float:
    """Time in steps, saves and loads, of the rank with the least of it."""
    by_rank: dict[int, float] = {}
    for path in sorted(trace.glob("rank_*.jsonl")):
        for record in read_records(path):
            kind = record.get("operation", record["type"])
            if record["type"] in ("operation_end", "iteration") and kind in ("save", "load", "iteration"):
                took_s = (record["end_ns"] - record["start_ns"]) / 1e9
                by_rank[record["rank"]] = by_rank.get(record["rank"], 0.0) + took_s
    if len(by_rank) < RANKS:
        raise ValueError(f"{trace}: holds no steps of {RANKS - len(by_rank)} ranks")
    return min(by_rank.values())


def table(samples: dict[str, tuple[list[Sample], list[Sample]]]) -> str:
    """The table in Markdown; `samples`: client -> those of its untraced and of its traced runs."""
    rows, met = [], 0
    for name, (untraced, traced) in samples.items():
        shares = [
            [sample["hooks_s"] / sample["worked_s"] for sample in traced],
            [sample["hooks_s"] / plain["cpu_s"] for plain, sample in zip(untraced, traced, strict=True)],
        ]
        met += max(map(statistics.median, shares)) < TARGET
        rows.append([
            name, *(spread(of, key, 1, 2) for key in ("wall_s", "cpu_s") for of in (untraced, traced)),
            spread(traced, "worked_s", 1, 2), f"{statistics.median(sample['calls'] for sample in traced):g}",
            spread(traced, "hooks_s", 1e3, 1), *(f"{100 * statistics.median(of):.2f} %" for of in shares),
        ])  # fmt: skip
    return table_of(
        [_HEAD, *rows], f"Hooks take less than {TARGET:.0%} of both: true of {met} of {len(samples)} clients."
    )


if __name__ == "__main__":
    sys.exit(main())
