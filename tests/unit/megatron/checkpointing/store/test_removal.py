"""Removing old checkpoints over several ranks: real files, real agreements, each rank a thread."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing.engines.base import CheckpointEngine, EngineOptions, FileState, SavedFile
from megatron.checkpointing.engines.errors import CheckpointSaveError
from megatron.checkpointing.save.writer import CheckpointIdentity, CheckpointWriter, SaveDirectory
from megatron.checkpointing.store import removal
from megatron.checkpointing.store.manifest import Manifest
from megatron.checkpointing.store.naming import removed_directory, temporary_directory
from megatron.checkpointing.store.ownership import claim
from megatron.checkpointing.store.removal import Removal, Removals
from megatron.checkpointing.store.search import Known
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


def test_a_checkpoint_in_use_is_removed_after_the_save_that_follows_its_use(tmp_path: Path) -> None:
    """Until then it is there beside those that are kept; it counts among them while it is new enough."""
    engine, identity = BytesEngine(EngineOptions(fsync=False)), CheckpointIdentity({"tp": 1, "pp": 1, "dp": 1}, {})
    writer = CheckpointWriter(engine, ControlPlane(0, 1), untraced_recorder(), identity, "g1")
    there = []
    writer.in_use.add(tmp_path / "global_step1")
    for step in (1, 2, 3, 4):
        if step == 4:
            writer.in_use.clear()
        writer.save(SaveDirectory(tmp_path, keep_last=1), step, lambda step=step: [FileState("a.pt", b"%d" % step)])
        writer.close()
        there.append([name.removeprefix("global_step") for name in directories(tmp_path)])
    assert there == [["1"], ["1", "2"], ["1", "3"], ["4"]]


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
    aside = tmp_path / removed_directory("global_step1", 1)
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
    aside = directory / removed_directory("global_step1", 1)
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
    sleep = time.sleep

    def look(seconds: float) -> None:
        looked.set()
        sleep(seconds)

    monkeypatch.setattr(removal.time, "sleep", look)
    monkeypatch.setattr(removal, "_OTHERS_S", 300.0)
    taken: list[str] = []
    remove_files = removal.remove_files

    def take(directory: Path, names: list[str]) -> None:
        if threading.current_thread() is closing:
            taken.extend(names)
        remove_files(directory, names)

    monkeypatch.setattr(removal, "remove_files", take)
    closing = threading.Thread(target=first.close)
    closing.start()
    assert looked.wait(300)
    second = Removals(1)
    second.begin(removal_of(aside, name_of(1, False)))
    second.close()
    closing.join(300)
    assert not closing.is_alive() and not aside.exists() and taken in ([], ["manifest.json"])


def test_at_the_end_rank_0_removes_what_nobody_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, aside = left_of_rank_1(tmp_path)
    monkeypatch.setattr(removal, "_OTHERS_S", 0.01)
    first.close()
    assert not aside.exists()


def test_after_an_error_rank_0_waits_for_no_other_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was killed removes nothing more, and a restart would wait."""
    first, aside = left_of_rank_1(tmp_path)
    monkeypatch.setattr(removal, "_OTHERS_S", 300.0)
    first.close(after_error=True)
    assert aside.exists()


def test_a_leftover_of_a_killed_removal_goes_with_the_next(tmp_path: Path) -> None:
    launch(tmp_path, 2, [1, 2])
    leftover = tmp_path / removed_directory("global_step0", 1)
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
    remove_files = removal.remove_files

    def slow(*arguments: Any) -> None:
        assert may_go_on.wait(300)
        remove_files(*arguments)

    monkeypatch.setattr(removal, "remove_files", slow)
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
    assert sorted(path.name for path in aside.iterdir()) == ["a.pt", "manifest.json"]  # the record is the last to go
    written.clear()
    threading.Timer(0.2, may_go_on.set).start()
    writer.save(directory, 3, collect)
    assert written == ["global_step2"]
    writer.close()


# What this run has not made


