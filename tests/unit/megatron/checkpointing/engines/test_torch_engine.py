"""The torch engine: what it writes, what it times, and that damage never loads as other data."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import io
import os
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.checkpointing.engines.base import CheckpointEngine, EngineOptions, FileState, SavedCheckpoint, SavedFile
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.engines.host_staging import Staging, stage_on_host
from megatron.checkpointing.engines.registry import create_engine
from megatron.checkpointing.engines.torch_files import tensor_records, write_state
from megatron.startup.injected_faults import InjectedFault
from restart_trace.recorder import Recorder, untraced_operation
from restart_trace.sink import JsonlSink
from tests.unit.megatron.checkpointing.engines.recorded import recorded_save_and_load, time_in_no_window
from tests.unit.trace_helpers import PROCESS, read

NAME = "layer_01-model_00-model_states.pt"


def engine(**options: Any) -> CheckpointEngine:
    return create_engine("torch", EngineOptions(**options))


def state() -> dict[str, Any]:
    return {
        "weight": torch.arange(256, dtype=torch.float32),
        "half": torch.linspace(0, 1, 7).to(torch.bfloat16),
        "empty": torch.empty(0, 3),
        "step": 5,
        "nested": [1, 2.5, None, ("text", True)],
        "scheduler": collections.OrderedDict(lr=1e-3),
    }


def same(one: Any, other: Any) -> bool:
    """Equal in type, structure and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        bits = [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and bits[0] == bits[1]
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@dataclass
class Saved:
    """A saved file, and a copy of it to damage."""

    path: Path
    entry: SavedFile
    content: bytes
    damaged: Path

    def load_damaged(self, content: bytes, with_manifest: bool = True) -> Any:
        self.damaged.write_bytes(content)
        expected = {NAME: self.entry} if with_manifest else {}
        return engine().load([NAME], SavedCheckpoint(self.damaged.parent, expected), untraced_operation())[NAME]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    directory = tmp_path_factory.mktemp("engine")
    (entry,) = engine(fsync=False).save([FileState(NAME, state())], directory, untraced_operation())
    (directory / "damaged").mkdir()
    path = directory / NAME
    return Saved(path, entry, path.read_bytes(), directory / "damaged" / NAME)


# Saving


def test_a_state_comes_back_bit_for_bit(saved: Saved) -> None:
    assert saved.entry == SavedFile(NAME, saved.path.stat().st_size, saved.entry.checksum)
    for verify in (True, False):
        for expected in ({NAME: saved.entry}, {}):
            reader = engine(verify_checksums=verify)
            loaded = reader.load([NAME], SavedCheckpoint(saved.path.parent, expected), untraced_operation())
            assert same(loaded[NAME], state())
    assert same(torch.load(saved.path, weights_only=True), state())  # as anyone's torch.load reads it


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_views_are_written_without_what_they_are_views_of(tmp_path: Path) -> None:
    """torch.save writes the whole storage of a view: of DeepSpeed's flat buffers, for one."""
    flat = torch.arange(10_000.0)
    counter = Staging()
    staged = stage_on_host({"part": flat[5:8], "whole": flat, "pair": Pair(flat[:2], flat.view(100, 100))}, counter)
    assert staged["whole"].data_ptr() == flat.data_ptr()  # not copied
    assert staged["part"].untyped_storage().nbytes() == 12 and counter.copied_bytes == 12 + 8
    assert type(staged["pair"]) is Pair and torch.equal(staged["pair"].first, flat[:2])
    (entry,) = engine().save([FileState("views", {"part": flat[5:8]})], tmp_path, untraced_operation())
    assert entry.num_bytes < 3000
    assert torch.equal(torch.load(tmp_path / "views")["part"], flat[5:8])


def test_odd_tensors(tmp_path: Path) -> None:
    odd = {
        "expanded": torch.ones(1).expand(5),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "scalar": torch.tensor(7),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "strided": torch.arange(10)[::3],
    }
    engine().save([FileState("odd", odd)], tmp_path, untraced_operation())
    loaded = torch.load(tmp_path / "odd", weights_only=True)
    for name, tensor in odd.items():
        assert torch.equal(loaded[name], tensor) and not loaded[name].requires_grad, name


def test_tensors_of_one_storage_are_written_once(tmp_path: Path) -> None:
    tied = torch.zeros(10_000)
    (entry,) = engine().save([FileState("tied", {"a": tied, "b": tied})], tmp_path, untraced_operation())
    assert entry.num_bytes < 50_000


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[tuple[Recorder, Path]]:
    path = tmp_path / "rank_00000_cycle_000.jsonl"
    recorder = Recorder(JsonlSink(path), PROCESS)
    yield recorder, path
    recorder.close()


@pytest.mark.parametrize("fsync", [True, False])
def test_phases_of_a_save(recorded: tuple[Recorder, Path], tmp_path: Path, fsync: bool) -> None:
    recorder, trace = recorded
    (tmp_path / "tag").mkdir()
    with recorder.operation("save", engine="TorchEngine") as op:
        (entry,) = engine(fsync=fsync).save([FileState(NAME, state())], tmp_path / "tag", op)
    spans = [r for r in read(trace) if r["type"] == "span"]
    phases = [(r["phase"], r.get("detail")) for r in spans]
    synchronised = [("flush", "fsync")] if fsync else []
    assert phases == [("device_to_host", None), *synchronised, ("serialize", None), ("flush", "write")]
    end = read(trace)[-1]
    assert (end["bytes"], end["num_files"], end["durable"]) == (entry.num_bytes, 1, fsync)
    assert all(r["bytes"] == entry.num_bytes for r in spans if r["phase"] == "flush")
    serialize, write = spans[-2:]
    window = serialize["end_ns"] - serialize["start_ns"]
    assert (serialize["start_ns"], serialize["end_ns"]) == (write["start_ns"], write["end_ns"])
    assert sum(span["duration_ns"] for span in spans) == window


@pytest.mark.parametrize("fsync", [True, False])
def test_spans_leave_no_time_between_files(tmp_path: Path, fsync: bool) -> None:
    for operation in recorded_save_and_load(engine(fsync=fsync), tmp_path):
        assert time_in_no_window(operation.spans, operation.start_ns) == 0


@pytest.mark.parametrize("verify", [True, False])
def test_phases_of_a_load(recorded: tuple[Recorder, Path], saved: Saved, verify: bool) -> None:
    recorder, trace = recorded
    for _ in range(10):  # what takes its time between two of them need not do so in each
        with recorder.operation("load", engine="TorchEngine") as op:
            engine(verify_checksums=verify).load([NAME], SavedCheckpoint(saved.path.parent, {NAME: saved.entry}), op)
    every = [r for r in read(trace) if r["type"] == "span"]
    spans = {r["detail"]: r for r in every}  # of the last load
    assert set(spans) == {"read", "verify", "deserialize"}
    assert spans["read"]["bytes"] == saved.entry.num_bytes == read(trace)[-1]["bytes"]
    verifying = min(r["duration_ns"] for r in every if r["detail"] == "verify")
    assert verify or verifying < 1_000_000  # the clock is read, no checksum is computed
    window = spans["read"]["end_ns"] - spans["read"]["start_ns"]
    assert sum(span["duration_ns"] for span in spans.values()) == window


def test_refused_write_is_named_as_the_operating_system_names_it(tmp_path: Path) -> None:
    """Out of torch's zip writer it would come as "unexpected pos 64 vs 0"; small files and large ones alike."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (10, 1_000_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                engine().save([FileState(f"file{size}", {"a": torch.ones(size)})], tmp_path, untraced_operation())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class FailsAfter(io.BytesIO):
    """A file whose `number`-th write raises `error`, as a fault does that comes while torch writes."""

    def __init__(self, number: int, error: Exception) -> None:
        super().__init__()
        self._left, self._error = number, error

    def write(self, data: Any) -> int:
        self._left -= 1
        if self._left == 0:
            raise self._error
        return super().write(data)


@pytest.mark.parametrize("number", [1, 3, 8])
@pytest.mark.parametrize(
    "error",
    [OSError(errno.EIO, "of the file"), InjectedFault("of the drill"), torch.AcceleratorError("of the device")],
    ids=lambda error: type(error).__name__,
)
def test_what_ends_a_write_is_not_hidden_by_what_torch_says_after_it(error: Exception, number: int) -> None:
    with pytest.raises(type(error)) as raised:
        write_state(state(), FailsAfter(number, error))
    assert raised.value is error


def test_name_used_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        engine().save([FileState("a", {}), FileState("a", {})], tmp_path, untraced_operation())


# Loading what is damaged

PROPERTY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """Memory is filled with a pattern when it is allocated: what was never read does not look like what was saved."""
    perturb, mallopt = -6, ctypes.CDLL(None).mallopt  # M_PERTURB of malloc.h
    mallopt(perturb, 0xA5)
    yield
    mallopt(perturb, 0)


def directory_of(content: bytes) -> dict[str, int]:
    """Name of a record -> where its entry in the zip directory begins (APPNOTE.TXT, 4.3.12)."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        found, at = {}, archive.start_dir
        for info in archive.infolist():
            found[info.filename] = at
            at += 46 + len(info.filename)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("filled_memory")
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(bit, marks=pytest.mark.nightly(minutes=1)) for bit in range(1, 5))]
)
def test_flipped_bits_of_the_zip_directory_never_load_as_other_data(saved: Saved, first: int) -> None:
    """Each bit of it alone: torch's reader does not read a record that is marked as a directory, and says nothing.

    Each fifth bit in the suite: of every field some.
    """
    start = min(directory_of(saved.content).values())
    for bit in range(8 * start + first, 8 * len(saved.content), 5):
        content = bytearray(saved.content)
        content[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(CheckpointDamagedError):
            assert same(saved.load_damaged(bytes(content), with_manifest=False), state()), f"bit {bit - 8 * start}"


def test_records_that_change_names_are_refused(tmp_path: Path) -> None:
    """One bit of each of two names, and torch would give each tensor the bytes of the other."""
    engine(fsync=False).save([FileState("moments", [torch.zeros(8), torch.ones(8)])], tmp_path, untraced_operation())
    content = bytearray((tmp_path / "moments").read_bytes())
    entries = directory_of(bytes(content))
    for name in ("archive/data/0", "archive/data/1"):
        content[entries[name] + 46 + len("archive/data/")] ^= 1
    (tmp_path / "moments").write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match="record archive/data/1 of the directory names itself"):
        engine().load(["moments"], SavedCheckpoint(tmp_path, {}), untraced_operation())


