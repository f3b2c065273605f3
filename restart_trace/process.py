"""Opens the trace of a rank: claims the cycle, creates the file, writes its first record."""

from __future__ import annotations

import functools
import os
import platform
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from restart_trace import cgroups, clock, cycles
from restart_trace.probes import make_probe
from restart_trace.recorder import Recorder, given, untraced_recorder
from restart_trace.redaction import redact_command, redact_text
from restart_trace.schema import RANK_FILE_PATTERN
from restart_trace.sink import JsonlSink

_PACKAGES = ("torch", "deepspeed", "numpy", "torchsnapshot", "datastates")
# The variables that matter to a restart. Complete names, no prefixes: a plugin may name a variable NCCL_AUTH_TOKEN.
_ENVIRONMENT_NAMES = frozenset((
    *cycles.LAUNCHER_VARIABLES, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE",
    "CROSS_RANK", "CROSS_SIZE", "DS_ACCELERATOR", "SLURM_NODEID", "PYTHONDONTWRITEBYTECODE",
    "RESTART_TRACE_LABEL", "RESTART_TRACE_LAUNCH_ID", "RESTART_TRACE_PRELOAD", "MEGATRON_MEMORY_COPIES",
    "MEGATRON_STANDBY",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_DYNAMIC", "OMP_SCHEDULE", "OMP_WAIT_POLICY",
    "GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT", "TORCH_GLOO_LAZY_INIT",
    "NCCL_ALGO", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_BUFFSIZE", "NCCL_COLLNET_ENABLE",
    "NCCL_COMM_BLOCKING", "NCCL_CROSS_NIC", "NCCL_CUMEM_ENABLE", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_IB_DISABLE",
    "NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_RETRY_CNT", "NCCL_IB_SL",
    "NCCL_IB_TC", "NCCL_IB_TIMEOUT", "NCCL_LAUNCH_MODE", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NET",
    "NCCL_NET_GDR_LEVEL", "NCCL_NET_PLUGIN", "NCCL_NSOCKS_PERTHREAD", "NCCL_NTHREADS", "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO", "NCCL_RUNTIME_CONNECT", "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_FAMILY", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_NTHREADS", "NCCL_TOPO_FILE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_COORD_CHECK_MILSEC", "TORCH_NCCL_DESYNC_DEBUG", "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "TORCH_NCCL_HIGH_PRIORITY", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_USE_COMM_NONBLOCKING",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
))  # fmt: skip


@dataclass(frozen=True)
class RankIdentity:
    """Identity of a rank: global rank, world size, coordinates and sizes of the layout."""

    rank: int
    world_size: int
    local_rank: int
    coordinates: tuple[int, int, int]  # (tp, pp, dp)
    layout: tuple[int, int, int]  # (TP, PP, DP)
    sequence: tuple[int, int] = (0, 1)  # which part of each sequence it has, and of how many
    experts: tuple[int, int] = (0, 1)  # which part of a layer's experts it holds, and of how many


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python, the kernel and the installed packages that matter to a restart. Imports none of them."""
    from importlib import metadata  # a quarter of what importing the hooks takes, and only ranks need it

    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """The allow-listed variables of an environment, without passwords in URLs."""
    return {name: redact_text(value) for name, value in sorted(env.items()) if name in _ENVIRONMENT_NAMES}


def cores() -> str | None:
    """The cores that this process may run on, as the kernel lists them ("0-3,8"); None where it does not tell."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next((line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list:")), None)


def process_fields(env: Mapping[str, str]) -> dict[str, Any]:
    """The fields of the first record of a file that describe the process."""
    anchor = clock.read_anchor()
    started = clock.process_start_ns()
    return {
        "host": socket.gethostname(),
        "boot_id": clock.boot_id(),
        "pid": os.getpid(),
        **given({"cores": cores(), "cpu_limit": cgroups.cpu_limit()}),
        "process_start_ns": anchor.monotonic_ns if started is None else started,
        "process_start_source": "python" if started is None else "os",
        "wall_ns": anchor.wall_ns,
        "monotonic_ns": anchor.monotonic_ns,
        "anchor_error_ns": anchor.error_ns,
        "versions": versions(),
        "environment": environment(env),
        "argv": redact_command(sys.argv),
    }


def rank_fields(
    identity: RankIdentity,
    env: Mapping[str, str],
    *,
    run_id: str,
    cycle: int,
    engine_asked: str | None = None,
    durability: str | None = None,
    instrument: str = "trainer",
    returns: int | None = None,
) -> dict[str, Any]:
    """The first record of a rank's file, without its version and type."""
    tp, pp, dp = identity.coordinates
    layout = dict(zip(("tp", "pp", "dp"), identity.layout, strict=True))
    more = {axis: of for axis, of in (("cp", identity.sequence), ("ep", identity.experts)) if of[1] > 1}
    asked = {"engine_asked": engine_asked, "durability": durability, "returns": returns}
    return {
        "run_id": run_id,
        "cycle": cycle,
        "rank": identity.rank,
        "tp": tp,
        "pp": pp,
        "dp": dp,
        **{axis: part for axis, (part, _) in more.items()},
        "role": "rank",
        "instrument": instrument,
        "world_size": identity.world_size,
        "layout": layout | {axis: parts for axis, (_, parts) in more.items()},
        **given(asked),
        **process_fields(env),
    }


def open_rank_trace(
    trace_dir: Path | None,
    identity: RankIdentity,
    env: Mapping[str, str],
    *,
    engine_asked: str,
    durability: str,
    probes: bool,
    returns: int = 0,
) -> tuple[Recorder, int]:
    """Open `rank_RRRRR_cycle_CCC.jsonl` in `trace_dir` and write the process record.

    `returns`: how often this process has returned from a start before, for in-process restarts.

    Returns (recorder, cycle); if `trace_dir` is None, a recorder that records nothing, and cycle 0.
    Raises OSError if the directory cannot be written.
    """
    if trace_dir is None:
        return untraced_recorder(), 0
    run_id, cycle = cycles.claim_cycle(trace_dir, cycles.launch_key(env), identity.rank)
    sink = JsonlSink(trace_dir / RANK_FILE_PATTERN.format(rank=identity.rank, cycle=cycle))
    process = rank_fields(
        identity, env, run_id=run_id, cycle=cycle, engine_asked=engine_asked, durability=durability, returns=returns
    )
    return Recorder(sink, process, make_probe(identity.local_rank) if probes else None), cycle
