"""Turns a forked process into a rank, as a launcher would have started it."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from typing import NoReturn

from megatron.launch.plan import Plan
from megatron.launch.rendezvous_store import STORE_VARIABLES
from megatron.processes.in_process_restart import InProcessRestarts
from megatron.processes.parent_process import SHUTDOWN_TIMEOUT_VARIABLE, end_with_parent
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
        SHUTDOWN_TIMEOUT_VARIABLE: plan.shutdown_timeout_s,
    }
    text = {name: str(value) for name, value in found.items()} | STORE_VARIABLES
    text["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return text | ({PRELOAD_VARIABLE: preloaded.to_text()} if preloaded is not None else {})


def become_rank(
    plan: Plan,
    local_rank: int,
    restart: int,
    port: int,
    launcher: int,
    preloaded: Preload | None,
    connection: socket.socket | None = None,
) -> NoReturn:
    """Run the script as the rank; raises SystemExit with its exit code, or what the script raises.

    `connection`: to the launcher, with --in-process-restart: the script is run again when the launcher says so.
    """
    os.setsid()  # as torchrun does: the processes that a rank starts are found by its process group
    end_with_parent(launcher)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.pop(PRELOAD_VARIABLE, None)
    os.environ.update(rank_environment(plan, local_rank, restart, port, preloaded))
    if connection is None:
        _run(plan)
    restarts = InProcessRestarts(connection, launcher, plan.return_timeout_s)
    while True:
        try:
            _run(plan)
        except BaseException as error:
            if not restarts.follows(error):
                raise
        # The exception is gone here, and with it the frames that hold what the script has built.
        environment = restarts.wait_for_start()
        os.environ.clear()
        os.environ.update(environment)


def _run(plan: Plan) -> NoReturn:
    sys.argv = [plan.script, *plan.arguments]
    runpy.run_path(plan.script, run_name="__main__")
    raise SystemExit(0)
