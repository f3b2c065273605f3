"""Opens the trace of a rank: claims the cycle, creates the file, writes its first record."""

from __future__ import annotations

import functools
import os
import platform
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron.restart_trace import clock, cycles
from megatron.restart_trace.probes import make_probe
from megatron.restart_trace.recorder import NullRecorder, Recorder
from megatron.restart_trace.schema import RANK_FILE_PATTERN
from megatron.restart_trace.sink import JsonlSink

_PACKAGES = ("torch", "deepspeed", "numpy", "torchsnapshot", "datastates")
_ENVIRONMENT_PREFIXES = (
    "NCCL_", "GLOO_", "OMP_", "CUDA_VISIBLE", "TORCH_NCCL", "TORCHELASTIC_", "RESTART_TRACE_",
)  # fmt: skip
_ENVIRONMENT_NAMES = (
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE",
    "CROSS_RANK", "CROSS_SIZE", "DS_ACCELERATOR", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID",
    "PBS_JOBID", "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip


@dataclass(frozen=True)
class RankIdentity:
    """Who this process is: global rank, world size, coordinates and sizes of the layout."""

    rank: int
    world_size: int
    local_rank: int
    coordinates: tuple[int, int, int]  # (tp, pp, dp)
    layout: tuple[int, int, int]  # (TP, PP, DP)


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python and of installed packages that matter to a restart; imports none of them."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """The allow-listed part of an environment: nothing that could hold a secret."""
    return {
        name: value
        for name, value in sorted(env.items())
        if name in _ENVIRONMENT_NAMES or name.startswith(_ENVIRONMENT_PREFIXES)
    }


def process_fields(env: Mapping[str, str]) -> dict[str, Any]:
    """What the first record of a file says about the process itself."""
    anchor = clock.read_anchor()
    started = clock.process_start_ns()
    return {
        "host": socket.gethostname(),
        "boot_id": clock.boot_id(),
        "pid": os.getpid(),
        "process_start_ns": anchor.monotonic_ns if started is None else started,
        "process_start_source": "python" if started is None else "os",
        "wall_ns": anchor.wall_ns,
        "monotonic_ns": anchor.monotonic_ns,
        "anchor_error_ns": anchor.error_ns,
        "versions": versions(),
        "environment": environment(env),
        "argv": sys.argv,
    }


def open_rank_trace(
    trace_dir: Path | None,
    identity: RankIdentity,
    env: Mapping[str, str],
    *,
    engine_asked: str,
    durability: str,
    probes: bool,
) -> tuple[Recorder, int]:
    """Open `rank_RRRRR_cycle_CCC.jsonl` in `trace_dir` and write the process record.

    Returns (recorder, cycle); a NullRecorder and cycle 0 if `trace_dir` is None.
    Raises OSError if the directory cannot be written.
    """
    if trace_dir is None:
        return NullRecorder(), 0
    run_id, cycle = cycles.claim_cycle(trace_dir, cycles.launch_key(env), identity.rank)
    sink = JsonlSink(trace_dir / RANK_FILE_PATTERN.format(rank=identity.rank, cycle=cycle))
    tp, pp, dp = identity.coordinates
    common = {"run_id": run_id, "cycle": cycle, "rank": identity.rank, "tp": tp, "pp": pp, "dp": dp}
    recorder = Recorder(sink, common, make_probe(identity.local_rank) if probes else None)
    recorder.write(
        "process",
        role="rank",
        world_size=identity.world_size,
        layout=dict(zip(("tp", "pp", "dp"), identity.layout, strict=True)),
        engine_asked=engine_asked,
        durability=durability,
        **process_fields(env),
    )
    return recorder, cycle
