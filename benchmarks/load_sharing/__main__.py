"""Command line: `python -m benchmarks.load_sharing`. Exit status: 0 measured, 2 could not run."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common.program import printed
from benchmarks.common.ranks import ROOT, MeasurementError, own_directory
from benchmarks.common.rounds import add_directory, add_format, add_repeat, in_turn
from tools.common import page_cache
from tools.common.cli import make_parser, require_at_least
from tools.common.machine import machine
from tools.common.tables import markdown_table

FLAG = "--ckpt-fully-parallel-load"
ENGINES = ("lazy", "torch")
_VOCABULARY = 1000
_LAST_WORDS = 2000  # characters
_EPILOG = """\
examples:
  %(prog)s --layout 2,2,16 --hidden-size 256
      64 ranks of this machine: a quarter of an hour, 12 GiB of memory
  %(prog)s --layout 1,1,2 --engine lazy --repeat 1
      a first look

The files are dropped from the page cache before each load. Storage that is slower than the network is what the flag is
for: start the command in a control group that limits its reads (docs/results/load_sharing.md has the lines).

exit status: 0 measured, 2 could not run
"""


@dataclass(frozen=True)
class Load:
    """One load, of all ranks. Bytes as in the report's `reads`; `seconds`: the slowest rank's.

    `fetched_bytes`: that the kernel read from storage; None where it does not say. `exchange_s`: the slowest rank's.
    """

    engine: str
    shared: bool
    seconds: float
    checkpoint_bytes: int
    asked_bytes: int
    fetched_bytes: int | None
    exchange_s: float


def parse_layout(text: str) -> tuple[int, int, int]:
    """TP, PP and DP in "2,2,16". Raises argparse.ArgumentTypeError."""
    sizes = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if len(sizes) != 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give three sizes, of TP, PP and DP, as in 2,2,16")
    if sizes[2] == 1:
        raise argparse.ArgumentTypeError(f"{text!r}: one replica has nobody to share with; give a DP of 2 or more")
    return sizes[0], sizes[1], sizes[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    what = f"Time loads on the layout that saved, with and without {FLAG}, and count what they read."
    parser = make_parser("python -m benchmarks.load_sharing", what, _EPILOG)
    parser.add_argument("--layout", type=parse_layout, default=(1, 1, 4), metavar="TP,PP,DP", help="(default: 1,1,4)")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES), help="(default: both)")
    parser.add_argument("--hidden-size", type=int, default=256, metavar="N", help="of 8 layers (default: 256)")
    add_repeat(parser, 3)
    add_directory(parser)
    add_format(parser)
    arguments = parser.parse_args(argv)
    require_at_least(parser, arguments, 1, "repeat")
    return printed("load_sharing", lambda: _report(arguments))


def _report(arguments: argparse.Namespace) -> str:
    before = machine()
    with own_directory(arguments.dir, "load_sharing_") as directory:
        loads = list(_measure(directory, arguments))
    if arguments.format == "json":
        return json.dumps({"machine": before, "layout": arguments.layout, "loads": [asdict(load) for load in loads]})
    return "\n".join(table(loads))


def _measure(directory: Path, arguments: argparse.Namespace) -> Iterator[Load]:
    """Raises MeasurementError if a training fails."""
    from tools.make_synthetic_dataset import write_dataset

    data = directory / "data"
    write_dataset(str(data), 100_000, _VOCABULARY, 0)
    flags = _flags(arguments, data)
    for engine in arguments.engine:
        print(f"saving with {engine}", file=sys.stderr)
        saving = ["--save", str(directory / engine), "--save-interval", "1"]
        _train(directory, arguments.layout, [*flags, "--checkpoint-engine", engine, *saving])
    variants = [f"{engine}{shared}" for engine in arguments.engine for shared in ("", f" {FLAG}")]
    for number, variant in in_turn(variants, arguments.repeat):
        print(f"round {number + 1} of {arguments.repeat}: {variant}", file=sys.stderr)
        engine, *shared = variant.split()
        page_cache.drop(page_cache.files_below(directory / engine))
        trace = directory / f"trace_{number}_{engine}_{len(shared)}"
        loading = ["--load", str(directory / engine), "--exit-on-missing-checkpoint", "--restart-trace-dir", str(trace)]
        _train(directory, arguments.layout, [*flags, "--checkpoint-engine", engine, *loading, *shared])
        yield _load_of(trace, engine, bool(shared))


def _flags(arguments: argparse.Namespace, data: Path) -> list[str]:
    tp, pp, dp = arguments.layout
    return f"""
        --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}
        --num-layers 8 --hidden-size {arguments.hidden_size} --num-attention-heads 8 --seq-length 32
        --micro-batch-size 1 --global-batch-size {dp} --bf16 --lr 1e-4 --train-iters 1 --eval-iters 0
        --untie-embeddings-and-output-weights --max-position-embeddings 32
        --tokenizer-type NullTokenizer --vocab-size {_VOCABULARY} --data-path {data} --split 1,0,0
        --distributed-timeout-minutes 20
    """.split()


def _train(directory: Path, layout: tuple[int, int, int], flags: Sequence[str]) -> None:
    tp, pp, dp = layout
    command = [sys.executable, "-m", "megatron.launch", "--nproc-per-node", str(tp * pp * dp), "pretrain_gpt.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    log = directory / "training.log"
    with log.open("wb") as output:
        done = subprocess.run([*command, *flags], cwd=ROOT, env=environment, stdout=output, stderr=output, check=False)
    if done.returncode:
        text = log.read_text(errors="replace").strip()
        raise MeasurementError(f"a training ended with exit status {done.returncode}:\n{text[-_LAST_WORDS:]}")


def _load_of(trace: Path, engine: str, shared: bool) -> Load:
    """The load of a training that left this trace. Raises MeasurementError if the trace does not tell of one."""
    from tools.ckpt_analysis.ingest.load import load_trace
    from tools.ckpt_analysis.report import analyse

    load = analyse(load_trace(trace)).report.loads[-1]
    reads = load.reads
    if load.wall is None or reads is None:
        raise MeasurementError(f"{trace}: tells of no load to its end")
    fetched = [host.storage_bytes for host in reads.hosts]
    details = {detail.name: detail for phase in load.phases for detail in phase.details or ()}
    exchange = details.get("broadcast")
    return Load(
        engine, shared, load.wall.max_s, reads.checkpoint_bytes, reads.bytes,
        None if None in fetched else sum(number or 0 for number in fetched),
        exchange.time.max_s if exchange is not None else 0.0,
    )  # fmt: skip


def table(loads: Sequence[Load]) -> list[str]:
    """A row for each engine with and without the flag: medians, with the least and the most of the times."""
    rows = []
    for engine, shared in dict.fromkeys((load.engine, load.shared) for load in loads):
        found = [load for load in loads if (load.engine, load.shared) == (engine, shared)]
        asked = statistics.median(load.asked_bytes for load in found)
        fetched = [load.fetched_bytes for load in found if load.fetched_bytes is not None]
        times = sorted(load.seconds for load in found)
        rows.append([
            f"`{engine}`" + (", with it" if shared else ""),
            f"{asked / 1e6:.0f} MB",
            f"{asked / found[0].checkpoint_bytes:.2f}",
            f"{statistics.median(fetched) / 1e6:.0f} MB" if fetched else "not recorded",
            f"{statistics.median(times):.1f} [{times[0]:.1f} to {times[-1]:.1f}] s",
            f"{statistics.median(load.exchange_s for load in found):.2f} s" if shared else "",
        ])  # fmt: skip
    head = [f"engine, `{FLAG}`", "asked for", "read amplification", "fetched from storage", "load", "exchange"]
    return markdown_table(head, rows)


if __name__ == "__main__":
    sys.exit(main())
