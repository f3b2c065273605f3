"""Some of the ranks of a simulated job, each a thread of this process; no torch.

Run as a program: the first argument is a Task as JSON; then a command per line on stdin, answered by a line on stdout.
Everything that a rank does is the code of a training: trees and control planes, the writer of checkpoints, the
discovery of a load, the checks of a start, the trace. Only its files are small, and its engine writes bytes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pickle
import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.checkpointing.engines.base import CheckpointEngine, EngineOptions, FileState, SavedFile
from megatron.checkpointing.load.storage import DirectorySource
from megatron.checkpointing.save.writer import CheckpointIdentity, CheckpointWriter, Save, SaveDirectory
from megatron.checkpointing.store.ownership import Ownership, check_not_in_use, claim
from megatron.config.arguments import config_from_args, parse_args
from megatron.parallel import control_plane
from megatron.parallel.connecting import Listener, Neighbours, Where
from megatron.parallel.control_plane import ControlPlane
from megatron.parallel.tree import Tree
from megatron.startup.once_per_host import once_per_host
from megatron.startup.preflight import check_before_imports
from restart_trace.clock import now_ns
from restart_trace.process import RankIdentity, open_rank_trace
from restart_trace.recorder import Operation, untraced_operation, untraced_recorder

RANKS_PER_HOST = 8
FILES_PER_RANK = 3
_TREES = 2
_TIMEOUT_S = 600.0
_LONG = 1 << 16  # bytes
_STACK = 256 << 10  # bytes


@dataclass(frozen=True)
class Task:
    """What this process has to be: these of `world_size` ranks. `flags`: of the training that they simulate."""

    world_size: int
    ranks: Sequence[int]
    directory: str
    flags: Sequence[str]
    mark: bool = False  # by system calls, where each operation begins and ends


class BytesEngine(CheckpointEngine):
    """Writes the bytes that it is given."""

    name = "torch"

    def _save_file(self, file: FileState, directory: Path, op: Operation) -> SavedFile:
        (directory / file.name).write_bytes(file.state)
        return SavedFile(file.name, len(file.state), "none")


class SimulatedRank:
    """One of them."""

    def __init__(self, task: Task, rank: int) -> None:
        self.rank = rank
        self._task = task
        self._listener = Listener(rank, f"host{rank // RANKS_PER_HOST}", "127.0.0.1")
        self._trees: list[Tree] = []
        self._writer: CheckpointWriter | None = None
        self._ownership: Ownership | None = None
        self._save = Path(task.directory) / "save"
        self.where = self._listener.where

    def connect(self, neighbours: Neighbours) -> int:
        """How many connections it has."""
        self._trees = self._listener.connect(neighbours, _TREES, _TIMEOUT_S)
        self.control, commits = (ControlPlane(self.rank, self._task.world_size, tree) for tree in self._trees)
        identity = CheckpointIdentity({"tp": 1, "pp": 1, "dp": self._task.world_size}, {})
        engine = BytesEngine(EngineOptions(fsync=False))
        self._writer = CheckpointWriter(engine, self.control, untraced_recorder(), identity, "0", commits)
        return sum(tree.connections for tree in self._trees)

    def claim(self, launch: str) -> None:
        """Claim the directory of saves, or see that it can be claimed."""
        self._save.mkdir(exist_ok=True)
        if self.rank == 0:
            self._ownership = claim(self._save, launch)
        else:
            check_not_in_use(self._save, launch, first_of_host=self.rank % RANKS_PER_HOST == 0)

    def agree(self, times: int) -> list[int]:
        """ns of each; of all but the first, as that also waits for ranks that come later."""
        took = []
        for _ in range(times + 1):
            begin = now_ns()
            self.control.agree(None)
            took.append(now_ns() - begin)
        return took[1:]

    def save(self, step: int) -> Save:
        """Save FILES_PER_RANK files of a few bytes."""
        assert self._writer is not None
        files = [FileState(f"rank_{self.rank:05d}_file_{n}.pt", b"state") for n in range(FILES_PER_RANK)]
        directory = SaveDirectory(self._save, self._ownership, keep_last=2)
        return self._writer.save(directory, step, lambda: files)

    def save_again(self, step: int) -> Save:
        """A save that is not the first of its launch."""
        return self.save(step)

    def end(self, _: Any) -> int:
        """ns until the last checkpoint that went is removed."""
        assert self._writer is not None
        begin = now_ns()
        self._writer.close()
        return now_ns() - begin

    def discover(self, _: Any) -> tuple[int, int]:
        """ns until all know of a checkpoint whose files are there; ns that one rank takes to read the list of them."""
        self.control.agree(None)
        begin = now_ns()
        source, op = DirectorySource(self.control, self._save, None), untraced_operation()
        source.candidates(op)
        candidate = source.open(op).candidate
        self.control.agree(None)
        all_told = now_ns()
        if self.rank == 0:
            pickle.loads(pickle.dumps(candidate))
        return all_told - begin, now_ns() - all_told

    def start(self, _: Any) -> int:
        """ns of what a rank checks before it imports anything."""
        config = config_from_args(_parsed(tuple(self._task.flags)), self._environment())
        begin = now_ns()
        once_per_host(lambda: check_before_imports(config), self._environment(), _TIMEOUT_S)
        return now_ns() - begin

    def open_trace(self, _: Any) -> int:
        """ns."""
        world_size = self._task.world_size
        identity = RankIdentity(
            self.rank, world_size, self.rank % RANKS_PER_HOST, (0, 0, self.rank), (1, 1, world_size)
        )
        begin = now_ns()
        recorder, _ = open_rank_trace(
            Path(self._task.directory) / "trace", identity, self._environment(), engine_asked="torch",
            durability="none", probes=False,
        )  # fmt: skip
        took = now_ns() - begin
        recorder.close()
        return took

    def _environment(self) -> dict[str, str]:
        local_rank = self.rank % RANKS_PER_HOST
        mine = {
            "RANK": self.rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": self._task.world_size,
            "LOCAL_WORLD_SIZE": RANKS_PER_HOST, "GROUP_RANK": self.rank // RANKS_PER_HOST,
        }  # fmt: skip
        return {name: str(value) for name, value in mine.items()} | {"RESTART_TRACE_LAUNCH_ID": "scaling"}


class Unpickled:
    """In the place of pickle in the agreements: the ranks of this process share what all of them were told last.

    Of a long list each would have a copy of its own on a host of its own; thousands of copies have no room on one.
    """

    HIGHEST_PROTOCOL = pickle.HIGHEST_PROTOCOL
    dumps = staticmethod(pickle.dumps)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._content, self._found = b"", None

    def loads(self, content: bytes) -> Any:
        """As pickle.loads. Nobody changes what a rank is told."""
        if len(content) < _LONG:
            return pickle.loads(content)
        with self._lock:
            if content != self._content:
                self._content, self._found = content, pickle.loads(content)
            return self._found


@functools.cache
def _parsed(flags: tuple[str, ...]) -> argparse.Namespace:
    """Once for all ranks of a process: their threads take turns."""
    return parse_args(list(flags))


class Process:
    """All of the ranks of this process, on a thread each."""

    def __init__(self, task: Task) -> None:
        self._task = task
        threading.stack_size(_STACK)
        self._ranks = [SimulatedRank(task, rank) for rank in task.ranks]
        self._pool = ThreadPoolExecutor(len(self._ranks))

    def answer(self, command: str, argument: Any) -> Any:
        if command == "listen":
            return [asdict(rank.where) for rank in self._ranks]
        if command == "connect":
            neighbours = [_neighbours(one) for one in argument]
            connections = list(
                self._pool.map(lambda pair: pair[0].connect(pair[1]), zip(self._ranks, neighbours, strict=True))
            )
            return {"connections": max(connections)}
        if self._task.mark:
            os.path.exists(f"/mark/{command}/begin")
        found = self._on_all(getattr(type(self._ranks[0]), command), argument)
        if self._task.mark:
            os.path.exists(f"/mark/{command}/end")
        if command == "agree":
            return statistics.median(found[0])
        if command.startswith("save"):
            return {"flushed_ns": max(s.flushed_ns for s in found), "committed_ns": max(s.committed_ns for s in found)}
        return max(found) if command in ("start", "open_trace", "end") else found[0]

    def _on_all(self, work: Callable[[SimulatedRank, Any], Any], argument: Any) -> list[Any]:
        return list(self._pool.map(lambda rank: work(rank, argument), self._ranks))


def _neighbours(fields: dict[str, Any]) -> Neighbours:
    parent = None if fields["parent"] is None else Where(**fields["parent"])
    return Neighbours(parent, tuple((rank, host) for rank, host in fields["children"]), fields["secret"])


def main() -> int:
    task = Task(**json.loads(sys.argv[1]))
    sys.argv = ["pretrain_gpt.py", *task.flags]
    _parsed(tuple(task.flags))
    control_plane.pickle = Unpickled()  # type: ignore[assignment]
    process = Process(task)
    for line in sys.stdin:
        print(json.dumps(process.answer(*json.loads(line))), flush=True)
    os._exit(0)  # thousands of threads and connections: nothing of them needs to be taken down in order


if __name__ == "__main__":
    sys.exit(main())