def saves(save: Path, keep_last: int | None, *steps: int) -> None:
    """One launch of one rank that owns `save`, and ends after its last save."""
    owner = claim(save)
    identity = CheckpointIdentity({"tp": 1, "pp": 1, "dp": 1}, {})
    attempt = f"g{owner.generation}"
    writer = CheckpointWriter(
        BytesEngine(EngineOptions(fsync=False)), ControlPlane(0, 1), untraced_recorder(), identity, attempt
    )
    try:
        for step in steps:
            writer.save(
                SaveDirectory(save, owner, keep_last), step, lambda step=step: [FileState("a.pt", b"%d" % step)]
            )
        writer.close()
    finally:
        owner.release()


def test_a_save_that_fails_removes_those_that_were_killed(tmp_path: Path) -> None:
    """A quota, which no start can see, may leave no space beside them: else no save would ever succeed."""
    claim(tmp_path).release()
    killed = _made(tmp_path / temporary_directory("global_step5", "g1_1"))
    (killed / "a.pt").write_bytes(b"half of it")
    names = iter(["folder/folder/a.pt", "a.pt"])  # the first is in a folder that the engine does not make
    owner = claim(tmp_path)
    writer = CheckpointWriter(
        BytesEngine(EngineOptions(fsync=False)), ControlPlane(0, 1), untraced_recorder(),
        CheckpointIdentity({"tp": 1, "pp": 1, "dp": 1}, {}), "g2",
    )  # fmt: skip
    directory = SaveDirectory(tmp_path, owner)
    with pytest.raises(CheckpointSaveError):
        writer.save(directory, 6, lambda: [FileState(next(names), b"a")])
    assert directories(tmp_path) == [".generations"]
    writer.save(directory, 7, lambda: [FileState(next(names), b"a")])
    assert directories(tmp_path) == [".generations", "global_step7"]
    owner.release()


