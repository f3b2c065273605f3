"""Starts the processes of the replayed ranks, new ones for each task, here or under a launcher."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.net.free_port import free_port

from .plan import IN_MEMORY, Preparation, ReplayError, Request, Task, ended_file, loading_file, result_file
from .worker import PREPARE, TASK

ROOT = Path(__file__).resolve().parents[2]
_LAST_WORDS = 2000
_STOP_S = 30.0
_DCP = "torch.distributed.checkpoint"  # its import takes more than a second of processor time


class TaskError(RuntimeError):
    """A process failed; the message holds the end of what it printed."""


@dataclass(frozen=True)
class WorkerGroup:
    """The processes that this one starts: of all ranks, or under a launcher of its own rank.

    `processes`: their numbers within `world_size`; `notes`: a directory of this host; `server`:
    tools.ckpt_replay.worker.
    """

    processes: tuple[int, ...]
    world_size: int
    launched: bool
    notes: Path
    server: subprocess.Popen[str]

    @property
    def leads(self) -> bool:
        """Whether this process receives the results and reports them."""
        return 0 in self.processes

    def prepare(self, request: Request) -> dict[str, Any]:
        """The answer of tools.ckpt_replay.prepare.

        Raises ReplayError with its error, TaskError if its process failed.
        """
        (error,) = self._have_done(PREPARE, [Preparation(request, self.notes, self.processes)], self.processes[:1])
        if error is not None:
            raise error
        answer = json.loads((self.notes / "answer.json").read_text())
        if "error" in answer:
            raise ReplayError(answer["error"])
        return answer

    def run(self, task: Task) -> list[dict[str, Any]] | None:
        """Have all ranks carry out `task`; returns what each measured, or None if another process receives it.

        Raises TaskError if a rank fails, after all processes of the task have ended.
        """
        (found,) = self.run_beside([task])
        if isinstance(found, TaskError):
            raise found
        return found

    def run_beside(self, tasks: Sequence[Task]) -> list[list[dict[str, Any]] | TaskError | None]:
        """As `run`, of tasks at once; of one that fails its error, while the others go on."""
        errors = self._have_done(TASK, tasks, self.processes)
        return [
            error or (json.loads(result_file(self.notes, task.index).read_text()) if self.leads else None)
            for task, error in zip(tasks, errors, strict=True)
        ]

    def _have_done(
        self, what: str, asked: Sequence[Preparation | Task], processes: tuple[int, ...]
    ) -> list[TaskError | None]:
        """What is wrong with each of those `asked`, after all processes have ended."""
        assert self.server.stdin is not None and self.server.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            first = asked[0]
            message = {
                "what": what,
                "jobs": [self._job(what, job, each, processes) for job, each in enumerate(asked)],
                "in_memory": isinstance(first, Task) and first.engine in IN_MEMORY,
                "imports": [_DCP] if isinstance(first, Preparation) and first.request.uses_dcp else [],
            }
            self.server.stdin.write(json.dumps(message) + "\n")
            self.server.stdin.flush()
            line = self.server.stdout.readline()
        if not line:
            raise TaskError(f"the process that starts the ranks ended:\n{_end_of(self.notes / 'server.log')}")
        return [
            failed
            and TaskError(
                f"the process of rank {failed['process']} ended with exit code {failed['code']}:\n"
                f"{_end_of(self._log(job, failed['process']))}"
            )
            for job, failed in enumerate(json.loads(line)["failed"])
        ]

    def _job(self, what: str, job: int, asked: Preparation | Task, processes: tuple[int, ...]) -> dict[str, Any]:
        """What the worker needs of number `job` of those that run at once."""
        path = self.notes / f"{what}_{job}.pickle"
        path.write_bytes(pickle.dumps(asked))
        port = None if self.launched else free_port()
        ranks = {}
        for number in processes:
            ranks[number] = {"environment": self._environment(number, port), "log": str(self._log(job, number))}
            if isinstance(asked, Task) and asked.beside is not None:
                ranks[number]["ends"] = str(loading_file(self.notes, asked.index, number))
        ends = str(ended_file(self.notes, asked.index)) if isinstance(asked, Task) else None
        return {"path": str(path), "ranks": ranks, "ends": ends}

    def _environment(self, process: int, port: int | None) -> dict[str, str]:
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", "1")
        if not self.launched:
            local = {"RANK": process, "LOCAL_RANK": process, "WORLD_SIZE": self.world_size}
            local |= {"LOCAL_WORLD_SIZE": self.world_size, "LOCAL_SIZE": self.world_size}
            environment |= {name: str(value) for name, value in local.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.setdefault("LOCAL_SIZE", environment.get("LOCAL_WORLD_SIZE", "1"))
        return environment

    def _log(self, job: int, process: int) -> Path:
        return self.notes / f"process_{job}_{process:05d}.log"


@contextlib.contextmanager
def worker_group(processes: tuple[int, ...], world_size: int, launched: bool, notes: Path) -> Iterator[WorkerGroup]:
    """A WorkerGroup whose processes have ended when the context exits."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")
    with (notes / "server.log").open("wb") as log:
        command = [sys.executable, "-m", f"{__package__}.worker"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        server = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)
    try:
        yield WorkerGroup(processes, world_size, launched, notes, server)
    finally:
        server.terminate()
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _end_of(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    return text.strip()[-_LAST_WORDS:]
