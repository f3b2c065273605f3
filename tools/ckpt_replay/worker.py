"""The processes of the ranks: `python -m tools.ckpt_replay.worker` imports all heavy modules once and forks them.

Reads one JSON object per line from its standard input: `what` ("prepare" or "task"), `jobs` that run at once, each with
the `path` of its pickle, `ranks`: process -> {"environment", "log", "ends"} and `ends` (files that are made when the
process, or the job, has ended), `in_memory`: whether the task's engine saves only to host memory, `imports`: modules
that the forked processes of this task and of later ones use. Answers with {"failed": [{"process", "code"} or null, of
each job]} when all have ended; if a process fails, the others of its job are killed. A forked process inherits the
imports of this process, and otherwise starts with fresh memory.

With devices, which do not survive a fork, each process is a new interpreter instead: `... worker WHAT PATH PROCESS`.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from megatron.processes.parent_process import end_with_parent
from restart_trace.devices import available_accelerator

from .plan import LOAD_BESIDE, LOAD_COLD, LOAD_WARM, SAVE, Task, result_file

PREPARE, TASK = "prepare", "task"


def carry_out(what: str, path: Path, process: int) -> None:
    """Run process number `process` of a task. Writes its result to a file."""
    if what == PREPARE:
        from .prepare import prepare

        return prepare(path)
    from .context import joined

    task: Task = pickle.loads(path.read_bytes())
    with joined(task) as ctx:
        gathered = ctx.control.gather(_measure(ctx))
        if gathered is not None:
            result_file(task.notes, task.index).write_text(json.dumps(gathered))


def _measure(ctx: Any) -> dict[str, Any]:
    if ctx.task.kind == SAVE:
        from .saving import run_saves

        return run_saves(ctx)
    if ctx.task.kind in (LOAD_COLD, LOAD_WARM, LOAD_BESIDE):
        from .loading import run_loads, run_loads_beside

        return run_loads_beside(ctx) if ctx.task.kind == LOAD_BESIDE else run_loads(ctx)
    from .storage import measure

    return measure(ctx)


class _Server:
    """Forks the requested processes, and waits for them."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # output of imports must not be read as an answer
        self._running: dict[int, tuple[int, int]] = {}  # process id -> number of its job, and of the process there
        self._forks = True
        self._kept: dict[
            str, str
        ] = {}  # variables by which ranks find saves in memory, set for the first engine that has them

    def serve(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        from megatron.startup.initialize import import_heavy

        import_heavy()
        # Imports of all tasks, so that no forked process takes time or memory for them.
        from . import loading, saving, storage  # noqa: F401

        self._forks = available_accelerator() is None
        gc.collect()
        gc.freeze()
        for line in sys.stdin:
            request = json.loads(line)
            if request["in_memory"] and self._forks and not self._kept:
                from .host_memory import HeldMemory

                self._kept = HeldMemory(len(request["jobs"][0]["ranks"])).environment
            for module in request["imports"] if self._forks else ():
                importlib.import_module(module)
            jobs = request["jobs"]
            for index, job in enumerate(jobs):
                for number, settings in job["ranks"].items():
                    pid = self._start(request["what"], Path(job["path"]), int(number), settings)
                    self._running[pid] = index, int(number)
            self._answers.write(json.dumps({"failed": self._wait(jobs)}) + "\n")
            self._answers.flush()

    def _start(self, what: str, path: Path, number: int, settings: dict[str, Any]) -> int:
        """The id of the new process."""
        if not self._forks:
            command = [sys.executable, "-m", f"{__package__}.worker", what, str(path), str(number)]
            with open(settings["log"], "wb") as log:
                started = subprocess.Popen(
                    command, env=settings["environment"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            return started.pid
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(server, what, path, number, settings)
        return pid

    def _become(self, server: int, what: str, path: Path, number: int, settings: dict[str, Any]) -> NoReturn:
        """In the forked process: run the rank, then exit as a forked process of multiprocessing does.

        A normal exit would tear down all imported modules, whose pages would first be copied: 0.3 s of processor time.
        """
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._running = {}
        end_with_parent(server)  # which SIGTERM may have ended before it has noted this process
        os.environ.clear()
        os.environ.update(settings["environment"] | self._kept)
        log = os.open(settings["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = 1
        try:
            carry_out(what, path, number)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _wait(self, jobs: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
        """Wait for all running processes; if one fails, kill the others of its job. Which of each job failed first."""
        failed: list[dict[str, Any] | None] = [None] * len(jobs)
        while self._running:
            pid, status = os.wait()
            if pid not in self._running:
                continue
            index, number = self._running.pop(pid)
            job, code = jobs[index], os.waitstatus_to_exitcode(status)
            if code and failed[index] is None:
                failed[index] = {"process": number, "code": code}
                self._kill(index)
            made = [job["ranks"][str(number)].get("ends")]
            made += [job["ends"]] * all(other != index for other, _ in self._running.values())
            for path in filter(None, made):
                Path(path).touch()
        return failed

    def _kill(self, job: int | None = None) -> None:
        """The processes of a job, or all."""
        for pid, (index, _) in self._running.items():
            if job in (None, index):
                os.kill(pid, signal.SIGKILL)

    def _stop(self) -> None:
        self._kill()
        for pid in self._running:
            os.waitpid(pid, 0)
        os._exit(128 + signal.SIGTERM)


def main() -> None:
    end_with_parent()
    if len(sys.argv) == 1:
        _Server().serve()
        return
    what, path, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    from megatron.startup.initialize import import_heavy

    import_heavy()
    carry_out(what, path, number)


if __name__ == "__main__":
    main()
