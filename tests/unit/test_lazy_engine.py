"""Engine lazy: what training may do while it saves, its memory, its storage paths, and that damage is never loaded."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint_engines import direct_files, lazy_format
from megatron.checkpoint_engines.base import MIB, EngineOptions, FileState, SavedFile
from megatron.checkpoint_engines.direct_files import DirectIOError, ResidentPages
from megatron.checkpoint_engines.errors import CheckpointDamagedError
from megatron.checkpoint_engines.lazy_engine import LazyEngine
from megatron.config.errors import ConfigError
from megatron.restart_trace.recorder import NullOperation, Recorder
from megatron.restart_trace.sink import JsonlSink
from tests.dist.storage import disk_without_direct_io, fill, small_disk
from tests.unit.trace_helpers import COMMON, ROOT, read

NAMES = ["layer_01-model_00-model_states.pt", "mp_rank_00_model_states.pt"]
BLOCK = 64 * 1024


def files(num_bytes: int = 3 * MIB) -> list[FileState]:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(num_bytes // 8, generator=generator)
    optimizer = {"m": torch.randn(num_bytes // 8, generator=generator), "step": torch.tensor(3.0)}
    small = {"half": torch.linspace(0, 1, 7).to(torch.bfloat16), "iteration": 5}
    return [FileState(NAMES[0], {"weights": weights}), FileState(NAMES[1], {"optimizer": optimizer, **small})]


def engine(**options: Any) -> LazyEngine:
    return LazyEngine(EngineOptions(**{"io_block_bytes": BLOCK, "fsync": False} | options))


def load(directory: Path, saved: list[SavedFile], names: list[str] = NAMES, **options: Any) -> dict[str, Any]:
    return engine(**options).load(names, directory, {file.name: file for file in saved}, NullOperation())


def check(found: dict[str, Any], expected: list[FileState]) -> None:
    assert list(found) == [file.name for file in expected]
    weights, rest = expected[0].state, expected[1].state
    assert torch.equal(found[NAMES[0]]["weights"], weights["weights"])
    assert torch.equal(found[NAMES[1]]["optimizer"]["m"], rest["optimizer"]["m"])
    assert torch.equal(found[NAMES[1]]["half"], rest["half"]) and found[NAMES[1]]["iteration"] == 5


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A real disk that takes nothing until the event is set."""
    gate, write_all = threading.Event(), direct_files.write_all

    def wait_and_write(fd: int, view: memoryview, offset: int) -> None:
        assert gate.wait(30)
        write_all(fd, view, offset)

    monkeypatch.setattr(direct_files, "write_all", wait_and_write)
    yield gate
    gate.set()


# Saving while training goes on


def test_state_may_change_once_it_is_released_though_nothing_is_written(
    tmp_path: Path, disk: threading.Event
) -> None:
    mine, same = files(), files()
    pending = engine().begin_save(mine, tmp_path, NullOperation())
    pending.release_state()
    for tensor in (mine[0].state["weights"], mine[1].state["optimizer"]["m"], mine[1].state["half"]):
        tensor.fill_(-1)
    mine[1].state["iteration"] = 6
    assert not any(path.stat().st_size for path in tmp_path.iterdir())
    disk.set()
    check(load(tmp_path, pending.wait()), same)


def test_release_waits_while_the_cache_is_full(tmp_path: Path, disk: threading.Event) -> None:
    """Back-pressure rather than more memory."""
    small = engine(io_threads=2, host_cache_bytes=6 * BLOCK)
    mine, same = files(), files()
    pending = small.begin_save(mine, tmp_path, NullOperation())
    releasing = threading.Thread(target=pending.release_state)
    releasing.start()
    releasing.join(0.3)
    assert releasing.is_alive(), "released with 3 MiB of state in a cache of 384 KiB and nothing written"
    disk.set()
    releasing.join(30)
    assert not releasing.is_alive()
    mine[0].state["weights"].zero_()
    check(load(tmp_path, pending.wait()), same)
    assert small._cache.allocated_bytes <= 6 * BLOCK


