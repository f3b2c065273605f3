"""SIGKILL at random instants of saves to a real S3 server: nothing torn is accepted, nothing committed is lost.

    python -m tests.object_storage_kills --rounds 200

Each round forks a launch that saves one checkpoint after the other and tells of each that is committed, kills it at a
random instant, and looks at the store as the next launch does. The state is some megabytes: two files, one of which
goes up in parts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.engines.base import EngineOptions, FileState, SavedCheckpoint, first_undamaged
from megatron.checkpointing.engines.registry import create_engine
from megatron.checkpointing.save.writer import CheckpointIdentity, CheckpointWriter
from megatron.checkpointing.store.bucket.checkpoints import NodeFiles, StoredCandidate, StoredCheckpoints
from megatron.checkpointing.store.bucket.generations import claim
from megatron.checkpointing.store.bucket.saving import ObjectDirectory
from megatron.config.uris import ObjectUri
from megatron.fileio.objects.node_directory import remove_abandoned
from megatron.fileio.objects.s3 import Bucket
from megatron.parallel.control_plane import ControlPlane
from restart_trace.recorder import untraced_operation, untraced_recorder
from tests.object_storage import BUCKET, environment_of, serving

_ELEMENTS = {"large.pt": (9 << 20) // 4, "small.pt": 1000}
_KEEP_LAST = 3


def states(step: int) -> list[FileState]:
    return [FileState(name, {"w": torch.full((count,), float(step))}) for name, count in _ELEMENTS.items()]


def checkpoints(uri: ObjectUri, root: Path) -> StoredCheckpoints:
    return StoredCheckpoints(uri, Bucket(BUCKET, threads=2), root)


def writer(engine: str, generation: int, **options: Any) -> CheckpointWriter:
    identity = CheckpointIdentity({"tp": 1, "pp": 1, "dp": 1}, {})
    planes = ControlPlane(0, 1), ControlPlane(0, 1)
    made = create_engine(engine, EngineOptions(fsync=False, **options))
    return CheckpointWriter(made, planes[0], untraced_recorder(), identity, f"g{generation}", planes[1])


def load(
    stored: StoredCheckpoints,
    candidate: StoredCandidate,
    engine: str = "torch",
    files: Sequence[str] = tuple(_ELEMENTS),
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of these files, every byte verified."""
    assert candidate.manifest is not None
    reader, op = create_engine(engine, EngineOptions()), untraced_operation()

    def read(checkpoint: SavedCheckpoint) -> dict[str, torch.Tensor]:
        return {name: state["w"].clone() for name, state in reader.load(list(files), checkpoint, op).items()}

    with contextlib.closing(NodeFiles(stored)) as fetched:
        return first_undamaged(fetched.copies(candidate, reader, list(files), [], op), read)


def _launch(uri: ObjectUri, root: Path, first: int, told: int, engine: str) -> None:
    """Save until killed; a line for each that is committed. `told`: the descriptor of a pipe."""
    stored = checkpoints(uri, root)
    held = claim(stored.bucket, uri)
    os.write(told, b"begun\n")
    directory, saves = ObjectDirectory(stored, 0, held, _KEEP_LAST), writer(engine, held.generation)
    for step in range(first, first + 1000):
        saves.save(directory, step, lambda step=step: states(step))
        saves.background.drain()
        assert all(save.error is None for save in saves.background.finished())
        os.write(told, f"{step}\n".encode())


def _killed(uri: ObjectUri, root: Path, first: int, after_s: float, engine: str) -> list[int]:
    """Steps that a launch told of as committed before it was killed, `after_s` after it had claimed the prefix."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _launch(uri, root, first, writing, engine)
        except BaseException as exc:
            print(f"{type(exc).__name__}: {exc}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert select.select([reading], [], [], 300)[0], "the launch claimed nothing"
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the launch has ended by itself"
        lines = os.read(reading, 1 << 16).decode().split()
    finally:
        os.close(reading)
    return [int(line) for line in lines if line != "begun"]


def run(rounds: int, seed: int, root: Path, longest_s: float = 1.5, engine: str = "torch") -> Counter[str]:
    """Kill a launch `rounds` times. Returns what was seen; raises AssertionError at the first thing that is wrong."""
    instants, seen = random.Random(seed), Counter[str]()
    uri = ObjectUri(BUCKET, f"kills/{engine}/{seed}")
    stored, newest = checkpoints(uri, root), 0
    for _ in range(rounds):
        told = _killed(uri, root, newest + 1, instants.uniform(0, longest_s), engine)
        remove_abandoned(root)
        assert not list(root.iterdir())
        found, problems = stored.discover(None)
        assert problems == [], problems
        newest_told = max(told, default=newest)
        assert newest_told == 0 or found[0].step >= newest_told, f"{newest_told} was committed, and {found} are there"
        assert len(found) >= min(newest_told, _KEEP_LAST)
        if found:
            newest = found[0].step
            for name, tensor in load(stored, found[0], engine).items():
                assert torch.equal(tensor, torch.full((_ELEMENTS[name],), float(newest))), f"{name} of {newest} is torn"
        unfinished = {place for place, files in stored.listed().items() if "manifest.json" not in files}
        seen += Counter(
            rounds=1, committed=len(told), committed_and_not_told=int(newest > newest_told),
            uploads_cut_off=len(stored.bucket.unfinished_uploads(uri.key(""))), saves_cut_off=len(unfinished),
        )  # fmt: skip
    held = claim(stored.bucket, uri)
    ObjectDirectory(stored, 0, held, _KEEP_LAST).close()
    held.release()
    assert stored.bucket.unfinished_uploads(uri.key("")) == []
    assert all("manifest.json" in files for files in stored.listed().values())
    return seen


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", default="torch", choices=["torch", "lazy"])
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    with serving() as server, environment_of(server.environment()), tempfile.TemporaryDirectory() as root:
        seen = run(arguments.rounds, arguments.seed, Path(root), engine=arguments.engine)
    print(", ".join(f"{name} {count}" for name, count in seen.items()))


if __name__ == "__main__":
    main()
