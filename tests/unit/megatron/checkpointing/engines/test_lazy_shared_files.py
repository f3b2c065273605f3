"""Engine lazy with --checkpoint-files-per-node: ranks write parts of one file, and read them without the others."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from megatron.checkpointing.engines.base import MIB, FileState, SavedCheckpoint, SavedFile
from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointSaveError
from megatron.checkpointing.engines.lazy import shared_format
from megatron.checkpointing.engines.lazy.engine import LazyEngine
from megatron.checkpointing.engines.lazy.shared_format import Room, file_name, place_parts
from megatron.checkpointing.store.commit import collect_files, parts_of_ranks
from restart_trace.recorder import untraced_operation
from tests.unit.megatron.checkpointing.engines.lazy_helpers import engine, give_places, save_together

RANKS = 3
FILE = "ranks_00000-00002.safetensors"
WAIT_S = 60.0


def shard(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def states(rank: int) -> list[FileState]:
    """Sizes that are no multiple of anything, other ones on each rank; rank 1 has only a tensor without elements."""
    generator = torch.Generator().manual_seed(rank)
    big = torch.randn(0 if rank == 1 else 40_003 + 1000 * rank, generator=generator)
    state: dict[str, Any] = {"master": big, "step": 7 * rank, "text": "é }, " * rank}
    if rank != 1:
        state["odd"] = torch.arange(5 + rank, dtype=torch.uint8)
    return [FileState(shard(rank), state)]


def engines(ranks: int = RANKS, **options: Any) -> list[LazyEngine]:
    shared = {"local_world_size": ranks, "files_per_node": 1} | options
    return [engine(rank=rank, local_rank=rank, **shared) for rank in range(ranks)]


def saved(directory: Path, **options: Any) -> dict[str, SavedFile]:
    return save_together(engines(**options), [states(rank) for rank in range(RANKS)], directory)


def loaded(directory: Path, files: dict[str, SavedFile], rank: int, **options: Any) -> tuple[dict[str, Any], Any]:
    """(the state of a rank, the operation of its load)"""
    op = untraced_operation()
    found = engine(**options).load([shard(rank)], SavedCheckpoint(directory, files), op)
    return found[shard(rank)], op


def check(found: dict[str, Any], rank: int) -> None:
    expected = states(rank)[0].state
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value, name


@pytest.mark.parametrize("options", [{}, {"direct_io": "off"}, {"checksum": False}], ids=str)
def test_the_ranks_leave_one_file_and_each_gets_its_state_back(tmp_path: Path, options: dict[str, Any]) -> None:
    files = saved(tmp_path, **options)
    assert [path.name for path in tmp_path.iterdir()] == [FILE] == list(files)
    assert (tmp_path / FILE).stat().st_size == files[FILE].num_bytes
    for rank in range(RANKS):
        check(loaded(tmp_path, files, rank, **options)[0], rank)


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_any_reader_of_safetensors_reads_the_file(tmp_path: Path, direct_io: str) -> None:
    saved(tmp_path, direct_io=direct_io)
    with safetensors.safe_open(tmp_path / FILE, "pt") as file:
        names = {name for name in file.keys() if not name.startswith("padding/")}  # noqa: SIM118  it is no dict
        assert names == {
            f"{shard(rank)}/{name}"
            for rank in range(RANKS)
            for name, value in states(rank)[0].state.items()
            if torch.is_tensor(value)
        }
        for rank in range(RANKS):
            for name, value in states(rank)[0].state.items():
                if torch.is_tensor(value):
                    assert torch.equal(file.get_tensor(f"{shard(rank)}/{name}"), value)
        for name in set(file.keys()) - names:
            assert not file.get_tensor(name).any(), "padding holds what another save has left in a buffer"
        ranks = [json.loads(text) for key, text in sorted(file.metadata().items()) if key.startswith("rank_")]
    assert [list(told["states"]) for told in ranks] == [[shard(rank)] for rank in range(RANKS)]


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_reads_its_own_extents_only(tmp_path: Path, rank: int) -> None:
    """All others are overwritten, and the load verifies what it reads."""
    files = saved(tmp_path)
    (mine,) = [part for part in files[FILE].parts if part.rank == rank]
    content = (tmp_path / FILE).read_bytes()
    other = bytearray(b"\xff" * len(content))
    for start, stop in [(extent.start, extent.stop) for extent in mine.header] + [mine.data]:
        other[start:stop] = content[start:stop]
    (tmp_path / FILE).write_bytes(other)
    found, op = loaded(tmp_path, files, rank)
    check(found, rank)
    tensors = sum(value.nbytes for value in states(rank)[0].state.values() if torch.is_tensor(value))
    assert (op.bytes, op.num_files) == (mine.header_bytes + tensors, 1)


def test_what_the_ranks_write_adds_up_to_the_file(tmp_path: Path) -> None:
    made, ops = engines(), [untraced_operation() for _ in range(RANKS)]
    pending = [
        each.begin_save(states(rank), tmp_path, op) for rank, (each, op) in enumerate(zip(made, ops, strict=True))
    ]
    give_places(made, pending)
    files = collect_files([save.wait() for save in pending])
    assert sum(op.bytes or 0 for op in ops) == files[FILE].num_bytes == (tmp_path / FILE).stat().st_size
    assert [op.num_files for op in ops] == [1, 0, 0]


def test_damage_is_named_by_tensor_or_rank(tmp_path: Path) -> None:
    files = saved(tmp_path)
    content = (tmp_path / FILE).read_bytes()
    part = files[FILE].parts[2]
    places = {"tensor .*/master does not have": part.data[0] + 9, "rank 2's part": part.header[1].start + 9}
    places["rank 2.s part, have"] = part.header[0].stop - 1  # the spaces behind the JSON
    for message, position in places.items():
        damaged = bytearray(content)
        damaged[position] ^= 16
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(CheckpointDamagedError, match=message) as raised:
            loaded(tmp_path, files, 2)
        assert str(tmp_path / FILE) in str(raised.value)
        check(loaded(tmp_path, files, 0)[0], 0)
    (tmp_path / FILE).write_bytes(content[:-1])
    with pytest.raises(CheckpointDamagedError, match="bytes, but"):
        loaded(tmp_path, files, 0)


@pytest.mark.parametrize(
    ("found", "written", "says"),
    [
        (b'"data_offsets":[0,', b'"data_offsets":[', "is not one of engine lazy"),
        (b'"data_offsets":[0,160012]', b'"data_offsets":[]', "is not one of engine lazy (IndexError"),
        (b'"shape":[40003]', b'"shape":[40002]', "is not one of engine lazy (ValueError"),
        (b'lazy_format_version\\":\\"2', b'lazy_format_version\\":\\"3', "format version 3; only 2 is known"),
        (b'"rank_00000"', b'"rank_00009"', "is not one of engine lazy (KeyError"),
        (b'"F32"', b'"F64"', "is not one of engine lazy (ValueError"),
    ],
)
def test_headers_that_are_none_are_damaged(tmp_path: Path, found: bytes, written: bytes, says: str) -> None:
    """Which --checkpoint-verify size leaves to the parser."""
    files = saved(tmp_path)
    content = (tmp_path / FILE).read_bytes()
    assert found in content
    (tmp_path / FILE).write_bytes(content.replace(found, written.ljust(len(found)), 1))
    with pytest.raises(CheckpointDamagedError) as raised:
        loaded(tmp_path, files, 0, verify_checksums=False)
    assert str(raised.value).startswith(str(tmp_path / FILE)) and says in str(raised.value)


@pytest.mark.parametrize("data", [(1 << 40, (1 << 40) + 163840), (0, 8192)])
def test_a_manifest_that_tells_of_other_bytes_is_refused(tmp_path: Path, data: tuple[int, int]) -> None:
    files = saved(tmp_path)
    parts = [replace(part, data=data) if part.rank == 0 else part for part in files[FILE].parts]
    with pytest.raises(CheckpointDamagedError, match="rank 0's part"):
        loaded(tmp_path, {FILE: files[FILE].with_parts(parts)}, 0)


def test_training_goes_on_before_the_places_are_known(tmp_path: Path) -> None:
    """The state is released, and changed, while no rank knows yet where its part lies."""
    made, live = engines(1, host_cache_bytes=8 * MIB), states(0)
    pending = made[0].begin_save(live, tmp_path, untraced_operation())
    pending.release_state()
    live[0].state["master"].zero_()
    assert not list(tmp_path.iterdir())
    give_places(made, [pending])
    files = collect_files([pending.wait()])
    check(loaded(tmp_path, files, 0)[0], 0)


def test_a_rank_without_a_place_fails_with_the_reason_and_writes_nothing(tmp_path: Path) -> None:
    made = engines(1)
    pending = made[0].begin_save(states(0), tmp_path, untraced_operation())
    waiting = threading.Thread(target=pending.release_state, daemon=True)
    waiting.start()
    pending.give_up("rank 2 has failed to begin its part")
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    with pytest.raises(CheckpointSaveError, match="rank 2 has failed"):
        pending.wait()
    assert not list(tmp_path.iterdir())
    check(loaded(tmp_path, collect_files([made[0].save(states(0), tmp_path, untraced_operation())]), 0)[0], 0)


def test_a_save_that_fails_early_has_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the other ranks, which wait for it, hear of that."""

    def broken(*_: Any) -> Any:
        raise IndexError("cannot be laid out")

    monkeypatch.setattr(shared_format, "room_for", broken)
    pending = engines(1)[0].begin_save(states(0), tmp_path, untraced_operation())
    assert pending.shared_part() is None
    pending.give_up("rank 0 has failed to begin its part")
    with pytest.raises(IndexError, match="cannot be laid out"):
        pending.wait()