def test_nothing_is_copied_ahead_if_the_writing_ends_before_the_step(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    (tmp_path / "checkpoint").mkdir()
    saving = engine(io_threads=2)
    with Recorder(JsonlSink(trace), COMMON).operation("save") as op:
        pending = saving.begin_save(files(), tmp_path / "checkpoint", op)
        pending.wait()
        pending.release_state()
    spans = [record for record in read(trace) if record["type"] == "span"]
    (released,) = [s for s in spans if s["phase"] == "device_to_host" and s["blocking"]]
    assert released["bytes"] == 0 and released["duration_ns"] < 50e6
    assert saving._cache.allocated_bytes <= 2 * BLOCK  # one buffer for each I/O thread


def test_trace_of_a_save_accounts_for_every_byte(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    (tmp_path / "checkpoint").mkdir()
    with Recorder(JsonlSink(trace), COMMON).operation("save") as op:
        (saved,) = engine(fsync=True).save(files(), tmp_path / "checkpoint", op)
    spans = [record for record in read(trace) if record["type"] == "span"]
    written = sum(s["bytes"] for s in spans if s.get("detail") == "write")
    assert written == saved.num_bytes == (tmp_path / "checkpoint" / saved.name).stat().st_size
    assert [s["bytes"] for s in spans if s.get("detail") == "fsync"] == [saved.num_bytes]
    assert {s["phase"] for s in spans if not s["blocking"]} >= {"serialize", "flush"}
    (end,) = [record for record in read(trace) if record["type"] == "operation_end"]
    assert (end["bytes"], end["num_files"], end["durable"]) == (saved.num_bytes, 1, True)


def test_peak_memory_stays_within_the_cache_and_64_mib(tmp_path: Path) -> None:
    """In a process of its own: 768 MiB of state, a cache of 96 MiB, and an optimizer step while nothing is written."""
    code = """
        import resource, sys, torch, threading, time
        from pathlib import Path
        from megatron.checkpoint_engines import direct_files
        from megatron.checkpoint_engines.base import EngineOptions, FileState
        from megatron.checkpoint_engines.lazy_engine import LazyEngine
        from megatron.restart_trace.recorder import NullOperation
        write_all = direct_files.write_all
        def slowly(fd, view, offset):
            time.sleep(0.01)
            write_all(fd, view, offset)
        direct_files.write_all = slowly
        def peak():
            return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
        state = {"a": torch.ones(96 << 20), "b": torch.ones(96 << 20)}
        engine = LazyEngine(EngineOptions(fsync=False, host_cache_bytes=96 << 20))
        engine.save([FileState("warm.pt", {"a": torch.ones(1 << 20)})], Path(sys.argv[1]), NullOperation())
        Path(sys.argv[1], "rank_00000.safetensors").unlink()
        engine.close()
        before = peak()
        pending = engine.begin_save([FileState("x.pt", state)], Path(sys.argv[1]), NullOperation())
        pending.release_state()
        pending.wait()
        print((peak() - before) >> 20)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    assert 32 <= int(output) <= 96 + 64


def test_two_saves_one_after_the_other_use_the_same_memory(tmp_path: Path) -> None:
    saving = engine(io_threads=2)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        check(load(tmp_path / name, saving.save(files(), tmp_path / name, NullOperation())), files())
        allocated = saving._cache.allocated_bytes
    assert saving._cache.allocated_bytes == allocated
    saving.close()
    assert saving._cache.allocated_bytes == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lazy")]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host_cache_bytes": 4 * BLOCK}, "--host-cache-size"),
        ({"io_block_bytes": 5000}, "--io-block-size"),
    ],
)
def test_a_cache_too_small_to_work_with_is_refused(options: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        engine(**options)


# Storage


def test_direct_io_leaves_the_page_cache_alone(tmp_path: Path) -> None:
    for mode, cached in (("on", False), ("off", True)):
        directory = tmp_path / mode
        directory.mkdir()
        (saved,) = engine(direct_io=mode).save(files(), directory, NullOperation())
        with (directory / saved.name).open("rb") as file:
            assert (ResidentPages(file.fileno()).share(0, saved.num_bytes) == 1) is cached


def test_a_direct_load_goes_around_the_page_cache(tmp_path: Path) -> None:
    (saved,) = engine(direct_io="on", fsync=True).save(files(), tmp_path, NullOperation())
    with (tmp_path / saved.name).open("rb") as file:
        last = saved.num_bytes // BLOCK * BLOCK
        check(load(tmp_path, [saved], direct_io="on"), files())
        assert ResidentPages(file.fileno()).share(last - BLOCK, last) < 1


def test_what_lies_in_the_page_cache_needs_no_other_memory(tmp_path: Path) -> None:
    """Else it is read around the cache, into an arena."""
    (saved,) = engine(direct_io="on", fsync=True).save(files(), tmp_path, NullOperation())
    loading = engine()
    check(loading.load(NAMES, tmp_path, {saved.name: saved}, NullOperation()), files())
    assert loading._arena._tensor is not None and loading._arena._tensor.numel() >= saved.num_bytes - MIB
    with (tmp_path / saved.name).open("rb") as file:
        assert ResidentPages(file.fileno()).share(0, saved.num_bytes) < 0.1
        os.pread(file.fileno(), saved.num_bytes * 3 // 4, 0)  # most of it: the rest is read there, too
    loading = engine()
    found = loading.load(NAMES, tmp_path, {saved.name: saved}, NullOperation())
    check(found, files())
    assert loading._arena._tensor is None or loading._arena._tensor.numel() <= 16 * 4096
    with (tmp_path / saved.name).open("rb") as file:
        assert ResidentPages(file.fileno()).share(0, saved.num_bytes) > 0.9
    # A change to what was loaded is no change to the checkpoint, and its removal none to what was loaded.
    found[NAMES[0]]["weights"].zero_()
    check(load(tmp_path, [saved]), files())
    (tmp_path / saved.name).unlink()
    assert torch.equal(found[NAMES[1]]["optimizer"]["m"], files()[1].state["optimizer"]["m"])


def test_a_file_system_without_direct_io(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with disk_without_direct_io(tmp_path / "ram") as mounted:
        if not mounted:
            pytest.skip("mounting a file system that refuses O_DIRECT needs root")
        for mode in ("auto", "off"):
            directory = tmp_path / "ram" / "save" / mode
            directory.mkdir(parents=True)
            saved = engine(direct_io=mode).save(files(), directory, NullOperation())
            check(load(directory, saved, direct_io=mode), files())
        told = [record.message for record in caplog.records if "refuses O_DIRECT" in record.message]
        assert (
            len(told) == 1 and str(tmp_path / "ram" / "save") in told[0] and "buffered I/O instead" in told[0]
        )
        (tmp_path / "ram" / "save" / "on").mkdir()
        with pytest.raises(DirectIOError, match="--direct-io auto or off"):
            engine(direct_io="on").save(files(), tmp_path / "ram" / "save" / "on", NullOperation())


def test_full_disk_fails_the_save_and_not_the_next(tmp_path: Path) -> None:
    saving = engine(io_threads=2, host_cache_bytes=8 * BLOCK)
    with small_disk(tmp_path / "disk", 4 * MIB) as mounted:
        if not mounted:
            pytest.skip("mounting a disk small enough to fill needs root")
        fill(tmp_path / "disk" / "ballast", room=MIB)
        pending = saving.begin_save(files(), tmp_path / "disk", NullOperation())
        pending.release_state()
        with pytest.raises(OSError) as caught:
            pending.wait()
        assert caught.value.errno == errno.ENOSPC and "rank_00000.safetensors" in str(caught.value)
    for attempt in ("one", "two"):
        (tmp_path / attempt).mkdir()
        pending = saving.begin_save(files(), tmp_path / attempt, NullOperation())
        pending.release_state()
        check(load(tmp_path / attempt, pending.wait()), files())
    assert saving._cache.allocated_bytes <= 8 * BLOCK


def test_a_file_that_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    (saved,) = engine().save(files(), tmp_path, NullOperation())
    before = (tmp_path / saved.name).read_bytes()
    pending = engine().begin_save(files(), tmp_path, NullOperation())
    pending.release_state()
    with pytest.raises(FileExistsError, match=saved.name):
        pending.wait()
    assert (tmp_path / saved.name).read_bytes() == before


# Loading


@pytest.mark.parametrize("direct_io", ["auto", "on"])
def test_only_the_states_that_are_asked_for_are_read(tmp_path: Path, direct_io: str) -> None:
    saved = engine().save(files(), tmp_path, NullOperation())
    trace = tmp_path / "trace.jsonl"
    with Recorder(JsonlSink(trace), COMMON).operation("load") as op:
        found = engine(direct_io=direct_io).load(NAMES[:1], tmp_path, {saved[0].name: saved[0]}, op)
    assert torch.equal(found[NAMES[0]]["weights"], files()[0].state["weights"])
    read_bytes = sum(r["bytes"] for r in read(trace) if r["type"] == "span" and r.get("detail") == "read")
    assert 1.5 * MIB <= read_bytes <= 1.5 * MIB + 2 * 4096


def test_memory_of_a_load_is_used_again_only_when_nothing_of_it_is_left(tmp_path: Path) -> None:
    saved = engine().save(files(), tmp_path, NullOperation())
    loading, expected = engine(direct_io="on"), {file.name: file for file in saved}
    first = loading.load(NAMES, tmp_path, expected, NullOperation())
    kept = first[NAMES[1]]["half"]  # seven elements keep the whole arena
    address = first[NAMES[0]]["weights"].data_ptr()
    del first
    second = loading.load(NAMES, tmp_path, expected, NullOperation())
    assert second[NAMES[0]]["weights"].data_ptr() != address
    second[NAMES[1]]["half"].zero_()
    assert torch.equal(kept, files()[1].state["half"])
    address = second[NAMES[0]]["weights"].data_ptr()
    del second
    third = loading.load(NAMES, tmp_path, expected, NullOperation())
    assert third[NAMES[0]]["weights"].data_ptr() == address
    check(third, files())


def live_files(like: list[FileState]) -> tuple[list[FileState], torch.Tensor]:
    """A model that is about to be restored: views of one buffer with room between them, and that buffer."""
    weights, moments = like[0].state["weights"], like[1].state["optimizer"]["m"]
    flat = torch.full((3 * 100 + len(weights) + len(moments),), 7.5)
    mine = flat[100 : 100 + len(weights)], flat[200 + len(weights) : 200 + len(weights) + len(moments)]
    return [
        FileState(NAMES[0], {"weights": mine[0]}),
        FileState(NAMES[1], {"optimizer": {"m": mine[1]}}),
    ], flat


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
    (saved,) = saving.save(files(9 * MIB + 40), tmp_path, NullOperation())
    path = tmp_path / saved.name
    with path.open("rb") as file:
        assert (ResidentPages(file.fileno()).share(0, saved.num_bytes) == 1) == cached
    loading = engine(io_threads=threads, direct_io=direct_io)
    live, flat = live_files(files(9 * MIB + 40))
    found = loading.load_into(live, tmp_path, {saved.name: saved}, NullOperation())
    check(found, files(9 * MIB + 40))
    check_in_place(found, live, flat)
    assert loading._arena._tensor is None or loading._arena._tensor.numel() <= 16 * 4096
    with path.open("rb") as file:  # read around the page cache, where it was not there already
        resident = ResidentPages(file.fileno())
        assert (resident.share(0, saved.num_bytes) == 1) == (cached or direct_io == "off")


@pytest.mark.parametrize("cached", [False, True])
def test_what_has_a_placement_gets_a_tensor_of_its_own(tmp_path: Path, cached: bool) -> None:
    """Moments, which are kept for good: no view of an arena or of the page cache, where a first write costs a copy."""
    mine = files()
    placed = [mine[0], FileState(NAMES[1], mine[1].state, {("optimizer", "m"): {"kind": "exp_avg"}})]
    (saved,) = engine(direct_io="off" if cached else "on", fsync=True).save(placed, tmp_path, NullOperation())
    live, _ = live_files(files())
    loading = engine()
    found = loading.load_into(
        [live[0], FileState(NAMES[1], {})], tmp_path, {saved.name: saved}, NullOperation()
    )
    check(found, mine)
    moments = found[NAMES[1]]["optimizer"]["m"]
    assert moments.untyped_storage().nbytes() == moments.numel() * moments.element_size()


def test_live_tensors_are_filled_where_the_file_system_refuses_direct_io(tmp_path: Path) -> None:
    with disk_without_direct_io(tmp_path / "ram") as mounted:
        if not mounted:
            pytest.skip("mounting a file system is not allowed here")
        (saved,) = engine().save(files(5 * MIB), tmp_path / "ram", NullOperation())
        live, flat = live_files(files(5 * MIB))
        found = engine().load_into(live, tmp_path / "ram", {saved.name: saved}, NullOperation())
        check(found, files(5 * MIB))
        check_in_place(found, live, flat)


def test_live_tensors_that_do_not_fit_are_left_alone(tmp_path: Path) -> None:
    """Another type, another shape, elements in another order, another name: loaded as without them."""
    (saved,) = engine().save(files(MIB), tmp_path, NullOperation())
    number = len(files(MIB)[0].state["weights"])
    for unfit in (
        torch.zeros(number, dtype=torch.int32),
        torch.zeros(1, number),
        torch.zeros(number + 1),
        torch.zeros(2 * number)[::2],
    ):
        live = [
            FileState(NAMES[0], {"weights": unfit, "other": torch.zeros(number)}),
            FileState(NAMES[1], {}),
        ]
        found = engine().load_into(live, tmp_path, {saved.name: saved}, NullOperation())
        check(found, files(MIB))
        assert not unfit.any() and not live[0].state["other"].any()
        assert "other" not in found[NAMES[0]]


@pytest.mark.parametrize("cached", [False, True])
def test_a_flipped_bit_is_found_when_live_tensors_are_filled(tmp_path: Path, cached: bool) -> None:
    (saved,) = engine(fsync=True).save(files(5 * MIB), tmp_path, NullOperation())
    path = tmp_path / saved.name
    start = lazy_format.decode(lazy_format.read_header(path), path).data_start
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
            engine().load_into(live_files(files(5 * MIB))[0], damaged, {saved.name: saved}, NullOperation())


@pytest.mark.parametrize(("threads", "direct_io"), [(1, "auto"), (3, "auto"), (1, "on"), (3, "off")])
def test_every_flipped_bit_is_found(tmp_path: Path, threads: int, direct_io: str) -> None:
    (saved,) = engine().save(files(256 * 1024), tmp_path, NullOperation())
    path = tmp_path / saved.name
    content = path.read_bytes()
    start = lazy_format.decode(lazy_format.read_header(path), path).data_start
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
        (saved,) = engine(checksum=checksum).save(files(), directory, NullOperation())
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
    (saved,) = engine().save(files(), tmp_path, NullOperation())
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
    (saved,) = engine().save(files(), tmp_path, NullOperation())
    read_header = lazy_format.read_header

    def read_and_cut(path: Path) -> bytes:
        header = read_header(path)
        os.truncate(path, saved.num_bytes - 5000)
        return header

    monkeypatch.setattr(lazy_format, "read_header", read_and_cut)
    with pytest.raises(CheckpointDamagedError, match=f"{saved.name}: ends at byte"):
        load(tmp_path, [saved])


def test_what_the_manifest_does_not_have_is_named(tmp_path: Path) -> None:
    saved = engine().save(files(), tmp_path, NullOperation())
    with pytest.raises(CheckpointDamagedError, match="layer_99"):
        load(tmp_path, saved, ["layer_99"])


def test_wait_is_not_needed_for_release_and_release_not_for_wait(tmp_path: Path) -> None:
    """The order in which the commit thread and the training thread come does not matter."""
    for index, delay in enumerate((0.0, 0.05)):
        directory = tmp_path / str(index)
        directory.mkdir()
        pending = engine().begin_save(files(), directory, NullOperation())
        result: list[list[SavedFile]] = []
        waiting = threading.Thread(target=lambda p=pending, r=result: r.append(p.wait()))
        waiting.start()
        time.sleep(delay)
        pending.release_state()
        pending.release_state()
        waiting.join(30)
        check(load(directory, result[0]), files())
