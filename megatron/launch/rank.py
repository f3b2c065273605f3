"""Turns a forked process into a rank, as a launcher would have started it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from megatron.config.arguments import EXIT_CODE
from megatron.launch.plan import Plan
from megatron.processes.parent_process import end_with_parent
from megatron.processes.rendezvous_store import STORE_VARIABLES
from restart_trace.startup import PRELOAD_VARIABLE, Preload


def rank_environment(plan: Plan, local_rank: int, restart: int, port: int, preloaded: Preload | None) -> dict[str, str]:
    """The variables that a rank has in addition to the launcher's: torchrun's, and DeepSpeed's LOCAL_SIZE."""
    rank = plan.rank(local_rank)
    found = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": plan.node_rank,
        "WORLD_SIZE": plan.world_size,
        "LOCAL_WORLD_SIZE": plan.nproc_per_node,
        "GROUP_WORLD_SIZE": plan.nnodes,
        "LOCAL_SIZE": plan.nproc_per_node,
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": restart,
        "TORCHELASTIC_MAX_RESTARTS": plan.max_restarts,
    }
    text = {name: str(value) for name, value in found.items()} | STORE_VARIABLES
    text["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return text | ({PRELOAD_VARIABLE: preloaded.to_text()} if preloaded is not None else {})


def become_rank(
    plan: Plan, local_rank: int, restart: int, port: int, launcher: int, preloaded: Preload | None
) -> NoReturn:
    """Run the script as the rank; raises SystemExit with its exit code, or what the script raises."""
    os.setsid()  # as torchrun does: the processes that a rank starts are found by its process group
    end_with_parent(launcher)
    os.environ.pop(PRELOAD_VARIABLE, None)
    os.environ.update(rank_environment(plan, local_rank, restart, port, preloaded))
    _check_cuda()
    sys.argv = [plan.script, *plan.arguments]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    runpy.run_path(plan.script, run_name="__main__")
    raise SystemExit(0)


def cuda_problem(torch: Any, env: Mapping[str, str]) -> str | None:
    """Why CUDA would refuse to work in this forked process; None if it works, or is not used.

    `torch` is the module, or None where nobody has imported it. DS_ACCELERATOR is cpu where the launcher saw no CUDA
    device. With a CUDA build of torch and no driver even that look counts as initialising CUDA, and does no harm.
    """
    if torch is None or env.get("DS_ACCELERATOR") == "cpu" or not torch.cuda._is_in_bad_fork():
        return None
    return (
        "CUDA was initialised before the ranks were forked (is NVML missing?), and cannot be used in them; use torchrun"
    )


def _check_cuda() -> None:
    """Raises SystemExit if CUDA would refuse to work in this process."""
    problem = cuda_problem(sys.modules.get("torch"), os.environ)
    if problem is not None:
        print(f"[launch] error: {problem}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CODE)
