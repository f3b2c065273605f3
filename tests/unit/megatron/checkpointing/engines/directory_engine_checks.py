"""What every engine must stand up to that keeps each state in a directory of its own; test classes inherit it."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from megatron.checkpointing.engines import unpickling
from megatron.checkpointing.engines.base import CheckpointEngine, EngineOptions, FileState, SavedCheckpoint, SavedFile
from megatron.checkpointing.engines.codec import SkeletonError
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.engines.registry import create_engine
from restart_trace.recorder import Recorder, untraced_operation
from restart_trace.sink import JsonlSink
from tests.dist.storage import drop_root_rights, small_disk
from tests.unit.megatron.checkpointing.engines.nests import identical, nest, random_tensor
from tests.unit.megatron.checkpointing.engines.recorded import recorded_save_and_load, time_in_no_window
from tests.unit.trace_helpers import PROCESS, read

GOLDEN = Path(__file__).resolve().parents[4] / "golden/upstream_run/global_step5"
NAME = "layer_01-model_00-model_states.pt"
MIB = 1 << 20


def by_name(saved: Sequence[SavedFile]) -> dict[str, SavedFile]:
    return {file.name: file for file in saved}


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))


def large(num_bytes: int) -> dict[str, torch.Tensor]:
    """Four tensors of that many bytes together, of different types."""
    count = num_bytes // 16
    return {
        "float": torch.arange(count, dtype=torch.float32),
        "half": torch.arange(2 * count).to(torch.bfloat16),
        "bytes": torch.arange(4 * count).to(torch.uint8),
        "int": torch.arange(count, dtype=torch.int32),
    }


# The library's own threads print what they raise; what matters is that the save fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
class DirectoryEngineChecks:
    engine_name: ClassVar[str]
    metadata: ClassVar[str]  # the file by which the library finds the others

    def engine(self, **options: Any) -> CheckpointEngine:
        return create_engine(self.engine_name, EngineOptions(**options))

    def save(self, directory: Path, state: Any, op: Any = None, **options: Any) -> list[SavedFile]:
        directory.mkdir(exist_ok=True)
        return self.engine(**options).save([FileState(NAME, state)], directory, op or untraced_operation())

    def load(self, directory: Path, saved: Sequence[SavedFile], op: Any = None, **options: Any) -> Any:
        return self.engine(**options).load(
            [NAME], SavedCheckpoint(directory, by_name(saved)), op or untraced_operation()
        )[NAME]

    def test_every_kind_of_state_comes_back(self, tmp_path: Path) -> None:
        state = nest()
        saved = self.save(tmp_path, state)
        assert identical(self.load(tmp_path, saved), state)
        assert identical(self.load(tmp_path, []), state)  # without a manifest
        assert {file.name for file in saved} == {
            str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()
        }
        assert all(file.states == (NAME,) and file.checksum.startswith("crc32:") for file in saved)
        assert all(file.num_bytes == (tmp_path / file.name).stat().st_size for file in saved)

    @pytest.mark.parametrize("kind", ["bf16_zero_pp_rank_0", "layer_02", "layer_06", "mp_rank_00"])
    def test_a_file_of_upstream_comes_back(self, tmp_path: Path, kind: str) -> None:
        path = next(iter(sorted(GOLDEN.glob(f"{kind}*.pt"))))
        with unpickling.known_classes():
            state = torch.load(path, weights_only=True)
        assert identical(self.load(tmp_path, self.save(tmp_path, state)), state)

    @pytest.mark.parametrize(
        "state", [{}, None, 5, {"only": torch.empty(0)}, torch.ones(3), {"skeleton": torch.ones(1)}]
    )
    def test_small_states_come_back(self, tmp_path: Path, state: Any) -> None:
        assert identical(self.load(tmp_path, self.save(tmp_path, state)), state)

    @pytest.mark.slow
    def test_many_small_tensors_take_no_more_than_their_number_of_steps(self, tmp_path: Path) -> None:
        state = {f"layer.{i}.weight": torch.full((8,), i) for i in range(1000)}
        saved = self.save(tmp_path, state, fsync=False)
        start = time.process_time()
        assert identical(self.load(tmp_path, saved), state)
        assert time.process_time() - start < 5  # 0.3 s; 15 s if every read looks through all others

    def test_several_states_are_kept_apart(self, tmp_path: Path) -> None:
        engine = self.engine()
        states = {f"file_{i}.pt": {"a": random_tensor(torch.float32, 100, seed=i), "i": i} for i in range(5)}
        files = [FileState(name, state) for name, state in states.items()]
        saved = by_name(engine.save(files, tmp_path, untraced_operation()))
        assert identical(engine.load(list(states), SavedCheckpoint(tmp_path, saved), untraced_operation()), states)
        one = engine.load(["file_3.pt"], SavedCheckpoint(tmp_path, saved), untraced_operation())
        assert identical(one, {"file_3.pt": states["file_3.pt"]})

    def test_saves_follow_one_another(self, tmp_path: Path) -> None:
        engine = self.engine()
        for i in range(3):
            directory = tmp_path / f"step{i}"
            directory.mkdir()
            engine.save([FileState(NAME, {"i": torch.tensor(i)})], directory, untraced_operation())
        for i in range(3):
            assert self.load(tmp_path / f"step{i}", [])["i"].item() == i
        engine.close()

    @pytest.mark.slow
    def test_what_changes_after_release_is_not_saved(self, tmp_path: Path) -> None:
        for options in ({}, {"host_cache_bytes": 8 * MIB}):
            directory = tmp_path / f"{len(options)}"
            directory.mkdir()
            state = large(32 * MIB)
            state["view"] = state["float"][1::2]
            expected = {name: tensor.clone() for name, tensor in state.items()}
            pending = self.engine(**options).begin_save([FileState(NAME, state)], directory, untraced_operation())
            pending.release_state()
            pending.release_state()
            for tensor in state.values():
                tensor.zero_()
            state.clear()
            assert identical(self.load(directory, pending.wait()), expected)

    def test_a_flipped_bit_in_any_file_is_found(self, tmp_path: Path) -> None:
        saved = self.save(tmp_path / "good", {"a": random_tensor(torch.float32, 1 << 18), "b": 5, "c": "text"})
        assert len(saved) > 1
        for file in saved:
            for position in (0, file.num_bytes // 3, file.num_bytes - 1):
                copy = tmp_path / "bad"
                shutil.copytree(tmp_path / "good", copy)
                flip(copy / file.name, position)
                with pytest.raises(CheckpointDamagedError, match=file.name):
                    self.load(copy, saved)
                shutil.rmtree(copy)

    def test_a_file_that_is_short_or_gone_is_named(self, tmp_path: Path) -> None:
        saved = self.save(tmp_path, {"a": torch.ones(1000)})
        for file in saved:
            path = tmp_path / file.name
            content = path.read_bytes()
            path.write_bytes(content[:-1])
            with pytest.raises(CheckpointDamagedError, match=f"{file.name}: {file.num_bytes - 1} bytes"):
                self.load(tmp_path, saved)
            path.unlink()
            with pytest.raises(CheckpointDamagedError, match=f"{file.name}: file is missing"):
                self.load(tmp_path, saved)
            path.write_bytes(content)
        with pytest.raises(CheckpointDamagedError, match="is missing"):
            self.engine().load(["other.pt"], SavedCheckpoint(tmp_path, by_name(saved)), untraced_operation())
        with pytest.raises(CheckpointDamagedError, match="is missing"):
            self.engine().load(["other.pt"], SavedCheckpoint(tmp_path), untraced_operation())

    def test_damage_without_checksums_is_a_named_error_or_other_values(self, tmp_path: Path) -> None:
        """Neither another exception, nor a state of another form."""
        state = {"a": random_tensor(torch.float32, 500), "b": [1, "x"], "e": torch.empty(0)}
        saved = self.save(tmp_path / "good", state)
        options = {"verify_checksums": False}
        for file in saved:
            size = file.num_bytes
            cuts = {0, 1, size // 4, size // 2, size - 1}
            for cut in cuts:
                copy = tmp_path / "bad"
                shutil.copytree(tmp_path / "good", copy)
                os.truncate(copy / file.name, cut)
                with pytest.raises(CheckpointDamagedError, match=NAME):
                    self.load(copy, [], **options)
                shutil.rmtree(copy)
            for position in range(0, size, max(size // 12, 1)):
                copy = tmp_path / "bad"
                shutil.copytree(tmp_path / "good", copy)
                flip(copy / file.name, position)
                try:
                    found = self.load(copy, saved, **options)
                except CheckpointDamagedError as exc:
                    assert NAME in str(exc)
                else:
                    assert found["a"].shape == (500,)
                shutil.rmtree(copy)

    def test_checksums_can_be_left_out(self, tmp_path: Path) -> None:
        state = nest()
        saved = self.save(tmp_path, state, checksum=False)
        assert {file.checksum for file in saved} == {"none"}
        assert identical(self.load(tmp_path, saved), state)

    def test_a_checksum_of_another_engine_is_refused(self, tmp_path: Path) -> None:
        saved = self.save(tmp_path, {"a": torch.ones(3)})
        for checksum in ("sha256:00", "crc32:xyz", "crc32"):
            other = [SavedFile(file.name, file.num_bytes, checksum, file.states) for file in saved]
            with pytest.raises(CheckpointDamagedError, match="not one of this engine's"):
                self.load(tmp_path, other)

    def test_a_full_disk_is_an_error_with_number_and_file(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", 2 * MIB) as mounted:
            if not mounted:
                pytest.skip("needs the right to mount a tmpfs: run as root, with CAP_SYS_ADMIN")
            for threads in (None, 3):
                directory = tmp_path / "disk" / f"save{threads}"
                directory.mkdir()
                files = [FileState(f"{i}.pt", large(MIB)) for i in range(6)]
                with pytest.raises(OSError) as info:
                    self.engine(io_threads=threads).save(files, directory, untraced_operation())
                assert info.value.errno == errno.ENOSPC
                assert str(directory) in str(info.value.filename)
                self.nothing_is_written_any_more(directory)
                shutil.rmtree(directory)

    def nothing_is_written_any_more(self, directory: Path) -> None:
        assert not [thread.name for thread in threading.enumerate() if "torchsnapshot" in thread.name.lower()]
        shutil.rmtree(directory)
        directory.mkdir()
        assert list(directory.iterdir()) == []

    def test_a_directory_that_may_not_be_written_to_is_an_error_with_number_and_file(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        errors: list[BaseException] = []

        def save() -> None:  # rights belong to a thread, and the threads that it starts
            drop_root_rights()
            try:
                self.save(tmp_path, {"a": torch.ones(3)})
            except BaseException as exc:
                errors.append(exc)

        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
        (error,) = errors
        assert isinstance(error, OSError) and error.errno == errno.EACCES
        assert str(tmp_path / NAME) in str(error.filename)

    def test_what_cannot_be_kept_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(SkeletonError, match="a/b: cannot save a builtins.set"):
            self.save(tmp_path, {"a": {"b": {1}}})

    def test_spans_follow_the_schema_and_count_every_byte(self, tmp_path: Path) -> None:
        state = large(16 * MIB)
        covered = [0.0]
        for attempt in range(5):  # other processes may get between two spans
            covered.append(self._spans_of_one_save_and_load(tmp_path / str(attempt), state))
            if covered[-1] >= 0.9:
                break
        assert max(covered) >= 0.9  # above 0.98 on a machine with nothing else to do

    def _spans_of_one_save_and_load(self, directory: Path, state: Any) -> float:
        """Checks them; returns the least part of an operation that they cover."""
        directory.mkdir()
        recorder = Recorder(JsonlSink(directory / "trace.jsonl"), PROCESS)
        engine, saved, found = self.engine(), [], None  # `found` is kept: giving memory back takes time, too
        for operation in ("save", "load"):
            with recorder.operation(operation, tag="t", step=1) as op:
                if operation == "save":
                    saved = engine.save([FileState(NAME, state)], directory, op)
                else:
                    found = engine.load([NAME], SavedCheckpoint(directory, by_name(saved)), op)
            assert op.bytes == sum(file.num_bytes for file in saved)
            assert op.num_files == len(saved)
            assert op.durable is (True if operation == "save" else None)
        assert found is not None
        recorder.close()
        records = read(directory / "trace.jsonl")
        spans = [record for record in records if record["type"] == "span"]
        total = sum(file.num_bytes for file in saved)
        assert _moved(spans, "flush", "write") == total
        assert _moved(spans, "flush", "fsync") == total
        assert _moved(spans, "load", "read") == total
        assert not [span for span in spans if "error" in span]
        loading = [span for span in spans if span["operation"] == "load"]
        assert {span["detail"] for span in loading} == {"read", "verify", "deserialize"}
        assert sum(span["duration_ns"] for span in loading) == loading[0]["end_ns"] - loading[0]["start_ns"]
        least = 1.0
        for end in [record for record in records if record["type"] == "operation_end"]:
            windows = [(s["start_ns"], s["end_ns"]) for s in spans if s["operation"] == end["operation"]]
            least = min(least, _union(windows) / (end["end_ns"] - end["start_ns"]))
        return least

    def test_spans_of_training_leave_no_time_between_them(self, tmp_path: Path) -> None:
        for end in recorded_save_and_load(self.engine(), tmp_path):
            assert time_in_no_window([span for span in end.spans if span["blocking"]], end.start_ns) == 0

    def test_fsync_is_done_for_every_byte_and_directory_or_not_at_all(self, tmp_path: Path, monkeypatch: Any) -> None:
        synced: dict[str, int] = {}
        fsync = os.fsync

        def noted(fd: int) -> None:
            synced[os.readlink(f"/proc/self/fd/{fd}").removesuffix(".tmp")] = os.fstat(fd).st_size
            fsync(fd)

        monkeypatch.setattr(os, "fsync", noted)
        saved = self.save(tmp_path / "off", nest(), fsync=False)
        assert synced == {}
        assert identical(self.load(tmp_path / "off", saved), nest())
        for folder, state in {"large": nest(), "small": {"a": 1}}.items():
            root = tmp_path / folder
            for file in self.save(root, state):
                assert synced[str(root / file.name)] == file.num_bytes
                above = [path for path in (root / file.name).parents if path.is_relative_to(root)]
                assert above and all(str(path) in synced for path in above)


def _moved(spans: Sequence[dict[str, Any]], phase: str, detail: str) -> int:
    return sum(s.get("bytes", 0) for s in spans if s["phase"] == phase and s["detail"] == detail)


def _union(windows: Sequence[tuple[int, int]]) -> int:
    total = reached = 0
    for start, end in sorted(windows):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total
