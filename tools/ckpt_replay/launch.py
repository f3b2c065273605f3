"""Starts the processes of the replayed ranks, new ones for each task, here or under a launcher."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.net.free_port import free_port

from .plan import IN_MEMORY, Preparation, ReplayError, Request, Task, result_file
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
        self._have_done(PREPARE, Preparation(request, self.notes, self.processes), self.processes[:1])
        answer = json.loads((self.notes / "answer.json").read_text())
        if "error" in answer:
            raise ReplayError(answer["error"])
        return answer

    def run(self, task: Task) -> list[dict[str, Any]] | None:
        """Have all ranks carry out `task`; returns what each measured, or None if another process receives it.

        Raises TaskError if a rank fails, after all processes of the task have ended.
        """
        self._have_done(TASK, task, self.processes)
        return json.loads(result_file(self.notes, task.index).read_text()) if self.leads else None

    def _have_done(self, what: str, asked: Preparation | Task, processes: tuple[int, ...]) -> None:
        path = self.notes / f"{what}.pickle"
        path.write_bytes(pickle.dumps(asked))
        port = None if self.launched else free_port()
        ranks = {
            number: {"environment": self._environment(number, port), "log": str(self._log(number))}
            for number in processes
        }
        assert self.server.stdin is not None and self.server.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            in_memory = isinstance(asked, Task) and asked.engine in IN_MEMORY
            message = {"what": what, "path": str(path), "ranks": ranks, "in_memory": in_memory}
            message["imports"] = [_DCP] if isinstance(asked, Preparation) and asked.request.uses_dcp else []
            self.server.stdin.write(json.dumps(message) + "\n")
            self.server.stdin.flush()
            line = self.server.stdout.readline()
        if not line:
            raise TaskError(f"the process that starts the ranks ended:\n{_end_of(self.notes / 'server.log')}")
        answer = json.loads(line)
        if answer["failed"] is not None:
            number = answer["failed"]
            raise TaskError(
                f"the process of rank {number} ended with exit code {answer['code']}:\n{_end_of(self._log(number))}"
            )

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

    def _log(self, process: int) -> Path:
        return self.notes / f"process_{process:05d}.log"


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
