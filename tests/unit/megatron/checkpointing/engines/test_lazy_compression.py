"""Engine lazy with --checkpoint-compression: files that hold less, states that are the same to the bit."""

from __future__ import annotations

import resource
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing.engines.base import MIB, FileState, SavedCheckpoint, SavedFile
from megatron.checkpointing.engines.errors import CheckpointDamagedError, EngineUnavailableError
from megatron.fileio import compressed_blocks
from restart_trace.recorder import untraced_operation
from tests.conformance.compare import differences
from tests.conformance.subjects import Traced, traced
from tests.unit.megatron.checkpointing.engines.lazy_helpers import BLOCK, NAMES, check, engine, files, load
from tests.unit.megatron.fileio.test_compressed_blocks import DTYPES, SPECIAL
from tests.unit.megatron.hf.peak_memory import peak_growth

SIZES = 0, 1, 3, 1000, BLOCK + 1  # elements; blocks and their cuts lie within the larger ones


def save(states: list[FileState], directory: Path, **options: Any) -> tuple[list[SavedFile], Traced]:
    trace = traced("save")
    return engine(compress_files=True, **options).save(states, directory, trace.op), trace


def odd_states() -> list[FileState]:
    """Tensors of every type and of odd sizes, and special floats."""
    generator = torch.Generator().manual_seed(5)
    drawn: dict[str, Any] = {}
    for dtype in DTYPES:
        for size in SIZES:
            bits = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            drawn[f"{dtype}_{size}"] = (bits % 2).bool() if dtype is torch.bool else bits.view(dtype)
    for width, dtype in ((2, torch.bfloat16), (4, torch.float32), (8, torch.float64)):
        bits = b"".join(value.to_bytes(width, "little") for value in SPECIAL[width]) * 500
        drawn[f"special_{width}"] = torch.frombuffer(bytearray(bits), dtype=torch.uint8).view(dtype)
    return [FileState(NAMES[0], drawn), FileState(NAMES[1], {"step": 3, "nothing": {}})]


@pytest.mark.parametrize("block", [4096, BLOCK, 3 * MIB + 4096], ids=str)
@pytest.mark.parametrize("direct_io", ["on", "off"])
def test_every_state_comes_back_to_the_bit(tmp_path: Path, block: int, direct_io: str) -> None:
    states = odd_states()
    saved, _ = save(states, tmp_path, io_block_bytes=block, direct_io=direct_io)
    found = load(tmp_path, saved, direct_io=direct_io)
    for state in states:
        assert differences(state.state, found[state.name]) == []


def test_a_file_is_smaller_and_says_that_it_is_another(tmp_path: Path) -> None:
    """Its name has an ending of its own, for readers of safetensors must not take it for one; and what it took."""
    (tmp_path / "plain").mkdir()
    (plain,) = engine().save(files(), tmp_path / "plain", untraced_operation())
    (file,), trace = save(files(), tmp_path)
    assert (plain.name, file.name) == ("rank_00000.safetensors", "rank_00000.safetensors.cblk")
    assert file.num_bytes == (tmp_path / file.name).stat().st_size < 0.9 * plain.num_bytes
    assert file.checksum == plain.checksum, "that of the header, which covers all of the original"
    trace.op.end()
    (end,) = [r for r in trace.records.all if r["type"] == "operation_end"]
    values = [r["values"] for r in trace.records.all if r["type"] == "probe"][-1]
    assert end["bytes"] == file.num_bytes == trace.records.bytes("flush", "write")
    assert values["original_bytes"] == plain.num_bytes and values["compress_s"] > 0


def test_a_load_reads_what_is_stored(tmp_path: Path) -> None:
    """The bytes of its spans and of the operation are those of the file; what restores them is no reading."""
    saved, _ = save(files(), tmp_path)
    trace = traced("load")
    live = files()
    for file in live:
        for value in file.state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    found = engine(direct_io="on").load_into(
        live, SavedCheckpoint(tmp_path, {file.name: file for file in saved}), trace.op
    )
    check(found, files())
    assert found[NAMES[0]]["weights"] is live[0].state["weights"], "filled in place"
    size = saved[0].num_bytes
    assert size <= trace.records.bytes("load", "read") <= 1.3 * size + 16 * MIB
    restored = [
        span for span in trace.records.spans("load", "deserialize") if span.get("thread", "").startswith("lazy-io")
    ]
    assert restored


