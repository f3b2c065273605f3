"""Every engine among hostile files: whatever a header or a description says, what comes out is a checkpoint, or
CheckpointDamagedError that names the file."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.checkpointing.engines.base import CheckpointEngine, EngineOptions, FileState, SavedCheckpoint, SavedFile
from megatron.checkpointing.engines.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    EngineUnavailableError,
    reading,
)
from megatron.checkpointing.engines.registry import builtin_engines, create_engine
from megatron.config import ConfigError
from megatron.startup.injected_faults import InjectedFault
from restart_trace.recorder import untraced_operation
from tests.unit.hostile import NO_FILES, altered, blocking_fails
from tests.unit.megatron.checkpointing.engines import datastates_files

NAME = "mp_rank_00_model_states.pt"
MANY = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


def state() -> dict[str, Any]:
    return {"w": torch.arange(6, dtype=torch.float32).reshape(2, 3), "half": torch.ones(3).bfloat16(), "step": 3}


def saved_by(engine: str, directory: Path) -> dict[str, SavedFile]:
    """The state of NAME, saved by `engine`; its files by name, without checksums of them."""
    directory.mkdir(parents=True, exist_ok=True)
    if engine == "datastates":  # its package is not here
        content = datastates_files.write(directory / NAME, "packed", state())
        return {NAME: SavedFile(NAME, len(content), "none")}
    placement = {"name": "w", "shape": [2, 3], "dim": None, "ranges": None}
    file = FileState(NAME, state(), {("w",): placement} if engine == "lazy" else {})
    saver = create_engine(engine, EngineOptions(fsync=False))
    try:
        return {file.name: file for file in saver.save([file], directory, untraced_operation())}
    finally:
        saver.close()


def reader_of(engine: str, verify: bool = False) -> CheckpointEngine:
    return create_engine(engine, EngineOptions(verify_checksums=verify, io_threads=1, rank=0))


def outcome(engine: str, directory: Path, files: dict[str, SavedFile]) -> str | None:
    """What is told of the damage that a load found; None if it found none. Anything else that is raised fails."""
    reader = reader_of(engine)
    try:
        with blocking_fails():
            reader.load_into([FileState(NAME, state())], SavedCheckpoint(directory, files), untraced_operation())
            if engine == "lazy":
                reader.placed_tensors(SavedCheckpoint(directory, files), untraced_operation())
    except CheckpointDamagedError as exc:
        return str(exc)
    finally:
        reader.close()
    return None


def told_of(engine: str, directory: Path, files: dict[str, SavedFile], path: Path) -> str:
    told = outcome(engine, directory, files)
    assert told is not None and str(path) in told, told
    return told


def with_size(files: dict[str, SavedFile], path: Path, directory: Path) -> dict[str, SavedFile]:
    """The manifest's entry of the file at `path` as an attacker writes it: with the size that it has now."""
    name = str(path.relative_to(directory))
    return files | {name: replace(files[name], num_bytes=path.stat().st_size)}


# Engine lazy


def lazy_header(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:end]), content[end:]


