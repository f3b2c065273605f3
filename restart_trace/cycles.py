"""Which restart of the run is this? All ranks of a launch agree on the cycle through the trace directory.

A collective is not available that early, and the trace must not add one. The first rank of a launch claims the next
cycle number by creating `cycle_NNN.json` (link(2) makes name and content appear at once); the others find their own
launch in that file and join. The directory holds a file for every rank and cycle, so once a cycle was claimed no rank
lists it: numbers have no gaps, and the newest is found by testing a few names.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from restart_trace import clock
from restart_trace.ancestors import launcher_of
from restart_trace.redaction import redact_text
from restart_trace.regular import read_regular
from restart_trace.schema import CYCLE_FILE_PATTERN, CYCLE_FILE_REGEX, RANK_FILE_PATTERN

LAUNCH_ID_VARIABLE = "RESTART_TRACE_LAUNCH_ID"
LAUNCHER_VARIABLES = (
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID",
)  # fmt: skip

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def is_restart_in_place(env: Mapping[str, str]) -> bool:
    """Whether this rank's launcher (torchrun's agent or megatron.launch) has started ranks before."""
    return env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def job_key(env: Mapping[str, str]) -> str:
    """A key that is equal on all ranks of a launch, however each was started. The next launch may have the same key.

    It is RESTART_TRACE_LAUNCH_ID, or rendezvous address, run id and job step as the launcher gives them. Unlike
    `launch_key` it is also equal if each rank has its own wrapper that sets RANK, and in a restart in place, whose
    count may differ between the agents of several nodes.
    """
    return redact_text(env.get(LAUNCH_ID_VARIABLE, "")) or "/".join(_launcher_parts(env))


def _launcher_parts(env: Mapping[str, str]) -> list[str]:
    return [redact_text(env.get(name, "")) for name in LAUNCHER_VARIABLES]


def launch_key(env: Mapping[str, str]) -> str:
    """Identity of a launch, equal on all its ranks and different in the next launch.

    It is RESTART_TRACE_LAUNCH_ID if the launching script exports it; otherwise rendezvous address and run id, scheduler
    job step and, on a single node, the launcher process. Each elastic restart in place counts as a launch.
    """
    restarts = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    explicit = redact_text(env.get(LAUNCH_ID_VARIABLE, ""))
    if explicit:
        return f"{explicit}/{restarts}"
    parts = _launcher_parts(env)
    # torchrun exports LOCAL_WORLD_SIZE, the deepspeed launcher LOCAL_SIZE. With neither it is unknown whether
    # all ranks share one parent, so no parent is part of the key.
    local = env.get("LOCAL_WORLD_SIZE") or env.get("LOCAL_SIZE")
    if local == env.get("WORLD_SIZE") or env.get("WORLD_SIZE", "1") == "1":
        owner = (launcher_of(env, _RANK_VARIABLES) or os.getppid()) if "RANK" in env else os.getpid()
        parts += [str(owner), str(clock.process_start_ticks(owner))]
    return "/".join([*parts, restarts])


def claim_cycle(trace_dir: Path, key: str, rank: int) -> tuple[str, int]:
    """Return (run_id, cycle) of this launch; claim the next cycle if no rank of the launch has done so yet.

    A launch with the key of the newest cycle joins that cycle, unless this rank already has a file there: then the
    launcher was started again with the same key, and a new cycle begins.
    Raises OSError if `trace_dir` cannot be written.
    """
    make_directory(trace_dir)
    while True:
        newest = newest_cycle(trace_dir)
        if newest is not None:
            cycle, claim = newest
            mine = trace_dir / RANK_FILE_PATTERN.format(rank=rank, cycle=cycle)
            if claim["launch_key"] == key and not mine.exists():
                return claim["run_id"], cycle
        cycle = 0 if newest is None else newest[0] + 1
        run_id = os.urandom(6).hex() if newest is None else newest[1]["run_id"]
        if _create(trace_dir / CYCLE_FILE_PATTERN.format(cycle=cycle), run_id, cycle, key):
            return run_id, cycle


def make_directory(trace_dir: Path) -> None:
    """Create the directory of a trace if it is missing. Raises OSError."""
    try:
        trace_dir.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(trace_dir)) from None


def newest_cycle(trace_dir: Path) -> tuple[int, dict[str, str]] | None:
    """(number, content) of the newest cycle claimed in `trace_dir`; None if there is none.

    Raises OSError if its file cannot be read or was not written by `claim_cycle`.
    """
    number = _last_claimed(trace_dir)
    if number is None:
        return None
    path = trace_dir / CYCLE_FILE_PATTERN.format(cycle=number)
    try:
        content = json.loads(read_regular(path))
        damaged = not all(isinstance(content[name], str) for name in ("run_id", "launch_key"))
    except (ValueError, KeyError, TypeError, RecursionError):
        damaged = True
    if damaged:
        raise OSError(errno.EINVAL, "is not a cycle file; remove it, or give another trace directory", str(path))
    return number, content


def _last_claimed(trace_dir: Path) -> int | None:
    """The highest cycle number below the first gap, found by testing names in steps that double, then halve.

    Without number 0 the directory is listed: either nothing was claimed yet and it is short, or file 0 was removed.
    """

    def claimed(cycle: int) -> bool:
        return os.path.lexists(trace_dir / CYCLE_FILE_PATTERN.format(cycle=cycle))

    if not claimed(0):
        listed = [int(m.group(1)) for p in trace_dir.iterdir() if (m := re.match(CYCLE_FILE_REGEX, p.name))]
        return max(listed, default=None)
    low, high = 0, 1
    while claimed(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if claimed(middle) else (low, middle)
    return low


def _create(path: Path, run_id: str, cycle: int, key: str) -> bool:
    """Create the claim file at once with its content; False if another rank was first."""
    anchor = clock.read_anchor()
    content = {"run_id": run_id, "cycle": cycle, "launch_key": key, "wall_ns": anchor.wall_ns}
    # Random, since ranks on different hosts may have equal process ids.
    temporary = path.with_name(f".{path.name}.{os.urandom(16).hex()}.tmp")
    temporary.write_text(json.dumps(content) + "\n")
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True