def test_a_part_of_a_state_is_read_without_the_rest(tmp_path: Path) -> None:
    saved, _ = save(files(24 * MIB), tmp_path, io_block_bytes=MIB)
    trace = traced("load")
    found = engine(direct_io="on").load(NAMES[:1], SavedCheckpoint(tmp_path, {f.name: f for f in saved}), trace.op)
    assert torch.equal(found[NAMES[0]]["weights"], files(24 * MIB)[0].state["weights"])
    assert trace.records.bytes("load", "read") < 0.7 * saved[0].num_bytes


@pytest.mark.parametrize("verify", [True, False], ids=["checksum", "size"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.9999])
def test_a_damaged_file_is_named(tmp_path: Path, verify: bool, share: float) -> None:
    """With --checkpoint-verify size, too: each block has a checksum of its own."""
    saved, _ = save(files(), tmp_path)
    path = tmp_path / saved[0].name
    text = bytearray(path.read_bytes())
    text[int(share * len(text))] ^= 16
    path.write_bytes(text)
    with pytest.raises(CheckpointDamagedError, match=f"^{path}: "):
        load(tmp_path, saved, verify_checksums=verify)


def test_a_plain_file_with_the_name_is_refused_as_damaged(tmp_path: Path) -> None:
    (plain,) = engine().save(files(), tmp_path, untraced_operation())
    named = replace(plain, name=plain.name + ".cblk")
    (tmp_path / plain.name).rename(tmp_path / named.name)
    with pytest.raises(CheckpointDamagedError, match="does not end as a compressed file"):
        load(tmp_path, [named])


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a checkpoint that is there, which is not damaged."""
    saved, _ = save(files(), tmp_path)
    monkeypatch.setattr(compressed_blocks, "is_available", lambda: False)
    with pytest.raises(EngineUnavailableError, match="^--checkpoint-compression zstd: package zstandard is not instal"):
        engine(compress_files=True).check_can_save()
    engine().check_can_save()
    with pytest.raises(EngineUnavailableError, match="rank_00000.safetensors.cblk: is compressed, and package zstand"):
        load(tmp_path, saved)


def test_a_save_holds_buffers_and_no_second_state(tmp_path: Path) -> None:
    """The blocks in work and their compressed ones, of each I/O thread."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # which has freed no memory that a save could take
        grown, saved = pool.submit(growth_of_a_save, tmp_path).result()
    assert 0 < grown < 64 * MIB < saved[0].num_bytes
    check(load(tmp_path, saved), files(192 * MIB))


def growth_of_a_save(directory: Path) -> tuple[int, list[SavedFile]]:
    """Bytes by which this process grows during a save; and its files."""
    state = files(192 * MIB)
    mine = engine(compress_files=True, io_threads=2, io_block_bytes=MIB, host_cache_bytes=4 * MIB)
    saved: list[SavedFile] = []
    grown = peak_growth(lambda: saved.extend(mine.save(state, directory, untraced_operation())))
    return grown, saved


def test_a_save_needs_the_room_of_the_compressed_file(tmp_path: Path) -> None:
    """Not that of the original: here the system refuses files of more than the middle between the two."""
    (tmp_path / "plain").mkdir()
    (plain,) = engine().save(files(8 * MIB), tmp_path / "plain", untraced_operation())
    (tmp_path / "first").mkdir()
    (file,), _ = save(files(8 * MIB), tmp_path / "first", direct_io="on")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((plain.num_bytes + file.num_bytes) // 2, limits[1]))
    try:
        saved, _ = save(files(8 * MIB), tmp_path, direct_io="on")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check(load(tmp_path, saved), files(8 * MIB))


def test_placements_are_those_of_the_original(tmp_path: Path) -> None:
    placement = {"name": "w", "shape": [1000], "dim": None, "ranges": None}
    state = [FileState(NAMES[0], {"w": torch.arange(1000.0)}, {("w",): placement})]
    saved, _ = save(state, tmp_path)
    (placed,) = engine().placed_tensors(SavedCheckpoint(tmp_path, {f.name: f for f in saved}), untraced_operation())
    assert placed.placement == placement and placed.path == tmp_path / saved[0].name and placed.start % 4096 == 0
