"""Engine lazy, loading: in new memory or in place, and that damage is never loaded."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing.engines.base import MIB, FileState, SavedCheckpoint
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.engines.lazy import format as lazy_format
from megatron.checkpointing.engines.lazy import header as lazy_header
from megatron.fileio.page_cache import ResidentPages
from restart_trace.recorder import Recorder, untraced_operation
from restart_trace.sink import JsonlSink
from tests.dist.storage import disk_without_direct_io
from tests.unit.megatron.checkpointing.engines.lazy_helpers import BLOCK, MOST, NAMES, check, engine, files, load
from tests.unit.trace_helpers import PROCESS, read


@pytest.mark.parametrize("direct_io", ["auto", "on"])
def test_only_the_states_that_are_asked_for_are_read(tmp_path: Path, direct_io: str) -> None:
    saved = engine().save(files(), tmp_path, untraced_operation())
    trace = tmp_path / "trace.jsonl"
    with Recorder(JsonlSink(trace), PROCESS).operation("load") as op:
        found = engine(direct_io=direct_io).load(NAMES[:1], SavedCheckpoint(tmp_path, {saved[0].name: saved[0]}), op)
    assert torch.equal(found[NAMES[0]]["weights"], files()[0].state["weights"])
    read_bytes = sum(r["bytes"] for r in read(trace) if r["type"] == "span" and r.get("detail") == "read")
    assert 1.5 * MIB <= read_bytes <= 1.5 * MIB + 2 * 4096


def test_a_small_file_takes_few_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four ranks of a small model share a host: twelve threads each would cost more than what they read."""
    saved = engine().save(files(5 * MIB), tmp_path, untraced_operation())  # three cells of 2 MiB
    started: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (started.append(self.name), start(self))[1])
    load(tmp_path, saved, io_block_bytes=8 * MIB)
    assert 1 <= len([name for name in started if name.startswith("lazy-io")]) <= 4


def test_memory_of_a_load_is_used_again_only_when_nothing_of_it_is_left(tmp_path: Path) -> None:
    saved = engine().save(files(), tmp_path, untraced_operation())
    loading, expected = engine(direct_io="on"), {file.name: file for file in saved}
    first = loading.load(NAMES, SavedCheckpoint(tmp_path, expected), untraced_operation())
    kept = first[NAMES[1]]["half"]  # seven elements keep the whole arena
    address = first[NAMES[0]]["weights"].data_ptr()
    del first
    second = loading.load(NAMES, SavedCheckpoint(tmp_path, expected), untraced_operation())
    assert second[NAMES[0]]["weights"].data_ptr() != address
    second[NAMES[1]]["half"].zero_()
    assert torch.equal(kept, files()[1].state["half"])
    address = second[NAMES[0]]["weights"].data_ptr()
    del second
    third = loading.load(NAMES, SavedCheckpoint(tmp_path, expected), untraced_operation())
    assert third[NAMES[0]]["weights"].data_ptr() == address
    check(third, files())


def live_files(like: list[FileState]) -> tuple[list[FileState], torch.Tensor]:
    """A model that is about to be restored: views of one buffer with room between them, and that buffer."""
    weights, moments = like[0].state["weights"], like[1].state["optimizer"]["m"]
    flat = torch.full((3 * 100 + len(weights) + len(moments),), 7.5)
    mine = flat[100 : 100 + len(weights)], flat[200 + len(weights) : 200 + len(weights) + len(moments)]
    return [FileState(NAMES[0], {"weights": mine[0]}), FileState(NAMES[1], {"optimizer": {"m": mine[1]}})], flat