def test_a_failed_save_does_not_tell_removals_again(told: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    saves(tmp_path, None, 1, 2)
    owner = claim(tmp_path)
    directory, known = SaveDirectory(tmp_path, owner, keep_last=1), Known()
    pruned = directory.prune(2, known, False)
    for candidate in pruned.to_look_at:
        known.complete[candidate.directory] = candidate
    assert directory.prune(2, known, False).removed == ["global_step1"]  # set aside, and its removal not yet begun
    (tmp_path / temporary_directory("global_step3", "g1_1")).mkdir()  # a save that was killed
    directory.discard("global_step4", "a", tmp_path / "none", known)
    owner.release()
    removed = [message for message in told.messages if "takes the space of saves to come" in message]
    assert len(removed) == 1 and "global_step3" in removed[0], removed


def contents(directory: Path) -> dict[str, bytes]:
    """All files below a directory."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture
def two_runs(tmp_path: Path) -> tuple[Path, Path]:
    """Directories of two runs; the first has saved step 4."""
    runs = tmp_path / "run1", tmp_path / "run2"
    for run in runs:
        run.mkdir()
    saves(runs[0], None, 4)
    return runs


def left_alone(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("left alone: ")]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO")
    return caplog


def test_a_link_to_a_checkpoint_of_another_run_is_left_alone(
    two_runs: tuple[Path, Path], told: pytest.LogCaptureFixture
) -> None:
    one, other = two_runs
    before = contents(one)
    (other / "global_step4").symlink_to(one / "global_step4")
    saves(other, 1, 5, 6)
    assert contents(one) == before and (other / "global_step4").is_symlink()
    assert directories(other) == [".generations", "global_step4", "global_step6"]
    assert left_alone(told) == [f"left alone: {other / 'global_step4'} (a link)"]


def test_a_link_that_took_the_place_of_a_checkpoint_during_the_run_is_left_alone(tmp_path: Path) -> None:
    """Moved to an archive, with a link for whoever looks for it."""
    save, archive = tmp_path / "save", tmp_path / "archive"
    save.mkdir()
    owner = claim(save)
    identity = CheckpointIdentity({"tp": 1, "pp": 1, "dp": 1}, {})
    writer = CheckpointWriter(BytesEngine(EngineOptions()), ControlPlane(0, 1), untraced_recorder(), identity, "g1")
    for step in (1, 2, 3):
        writer.save(SaveDirectory(save, owner, 2), step, lambda: [FileState("a.pt", b"a")])
        if step == 2:
            (save / "global_step1").rename(archive)
            (save / "global_step1").symlink_to(archive)
    writer.close()
    owner.release()
    assert sorted(contents(archive)) == ["a.pt", "manifest.json"] and (save / "global_step1").is_symlink()


@pytest.mark.parametrize(
    "name", [".incomplete_removed_x", removed_directory("global_step1", 1), ".incomplete_global_step1_g0_1"]
)
def test_no_link_at_a_name_of_this_program_is_followed(
    tmp_path: Path, name: str, told: pytest.LogCaptureFixture
) -> None:
    save, precious = tmp_path / "save", tmp_path / "precious"
    for directory in (save, precious / "folder"):
        directory.mkdir(parents=True)
    for file in ("thesis.txt", "a.pt", "folder/a.pt"):
        (precious / file).write_text("mine")
    before = contents(precious)
    (save / name).symlink_to(precious)
    saves(save, 1, 1, 2)
    saves(save, 1, 3)
    assert contents(precious) == before and (save / name).is_symlink()
    assert left_alone(told) == 2 * [f"left alone: {save / name} (a link)"]  # once in each launch


def test_a_folder_of_a_checkpoint_that_became_a_link_is_not_emptied(tmp_path: Path) -> None:
    save, precious = _made(tmp_path / "save"), tmp_path / "precious"
    launch(save, 2, [1], ranks=1, folder=True)
    folder = save / "global_step1" / "rank_0"
    folder.rename(precious)
    folder.symlink_to(precious)
    before = contents(precious)
    launch(save, 1, [2, 3], ranks=1, folder=True)
    assert contents(precious) == before


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def test_a_save_does_not_write_through_a_link(tmp_path: Path) -> None:
    save, precious = _made(tmp_path / "save"), _made(tmp_path / "precious")
    link = save / temporary_directory("global_step6", "g1_1")
    link.symlink_to(precious)
    with pytest.raises(CheckpointSaveError, match=rf"is a link, which is not followed.*{link.name}"):
        saves(save, None, 6)
    assert contents(precious) == {} and link.is_symlink()
    saves(save, None, 6)  # another generation has other names
    assert directories(save) == [".generations", link.name, "global_step6"]


def test_copies_and_renamed_checkpoints_are_the_users(tmp_path: Path, told: pytest.LogCaptureFixture) -> None:
    saves(tmp_path, None, 2, 4)
    shutil.copytree(tmp_path / "global_step4", tmp_path / "best_model")
    (tmp_path / "best_model" / "notes.txt").write_text("0.93")
    (tmp_path / "global_step2").rename(tmp_path / "KEEP_THIS_ONE")
    kept = {name: contents(tmp_path / name) for name in ("best_model", "KEEP_THIS_ONE")}
    saves(tmp_path, 2, 5, 6)
    assert directories(tmp_path) == [".generations", "KEEP_THIS_ONE", "best_model", "global_step5", "global_step6"]
    assert {name: contents(tmp_path / name) for name in kept} == kept
    assert left_alone(told) == [
        f"left alone: {tmp_path / 'best_model'} (saved as global_step4)",
        f"left alone: {tmp_path / 'KEEP_THIS_ONE'} (saved as global_step2)",
    ]


def test_a_copy_is_not_among_the_checkpoints_that_are_kept(tmp_path: Path) -> None:
    """Else it would push out one of those that --keep-last is to keep."""
    saves(tmp_path, 2, 4, 5)
    shutil.copytree(tmp_path / "global_step5", tmp_path / "best_model")
    saves(tmp_path, 2, 6)
    assert directories(tmp_path) == [".generations", "best_model", "global_step5", "global_step6"]


def test_a_checkpoint_copied_from_another_run_is_left_alone(
    two_runs: tuple[Path, Path], told: pytest.LogCaptureFixture
) -> None:
    one, other = two_runs
    shutil.copytree(one / "global_step4", other / "global_step4")
    saves(other, 1, 5, 6)
    assert directories(other) == [".generations", "global_step4", "global_step6"]
    assert left_alone(told) == [f"left alone: {other / 'global_step4'} (saved by another run)"]


def test_a_directory_that_is_moved_as_a_whole_goes_on(tmp_path: Path) -> None:
    first, second = _made(tmp_path / "first"), tmp_path / "second"
    saves(first, 2, 1, 2)
    shutil.copytree(first, second)
    saves(second, 2, 3)
    assert directories(second) == [".generations", "global_step2", "global_step3"]


def test_checkpoints_of_earlier_versions_count_by_their_names(tmp_path: Path) -> None:
    launch(tmp_path, 3, [1, 2], ranks=1)  # no owner, and no id in the manifests
    saves(tmp_path, 2, 3)
    assert directories(tmp_path) == [".generations", "global_step2", "global_step3"]


@pytest.mark.parametrize("name", ["global_step6", "global_step6.replaced"])
def test_what_is_in_the_way_of_a_checkpoint_is_kept(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Upstream's, or anybody's: it has no manifest."""
    foreign = tmp_path / name
    saves(tmp_path, 2, 5, 6) if name.endswith(".replaced") else saves(tmp_path, 2, 5)
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    for _ in range(2):
        saves(tmp_path, 2, 6, 6)
    found = [path for path in tmp_path.rglob("notes.txt") if path.read_text() == "mine"]
    assert len(found) == 1
    assert directories(tmp_path)[-2:] == ["global_step5", "global_step6"] or name.endswith(".replaced")
    if found[0].parent != foreign:
        assert any(f"kept as {found[0].parent}" in message for message in caplog.messages)


def test_files_that_no_save_has_written_stay_in_their_directory(tmp_path: Path, told: pytest.LogCaptureFixture) -> None:
    saves(tmp_path, None, 1, 2)
    for note in ("notes.txt", "plots/loss.png"):
        path = tmp_path / "global_step1" / note
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    saves(tmp_path, 1, 3)
    assert contents(tmp_path / "global_step1") == {"notes.txt": b"mine", "plots/loss.png": b"mine"}
    assert directories(tmp_path) == [".generations", "global_step1", "global_step3"]
    assert left_alone(told) == [
        f"left alone: {tmp_path / 'global_step1/notes.txt'}, {tmp_path / 'global_step1/plots/loss.png'}, "
        "which no save has written"
    ]


def test_notes_outlive_a_removal_that_was_killed(tmp_path: Path) -> None:
    saves(tmp_path, None, 1)
    (tmp_path / "global_step1" / "notes.txt").write_text("mine")
    (tmp_path / "global_step1").rename(tmp_path / removed_directory("global_step1", 1))
    saves(tmp_path, 1, 2)
    assert contents(tmp_path / "global_step1") == {"notes.txt": b"mine"}


def test_a_checkpoint_whose_record_is_damaged_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its heading is whole; which files it has is not known."""
    saves(tmp_path, None, 1, 2)
    manifest = tmp_path / "global_step1" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"num_bytes": 1', '"num_bytes": 7'))
    (tmp_path / "global_step1" / "notes.txt").write_text("mine")
    saves(tmp_path, 1, 3)
    (aside,) = tmp_path.glob(".incomplete_removed_global_step1_*")
    assert sorted(contents(aside)) == ["manifest.json", "notes.txt"]
    assert any("not known which files" in message for message in caplog.messages)


def test_a_directory_that_another_has_called_so_is_left_alone(tmp_path: Path, told: pytest.LogCaptureFixture) -> None:
    mine = _made(tmp_path / ".incomplete_removed_x")
    (mine / "thesis.txt").write_text("mine")
    saves(tmp_path, 1, 1)
    assert contents(mine) == {"thesis.txt": b"mine"}
    assert left_alone(told) == [f"left alone: {mine} (not made by this run)"]
