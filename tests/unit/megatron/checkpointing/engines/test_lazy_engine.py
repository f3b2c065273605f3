"""Engine lazy, saving: what training may do meanwhile, its memory and its storage paths."""

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

import pytest
import torch

from megatron.checkpointing.engines.base import MIB, SavedCheckpoint, SavedFile
from megatron.config.errors import ConfigError
from megatron.fileio import direct_files
from megatron.fileio.direct_files import DirectIOError
from megatron.fileio.page_cache import ResidentPages
from restart_trace.clock import now_ns
from restart_trace.recorder import Recorder, untraced_operation
from restart_trace.sink import JsonlSink
from tests.dist.storage import disk_without_direct_io, fill, small_disk
from tests.unit.megatron.checkpointing.engines.lazy_helpers import (
    BLOCK,
    MOST,
    NAMES,
    check,
    engine,
    files,
    load,
    losing_its_processor,
)
from tests.unit.trace_helpers import PROCESS, ROOT, read


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A real disk that takes nothing until the event is set."""
    gate, write_all = threading.Event(), direct_files.write_all

    def wait_and_write(fd: int, view: memoryview, offset: int) -> None:
        assert gate.wait(300)
        write_all(fd, view, offset)

    monkeypatch.setattr(direct_files, "write_all", wait_and_write)
    yield gate
    gate.set()


# Saving while training goes on


def test_state_may_change_once_it_is_released_though_nothing_is_written(tmp_path: Path, disk: threading.Event) -> None:
    mine, same = files(), files()
    pending = engine().begin_save(mine, tmp_path, untraced_operation())
    pending.release_state()
    for tensor in (mine[0].state["weights"], mine[1].state["optimizer"]["m"], mine[1].state["half"]):
        tensor.fill_(-1)
    mine[1].state["iteration"] = 6
    assert not any(path.read_bytes().strip(b"\0") for path in tmp_path.iterdir())
    disk.set()
    check(load(tmp_path, pending.wait()), same)


def test_no_block_is_left_out_wherever_training_loses_its_processor(tmp_path: Path) -> None:
    """The I/O threads may be through with all the others when the last block that training gathered is handed over."""
    with losing_its_processor(threading.current_thread().name):
        pending = engine(io_threads=2).begin_save(files(), tmp_path, untraced_operation())
        pending.release_state()
    check(load(tmp_path, pending.wait()), files())


def test_release_waits_while_the_cache_is_full(tmp_path: Path, disk: threading.Event) -> None:
    """Back-pressure rather than more memory."""
    small = engine(io_threads=2, host_cache_bytes=6 * BLOCK)
    mine, same = files(), files()
    pending = small.begin_save(mine, tmp_path, untraced_operation())
    releasing = threading.Thread(target=pending.release_state)
    releasing.start()
    releasing.join(0.3)
    assert releasing.is_alive(), "released with 3 MiB of state in a cache of 384 KiB and nothing written"
    disk.set()
    releasing.join(300)
    assert not releasing.is_alive()
    mine[0].state["weights"].zero_()
    check(load(tmp_path, pending.wait()), same)
    assert small._cache.allocated_bytes <= 6 * BLOCK


def test_nothing_is_copied_ahead_if_the_writing_ends_before_the_step(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    (tmp_path / "checkpoint").mkdir()
    saving = engine(io_threads=2)
    with Recorder(JsonlSink(trace), PROCESS).operation("save") as op:
        pending = saving.begin_save(files(), tmp_path / "checkpoint", op)
        pending.wait()
        pending.release_state()
    spans = [record for record in read(trace) if record["type"] == "span"]
    (released,) = [s for s in spans if s["phase"] == "device_to_host" and s["blocking"]]
    assert released["bytes"] == 0
    assert saving._cache.allocated_bytes <= 2 * BLOCK  # one buffer for each I/O thread


def test_trace_of_a_save_accounts_for_every_byte(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    (tmp_path / "checkpoint").mkdir()
    with Recorder(JsonlSink(trace), PROCESS).operation("save") as op:
        (saved,) = engine(fsync=True).save(files(), tmp_path / "checkpoint", op)
    spans = [record for record in read(trace) if record["type"] == "span"]
    written = sum(s["bytes"] for s in spans if s.get("detail") == "write")
    assert written == saved.num_bytes == (tmp_path / "checkpoint" / saved.name).stat().st_size
    assert [s["bytes"] for s in spans if s.get("detail") == "fsync"] == [saved.num_bytes]
    assert {s["phase"] for s in spans if not s["blocking"]} >= {"serialize", "flush"}
    (end,) = [record for record in read(trace) if record["type"] == "operation_end"]
    assert (end["bytes"], end["num_files"], end["durable"]) == (saved.num_bytes, 1, True)


@pytest.mark.slow
def test_peak_memory_stays_within_the_cache_and_64_mib(tmp_path: Path) -> None:
    """In a process of its own: 768 MiB of state, a cache of 96 MiB, and an optimizer step while nothing is written."""
    code = """
        import resource, sys, torch, threading, time
        from pathlib import Path
        from megatron.fileio import direct_files
        from megatron.checkpointing.engines.base import EngineOptions, FileState
        from megatron.checkpointing.engines.lazy.engine import LazyEngine
        from restart_trace.recorder import untraced_operation
        write_all = direct_files.write_all
        def slowly(fd, view, offset):
            time.sleep(0.01)
            write_all(fd, view, offset)
        direct_files.write_all = slowly
        def peak():
            return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
        state = {"a": torch.ones(96 << 20), "b": torch.ones(96 << 20)}
        engine = LazyEngine(EngineOptions(fsync=False, host_cache_bytes=96 << 20))
        engine.save([FileState("warm.pt", {"a": torch.ones(1 << 20)})], Path(sys.argv[1]), untraced_operation())
        Path(sys.argv[1], "rank_00000.safetensors").unlink()
        engine.close()
        before = peak()
        pending = engine.begin_save([FileState("x.pt", state)], Path(sys.argv[1]), untraced_operation())
        pending.release_state()
        pending.wait()
        print((peak() - before) >> 20)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout
    assert 32 <= int(output) <= 96 + 64