@pytest.mark.slow
@pytest.mark.usefixtures("filled_memory")
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("with_manifest", [True, False])
@settings(PROPERTY, max_examples=500)
@given(data=st.data())
def test_flipped_bits_never_load_as_other_data(saved: Saved, with_manifest: bool, data: st.DataObject) -> None:
    """Refused, or (in padding, say) of no consequence. Upstream's files have no manifest, but CRCs all the same."""
    content = bytearray(saved.content)
    bits = data.draw(st.lists(st.integers(0, 8 * len(content) - 1), min_size=1, max_size=4, unique=True))
    for bit in bits:
        content[bit // 8] ^= 1 << bit % 8
    try:
        loaded = saved.load_damaged(bytes(content), with_manifest)
    except CheckpointDamagedError as error:
        assert str(saved.damaged) in str(error)
        return
    assert same(loaded, state())


@PROPERTY
@given(size=st.integers(0, 10_000))
def test_truncated_file_is_refused(saved: Saved, size: int) -> None:
    for with_manifest in (True, False):
        with pytest.raises(CheckpointDamagedError):
            saved.load_damaged(saved.content[: min(size, len(saved.content) - 1)], with_manifest)


@pytest.mark.parametrize("content", [b"", b"text", bytes(5000), b"\x80\x02}q\x00."])
def test_file_of_another_kind(saved: Saved, content: bytes) -> None:
    with pytest.raises(CheckpointDamagedError, match="not a complete torch.save file"):
        saved.load_damaged(content, with_manifest=False)


def test_whole_file_of_another_save_is_refused(saved: Saved, tmp_path: Path) -> None:
    other = state() | {"weight": torch.arange(256, dtype=torch.float32) + 1}
    engine().save([FileState(NAME, other)], tmp_path, untraced_operation())
    assert (tmp_path / NAME).stat().st_size == saved.entry.num_bytes
    with pytest.raises(CheckpointDamagedError, match=f"but {saved.entry.checksum} was saved"):
        saved.load_damaged((tmp_path / NAME).read_bytes())


def test_checksum_of_another_engine(saved: Saved) -> None:
    expected = {NAME: SavedFile(NAME, saved.entry.num_bytes, "sha256:00")}
    with pytest.raises(CheckpointDamagedError, match="checksum 'sha256:00' is not one of this engine's"):
        engine().load([NAME], SavedCheckpoint(saved.path.parent, expected), untraced_operation())


def test_missing_and_short_files_are_named(saved: Saved, tmp_path: Path) -> None:
    expected = {NAME: saved.entry}
    with pytest.raises(CheckpointDamagedError, match=f"{tmp_path / NAME}: file is missing"):
        engine().load([NAME], SavedCheckpoint(tmp_path, expected), untraced_operation())
    shutil.copy(saved.path, tmp_path / NAME)
    os.truncate(tmp_path / NAME, 7)
    with pytest.raises(CheckpointDamagedError, match=f"7 bytes, but {saved.entry.num_bytes} were saved"):
        engine().load([NAME], SavedCheckpoint(tmp_path, expected), untraced_operation())


class Unknown:
    """Not on the allow-list."""


def test_unknown_class_is_not_unpickled(tmp_path: Path) -> None:
    torch.save({"object": Unknown()}, tmp_path / NAME)
    with pytest.raises(CheckpointDamagedError, match="holds a class that is not on the allow-list"):
        engine().load([NAME], SavedCheckpoint(tmp_path), untraced_operation())


def test_values_alone_are_verified_without_reading_tensors(tmp_path: Path) -> None:
    """load_values: a flipped bit in the pickle or in a step counter is found; the tensors are for others to verify."""
    content = {"step": torch.tensor(7.0), "lr": 1e-3, "large": torch.arange(5000.0)}
    (entry,) = engine().save([FileState(NAME, content)], tmp_path, untraced_operation())
    path, expected = tmp_path / NAME, {NAME: entry}
    found = engine().load_values(NAME, SavedCheckpoint(tmp_path, expected), untraced_operation())
    assert same(found["step"], content["step"]) and found["lr"] == 1e-3 and found["large"].device.type == "meta"
    whole = path.read_bytes()
    records = {record.size: record for record in tensor_records(path).values() if "/data/" in record.name}
    pickled = next(record for record in tensor_records(path).values() if record.name.endswith("data.pkl"))
    for record in (pickled, records[4]):
        damaged = bytearray(whole)
        damaged[record.offset + record.size // 2] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointDamagedError, match=f"{path}: record {record.name} does not have the checksum"):
            engine().load_values(NAME, SavedCheckpoint(tmp_path, expected), untraced_operation())
    damaged = bytearray(whole)
    damaged[records[20_000].offset] ^= 1
    path.write_bytes(damaged)
    engine().load_values(NAME, SavedCheckpoint(tmp_path, expected), untraced_operation())
    with pytest.raises(CheckpointDamagedError, match="data/"):
        engine().load([NAME], SavedCheckpoint(tmp_path, expected), untraced_operation())