def check_in_place(found: dict[str, Any], live: list[FileState], flat: torch.Tensor) -> None:
    """The loaded tensors are the live ones, and nothing beside them was written."""
    weights, moments = live[0].state["weights"], live[1].state["optimizer"]["m"]
    assert found[NAMES[0]]["weights"] is weights and found[NAMES[1]]["optimizer"]["m"] is moments
    rest = torch.cat([flat[:100], flat[100 + len(weights) : 200 + len(weights)], flat[-100:]])
    assert torch.equal(rest, torch.full_like(rest, 7.5))
    assert found[NAMES[1]]["optimizer"]["step"] == 3.0  # without a live tensor: of its own


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("threads", "direct_io"), [(1, "auto"), (3, "auto"), (3, "on"), (3, "off")])
def test_live_tensors_are_filled_in_place(tmp_path: Path, threads: int, direct_io: str, cached: bool) -> None:
    saving = engine(direct_io="off" if cached else "on", fsync=True)
    (saved,) = saving.save(files(9 * MIB + 40), tmp_path, untraced_operation())
    path = tmp_path / saved.name
    with path.open("rb") as file:
        assert (ResidentPages(file.fileno()).share(0, saved.num_bytes) > MOST) == cached
    loading = engine(io_threads=threads, direct_io=direct_io)
    live, flat = live_files(files(9 * MIB + 40))
    found = loading.load_into(live, SavedCheckpoint(tmp_path, {saved.name: saved}), untraced_operation())
    check(found, files(9 * MIB + 40))
    check_in_place(found, live, flat)
    assert loading._arena._memory is None or len(loading._arena._memory) <= 16 * 4096
    with path.open("rb") as file:  # read around the page cache, where it was not there already
        resident = ResidentPages(file.fileno())
        assert (resident.share(0, saved.num_bytes) > MOST) == (cached or direct_io == "off")


def test_only_the_end_of_the_file_lies_in_the_page_cache(tmp_path: Path) -> None:
    """It is no multiple of a page long; what is before it is read around the cache."""
    (saved,) = engine(direct_io="on", fsync=True).save(files(), tmp_path, untraced_operation())
    path, last = tmp_path / saved.name, saved.num_bytes // BLOCK * BLOCK
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), BLOCK, last)
        assert saved.num_bytes % 4096 and ResidentPages(file.fileno()).share(0, saved.num_bytes) < 0.5
    check(load(tmp_path, [saved]), files())


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("size", [3 * MIB, 16 * MIB])  # of the latter, moments are read to directly
def test_what_has_a_placement_gets_a_tensor_of_its_own(tmp_path: Path, size: int, cached: bool) -> None:
    """Moments, which are kept for good: no view of an arena or of the page cache, where a first write costs a copy."""
    mine = files(size)
    placed = [mine[0], FileState(NAMES[1], mine[1].state, {("optimizer", "m"): {"kind": "exp_avg"}})]
    (saved,) = engine(direct_io="off" if cached else "on", fsync=True).save(placed, tmp_path, untraced_operation())
    live, _ = live_files(files(size))
    loading = engine()
    found = loading.load_into(
        [live[0], FileState(NAMES[1], {})], SavedCheckpoint(tmp_path, {saved.name: saved}), untraced_operation()
    )
    check(found, mine)
    moments = found[NAMES[1]]["optimizer"]["m"]
    assert moments.untyped_storage().nbytes() == moments.numel() * moments.element_size()


def test_live_tensors_are_filled_where_the_file_system_refuses_direct_io(tmp_path: Path) -> None:
    with disk_without_direct_io(tmp_path / "ram") as mounted:
        if not mounted:
            pytest.skip("mounting a file system is not allowed here: run as root, with CAP_SYS_ADMIN")
        (saved,) = engine().save(files(5 * MIB), tmp_path / "ram", untraced_operation())
        live, flat = live_files(files(5 * MIB))
        found = engine().load_into(live, SavedCheckpoint(tmp_path / "ram", {saved.name: saved}), untraced_operation())
        check(found, files(5 * MIB))
        check_in_place(found, live, flat)


def test_live_tensors_that_do_not_fit_are_left_alone(tmp_path: Path) -> None:
    """Another type, another shape, elements in another order, another name: loaded as without them."""
    (saved,) = engine().save(files(MIB), tmp_path, untraced_operation())
    number = len(files(MIB)[0].state["weights"])
    for unfit in (
        torch.zeros(number, dtype=torch.int32),
        torch.zeros(1, number),
        torch.zeros(number + 1),
        torch.zeros(2 * number)[::2],
    ):
        live = [FileState(NAMES[0], {"weights": unfit, "other": torch.zeros(number)}), FileState(NAMES[1], {})]
        found = engine().load_into(live, SavedCheckpoint(tmp_path, {saved.name: saved}), untraced_operation())
        check(found, files(MIB))
        assert not unfit.any() and not live[0].state["other"].any()
        assert "other" not in found[NAMES[0]]


