"""The torchsnapshot engine: what every such engine must do, and what is worked round in its library."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchsnapshot", reason="the package torchsnapshot is not installed")

import torchsnapshot.snapshot as library_module  # noqa: E402
from torchsnapshot import scheduler  # noqa: E402

from megatron.checkpointing.engines.base import EngineOptions, FileState, SavedCheckpoint  # noqa: E402
from megatron.checkpointing.engines.errors import CheckpointDamagedError  # noqa: E402
from megatron.checkpointing.engines.torchsnapshot import library  # noqa: E402
from megatron.checkpointing.engines.torchsnapshot.engine import PendingSnapshots, TorchSnapshotEngine  # noqa: E402
from restart_trace.recorder import Recorder, untraced_operation  # noqa: E402
from restart_trace.sink import JsonlSink  # noqa: E402
from tests.unit.megatron.checkpointing.engines.directory_engine_checks import MIB, NAME, DirectoryEngineChecks, large  # noqa: E402
from tests.unit.megatron.checkpointing.engines.nests import identical  # noqa: E402
from tests.unit.megatron.checkpointing.engines.recorded import recorded_save_and_load, time_in_no_window  # noqa: E402
from tests.unit.trace_helpers import PROCESS, read  # noqa: E402


class TestTorchSnapshotEngine(DirectoryEngineChecks):
    engine_name = "torchsnapshot"
    metadata = ".snapshot_metadata"

    @pytest.mark.slow
    def test_tensors_that_the_library_writes_from_where_they_are_may_change(self, tmp_path: Path) -> None:
        state = {"a": torch.full((130 * MIB,), 7, dtype=torch.uint8)}  # above its limit for slabs, which it copies
        pending = self.engine(io_threads=1).begin_save([FileState(NAME, state)], tmp_path, untraced_operation())
        state["a"].zero_()
        found = self.load(tmp_path, pending.wait())
        assert bool((found["a"] == 7).all())

    def test_spans_of_the_background_follow_those_of_training(self, tmp_path: Path) -> None:
        save, _ = recorded_save_and_load(self.engine(), tmp_path)
        synced = [span for span in save.spans if (span["phase"], span.get("detail")) == ("flush", "fsync")]
        last = max(synced, key=lambda span: span["end_ns"])  # of the directories; a thread of its own begins it
        assert "file" not in last
        assert time_in_no_window([span for span in save.spans if span is not last], save.start_ns) == 0

    @pytest.mark.slow
    def test_the_budget_bounds_all_snapshots_of_a_save_together(self, tmp_path: Path) -> None:
        trace = tmp_path / "trace.jsonl"
        recorder = Recorder(JsonlSink(trace), PROCESS)
        budget = 8 * MIB
        states = {f"{i}.pt": large(8 * MIB) for i in range(4)}
        engine = self.engine(host_cache_bytes=budget)
        (tmp_path / "out").mkdir()
        with recorder.operation("save", tag="t", step=1) as op:
            files = [FileState(name, state) for name, state in states.items()]
            pending = engine.begin_save(files, tmp_path / "out", op)
            assert isinstance(pending, PendingSnapshots)
            saved = {file.name: file for file in pending.wait()}
        recorder.close()
        assert budget / 4 < pending.buffers.peak <= budget
        waits = [s for s in read(trace) if s.get("phase") == "flush" and s["detail"] == "write" and s["blocking"]]
        assert sum(span["duration_ns"] for span in waits) > 0
        assert identical(
            engine.load(list(states), SavedCheckpoint(tmp_path / "out", saved), untraced_operation()), states
        )

    def test_a_budget_below_one_tensor_still_saves(self, tmp_path: Path) -> None:
        state = large(8 * MIB)
        saved = self.save(tmp_path, state, host_cache_bytes=MIB)
        assert identical(self.load(tmp_path, saved, host_cache_bytes=MIB), state)

    def test_the_default_budget_is_divided_among_the_ranks_of_a_host(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(scheduler, "_AVAILABLE_MEMORY_MULTIPLIER", 1e-3)  # below the library's 32 GiB
        alone, shared = (library.memory_budget(EngineOptions(local_world_size=n)) for n in (1, 8))
        assert alone / shared == pytest.approx(8, rel=0.2)
        assert library.memory_budget(EngineOptions(host_cache_bytes=5)) == 5
        monkeypatch.setenv(library.BUDGET_VARIABLE, "77")
        assert library.memory_budget(EngineOptions()) == 77

    @pytest.mark.parametrize("threads", [1, 3])
    def test_as_many_files_are_written_at_once_as_asked_for(
        self, tmp_path: Path, monkeypatch: Any, threads: int
    ) -> None:
        lock, now, most = threading.Lock(), 0, 0
        all_at_once, write = threading.Event(), os.write

        def slow(fd: int, data: Any) -> int:
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
            if now >= threads:
                all_at_once.set()
            all_at_once.wait(60)  # the first wait for as many as there are to be
            time.sleep(0.01)
            with lock:
                now -= 1
            return write(fd, data)

        monkeypatch.setattr(os, "write", slow)
        engine = self.engine(io_threads=threads, fsync=False)
        files = [FileState(f"{i}.pt", {"a": torch.ones(10)}) for i in range(8)]
        engine.save(files, tmp_path, untraced_operation())
        assert most == threads

    def test_more_threads_than_the_library_has_by_itself_reach_it(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(scheduler, "_MAX_PER_RANK_IO_CONCURRENCY", 16)
        TorchSnapshotEngine(EngineOptions(io_threads=4))
        assert scheduler._MAX_PER_RANK_IO_CONCURRENCY == 16
        TorchSnapshotEngine(EngineOptions(io_threads=24))
        assert scheduler._MAX_PER_RANK_IO_CONCURRENCY == 24

    def test_the_library_is_left_as_it_was(self, tmp_path: Path) -> None:
        before = dict(vars(library_module)), dict(os.environ)
        saved = self.save(tmp_path, {"a": torch.ones(3)})
        self.load(tmp_path, saved)
        (tmp_path / saved[0].name).write_bytes(b"{")
        with pytest.raises(CheckpointDamagedError):
            self.load(tmp_path, [])
        assert (dict(vars(library_module)), dict(os.environ)) == before

    @pytest.mark.parametrize(
        "entry",
        [
            {
                "type": "object",
                "location": "batched/x",
                "serializer": "torch_save",
                "obj_type": "x",
                "replicated": False,
            },
            {"type": "int", "serialized_value": "5", "readable": "5", "replicated": False},
            {"type": "list"},
        ],
        ids=lambda entry: entry["type"],
    )
    def test_entries_that_this_engine_does_not_write_are_refused(self, tmp_path: Path, entry: Any) -> None:
        self.save(tmp_path, {"a": torch.ones(3)})
        path = tmp_path / NAME / self.metadata
        content = json.loads(path.read_text())
        content["manifest"]["0/state/poison"] = entry
        path.write_text(json.dumps(content))
        with pytest.raises(CheckpointDamagedError, match=f"0/state/poison is of type {entry['type']}"):
            self.load(tmp_path, [])

    @pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "batched/other"])
    def test_files_elsewhere_are_not_read(self, tmp_path: Path, location: str) -> None:
        self.save(tmp_path, {"a": torch.ones(3)})
        (tmp_path / "secret").write_bytes(bytes(1000))
        path = tmp_path / NAME / self.metadata
        content = json.loads(path.read_text())
        for entry in content["manifest"].values():
            if "location" in entry:
                entry["location"] = location
        path.write_text(json.dumps(content))
        with pytest.raises(CheckpointDamagedError, match="not one of the files that were saved"):
            self.load(tmp_path, [])