def test_a_directory_that_refuses_is_named(tmp_path: Path) -> None:
    (made,) = engines(1)
    with pytest.raises(FileNotFoundError, match=r"missing/ranks_00000-00000\.safetensors"):
        made.save(states(0), tmp_path / "missing", untraced_operation())


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    other, directory = tmp_path / "other", tmp_path / "save"
    other.write_bytes(b"of another")
    directory.mkdir()
    (directory / "ranks_00000-00000.safetensors").symlink_to(other)
    with pytest.raises(OSError, match=r"save/ranks_00000-00000\.safetensors"):
        engines(1)[0].save(states(0), directory, untraced_operation())
    assert other.read_bytes() == b"of another"


@pytest.mark.parametrize(("files", "expected"), [(1, 8), (3, 24), (8, 64), (99, 64)])
def test_the_ranks_of_a_node_are_divided_evenly(files: int, expected: int) -> None:
    names = [file_name(rank, rank % 8, 8, files) for rank in range(64)]
    assert len(set(names)) == expected
    assert names == sorted(names)
    for name in set(names):
        ranks = [rank for rank in range(64) if names[rank] == name]
        assert name == f"ranks_{ranks[0]:05d}-{ranks[-1]:05d}.safetensors"
        assert ranks == list(range(ranks[0], ranks[-1] + 1)), "neighbours"


