"""The dcp engines: what every such engine must do, what the library loses by itself, and that no pickle runs."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as library_metadata

from megatron.checkpointing.engines.base import EngineOptions, FileState, SavedCheckpoint, SavedFile
from megatron.checkpointing.engines.dcp import engine as dcp_engine
from megatron.checkpointing.engines.dcp.storage import Writer
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.engines.registry import create_engine
from restart_trace.recorder import Recorder, untraced_operation
from restart_trace.sink import JsonlSink
from tests.unit.megatron.checkpointing.engines.directory_engine_checks import (
    MIB,
    NAME,
    DirectoryEngineChecks,
    by_name,
    large,
)
from tests.unit.megatron.checkpointing.engines.nests import identical
from tests.unit.megatron.checkpointing.engines.newer_metadata import pickle_with_strides
from tests.unit.trace_helpers import PROCESS, read


class _Poison:
    """Unpickled as it stands, makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class _DcpChecks(DirectoryEngineChecks):
    metadata = ".metadata"

    @pytest.mark.parametrize("threads", [None, 1, 3])
    def test_as_many_threads_write_as_asked_for(self, tmp_path: Path, threads: int | None) -> None:
        state = large(MIB)
        saved = self.save(tmp_path, state, io_threads=threads)
        data = [file for file in saved if file.name.endswith(".distcp")]
        assert len(data) == (threads or 1)  # the library's thread_count: a file per thread
        assert identical(self.load(tmp_path, saved), state)

    @pytest.mark.parametrize("manifest", [True, False])
    def test_a_poisoned_metadata_file_runs_nothing(self, tmp_path: Path, manifest: bool) -> None:
        saved = self.save(tmp_path / "out", {"a": torch.ones(3)})
        path = tmp_path / "out" / NAME / self.metadata
        original = pickle.loads(path.read_bytes())
        for attribute in ("planner_data", "storage_data", "version"):
            poisoned = pickle.loads(pickle.dumps(original))
            setattr(poisoned, attribute, _Poison(tmp_path / "ran"))
            path.write_bytes(pickle.dumps(poisoned))
            size = path.stat().st_size
            known = [
                SavedFile(f.name, size, f.checksum, f.states) if f.name.endswith(".metadata") else f for f in saved
            ]
            message = "checksum" if manifest else "posix.mkdir, which is not on the allow-list"
            with pytest.raises(CheckpointDamagedError, match=rf"{NAME}/\.metadata: .*{message}"):
                self.load(tmp_path / "out", known if manifest else [])
            assert not (tmp_path / "ran").exists()
        pickle.loads(path.read_bytes())
        assert (tmp_path / "ran").exists()  # the poison works where nobody looks

    @pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"a": 1}), pickle.dumps(5)], ids=str)
    def test_metadata_of_another_kind_is_refused(self, tmp_path: Path, content: bytes) -> None:
        self.save(tmp_path, {"a": torch.ones(3)})
        (tmp_path / NAME / self.metadata).write_bytes(content)
        with pytest.raises(CheckpointDamagedError, match="cannot be read as the metadata"):
            self.load(tmp_path, [])

    @pytest.mark.parametrize("change", ["bytes", "elsewhere", "outside", "beyond", "larger", "partial", "transformed"])
    def test_what_this_engine_does_not_write_is_refused(self, tmp_path: Path, change: str) -> None:
        self.save(tmp_path, {"a": torch.ones(3)})
        path = tmp_path / NAME / self.metadata
        content = pickle.loads(path.read_bytes())
        item = content.state_dict_metadata["state/a"]
        place = next(info for index, info in content.storage_data.items() if index.fqn == "state/a")
        if change == "bytes":
            content.state_dict_metadata["state/a"] = library_metadata.BytesStorageMetadata()
        elif change == "elsewhere":
            place.relative_path = "../secret"
        elif change == "outside":
            place.relative_path = "/etc/hostname"
        elif change == "beyond":
            place.offset += 1 << 30
        elif change == "larger":
            item.size = item.chunks[0].sizes = torch.Size([1 << 50])
        elif change == "partial":
            item.size = torch.Size([6])
        else:
            place.transform_descriptors = ["zstd"]
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(CheckpointDamagedError, match=r"\.metadata"):
            self.load(tmp_path, [])

    def test_what_a_newer_torch_saved_is_loaded(self, tmp_path: Path, monkeypatch: Any) -> None:
        state = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}
        with monkeypatch.context() as patched:
            pickle_with_strides(patched)
            saved = self.save(tmp_path, state)
        assert identical(self.load(tmp_path, saved), state)

    def test_an_error_in_any_thread_of_the_library_fails_the_save(self, tmp_path: Path, monkeypatch: Any) -> None:
        """The library drops what its second and further threads raise, and calls the checkpoint complete."""
        fsync, lock, calls = os.fsync, threading.Lock(), []
        failed = threading.Event()

        def fails_off_the_calling_thread(fd: int) -> None:
            path = os.readlink(f"/proc/self/fd/{fd}")
            if "distcp" in path and "_write_files_from_queue" in threading.current_thread().name:
                with lock:
                    calls.append(path)
                failed.set()
                raise OSError(5, "Input/output error")
            if "distcp" in path:
                failed.wait(300)  # so that the other threads have something left to do
            fsync(fd)

        monkeypatch.setattr(os, "fsync", fails_off_the_calling_thread)
        monkeypatch.setattr(threading, "excepthook", lambda args: None)
        with pytest.raises(OSError, match=r"Input/output error: '.*\.distcp'"):
            self.save(tmp_path, large(MIB), io_threads=4)
        assert calls


