"""Tiny trainings for the multi-process tests, and how their checkpoints and losses are compared."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.parallel.topology import Layout
from tests.dist.forked_writers import FORKED_WRITERS
from tests.dist.harness import Run, Zygote, losses

SINGLE = Layout(tp=1, pp=1, dp=1)
MODEL = [
    "--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "96", "--num-attention-heads", "4",
    "--seq-length", "32",
]  # fmt: skip
TRAINING = [
    "--micro-batch-size", "1", "--global-batch-size", "4", "--lr", "1e-3", "--min-lr", "1e-4",
    "--lr-decay-style", "cosine", "--lr-warmup-iters", "2", "--weight-decay", "0.1", "--log-interval", "1",
]  # fmt: skip
NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
RECOMPUTE = ["--checkpoint-activations", "--deepspeed-activation-checkpointing"]
PRECISIONS = {"bf16": ["--bf16"], "fp32": [], "fp16": ["--fp16"]}


@dataclass(frozen=True)
class Launcher:
    """Starts trainings on one dataset with their logs under one directory."""

    zygote: Zygote
    dataset: Sequence[str]
    directory: Path

    def run(
        self,
        layout: Layout,
        *flags: str | Path,
        during: Callable[[list[int]], None] | None = None,
        env: Mapping[str, str] | None = None,
        forked_writers: bool = True,
        **options: Any,
    ) -> Run:
        """Launch pretrain_gpt.py (or `script`) on all ranks of `layout` and return when they have ended.

        `forked_writers` saves the imports of the processes that engine fastpersist-decoupled and exports start.
        """
        argv = [*self.dataset, *parallel(layout), *map(str, flags)]
        environment = ({FORKED_WRITERS: "1"} if forked_writers else {}) | dict(env or {})
        logs = self.directory / "logs"
        return self.zygote.run(argv, layout.world_size, logs, env=environment, during=during, **options)

    def train(self, layout: Layout, *flags: str | Path, **options: Any) -> Run:
        """`run` that must succeed."""
        finished = self.run(layout, *flags, **options)
        assert finished.ok, f"exit codes {finished.exit_codes}:\n{finished.output[-6000:]}"
        return finished


def parallel(layout: Layout) -> list[str]:
    """Flags of a layout; DP follows from the number of processes."""
    flags = ["--tensor-model-parallel-size", str(layout.tp), "--pipeline-model-parallel-size", str(layout.pp)]
    return flags if layout.ep == 1 else [*flags, "--moe-expert-parallel-size", str(layout.ep)]


def saving(directory: Path, interval: int) -> list[str]:
    """Flags to save to `directory`; its restart trace lies in `directory`/restart_trace."""
    return ["--save", str(directory), "--save-interval", str(interval), "--verify-restored-state"]


def buffered_saving(directory: Path, interval: int) -> list[str]:
    """`saving` for tests that do not ask what outlives a power failure: no rank waits for the disk."""
    return ["--checkpoint-durability", "none", *saving(directory, interval)]


def losses_of_ranks(save: Path, layout: Layout, cycle: int | None = 0) -> list[dict[int, float]]:
    """Per rank: iteration -> loss with all its bits, of the run that saves to `save`."""
    found = [losses(save / "restart_trace", cycle, rank) for rank in range(layout.world_size)]
    assert all(found), f"a rank of {save} recorded no iteration"
    return found


def from_iteration(per_rank: list[dict[int, float]], first: int) -> list[dict[int, float]]:
    """The losses from iteration `first` on."""
    return [{step: loss for step, loss in mine.items() if step >= first} for mine in per_rank]


def hashes(checkpoint: Path, layout: Layout) -> list[dict[str, str]]:
    """Per rank: the recorded hash of every live tensor at the time of the save."""
    found = [
        json.loads((checkpoint / f"tensor_hashes_rank_{rank:05d}.json").read_text())
        for rank in range(layout.world_size)
    ]
    assert all(found), f"a rank of {checkpoint} recorded no hash"
    return found


def sha256(tensor: torch.Tensor) -> str:
    """SHA-256 of the bytes of a tensor."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def load_file(path: Path) -> Any:
    """The content of a checkpoint file that a test has had written itself."""
    return torch.load(path, map_location="cpu", weights_only=False)


def state_files(checkpoint: Path) -> list[str]:
    """Names of the files with state in a checkpoint directory."""
    names = sorted(path.name for path in checkpoint.glob("*.pt"))
    assert names, f"{checkpoint} holds no state"
    return names


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Every file of two checkpoints holds the same state, bit for bit; only command lines may differ."""
    assert state_files(one) == state_files(other)
    for name in state_files(one):
        found = differences(load_file(one / name), load_file(other / name), name)
        assert not found, found


def differences(one: Any, other: Any, where: str) -> list[str]:
    """Paths at which two nests of state differ in type, dtype, shape or any bit."""
    if type(one) is not type(other):
        return [f"{where}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, argparse.Namespace):  # the command line: it names directories
        return []
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and sha256(one) == sha256(other)
        return [] if same else [f"{where}: tensors differ"]
    if isinstance(one, np.ndarray):
        return [] if one.dtype == other.dtype and np.array_equal(one, other) else [f"{where}: arrays differ"]
    if isinstance(one, Mapping):
        if list(one) != list(other):
            return [f"{where}: keys {list(one)} and {list(other)}"]
        pairs = [(f"{where}/{key}", one[key], other[key]) for key in one]
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{where}: {len(one)} and {len(other)} items"]
        pairs = [(f"{where}/{i}", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    elif hasattr(one, "__dict__") and type(one).__eq__ is object.__eq__:
        pairs = [(where, vars(one), vars(other))]
    else:
        return [] if one == other else [f"{where}: {one!r} and {other!r}"]
    return [line for path, a, b in pairs for line in differences(a, b, path)]
