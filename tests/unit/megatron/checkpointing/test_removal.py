"""Removing old checkpoints over several ranks: real files, real agreements, each rank a thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing import removal
from megatron.checkpointing.commit import Manifest
from megatron.checkpointing.engines.base import CheckpointEngine, EngineOptions, FileState, SavedFile
from megatron.checkpointing.removal import Removal, Removals
from megatron.checkpointing.writer import CheckpointIdentity, CheckpointWriter, SaveDirectory
from megatron.parallel.control_plane import ControlPlane
from restart_trace.recorder import Operation, Recorder, untraced_operation, untraced_recorder
from tests.unit.megatron.parallel.test_tree import on_all, trees

RANKS = 4


class BytesEngine(CheckpointEngine):
    """Writes the bytes that it is given, each file into a folder if its name has one."""

    name = "torch"

    def _save_file(self, file: FileState, directory: Path, op: Operation) -> SavedFile:
        (directory / file.name).parent.mkdir(exist_ok=True)
        (directory / file.name).write_bytes(file.state)
        return SavedFile(file.name, len(file.state), "none")


class ListSink:
    """Keeps records."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> bool:
        self.records.append(record)
        return True

    def close(self) -> None:
        return None

    @property
    def removals(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record.get("phase") == "remove"]


def name_of(rank: int, folder: bool) -> str:
    return f"rank_{rank}/data" if folder else f"rank_{rank}.pt"


def launch(
    save: Path, keep_last: int, steps: list[int], ranks: int = RANKS, *, folder: bool = False
) -> dict[int, ListSink]:
    """Ranks that save after each of `steps`, and end; their traces."""
    sinks = {rank: ListSink() for rank in range(ranks)}

    def run(rank: int, tree: Any) -> None:
        identity = CheckpointIdentity({"tp": 1, "pp": 1, "dp": ranks}, {})
        engine = BytesEngine(EngineOptions(fsync=False))
        writer = CheckpointWriter(engine, ControlPlane(rank, ranks, tree), Recorder(sinks[rank], {}), identity, "g1")
        for step in steps:
            files = [FileState(name_of(rank, folder), b"%d" % step)]
            writer.save(SaveDirectory(save, keep_last=keep_last), step, lambda files=files: files)
        writer.close()

    with trees(["host"] * ranks) as connected:
        on_all(connected, run)
    return sinks


def directories(save: Path) -> list[str]:
    return sorted(path.name for path in save.iterdir() if path.is_dir())


@pytest.mark.parametrize("folder", [False, True])
def test_all_ranks_remove_and_nothing_is_left(tmp_path: Path, folder: bool) -> None:
    launch(tmp_path, 2, [1, 2, 3, 4, 5], folder=folder)
    assert directories(tmp_path) == ["global_step4", "global_step5"]
    assert len(Manifest.of(tmp_path / "global_step5").files) == RANKS


def test_checkpoints_of_another_layout_go_too(tmp_path: Path) -> None:
    launch(tmp_path, 3, [1, 2, 3])
    launch(tmp_path, 2, [4, 5], ranks=2)
    assert directories(tmp_path) == ["global_step4", "global_step5"]


