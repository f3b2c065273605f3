"""Jobs that are traced from outside, by the command of the guide: clients of DeepSpeed, and our own trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common.ranks import ROOT, MeasurementError
from restart_trace.reading import read_records

RANKS = 2
# name -> the script of a user and its arguments, in tests/dist/scripts/clients; WIDTH sets its size
CLIENTS = {
    "plain DeepSpeed": ["plain_deepspeed.py", "ordinary", "4"],
    "PipelineModule": ["plain_deepspeed.py", "pipeline", "4"],
    "Hugging Face Trainer": ["hf_trainer.py", "2"],
    "Accelerate": ["accelerate_loop.py", "2"],
}
_OWN = [
    "--num-layers", "4", "--hidden-size", "1024", "--num-attention-heads", "8", "--seq-length", "256", "--bf16",
    "--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "1e-3", "--save-interval", "3",
    "--train-iters", "12",
    "--tensor-model-parallel-size", "2", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1023",
    "--num-workers", "0", "--eval-iters", "0", "--split", "100,0,0",
]  # fmt: skip
_LAST_WORDS = 2000  # characters


def trace_client(name: str, width: int, directory: Path) -> Path:
    """Run a client of DeepSpeed; returns the directory of its trace. Raises MeasurementError if it fails."""
    script, *arguments = CLIENTS[name]
    work = directory / name.replace(" ", "_")
    work.mkdir()
    _run([str(ROOT / "tests/dist/scripts/clients" / script), *arguments], work, [], {"WIDTH": str(width)})
    return work / "trace"


def trace_own_trainer(directory: Path) -> tuple[Path, Path]:
    """Run our trainer with four saves, and its resumption; (its own trace, that of the hooks).

    Raises MeasurementError if it fails.
    """
    work = directory / "own"
    work.mkdir()
    data = [sys.executable, "-m", "tools.make_synthetic_dataset", "--output-prefix", str(work / "data")]
    subprocess.run([*data, "--tokens", "100000", "--vocab-size", "1023"], check=True, cwd=ROOT, capture_output=True)
    checkpointer = "megatron.checkpointing.manager:Checkpointer"
    options = ["--save-function", f"{checkpointer}.save", "--load-function", f"{checkpointer}.load"]
    save = ["--save", str(work / "checkpoints")]
    for more in (["--exit-interval", "6"], ["--load", str(work / "checkpoints")]):
        argv = [str(ROOT / "pretrain_gpt.py"), *_OWN, "--data-path", str(work / "data"), *save, *more]
        _run(argv, work, options, {"PYTHONPATH": str(ROOT)})
    return work / "checkpoints" / "restart_trace", work / "trace"


def seconds(trace_dir: Path) -> dict[str, list[float]]:
    """Kind of operation, or "iteration" -> wall times, s, of all that ended. Raises ValueError without a trace."""
    found: dict[str, list[float]] = {}
    for path in sorted(trace_dir.glob("rank_*.jsonl")):
        for record in read_records(path):
            if record["type"] in ("operation_end", "iteration"):
                name = record.get("operation", "iteration")
                found.setdefault(name, []).append((record["end_ns"] - record["start_ns"]) / 1e9)
    if not found:
        raise ValueError(f"{trace_dir}: holds no trace")
    return found


def covered(trace_dir: Path, kind: str) -> list[tuple[float, float, int]]:
    """(s, s that phases account for, bytes) of every save or load, as `kind` says, that moved a checkpoint."""
    found = []
    for path in sorted(trace_dir.glob("rank_*.jsonl")):
        spans: dict[int, int] = {}
        for record in read_records(path):
            if record.get("operation") != kind:
                continue
            if record["type"] == "span":
                spans[record["op"]] = spans.get(record["op"], 0) + record["duration_ns"]
            elif record["type"] == "operation_end" and record.get("bytes"):
                wall_ns = record["end_ns"] - record["start_ns"]
                found.append((wall_ns / 1e9, spans.get(record["op"], 0) / 1e9, record["bytes"]))
    return found


def _run(argv: Sequence[str], work: Path, options: Sequence[str], more: Mapping[str, str]) -> None:
    binaries = Path(sys.executable).parent
    command = [str(binaries / "restart-trace"), "run", "--trace-dir", str(work / "trace"), *options, "--"]
    command += [str(binaries / "torchrun"), "--standalone", "--nproc-per-node", str(RANKS), *argv]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(RANKS), **more}
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise MeasurementError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-_LAST_WORDS:]}")
    if "switched off" in done.stderr:
        raise MeasurementError(f"a hook failed: {done.stderr[-_LAST_WORDS:]}")