def test_a_small_save_takes_little_memory_and_a_larger_one_after_it_enough(tmp_path: Path) -> None:
    """Sixty-four ranks of a small model share a host: a block of 8 MiB each would be most of what they save with."""
    saving = engine(io_block_bytes=8 * MIB)
    for name, num_bytes in (("small", 256 * 1024), ("larger", 20 * MIB), ("smaller", 64 * 1024)):
        (tmp_path / name).mkdir()
        state = files(num_bytes)
        check(load(tmp_path / name, saving.save(state, tmp_path / name, untraced_operation())), state)
        if name == "small":
            assert num_bytes < saving._cache.allocated_bytes < num_bytes + 2 * 4096
    assert saving._cache.allocated_bytes % (8 * MIB) == 0


def test_two_saves_one_after_the_other_use_the_same_memory(tmp_path: Path) -> None:
    saving = engine(io_threads=2)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        check(load(tmp_path / name, saving.save(files(), tmp_path / name, untraced_operation())), files())
        allocated = saving._cache.allocated_bytes
    assert saving._cache.allocated_bytes == allocated
    saving.close()
    assert saving._cache.allocated_bytes == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lazy")]


@pytest.mark.parametrize(
    ("options", "says"),
    [({"host_cache_bytes": 4 * BLOCK}, "--host-cache-size"), ({"io_block_bytes": 5000}, "--io-block-size")],
)
def test_a_cache_too_small_to_work_with_is_refused(options: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        engine(**options)


# Storage


def test_direct_io_leaves_the_page_cache_alone(tmp_path: Path) -> None:
    for mode, cached in (("on", False), ("off", True)):
        directory = tmp_path / mode
        directory.mkdir()
        (saved,) = engine(direct_io=mode).save(files(), directory, untraced_operation())
        with (directory / saved.name).open("rb") as file:
            assert (ResidentPages(file.fileno()).share(0, saved.num_bytes) > MOST) is cached


def test_space_is_reserved_before_the_first_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, write_all = [], direct_files.write_all

    def look_and_write(fd: int, view: memoryview, offset: int) -> None:
        found.append(os.fstat(fd))
        write_all(fd, view, offset)

    monkeypatch.setattr(direct_files, "write_all", look_and_write)
    (saved,) = engine(direct_io="on").save(files(), tmp_path, untraced_operation())
    assert found and all(status.st_blocks * 512 >= saved.num_bytes for status in found)
    assert all(status.st_size >= saved.num_bytes for status in found)


def test_training_does_not_wait_for_space_to_be_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, allocate = threading.Event(), direct_files.allocate

    def wait_and_allocate(fd: int, num_bytes: int) -> None:
        assert gate.wait(300)
        allocate(fd, num_bytes)

    monkeypatch.setattr(direct_files, "allocate", wait_and_allocate)
    trace = tmp_path / "trace.jsonl"
    (tmp_path / "checkpoint").mkdir()
    with Recorder(JsonlSink(trace), PROCESS).operation("save") as op:
        pending = engine(direct_io="on").begin_save(files(), tmp_path / "checkpoint", op)
        pending.release_state()
        opened_ns = now_ns()
        gate.set()
        saved = pending.wait()
    check(load(tmp_path / "checkpoint", saved), files())
    spans = [record for record in read(trace) if record["type"] == "span" and record["phase"] == "flush"]
    (reserving,) = [s for s in spans if s["thread"] == "lazy-save" and s["bytes"] == 0]
    assert (reserving["detail"], reserving["blocking"]) == ("write", False)
    assert reserving["end_ns"] > opened_ns


def test_a_direct_load_goes_around_the_page_cache(tmp_path: Path) -> None:
    (saved,) = engine(direct_io="on", fsync=True).save(files(), tmp_path, untraced_operation())
    with (tmp_path / saved.name).open("rb") as file:
        last = saved.num_bytes // BLOCK * BLOCK
        check(load(tmp_path, [saved], direct_io="on"), files())
        assert ResidentPages(file.fileno()).share(last - BLOCK, last) < 1


def test_what_lies_in_the_page_cache_needs_no_other_memory(tmp_path: Path) -> None:
    """Else it is read around the cache, into an arena."""
    (saved,) = engine(direct_io="on", fsync=True).save(files(), tmp_path, untraced_operation())
    loading = engine()
    check(loading.load(NAMES, SavedCheckpoint(tmp_path, {saved.name: saved}), untraced_operation()), files())
    assert loading._arena._memory is not None and len(loading._arena._memory) >= saved.num_bytes - MIB
    with (tmp_path / saved.name).open("rb") as file:
        assert ResidentPages(file.fileno()).share(0, saved.num_bytes) < 0.1
        os.pread(file.fileno(), saved.num_bytes * 3 // 4, 0)  # most of it: the rest is read there, too
    loading = engine()
    found = loading.load(NAMES, SavedCheckpoint(tmp_path, {saved.name: saved}), untraced_operation())
    check(found, files())
    assert loading._arena._memory is None or len(loading._arena._memory) <= 16 * 4096
    with (tmp_path / saved.name).open("rb") as file:
        assert ResidentPages(file.fileno()).share(0, saved.num_bytes) > MOST
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
            saved = engine(direct_io=mode).save(files(), directory, untraced_operation())
            check(load(directory, saved, direct_io=mode), files())
        told = [record.message for record in caplog.records if "refuses O_DIRECT" in record.message]
        assert len(told) == 1 and str(tmp_path / "ram" / "save") in told[0] and "buffered I/O instead" in told[0]
        (tmp_path / "ram" / "save" / "on").mkdir()
        with pytest.raises(DirectIOError, match="--direct-io auto or off"):
            engine(direct_io="on").save(files(), tmp_path / "ram" / "save" / "on", untraced_operation())


def test_full_disk_fails_the_save_and_not_the_next(tmp_path: Path) -> None:
    saving = engine(io_threads=2, host_cache_bytes=8 * BLOCK)
    with small_disk(tmp_path / "disk", 4 * MIB) as mounted:
        if not mounted:
            pytest.skip("mounting a disk small enough to fill needs root")
        fill(tmp_path / "disk" / "ballast", room=MIB)
        pending = saving.begin_save(files(), tmp_path / "disk", untraced_operation())
        pending.release_state()
        with pytest.raises(OSError) as caught:
            pending.wait()
        assert caught.value.errno == errno.ENOSPC and "rank_00000.safetensors" in str(caught.value)
    for attempt in ("one", "two"):
        (tmp_path / attempt).mkdir()
        pending = saving.begin_save(files(), tmp_path / attempt, untraced_operation())
        pending.release_state()
        check(load(tmp_path / attempt, pending.wait()), files())
    assert saving._cache.allocated_bytes <= 8 * BLOCK


def test_a_file_that_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    (saved,) = engine().save(files(), tmp_path, untraced_operation())
    before = (tmp_path / saved.name).read_bytes()
    pending = engine().begin_save(files(), tmp_path, untraced_operation())
    pending.release_state()
    with pytest.raises(FileExistsError, match=saved.name):
        pending.wait()
    assert (tmp_path / saved.name).read_bytes() == before


def test_wait_is_not_needed_for_release_and_release_not_for_wait(tmp_path: Path) -> None:
    """The order in which the commit thread and the training thread come does not matter."""
    for index, delay in enumerate((0.0, 0.05)):
        directory = tmp_path / str(index)
        directory.mkdir()
        pending = engine().begin_save(files(), directory, untraced_operation())
        result: list[list[SavedFile]] = []
        waiting = threading.Thread(target=lambda p=pending, r=result: r.append(p.wait()))
        waiting.start()
        time.sleep(delay)
        pending.release_state()
        pending.release_state()
        waiting.join(300)
        check(load(directory, result[0]), files())
