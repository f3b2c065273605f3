"""Starts ranks of pretrain_gpt.py as real processes, forked from one that has imported torch and DeepSpeed.

Each rank is a process of its own with its own gloo connections, as under a launcher; only the seconds of import
are paid once per test session. Run as a program: reads one JSON request per line from stdin
({"argv", "env", "nproc", "log_dir", "script", "launcher"}), answers {"pids": [...]} when the ranks run and
{"exit_codes": [...]} when all have ended. Negative exit codes are signals, as in subprocess. After {"forks": true} a
process that it forks serves a ForkServer (forked_writers.py) on the descriptor that is its first argument, and {} is
the answer. Further arguments are modules to import before it forks.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def rank_environment(rank: int, nproc: int, port: int, store_variables: dict[str, str]) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "LOCAL_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCHELASTIC_RESTART_COUNT": "0",
        **store_variables,
        "RESTART_TRACE_LAUNCH_ID": f"test-{port}-{os.urandom(4).hex()}",
    }


def run_rank(request: dict[str, Any], environment: dict[str, str]) -> int:
    """In the forked process: become a rank. Returns the exit code."""
    os.environ.update(environment | request["env"])
    log = os.open(
        Path(request["log_dir"]) / f"rank_{environment['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    import megatron.config.arguments
    from tests.dist import forked_writers

    sys.argv = ["pretrain_gpt.py", *request["argv"]]
    if not request.get("launcher"):  # which would kill the others before rank 0 has told its error
        megatron.config.arguments.OTHER_RANKS_WAIT_S = 0.2
    if forked_writers.FORKED_WRITERS in os.environ:
        # Its helper forms a process group, and a rank has one by the time that it begins it.
        forked_writers.install(forked_writers.ForkServer.begin() if "dcp-process" in sys.argv else None)
    try:
        runpy.run_path(request.get("script") or str(ROOT / "pretrain_gpt.py"), run_name="__main__")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def wait_for_all(pids: list[int], launcher: bool) -> list[int]:
    """Exit codes of all ranks. A launcher sends SIGTERM to the others as soon as one of them fails.

    They are reaped together: until then the number of none is another process's, which a test could harm.
    """
    from megatron.processes.parent_process import pidfd_open

    codes: dict[int, int] = {}
    running = {pidfd_open(pid): pid for pid in pids}
    poller = select.poll()
    for descriptor in running:
        poller.register(descriptor, select.POLLIN)
    while running:
        for descriptor, _ in poller.poll():
            poller.unregister(descriptor)
            os.close(descriptor)
            pid = running.pop(descriptor)
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            codes[pid] = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            if launcher and codes[pid] != 0:
                for other in running.values():
                    os.kill(other, signal.SIGTERM)
    for pid in pids:
        os.waitpid(pid, 0)
    return [codes[pid] for pid in pids]


def serve() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(ROOT))
    from megatron.launch.rendezvous_store import STORE_VARIABLES, RendezvousStore
    from megatron.peers.memory_slots import hold_slots, let_go_of_slots
    from megatron.training.heavy_imports import import_for_forks

    import_for_forks()
    gc.disable()
    import megatron.checkpointing.engines.dcp.engine  # noqa: F401  half a second of each rank that uses it
    from tests.dist.forked_writers import serve_forks_beside
    from tests.huge_pages import gather_memory

    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # a collection in a rank would look at all that, and copy its memory
    gc.enable()
    gather_memory()

    for line in sys.stdin:
        request = json.loads(line)
        if request.get("forks"):
            serve_forks_beside(int(sys.argv[1]))
            print(json.dumps({}), flush=True)
            continue
        store = RendezvousStore("127.0.0.1", 0).serve()
        nproc = request["nproc"]
        hold_slots(nproc)  # as a launcher does, for one launch
        environments = [rank_environment(rank, nproc, store.port, STORE_VARIABLES) for rank in range(nproc)]
        for environment in environments:
            environment["RESTART_TRACE_LAUNCH_ID"] = environments[0]["RESTART_TRACE_LAUNCH_ID"]
        pids = []
        for environment in environments:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = run_rank(request, environment)
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            pids.append(pid)
        print(json.dumps({"pids": pids}), flush=True)
        codes = wait_for_all(pids, bool(request.get("launcher")))
        store.close()
        let_go_of_slots()
        print(json.dumps({"exit_codes": codes}), flush=True)


if __name__ == "__main__":
    serve()
