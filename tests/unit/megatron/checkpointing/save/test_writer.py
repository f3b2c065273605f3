"""A save of plain states, without DeepSpeed and without flags: real engines, real directories, one rank."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from megatron.checkpointing.engines.base import EngineOptions, FileState
from megatron.checkpointing.engines.errors import CheckpointSaveError, SaveDirectorySupersededError
from megatron.checkpointing.engines.registry import create_engine
from megatron.checkpointing.save.writer import CheckpointIdentity, CheckpointWriter, ExtraFile, SaveDirectory
from megatron.checkpointing.store import commit
from megatron.checkpointing.store.manifest import Manifest
from megatron.checkpointing.store.ownership import Ownership, claim
from megatron.checkpointing.store.search import discover
from megatron.parallel.control_plane import ControlPlane
from megatron.processes.in_process_restart import AskedToReturnError
from restart_trace.recorder import Recorder, untraced_recorder
from restart_trace.sink import JsonlSink
from tests.unit.trace_helpers import PROCESS, read

IDENTITY = CheckpointIdentity({"tp": 1, "pp": 1, "dp": 1}, {"hidden_size": 4}, "/elsewhere")
STATE = [FileState("weights.pt", {"w": torch.arange(1000.0)})]


def writer_of(engine: str = "torch", recorder: Recorder | None = None) -> CheckpointWriter:
    control, commits = ControlPlane(0, 1), ControlPlane(0, 1)
    return CheckpointWriter(
        create_engine(engine, EngineOptions()), control, recorder or untraced_recorder(), IDENTITY, "g7", commits
    )


def tags(directory: Path) -> list[str]:
    return [candidate.tag for candidate in discover(directory, None)[0]]


def fails(exception: BaseException) -> NoReturn:
    raise exception


def test_what_is_collected_is_committed(tmp_path: Path) -> None:
    extra = ExtraFile("beside.json", lambda: b"{}")
    writer = writer_of()
    save = writer.save(SaveDirectory(tmp_path), 3, lambda: STATE, [extra])
    manifest = Manifest.of(tmp_path / "global_step3")
    assert (manifest.step, manifest.engine, manifest.layout) == (3, "torch", IDENTITY.layout)
    assert (manifest.model, manifest.loaded_from) == (IDENTITY.model, "/elsewhere")
    assert set(manifest.files) == {"weights.pt", "beside.json"}
    assert manifest.files["beside.json"].checksum == "sha256:" + hashlib.sha256(b"{}").hexdigest()
    loaded = torch.load(tmp_path / "global_step3" / "weights.pt")
    assert torch.equal(loaded["w"], STATE[0].state["w"])
    assert save.start_ns < save.flushed_ns < save.committed_ns
    assert save.op.num_files == 2 and (tmp_path / "latest").read_text() == "global_step3"


def test_the_same_files_through_a_thread(tmp_path: Path) -> None:
    """An asynchronous engine: the extra file is made before training goes on, and written after it."""
    trace = tmp_path / "trace.jsonl"
    writer = writer_of("lazy", Recorder(JsonlSink(trace), PROCESS))
    extra = ExtraFile("beside.json", lambda: b"{}")
    save = writer.save(SaveDirectory(tmp_path / "save"), 3, lambda: STATE, [extra])
    writer.background.release_state()
    writer.background.drain()
    (ended,) = writer.background.finished()
    assert ended.error is None and ended.step == 3 and save.flushed_ns < save.committed_ns
    assert "beside.json" in Manifest.of(tmp_path / "save" / "global_step3").files
    spans = [r for r in read(trace) if r["type"] == "span"]
    beside = [(r["phase"], r["blocking"]) for r in spans if r.get("file") == "beside.json"]
    assert beside == [("serialize", True), ("flush", False), ("flush", False)]
    assert not any(r["blocking"] for r in spans if r["phase"] in ("barrier", "commit"))
    writer.engine.close()


def test_an_asynchronous_engine_needs_a_control_plane_of_its_own() -> None:
    engine = create_engine("lazy", EngineOptions())
    with pytest.raises(ValueError, match="engine lazy saves asynchronously: commit_control is needed"):
        CheckpointWriter(engine, ControlPlane(0, 1), untraced_recorder(), IDENTITY, "g7")
    engine.close()


@pytest.mark.parametrize("engine", ["torch", "lazy"])
def test_a_state_that_cannot_be_collected_is_a_failed_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    writer = writer_of(engine)
    directory = SaveDirectory(tmp_path)
    told = "checkpoint global_step1 was not saved: rank 0: IndexError: no such tensor"
    if engine == "torch":
        with pytest.raises(CheckpointSaveError, match=told):
            writer.save(directory, 1, lambda: fails(IndexError("no such tensor")))
    else:
        writer.save(directory, 1, lambda: fails(IndexError("no such tensor")))
        writer.background.drain()
        assert [save.error for save in writer.background.finished()] == [told]
    assert list(tmp_path.iterdir()) == []
    assert caplog.records[0].exc_info  # where it was raised, which its message does not tell
    writer.save(directory, 2, lambda: STATE)
    writer.background.drain()
    assert tags(tmp_path) == ["global_step2"]
    writer.engine.close()


@pytest.mark.parametrize("when", ["collected", "written"])
def test_an_error_of_another_rank_has_no_traceback_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    """After one of another rank, as a restart in this process follows, each that lives says what has happened."""
    writer = writer_of("lazy")
    if when == "written":
        writer.ranks_are_disconnected()
        writer.save(SaveDirectory(tmp_path), 1, lambda: STATE)
    else:
        writer.save(SaveDirectory(tmp_path), 1, lambda: fails(AskedToReturnError("another rank has failed")))
    writer.background.drain()
    (line,) = caplog.records
    assert line.exc_info is None
    assert line.getMessage().startswith("rank 0 could not save global_step1: another rank has failed")
    assert len(writer.background.finished()) == 1 and tags(tmp_path) == []
    writer.engine.close()


def test_an_interrupt_is_no_failed_save(tmp_path: Path) -> None:
    """Of the main thread, that is to end the program. The operation ends with it."""
    trace = tmp_path / "trace.jsonl"
    writer = writer_of(recorder=Recorder(JsonlSink(trace), PROCESS))
    working: dict[str, Any] = {"collect": lambda: STATE}
    broken: list[dict[str, Any]] = [
        {"collect": lambda: fails(KeyboardInterrupt())},
        {"extra_files": [interrupted_file()]},
    ]
    for part in broken:
        with pytest.raises(KeyboardInterrupt):
            writer.save(SaveDirectory(tmp_path / "save"), 1, **(working | part))
    ends = [r for r in read(trace) if r["type"] == "operation_end"]
    assert [end["error"].partition(":")[0] for end in ends] == ["KeyboardInterrupt"] * 2


def interrupted_file() -> Any:
    return ExtraFile("beside.json", lambda: fails(KeyboardInterrupt()))


def test_engine_none_writes_nothing(tmp_path: Path) -> None:
    writer_of("none").save(SaveDirectory(tmp_path), 1, lambda: STATE, [interrupted_file()])
    assert list(tmp_path.iterdir()) == []


def test_old_checkpoints_go_and_failing_at_that_is_no_failed_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer, directory = writer_of(), SaveDirectory(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        writer.save(directory, step, lambda: STATE)
    assert tags(tmp_path) == ["global_step3", "global_step2"] and caplog.messages == []
    # Moved aside for one that stands, and of too long a name to be renamed before it is removed.
    long = "x" * 240
    manifest = dataclasses.replace(Manifest.of(tmp_path / "global_step2"), tag=long, step=0)
    for name in (long, f"{long}.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(manifest.to_json())
    writer.save(directory, 4, lambda: STATE)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages[0].startswith("old checkpoints were not removed: [Errno 36]")
    assert tags(tmp_path)[0] == "global_step4"


def successor_of(held: Ownership) -> Ownership:
    return claim(held.save_dir, take_over=True)


def test_a_superseded_launch_commits_nothing(tmp_path: Path) -> None:
    held = claim(tmp_path)
    directory = SaveDirectory(tmp_path, held)
    writer = writer_of()
    writer.save(directory, 1, lambda: STATE)
    successors: list[Ownership] = []

    def collect() -> list[FileState]:
        successors.append(successor_of(held))
        return STATE

    with pytest.raises(SaveDirectorySupersededError, match="generation 2"):
        writer.save(directory, 2, collect)
    assert isinstance(writer.superseded, SaveDirectorySupersededError)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [".generations", "global_step1"]
    for mine in (held, *successors):
        mine.release()


def test_a_launch_that_is_superseded_while_it_publishes_ends_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was just committed is committed. There may be no later save that would tell."""
    (tmp_path / ".incomplete_global_step1_g0_1").mkdir()
    held = claim(tmp_path)
    successors: list[Ownership] = []
    publish = commit.publish

    def publish_and_lose(*arguments: Any) -> list[str]:
        wrong = publish(*arguments)
        successors.append(successor_of(held))
        return wrong

    monkeypatch.setattr(commit, "publish", publish_and_lose)
    writer = writer_of()
    with pytest.raises(SaveDirectorySupersededError, match="generation 2"):
        writer.save(SaveDirectory(tmp_path, held), 5, lambda: STATE)
    assert caplog.messages == [] and tags(tmp_path) == ["global_step5"]
    assert (tmp_path / ".incomplete_global_step1_g0_1").is_dir()  # for the successor to remove
    with pytest.raises(SaveDirectorySupersededError):
        writer.save(SaveDirectory(tmp_path, held), 6, lambda: STATE)
    for mine in (held, *successors):
        mine.release()


def test_after_a_successor_was_found_no_asynchronous_save_is_begun(tmp_path: Path) -> None:
    held = claim(tmp_path)
    directory, writer = SaveDirectory(tmp_path, held), writer_of("lazy")
    successor = successor_of(held)
    writer.save(directory, 1, lambda: STATE)
    with pytest.raises(SaveDirectorySupersededError):  # which waits for the one before
        writer.save(directory, 2, lambda: fails(AssertionError("collected for nothing")))
    assert not [name for name in os.listdir(tmp_path) if name != ".generations"]
    writer.engine.close()
    for mine in (held, successor):
        mine.release()
