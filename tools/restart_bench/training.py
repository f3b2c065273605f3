"""The command line of pretrain_gpt.py, and the checks of it before ranks are started."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .data import GIVEN
from .errors import LaunchEnded
from .presets import Preset
from .run import Run, Start, settle

_RECOMPUTES = re.compile(r"(^|\s)--(checkpoint-activations|recompute-|activations-checkpoint-)")


def training_flags(run: Run) -> list[str]:
    """Flags of pretrain_gpt.py, without those of RECOMPUTE."""
    model, given = run.model, run.given
    return [
        "--tensor-model-parallel-size", str(run.layout.tp), "--pipeline-model-parallel-size", str(run.layout.pp),
        *(["--sequence-parallel"] if run.sequence_parallel else []),
        "--distributed-backend", "gloo" if run.device == "cpu" else "nccl",
        "--num-layers", str(model.num_layers), "--hidden-size", str(model.hidden_size),
        "--ffn-hidden-size", str(model.ffn_hidden_size),
        "--num-attention-heads", str(model.num_attention_heads),
        "--num-key-value-heads", str(model.num_key_value_heads),
        "--seq-length", str(run.seq_length), "--max-position-embeddings", str(run.seq_length),
        # By its value, not by --use-rotary-position-embeddings: another kind in EXTRA_ARGS replaces it.
        "--position-embedding-type", "rotary", "--untie-embeddings-and-output-weights", "--swiglu",
        "--normalization", "rmsnorm", "--disable-bias-linear", "--no-query-key-layer-scaling",
        "--attention-dropout", "0", "--hidden-dropout", "0",
        "--micro-batch-size", str(run.micro_batch), "--global-batch-size", str(run.global_batch),
        "--train-iters", str(run.iters),
        "--optimizer", "adam", "--adam-beta1", "0.9", "--adam-beta2", "0.95", "--weight-decay", "0.1",
        "--clip-grad", "1.0", "--lr", "3e-4", "--lr-decay-style", "cosine", "--min-lr", "3e-5",
        "--lr-warmup-iters", "1",
        *([f"--{run.dtype}"] if run.dtype != "fp32" else []), "--deepspeed", "--zero-stage", "1",
        "--data-path", *run.data.path, "--data-impl", "mmap", "--split", "949,50,1", "--num-workers", "0",
        *run.data.tokenizer_flags(),
        "--log-interval", "1", "--eval-interval", "1000", "--eval-iters", "0",
        "--save", run.save_dir, "--load", run.save_dir, "--save-interval", str(run.save_interval),
        "--checkpoint-engine", run.engine, "--restart-trace-dir", run.trace_dir,
        *given.extra_args.split(),
    ]  # fmt: skip


def preset_flags(preset: Preset, dp: int) -> list[str]:
    """Flags of a preset that is trained without any settings, whatever devices this machine has."""
    environ = {"DP": str(dp), "SKIP_SETUP": "1", "CUDA_VISIBLE_DEVICES": ""}
    return training_flags(settle(Start(preset, environ)))


@dataclass(frozen=True)
class Recomputation:
    """Which activations the backward pass recomputes (none, selective, full), and why."""

    mode: str
    why: str

    def flags(self) -> list[str]:
        if self.mode == "selective":
            return ["--recompute-granularity", "selective"]
        return ["--checkpoint-activations", "--deepspeed-activation-checkpointing"] if self.mode == "full" else []

    def __str__(self) -> str:
        return f"recomputed activations: {self.mode} ({self.why})"


def recomputation(run: Run, flags: list[str]) -> Recomputation:
    """That of RECOMPUTE. auto: as few activations as the memory of a device allows by ckpt_plan's estimate.

    Flags in EXTRA_ARGS decide instead. Wrong flags are left to check_flags and check_run, which refuse them.
    """
    if run.recompute != "auto":
        return Recomputation(run.recompute, f"RECOMPUTE={run.recompute}")
    if _RECOMPUTES.search(run.given.extra_args):
        return Recomputation("none", "by RECOMPUTE; EXTRA_ARGS says what is")
    if run.device == "cpu":
        return Recomputation("none", "on CPUs")
    if not run.interpreter.exists():
        path = run.interpreter.path
        return Recomputation(
            "full", f"memory is not estimated: there is no {path} yet; RECOMPUTE=none or selective recomputes less"
        )
    words = ["--dp", str(run.layout.dp), "--recompute-on", run.device_gb, "--", *flags]
    asked = run.interpreter.run("ckpt_plan", *words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = asked.stdout.strip()
    if asked.returncode != 0:
        return Recomputation("full", f"memory is not estimated: {_last_line(said)}")
    mode, _, why = said.partition(":")
    return Recomputation(mode, f"the fullest device holds {why.strip()}")


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _checks(run: Run, *words: str) -> subprocess.CompletedProcess[str]:
    """The checks of every rank before it imports anything heavy, done once."""
    rank = {
        "WORLD_SIZE": str(run.layout.world_size), "LOCAL_WORLD_SIZE": str(run.nodes.gpus_per_node), "RANK": "0",
        "LOCAL_RANK": "0",
    }  # fmt: skip
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return run.interpreter.run("megatron.training.check_run", *words, environ=rank, **options)


def check_run(run: Run, flags: list[str]) -> None:
    """Raises LaunchEnded if the ranks would refuse their flags or what they find, after it has printed why."""
    checked = _checks(run, *flags)
    said = (checked.stdout or checked.stderr or "").strip()
    if said:
        print(said, file=sys.stderr, flush=True)
    if checked.returncode != 0:
        raise LaunchEnded(2, said.removeprefix("error: "))


def check_new_directory(run: Run, flags: list[str]) -> None:
    """check_run for a drill, which needs a new directory: what the check creates is removed."""
    if run.saves_to_store:  # the check creates nothing there
        trace = run.work_dir / ".check"
        check_run(run, [*flags, "--restart-trace-dir", str(trace)])
        shutil.rmtree(trace, ignore_errors=True)
        return
    place = Path(run.save_dir)
    place = place / ".check" if place.exists() else place
    check_run(run, [*flags, "--save", str(place), "--load", str(place), "--restart-trace-dir", str(place / "trace")])
    shutil.rmtree(place, ignore_errors=True)


def check_flags(run: Run, flags: list[str]) -> bool:
    """The part of check_run that writes nothing and asks no object storage: for a dry run, and before a job.

    An image has an interpreter of its own, with which only the job can check. Returns whether it was checked; raises
    LaunchEnded as check_run.
    """
    if run.given.image or not run.interpreter.exists():
        where = run.given.image or run.interpreter.path
        run.say(f"flags are not checked before the launch: there is no {where} to check them with")
        return False
    options = ["--read-only", *([] if run.data.kind == GIVEN else ["--without-data"])]
    checked = _checks(run, *options, *flags)
    said = (checked.stdout or checked.stderr or "").strip()
    if checked.returncode == 2:
        print(said, file=sys.stderr, flush=True)
        raise LaunchEnded(2, said.removeprefix("error: "))
    if checked.returncode != 0:
        path = run.interpreter.path
        run.say(f"flags are not checked before the launch: {path} cannot do it: {_last_line(said)}")
    return checked.returncode == 0