class TestDcpEngine(_DcpChecks):
    engine_name = "dcp"

    def test_training_waits_for_all_of_it(self, tmp_path: Path) -> None:
        trace = tmp_path / "trace.jsonl"
        recorder = Recorder(JsonlSink(trace), PROCESS)
        with recorder.operation("save", tag="t", step=1) as op:
            self.save(tmp_path / "out", large(4 * MIB), op)
        recorder.close()
        spans = [record for record in read(trace) if record["type"] == "span"]
        assert all(span["blocking"] for span in spans)
        named = [span for span in spans if span.get("file") == NAME]
        assert sum(span["duration_ns"] for span in named) == named[0]["end_ns"] - named[0]["start_ns"]


class TestDcpAsyncEngine(_DcpChecks):
    engine_name = "dcp-async"

    def test_spans_of_writing_leave_no_time_between_them(self, tmp_path: Path, monkeypatch: Any) -> None:
        finish = Writer.finish

        def finish_and_rest(writer: Writer, **arguments: Any) -> None:
            finish(writer, **arguments)
            time.sleep(0.02)  # as a thread does that gets no processor

        monkeypatch.setattr(Writer, "finish", finish_and_rest)
        trace, states = tmp_path / "trace.jsonl", [FileState(f"{i}.pt", {"t": torch.ones(8)}) for i in range(4)]
        recorder, engine = Recorder(JsonlSink(trace), PROCESS), create_engine(self.engine_name, EngineOptions())
        with recorder.operation("save", tag="t", step=1) as op:
            engine.save(states, tmp_path, op)
        recorder.close()
        spans = [record for record in read(trace) if record["type"] == "span" and not record["blocking"]]
        windows = list(dict.fromkeys((s["start_ns"], s["end_ns"]) for s in spans if s.get("file")))
        assert len(windows) == len(states)
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(windows))

    def test_training_waits_for_the_copy_alone(self, tmp_path: Path) -> None:
        trace = tmp_path / "trace.jsonl"
        recorder = Recorder(JsonlSink(trace), PROCESS)
        with recorder.operation("save", tag="t", step=1) as op:
            self.save(tmp_path / "out", large(4 * MIB), op)
        recorder.close()
        spans = [record for record in read(trace) if record["type"] == "span"]
        blocking = {(span["phase"], span.get("detail")) for span in spans if span["blocking"]}
        assert blocking == {("device_to_host", None), ("serialize", None)}
        copied = [span for span in spans if span["phase"] == "device_to_host"]
        assert copied[0]["bytes"] >= 4 * MIB and copied[0]["duration_ns"] > 0

    def test_states_are_written_one_after_the_other(self, tmp_path: Path, monkeypatch: Any) -> None:
        fsync, now, most = os.fsync, 0, 0

        def slow(fd: int) -> None:
            nonlocal now, most
            now += "distcp" in os.readlink(f"/proc/self/fd/{fd}")
            most = max(most, now)
            time.sleep(0.02)
            now -= "distcp" in os.readlink(f"/proc/self/fd/{fd}")
            fsync(fd)

        monkeypatch.setattr(os, "fsync", slow)
        engine = create_engine(self.engine_name, EngineOptions())
        states = {f"{i}.pt": large(MIB) for i in range(4)}
        saved = engine.save([FileState(*item) for item in states.items()], tmp_path, untraced_operation())
        assert most == 1
        assert identical(
            engine.load(list(states), SavedCheckpoint(tmp_path, by_name(saved)), untraced_operation()), states
        )

    def test_storage_that_hangs_is_given_up(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr(dcp_engine, "RESULT_TIMEOUT_S", 0.2)
        hang, fsync = threading.Event(), os.fsync

        def hanging(fd: int) -> None:
            hang.wait(300)
            fsync(fd)

        monkeypatch.setattr(os, "fsync", hanging)
        try:
            with pytest.raises(TimeoutError, match="not written within"):
                self.save(tmp_path, {"a": torch.ones(3)})
        finally:
            hang.set()


def test_nothing_more_is_begun_after_an_error(tmp_path: Path) -> None:
    writer = Writer(tmp_path, EngineOptions())
    writer.failure.set(OSError(28, "first"))
    writer.failure.set(OSError(5, "second"))
    with pytest.raises(RuntimeError, match="not written"), writer.fs.create_stream(tmp_path / "x", "wb"):
        pass
    assert str(writer.failure.error) == "[Errno 28] first" and not (tmp_path / "x").exists()