def test_only_whole_checkpoints_of_earlier_launches_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which of them are is found out by all ranks; each has looked at one file of each."""
    launch(tmp_path, 4, [1, 2, 3, 4])
    for step, rank in ((4, 3), (3, 1)):
        (tmp_path / f"global_step{step}" / name_of(rank, False)).write_bytes(b"longer")
    launch(tmp_path, 2, [5])
    assert directories(tmp_path) == ["global_step2", "global_step3", "global_step4", "global_step5"]
    told = [message for message in caplog.messages if "not counted by --keep-last" in message]
    assert len(told) == 2 and "rank_3.pt has 6 bytes, 1 were saved" in told[0]
    launch(tmp_path, 2, [6])
    assert directories(tmp_path) == ["global_step5", "global_step6"]


def removal_of(aside: Path, mine: str, all_names: list[str] | None = None) -> Removal:
    return Removal([aside], [mine], all_names or [], {}, untraced_operation())


def test_each_rank_removes_what_it_calls_its_own(tmp_path: Path) -> None:
    aside = tmp_path / ".incomplete_removed_x"
    aside.mkdir()
    everything = [name_of(rank, False) for rank in range(RANKS)]
    for name in (*everything, "of_another_layout.pt"):
        (aside / name).touch()
    first, second = Removals(0), Removals(1)
    first.begin(removal_of(aside, everything[0], everything))
    first.wait()
    assert sorted(path.name for path in aside.iterdir()) == everything[1:]
    second.begin(removal_of(aside, everything[1]))
    second.close()
    assert sorted(path.name for path in aside.iterdir()) == everything[2:]
    first.begin(Removal([], [], everything, {}, untraced_operation()))  # the next save: the others have had their time
    first.wait()
    assert not aside.exists()


def test_removals_are_in_the_trace_and_hold_up_nobody(tmp_path: Path) -> None:
    for rank, sink in launch(tmp_path, 2, [1, 2, 3, 4]).items():
        saves = {r["op"]: r["step"] for r in sink.records if r.get("type") == "operation_begin"}
        by_thread = [span for span in sink.removals if span.get("thread") == "ckpt-removal"]
        assert [saves[span["op"]] for span in by_thread] == [3, 4]
        assert not any(span["blocking"] for span in sink.removals)
        assert rank == 0 or by_thread == sink.removals  # at the end rank 0 removes what is left


def left_of_rank_1(directory: Path) -> tuple[Removals, Path]:
    """Rank 0, which has removed its own, and a directory that has a file of rank 1."""
    aside = directory / ".incomplete_removed_x"
    aside.mkdir()
    everything = [name_of(rank, False) for rank in range(2)]
    for name in everything:
        (aside / name).touch()
    first = Removals(0)
    first.begin(removal_of(aside, everything[0], everything))
    first.wait()
    return first, aside


def test_at_the_end_rank_0_leaves_their_files_to_the_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, aside = left_of_rank_1(tmp_path)
    looked = threading.Event()
    removed = removal._removed

    def look(directory: Path) -> bool:
        gone = removed(directory)
        looked.set()
        return gone

    monkeypatch.setattr(removal, "_removed", look)
    monkeypatch.setattr(removal, "_OTHERS_S", 60.0)
    taken: list[Path] = []
    monkeypatch.setattr(removal.shutil, "rmtree", lambda directory, **_: taken.append(directory))
    closing = threading.Thread(target=first.close)
    closing.start()
    assert looked.wait(60)
    second = Removals(1)
    second.begin(removal_of(aside, name_of(1, False)))
    second.close()
    closing.join(60)
    assert not closing.is_alive() and not aside.exists() and taken == []


def test_at_the_end_rank_0_removes_what_nobody_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, aside = left_of_rank_1(tmp_path)
    monkeypatch.setattr(removal, "_OTHERS_S", 0.01)
    first.close()
    assert not aside.exists()


def test_a_leftover_of_a_killed_removal_goes_with_the_next(tmp_path: Path) -> None:
    launch(tmp_path, 2, [1, 2])
    leftover = tmp_path / ".incomplete_removed_global_step0_1"
    for path in (leftover / name_of(1, False), leftover / "rank_9" / "data"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    launch(tmp_path, 2, [3])
    assert directories(tmp_path) == ["global_step2", "global_step3"]


def test_training_goes_on_while_files_are_removed_and_the_next_save_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal that takes long is no part of the save; what it makes room for is not written before."""
    may_go_on = threading.Event()
    unlink = removal._unlink

    def slow(*arguments: Any) -> None:
        assert may_go_on.wait(60)
        unlink(*arguments)

    monkeypatch.setattr(removal, "_unlink", slow)
    engine = BytesEngine(EngineOptions(fsync=False))
    identity = CheckpointIdentity({"tp": 1, "pp": 1, "dp": 1}, {})
    writer = CheckpointWriter(engine, ControlPlane(0, 1), untraced_recorder(), identity, "g1")
    directory = SaveDirectory(tmp_path, keep_last=1)
    written: list[str] = []

    def collect() -> list[FileState]:
        written.extend(directories(tmp_path))
        return [FileState("a.pt", b"a")]

    for step in (1, 2):
        writer.save(directory, step, collect)
    (aside,) = tmp_path.glob(".incomplete_removed_global_step1_*")
    assert [path.name for path in aside.iterdir()] == ["a.pt"]  # its manifest went first
    written.clear()
    threading.Timer(0.2, may_go_on.set).start()
    writer.save(directory, 3, collect)
    assert written == ["global_step2"]
    writer.close()