def test_places_of_a_file_are_disjoint_aligned_and_without_gaps() -> None:
    rooms = [Room("b", 5, 4096, 8192, 10), Room("a", 1, 4096, 4096, 0), Room("b", 4, 8192, 4096, 4097)]
    places = place_parts(rooms)
    second, alone, first = places
    assert [first.metadata, second.metadata] == [(0, 8192), (8192, 12288)]
    assert [first.entries, second.entries] == [(12288, 16384), (16384, 24576)]
    assert [first.data, second.data] == [(24576, 28673), (32768, 32778)]
    assert (first.header_bytes, first.file_bytes) == (24576, 36864) == second[3:5]
    assert (first.last, second.last, alone.last) == (False, True, True)
    assert (alone.metadata, alone.data, alone.file_bytes) == ((0, 4096), (8192, 8192), 8192)


def test_a_header_that_no_reader_takes_is_refused_by_name() -> None:
    with pytest.raises(CheckpointSaveError, match=r"--checkpoint-files-per-node: the header of a would have \d+ bytes"):
        place_parts([Room("a", rank, 4096, 40_960_000, 1) for rank in range(3)])


def test_a_header_longer_than_its_room_overwrites_nothing(tmp_path: Path) -> None:
    contents = saved(tmp_path)[FILE]
    live = engines(1)[0]._captured(states(0), untraced_operation()).contents
    (place,) = place_parts([Room(FILE, 0, 0, 0, live.data_bytes)])
    with pytest.raises(RuntimeError, match="for the header's bytes 0 to 0"):
        shared_format.encode_part(live, 0, place)
    assert contents.parts


def test_ranks_that_do_not_fit_together_are_not_committed(tmp_path: Path) -> None:
    file = saved(tmp_path)[FILE]
    one, two, *_ = file.split()
    assert collect_files([file.split()]) == {FILE: file}
    assert parts_of_ranks({FILE: file, "a.json": SavedFile("a.json", 1, "none")})[1:] == file.split()
    with pytest.raises(ValueError, match="differ in its size"):
        collect_files([[one], [replace(two, num_bytes=1)]])
    with pytest.raises(ValueError, match="one state twice"):
        collect_files([[one], [one]])