@pytest.mark.parametrize("cached", [False, True])
def test_a_flipped_bit_is_found_when_live_tensors_are_filled(tmp_path: Path, cached: bool) -> None:
    (saved,) = engine(fsync=True).save(files(5 * MIB), tmp_path, untraced_operation())
    path = tmp_path / saved.name
    start = lazy_format.decode(lazy_header.read_header(path), path).data_start
    for position in (start, start + saved.num_bytes // 2, saved.num_bytes - 40):
        content = bytearray(path.read_bytes())
        content[position] ^= 1
        damaged = tmp_path / f"{position}"
        damaged.mkdir()
        (damaged / saved.name).write_bytes(content)
        if not cached:
            with (damaged / saved.name).open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with pytest.raises(CheckpointDamagedError, match="does not have the checksum"):
            engine().load_into(
                live_files(files(5 * MIB))[0], SavedCheckpoint(damaged, {saved.name: saved}), untraced_operation()
            )


@pytest.mark.parametrize(("threads", "direct_io"), [(1, "auto"), (3, "auto"), (1, "on"), (3, "off")])
def test_every_flipped_bit_is_found(tmp_path: Path, threads: int, direct_io: str) -> None:
    (saved,) = engine().save(files(256 * 1024), tmp_path, untraced_operation())
    path = tmp_path / saved.name
    content = path.read_bytes()
    start = lazy_format.decode(lazy_header.read_header(path), path).data_start
    positions = [0, 7, 8, 100, start - 1, start, start + BLOCK, start + BLOCK - 1, len(content) - 1]
    positions += range(start, len(content), len(content) // 23)
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointDamagedError, match=saved.name):
            load(tmp_path, [saved], io_threads=threads, direct_io=direct_io)
    path.write_bytes(content)
    check(load(tmp_path, [saved], io_threads=threads, direct_io=direct_io), files(256 * 1024))


def test_checksums_can_be_left_out_of_the_save_and_of_the_load(tmp_path: Path) -> None:
    for checksum, verify, found in ((True, False, False), (False, True, False), (True, True, True)):
        directory = tmp_path / f"{checksum}-{verify}"
        directory.mkdir()
        (saved,) = engine(checksum=checksum).save(files(), directory, untraced_operation())
        content = bytearray((directory / saved.name).read_bytes())
        content[-1] ^= 1
        (directory / saved.name).write_bytes(content)
        try:
            load(directory, [saved], verify_checksums=verify)
            assert not found
        except CheckpointDamagedError:
            assert found


@pytest.mark.parametrize("direct_io", ["auto", "on", "off"])
def test_short_and_missing_files_are_named(tmp_path: Path, direct_io: str) -> None:
    (saved,) = engine().save(files(), tmp_path, untraced_operation())
    path = tmp_path / saved.name
    content = path.read_bytes()
    for length in (0, 5, 4096, 4097, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointDamagedError, match=saved.name):
            load(tmp_path, [saved], direct_io=direct_io)
    path.unlink()
    with pytest.raises(CheckpointDamagedError, match="missing"):
        load(tmp_path, [saved], direct_io=direct_io)


def test_a_file_cut_short_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its size was checked: the read itself has to notice."""
    (saved,) = engine().save(files(), tmp_path, untraced_operation())
    read_header = lazy_header.read_header

    def read_and_cut(path: Path, ranged: None) -> bytes:
        header = read_header(path, ranged)
        os.truncate(path, saved.num_bytes - 5000)
        return header

    monkeypatch.setattr(lazy_header, "read_header", read_and_cut)
    with pytest.raises(CheckpointDamagedError, match=f"{saved.name}: ends at byte"):
        load(tmp_path, [saved])


def test_what_the_manifest_does_not_have_is_named(tmp_path: Path) -> None:
    saved = engine().save(files(), tmp_path, untraced_operation())
    with pytest.raises(CheckpointDamagedError, match="layer_99"):
        load(tmp_path, saved, ["layer_99"])
