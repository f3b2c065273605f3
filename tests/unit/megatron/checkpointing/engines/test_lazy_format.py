"""The file of engine lazy: read by the safetensors library, its size beforehand, and damage to it."""

from __future__ import annotations

import ast
import collections
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from megatron.checkpointing.engines import codec
from megatron.checkpointing.engines.base import EngineOptions, FileState, SavedCheckpoint, SavedFile
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.engines.lazy import format as lazy_format
from megatron.checkpointing.engines.lazy import header as lazy_header
from megatron.checkpointing.engines.lazy.engine import LazyEngine
from megatron.checkpointing.engines.lazy.writer import cut_into_blocks
from megatron.fileio import direct_files
from megatron.fileio.page_cache import ResidentPages
from restart_trace.recorder import untraced_operation
from tests.unit.megatron.checkpointing.preflight.test_prefetch import forget

LAZY = Path(lazy_format.__file__).parent
NAME = "mp_rank_00_model_states.pt"


def state() -> dict[str, Any]:
    return {
        "weight": torch.arange(5000, dtype=torch.float32).reshape(50, 100),
        "half": torch.linspace(0, 1, 7).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "double": torch.tensor(2.5, dtype=torch.float64),
        "complex": torch.tensor([1 + 2j], dtype=torch.complex128),
        "empty": torch.empty(0, 3),
        "schedule": collections.OrderedDict(lr=1e-3, steps=(1, 2)),
    }


def save(directory: Path, files: list[FileState], **options: Any) -> SavedFile:
    (saved,) = LazyEngine(EngineOptions(fsync=False, **options)).save(files, directory, untraced_operation())
    return saved


def load(directory: Path, saved: SavedFile, name: str = NAME) -> Any:
    return LazyEngine(EngineOptions()).load(
        [name], SavedCheckpoint(directory, {saved.name: saved}), untraced_operation()
    )[name]


def test_the_safetensors_library_reads_every_tensor(tmp_path: Path) -> None:
    saved = save(tmp_path, [FileState(NAME, state())], rank=3)
    assert saved.name == "rank_00003.safetensors" and saved.states == (NAME,)
    with safe_open(str(tmp_path / saved.name), "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        assert file.metadata()["format"] == "pt"
    expected = {f"{NAME}/{key}": value for key, value in state().items() if isinstance(value, torch.Tensor)}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.dtype == torch.complex128:  # safetensors has no name for it: its bytes
            assert torch.equal(found[name].view(torch.complex128), tensor)
        else:
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_reading_a_header_reads_no_data_ahead(path_on_disk: Path) -> None:
    """Of which another rank may have the only need, or which is read around the page cache."""
    saved = save(path_on_disk, [FileState(NAME, {"zeros": torch.zeros(1 << 20)})])
    path = path_on_disk / saved.name
    forget(path)
    header = len(lazy_header.read_header(path))
    with path.open("rb") as file:
        resident = ResidentPages(file.fileno())
        assert resident.share(0, header) == 1 and resident.share(header, saved.num_bytes) == 0


def test_data_begins_aligned_and_each_tensor_at_a_multiple_of_its_element_size(tmp_path: Path) -> None:
    saved = save(
        tmp_path, [FileState(NAME, state()), FileState("other.pt", {"odd": torch.zeros(3, dtype=torch.uint8)})]
    )
    path = tmp_path / saved.name
    contents = lazy_format.decode(lazy_header.read_header(path), path)
    assert contents.data_start % 4096 == 0
    assert len(contents.entries) == 7
    for entry in contents.entries.values():
        assert entry.start % entry.dtype.itemsize == 0
    assert path.stat().st_size == contents.file_bytes == saved.num_bytes


def test_size_is_known_before_and_without_any_data(tmp_path: Path) -> None:
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in state().items()}
    for options in ({"checksum": True}, {"checksum": False}):
        directory = tmp_path / str(options["checksum"])
        directory.mkdir()
        saved = save(directory, [FileState(NAME, state())], rank=1, **options)
        planned = lazy_format.planned_size([FileState(NAME, meta)], 1, options["checksum"])
        assert planned == (saved.name, saved.num_bytes)