def write_lazy(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def lazy(tmp_path: Path) -> tuple[Path, dict[str, SavedFile]]:
    files = saved_by("lazy", tmp_path)
    return tmp_path / next(iter(files)), files


def entry(header: dict[str, Any], name: str = "w") -> dict[str, Any]:
    return header[f"{NAME}/{name}"]


def shape_larger(header: dict[str, Any]) -> None:
    entry(header)["shape"] = [1 << 40, 1 << 40]


def shape_smaller(header: dict[str, Any]) -> None:
    entry(header)["shape"] = [1]


def shape_text(header: dict[str, Any]) -> None:
    entry(header)["shape"] = "23"


def shape_negative(header: dict[str, Any]) -> None:
    entry(header)["shape"] = [-2, -3]


def shape_bool(header: dict[str, Any]) -> None:
    entry(header)["shape"] = [True, 6]


def offsets_overlap(header: dict[str, Any]) -> None:
    entry(header, "half")["data_offsets"] = [0, 6]


def offsets_beyond(header: dict[str, Any]) -> None:
    entry(header)["data_offsets"] = [1 << 40, (1 << 40) + 24]


def offsets_negative(header: dict[str, Any]) -> None:
    entry(header)["data_offsets"] = [-24, 0]


def offsets_infinite(header: dict[str, Any]) -> None:
    entry(header)["data_offsets"] = [float("inf"), float("inf")]


def dtype_list(header: dict[str, Any]) -> None:
    entry(header)["dtype"] = ["F32"]


def states_list(header: dict[str, Any]) -> None:
    header["__metadata__"]["states"] = json.dumps([NAME])


def crc_number(header: dict[str, Any]) -> None:
    described = json.loads(header["__metadata__"]["tensors"])
    described[f"{NAME}/w"]["crc32"] = 7
    header["__metadata__"]["tensors"] = json.dumps(described)


CHANGES = [
    shape_larger, shape_smaller, shape_text, shape_negative, shape_bool, offsets_overlap, offsets_beyond,
    offsets_negative, offsets_infinite, dtype_list, states_list, crc_number,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_lazy_header(lazy: tuple[Path, dict[str, SavedFile]], change: Callable[[dict[str, Any]], None]) -> None:
    path, files = lazy
    header, data = lazy_header(path)
    change(header)
    write_lazy(path, header, data)
    told = told_of("lazy", path.parent, with_size(files, path, path.parent), path)
    assert "its header is not one of engine lazy" in told


@pytest.mark.parametrize("where", ["header", "states", "tensors"])
def test_lazy_header_that_is_nested_deep(lazy: tuple[Path, dict[str, SavedFile]], where: str) -> None:
    path, files = lazy
    header, data = lazy_header(path)
    deep = "[" * 100_000
    if where != "header":
        header["__metadata__"][where] = deep
    write_lazy(path, deep.encode() if where == "header" else header, data)
    told_of("lazy", path.parent, with_size(files, path, path.parent), path)


@pytest.mark.parametrize(
    "placement",
    [
        [], {"name": 5, "shape": [2, 3], "dim": None, "ranges": None},
        {"name": "w", "shape": [2, 3, 4], "dim": None, "ranges": None},
        {"name": "w", "shape": [2, 3], "dim": 2, "ranges": [[0, 2]]},
        {"name": "w", "shape": [4, 3], "dim": 0, "ranges": [[-2, 0]]},
        {"name": "w", "shape": [1 << 60, 3], "dim": 0, "ranges": [[0, 2]]},
        {"kind": "master", "fragments": [{"name": "w", "shape": [6], "dim": None, "ranges": None,
                                          "local_shape": [6], "start": 0, "numel": 6, "offset": 5}]},
    ],
    ids=str,
)  # fmt: skip
def test_lazy_placement(lazy: tuple[Path, dict[str, SavedFile]], placement: Any) -> None:
    """A load onto another layout computes with it where to read and where to write."""
    path, files = lazy
    header, data = lazy_header(path)
    described = json.loads(header["__metadata__"]["tensors"])
    described[f"{NAME}/w"]["placement"] = placement
    header["__metadata__"]["tensors"] = json.dumps(described)
    write_lazy(path, header, data)
    told_of("lazy", path.parent, with_size(files, path, path.parent), path)


@pytest.mark.slow
@MANY
@given(data=st.data())
def test_altered_lazy_header(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("lazy")
    files = saved_by("lazy", directory)
    path = directory / next(iter(files))
    header, content = lazy_header(path)
    part = data.draw(st.sampled_from(["all", "states", "tensors"]))
    if part == "all":
        header = data.draw(altered(header))
    else:
        header["__metadata__"][part] = json.dumps(data.draw(altered(json.loads(header["__metadata__"][part]))))
    write_lazy(path, header, content)
    told = outcome("lazy", directory, with_size(files, path, directory))
    assert told is None or str(directory) in told


# DataStates


def datastates_header(path: Path) -> tuple[dict[str, Any], bytes]:
    return lazy_header(path)  # "packed" begins alike


@pytest.mark.parametrize("offsets", [[float("inf"), float("inf")], [-1, 5], [0, True], [0, "24"], [0, 24, 48], 24, {}])
def test_datastates_offsets(tmp_path: Path, offsets: Any) -> None:
    files = saved_by("datastates", tmp_path)
    header, data = datastates_header(tmp_path / NAME)
    for key in ("w", "datastates_metadata"):
        write_lazy(tmp_path / NAME, header | {key: header[key] | {"data_offsets": offsets}}, data)
        told_of("datastates", tmp_path, with_size(files, tmp_path / NAME, tmp_path), tmp_path / NAME)


def test_datastates_header_that_is_nested_deep(tmp_path: Path) -> None:
    files = saved_by("datastates", tmp_path)
    write_lazy(tmp_path / NAME, b'{"a":' * 100_000, bytes(100))
    told_of("datastates", tmp_path, with_size(files, tmp_path / NAME, tmp_path), tmp_path / NAME)


@pytest.mark.slow
@MANY
@given(data=st.data())
def test_altered_datastates_header(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("datastates")
    files = saved_by("datastates", directory)
    header, content = datastates_header(directory / NAME)
    write_lazy(directory / NAME, data.draw(altered(header)), content)
    told = outcome("datastates", directory, with_size(files, directory / NAME, directory))
    assert told is None or str(directory / NAME) in told


# Each format, by one engine of its package: altered bytes

OF_PACKAGE = {entry.package: name for name, entry in reversed(builtin_engines().items())}
ENGINES = [name for package, name in OF_PACKAGE.items() if package not in ("memory", "none")]  # lazy's format, and none


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@settings(MANY, max_examples=40)
@given(data=st.data())
def test_altered_bytes(tmp_path_factory: pytest.TempPathFactory, engine: str, data: st.DataObject) -> None:
    """With checksums left out, so that what reads the bytes is what is tested."""
    directory = tmp_path_factory.mktemp(engine)
    files = saved_by(engine, directory)
    path = directory / data.draw(st.sampled_from(sorted(files)))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=6))
    path.write_bytes(content)
    told = outcome(engine, directory, with_size(files, path, directory))
    assert told is None or str(directory) in told


@pytest.mark.parametrize("change", ["text", "list", pytest.param("deep", marks=pytest.mark.slow), "missing", "alien"])
def test_torchsnapshot_description(tmp_path: Path, change: str) -> None:
    files = saved_by("torchsnapshot", tmp_path)
    path = tmp_path / NAME / ".snapshot_metadata"
    content = {
        "text": b'"text"', "list": b"[1, 2]", "deep": b"[" * 20_000, "missing": b'{"manifest": {}}',
        "alien": b'{"version": 1, "world_size": {}, "manifest": {"0/state": {"type": "dict"}}}',
    }[change]  # fmt: skip
    path.write_bytes(content)
    told_of("torchsnapshot", tmp_path, with_size(files, path, tmp_path), tmp_path / NAME)


@pytest.mark.parametrize("change", ["size", "offset", "type", "none", "infinite"])
def test_dcp_description(tmp_path: Path, change: str) -> None:
    files = saved_by("dcp", tmp_path)
    path = tmp_path / NAME / ".metadata"
    content = pickle.loads(path.read_bytes())
    place = next(iter(content.storage_data.values()))
    if change == "size":
        next(iter(content.state_dict_metadata.values())).size = "23"
    elif change == "offset":
        place.offset = -5
    elif change == "infinite":
        place.length = float("inf")
    elif change == "type":
        content.state_dict_metadata = [1]
    else:
        content.storage_data = None
    path.write_bytes(pickle.dumps(content))
    told_of("dcp", tmp_path, with_size(files, path, tmp_path), tmp_path / NAME)


# What is no file, with a manifest and without


@pytest.mark.parametrize("make", NO_FILES)
@pytest.mark.parametrize(
    ("engine", "with_manifest"),
    [(engine, known) for engine in ENGINES for known in (True, False) if known or engine != "lazy"],
)  # without a manifest engine lazy has no names of files
def test_what_is_no_file(tmp_path: Path, engine: str, make: Callable[[Path], None], with_manifest: bool) -> None:
    files = saved_by(engine, tmp_path)
    for name in sorted(files):
        path = tmp_path / name
        content = path.read_bytes()
        path.unlink()
        make(path)
        told = outcome(engine, tmp_path, files if with_manifest else {})
        assert told is not None and (name in told or NAME in told)
        path.rmdir() if path.is_dir() else path.unlink()
        path.write_bytes(content)
    assert outcome(engine, tmp_path, files if with_manifest else {}) is None


# What is no damage


@pytest.mark.parametrize(
    "error",
    [
        CheckpointMismatchError("another shape"), EngineUnavailableError("no package"), ConfigError("--flag"),
        MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), OSError(5, "Input/output error"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"), InjectedFault("by a drill"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_what_is_no_damage_keeps_its_meaning(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, reading(Path("file")):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_device_that_fails_in_a_load_is_no_damage(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a good checkpoint would be passed over. No device fails here on demand: torch.load stands in for it."""
    files = saved_by("torch", tmp_path)

    def fail(*args: object, **kwargs: object) -> None:
        raise kind("CUDA error")

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(kind):
        outcome("torch", tmp_path, files)


@pytest.mark.parametrize("error", [KeyError("a"), RecursionError("deep"), AttributeError("x"), RuntimeError("y")])
def test_what_reading_makes_of_damage_is_damage(error: Exception) -> None:
    message = f"^file: cannot be read \\({type(error).__name__}: "
    with pytest.raises(CheckpointDamagedError, match=message), reading(Path("file")):
        raise error