def test_placements_lie_beside_their_tensors(tmp_path: Path) -> None:
    placement = {"name": "3.mlp.weight", "shape": [100, 100], "dim": 0, "ranges": [[50, 100]]}
    nest = {"module": [state(), {"weight": torch.zeros(4)}]}
    file = FileState(NAME, nest, {("module", 0, "weight"): placement})
    path = tmp_path / save(tmp_path, [file]).name
    contents = lazy_format.decode(lazy_header.read_header(path), path)
    found = {name: entry.placement for name, entry in contents.entries.items() if entry.placement}
    assert found == {f"{NAME}/module/0/weight": placement}


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 40_000), max_size=12), st.sampled_from([4096, 8192, 65536]))
def test_blocks_cover_every_byte_of_every_tensor_once(sizes: list[int], block_bytes: int) -> None:
    entries, position = {}, 0
    for index, size in enumerate(sizes):
        name = f"t{index}"
        entries[name] = lazy_format.TensorEntry(name, torch.uint8, (size,), position, position + size)
        position += size
    contents = lazy_format.Contents(entries, {}, 8192)
    covered: dict[str, list[tuple[int, int]]] = {name: [] for name in entries}
    for index, block in enumerate(cut_into_blocks(contents, block_bytes)):
        assert block.position == 8192 + index * block_bytes
        filled = 0
        for piece in block.pieces:
            assert piece.offset == filled, "a hole in the block"
            assert 8192 + entries[piece.tensor].start + piece.start == block.position + piece.offset
            filled += piece.stop - piece.start
            covered[piece.tensor].append((piece.start, piece.stop))
        assert filled == block.length <= block_bytes
    for name, parts in covered.items():
        assert sum(stop - start for start, stop in parts) == entries[name].num_bytes
        assert all(one[1] == other[0] for one, other in zip(parts, parts[1:], strict=False))


# Damage


def header_with(content: Any) -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "too few for a safetensors file"),
        (b"\x80\x04cos\nsystem\n(S'false'\ntR.", "not a safetensors file"),
        (struct.pack("<Q", 5000) + b"{}", "ends within its header of 5008 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "not a safetensors file"),
        (header_with([]), "not one of engine lazy"),
        (header_with({}), "not one of engine lazy (KeyError"),
        (header_with({"__metadata__": {"lazy_format_version": "9"}}), "format version 9; only 1 is known"),
        (header_with({"__metadata__": {"lazy_format_version": "1", "states": "{", "tensors": ""}}), "not one of"),
    ],
)  # fmt: skip
def test_what_is_no_file_of_the_engine_is_damaged(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "rank_00000.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointDamagedError) as caught:
        load(tmp_path, SavedFile(path.name, len(content), lazy_format.header_checksum(content), (NAME,)))
    assert str(path) in str(caught.value) and says in str(caught.value)


def test_a_poisoned_file_runs_nothing(tmp_path: Path) -> None:
    """A skeleton that asks for a class which is not on the allow-list, with a checksum that fits."""
    saved = save(tmp_path, [FileState(NAME, {"a": torch.zeros(3), "b": 1})])
    path = tmp_path / saved.name
    content = lazy_format.decode(lazy_header.read_header(path), path)
    marker = tmp_path / "ran"
    for poison in (
        {"class": "subprocess.Popen", "state": {"args": ["touch", str(marker)]}},
        {"class": "os.system", "state": f"touch {marker}"},
        {"namedtuple": "os.system", "fields": ["a"], "values": [f"touch {marker}"]},
    ):
        skeleton = {"a": {"tensor": "a"}, "b": poison}
        header = lazy_format.encode(lazy_format.Contents(content.entries, {NAME: skeleton}, 0))
        data = path.read_bytes()[content.data_start :]
        path.write_bytes(header + data)
        content = lazy_format.decode(lazy_header.read_header(path), path)
        forged = SavedFile(saved.name, path.stat().st_size, lazy_format.header_checksum(header), (NAME,))
        with pytest.raises(CheckpointDamagedError, match=NAME):
            load(tmp_path, forged)
        assert not marker.exists()


def test_the_engine_has_no_unpickler() -> None:
    """No module that a load goes through imports one, or torch.load."""
    modules = [*LAZY.glob("*.py"), Path(codec.__file__), *Path(direct_files.__file__).parent.glob("*.py")]
    assert len(modules) >= 12
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [a.name for a in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            assert not {"pickle", "dill", "cloudpickle", "marshal", "shelve", "unpickling"} & set(imported), path
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in ("torch.load", "torch.save", "numpy.load", "np.load"), path
