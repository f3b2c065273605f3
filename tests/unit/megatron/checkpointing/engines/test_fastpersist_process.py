"""fastpersist-decoupled: the process that writes, what ends it, and that it leaves nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch

from megatron.checkpointing.engines.base import EngineOptions, FileState
from megatron.checkpointing.engines.errors import CheckpointSaveError
from megatron.checkpointing.engines.fastpersist import decoupled_engine
from megatron.checkpointing.engines.fastpersist.decoupled_engine import FastPersistDecoupledEngine
from megatron.checkpointing.engines.fastpersist.writer import WRITER_EVENT
from restart_trace.clock import now_ns
from restart_trace.recorder import untraced_operation
from tests.conformance.compare import differences
from tests.conformance.subjects import Saved, traced
from tests.descriptors import open_descriptors
from tests.dist import forked_writers
from tests.dist.harness import Zygote, runs, wait_for
from tests.unit.megatron.checkpointing.engines.fastpersist_helpers import (
    NAME,
    load,
    process_of,
    save,
    state,
    without_launcher,
)
from tests.unit.trace_helpers import start_python

pytestmark = pytest.mark.slow  # most start processes that import torch


@pytest.fixture(autouse=True)
def _without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)


@pytest.fixture
def forked(zygote: Zygote) -> Iterator[None]:
    """For a test that asks for it, or for `decoupled`: its writers are forked, and import nothing. Other tests, and the
    programs that are started here, begin theirs as users begin it."""
    with forked_writers.installed(zygote.forks):
        yield


@pytest.fixture
def decoupled(forked: None) -> Iterator[FastPersistDecoupledEngine]:
    engine = FastPersistDecoupledEngine(EngineOptions(fsync=False))
    yield engine
    engine.close()


def test_a_save_is_handed_over_before_the_process_listens(tmp_path: Path) -> None:
    """Its imports are not waited for: it is an interpreter of its own."""
    engine = FastPersistDecoupledEngine(EngineOptions(fsync=False))
    weight = torch.arange(1000.0)
    engine._started()
    process = psutil.Process(process_of(engine))
    assert process.cmdline()[1] == "-c"
    process.suspend()
    pending = engine.begin_save([FileState(NAME, {"weight": weight})], tmp_path, untraced_operation())
    pending.release_state()
    weight.zero_()
    assert not list(tmp_path.iterdir())
    process.resume()
    saved = Saved(tmp_path, pending.wait(), traced("save"))
    assert torch.equal(load(engine, saved)["weight"], torch.arange(1000.0))
    engine.close()


def test_close_ends_the_process_and_gives_everything_back(forked: None, tmp_path: Path) -> None:
    engine = FastPersistDecoupledEngine(EngineOptions(fsync=False))
    before = open_descriptors()
    for number in range(2):  # a closed engine can be used again
        save(engine, tmp_path / str(number))
        pid = process_of(engine)
        engine.close()
        assert not psutil.pid_exists(pid)
        assert not open_descriptors() - before
    engine.close()


def test_signals_to_the_whole_job_do_not_end_it(decoupled: FastPersistDecoupledEngine, tmp_path: Path) -> None:
    """Training may answer a SIGTERM with one more save."""
    save(decoupled, tmp_path / "first")
    pid = process_of(decoupled)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(pid, number)
    save(decoupled, tmp_path / "second")
    assert process_of(decoupled) == pid


def test_death_of_the_process_is_told_and_the_next_save_starts_another(
    decoupled: FastPersistDecoupledEngine, tmp_path: Path
) -> None:
    save(decoupled, tmp_path / "first")
    first = process_of(decoupled)
    psutil.Process(first).suspend()  # so that it dies before it has replied
    pending = decoupled.begin_save([FileState(NAME, {"a": torch.ones(10)})], tmp_path, untraced_operation())
    os.kill(first, signal.SIGKILL)
    with pytest.raises(CheckpointSaveError, match=rf"process {first}\) was killed by SIGKILL, exit code -9"):
        pending.wait()
    saved = save(decoupled, tmp_path / "second")
    second = process_of(decoupled)
    assert second != first and differences(load(decoupled, saved), state()) == []
    # Between two saves too.
    assert decoupled._process is not None
    os.kill(second, signal.SIGKILL)
    decoupled._process._process.wait(300.0)  # a zombie may have threads that are not gone yet
    save(decoupled, tmp_path / "third")
    assert process_of(decoupled) != second


def test_a_save_that_is_given_up_waits_for_no_process(decoupled: FastPersistDecoupledEngine, tmp_path: Path) -> None:
    save(decoupled, tmp_path / "first")
    first = process_of(decoupled)
    psutil.Process(first).suspend()
    pending = decoupled.begin_save([FileState(NAME, {"a": torch.ones(10)})], tmp_path, untraced_operation())
    pending.give_up("another rank has failed")
    with pytest.raises(CheckpointSaveError, match="^another rank has failed$"):
        pending.wait()
    save(decoupled, tmp_path / "second")
    assert process_of(decoupled) != first


def test_a_process_at_rest_serves_the_next_start(decoupled: FastPersistDecoupledEngine, tmp_path: Path) -> None:
    """Its memory does not count to what the rank keeps; and each start's trace says which writer it is."""
    assert not decoupled.leave(), "it has no process yet"
    pending = decoupled.begin_save([FileState(NAME, state())], tmp_path, untraced_operation())
    pending.wait()
    pending.give_up("another rank has failed")
    first = process_of(decoupled)
    assert decoupled.leave() and decoupled.leave()
    assert decoupled._memory is not None and os.fstat(decoupled._memory.fd).st_size == 0
    saved = save(decoupled, tmp_path / "next start")
    assert process_of(decoupled) == first and differences(load(decoupled, saved), state()) == []
    assert [r["phase"] for r in saved.traced.records.all if r["type"] == "event"] == [WRITER_EVENT]


def test_a_process_that_was_not_ready_for_a_save_that_was_given_up_serves_the_next_start(tmp_path: Path) -> None:
    engine = FastPersistDecoupledEngine(EngineOptions(fsync=False))
    engine._started()
    process = psutil.Process(process_of(engine))
    process.suspend()
    pending = engine.begin_save([FileState(NAME, {"a": torch.ones(10)})], tmp_path, untraced_operation())
    pending.give_up("another rank has failed")
    with pytest.raises(CheckpointSaveError, match="^another rank has failed$"):
        pending.wait()
    assert engine.leave()
    process.resume()
    saved = save(engine, tmp_path / "next start")
    assert process_of(engine) == process.pid and differences(load(engine, saved), state()) == []
    engine.close()


@pytest.mark.parametrize("how", ["writes", "was given up", "has ended"])
def test_another_process_ends_with_its_start(decoupled: FastPersistDecoupledEngine, tmp_path: Path, how: str) -> None:
    save(decoupled, tmp_path / "first")
    process = psutil.Process(process_of(decoupled))
    if how == "has ended":
        assert decoupled._process is not None
        process.kill()
        decoupled._process._process.wait(300.0)  # a zombie may have threads that are not gone yet
    else:
        process.suspend()
        pending = decoupled.begin_save([FileState(NAME, {"a": torch.ones(10)})], tmp_path, untraced_operation())
        process.resume() if how == "writes" else pending.give_up("another rank has failed")
    assert not decoupled.leave() and decoupled._process is None
    assert not process.is_running()


def test_death_of_the_process_is_told_whoever_holds_its_connection(
    decoupled: FastPersistDecoupledEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process that another thread forks while this one is being started."""
    real, held = socket.socketpair, list[socket.socket]()

    def socketpair() -> tuple[socket.socket, socket.socket]:
        ours, theirs = real()
        held.append(theirs.dup())
        return ours, theirs

    monkeypatch.setattr(socket, "socketpair", socketpair)
    save(decoupled, tmp_path / "first")
    psutil.Process(process_of(decoupled)).suspend()
    pending = decoupled.begin_save([FileState(NAME, {"a": torch.ones(10)})], tmp_path, untraced_operation())
    os.kill(process_of(decoupled), signal.SIGKILL)
    with pytest.raises(CheckpointSaveError, match="was killed by SIGKILL, exit code -9"):
        pending.wait()
    for each in held:
        each.close()


SAVING = """
    import os, sys, threading, torch
    from pathlib import Path
    from megatron.checkpointing.engines.base import EngineOptions, FileState
    from megatron.checkpointing.engines.fastpersist.decoupled_engine import FastPersistDecoupledEngine
    from restart_trace.recorder import untraced_operation
    directory, in_thread, busy = Path(sys.argv[1]), sys.argv[2] == "thread", sys.argv[3] == "busy"

    def work():
        engine = FastPersistDecoupledEngine(EngineOptions())
        state = {"a": torch.ones(20_000_000)}
        number = 0
        while True:
            where = directory / str(number % 2)
            where.mkdir(exist_ok=True)
            for file in where.iterdir():
                file.unlink()
            engine.save([FileState("state", state)], where, untraced_operation())
            number += 1
            if number == 1:
                print(engine._process.pid, flush=True)
                if not busy:
                    threading.Event().wait()

    if in_thread:
        threading.Thread(target=work, daemon=True).start()
        threading.Event().wait()
    work()
"""


@contextmanager
def training_process(code: str, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that saves, once it has done so, and the id of the process that writes for it. Killed at the end."""
    training = start_python(code, *arguments)
    assert training.stdout is not None
    with training, training.stdout:
        try:
            yield training, int(training.stdout.readline())
        finally:
            training.kill()


@pytest.mark.parametrize(("thread", "busy"), [("main", "idle"), ("thread", "busy")])
def test_sigkill_of_the_training_leaves_nothing(tmp_path: Path, thread: str, busy: str) -> None:
    """In the main thread the system kills the process, too; otherwise the end of the connection alone must do."""
    with training_process(SAVING, tmp_path, thread, busy) as (training, pid):
        assert psutil.Process(pid).ppid() == training.pid
        time.sleep(0.3)
        assert not named_memory(training.pid) and not named_memory(pid)
    wait_for(lambda: not runs(pid), "its end")


def named_memory(pid: int) -> list[str]:
    """Files of /dev/shm that the process has open or mapped: what could remain there after it."""
    directory = Path("/proc", str(pid))
    links = []
    for fd in (directory / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(str(fd.readlink()))
    mapped = [line for line in (directory / "maps").read_text().splitlines() if "memfd:checkpoint-snapshot" in line]
    assert mapped, "it maps no snapshot"
    lines = links + (directory / "maps").read_text().splitlines()
    return [line for line in lines if "/dev/shm/" in line]


def test_a_copy_of_the_connection_in_another_process_does_not_keep_it(tmp_path: Path) -> None:
    """As one that a data loader's forked worker has."""
    report = "print(engine._process.pid, flush=True)"
    code = SAVING.replace(report, f"os.fork() or (threading.Event().wait(600), os._exit(0)); {report}")
    with training_process(code, tmp_path, "main", "idle") as (training, pid):
        workers = [child for child in psutil.Process(training.pid).children() if child.pid != pid]
        assert len(workers) == 1
    try:
        wait_for(lambda: not runs(pid), "its end")
        assert workers[0].is_running()
    finally:
        workers[0].kill()


def test_saving_from_another_thread(tmp_path: Path) -> None:
    """The process must outlive the thread that happened to start it.

    It is begun as users begin it: a fork by a thread may hang where an earlier test has used DTensors, for Python then
    clears what torch keeps for the main thread, with process groups whose threads the child does not have.
    """
    engine = FastPersistDecoupledEngine(EngineOptions(fsync=False))
    thread = threading.Thread(target=save, args=(engine, tmp_path / "first"))
    thread.start()
    thread.join()
    pid = process_of(engine)
    time.sleep(0.2)
    save(engine, tmp_path / "second")
    assert process_of(engine) == pid
    engine.close()


def test_a_process_that_begins_at_once_was_not_waited_for(
    decoupled: FastPersistDecoupledEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where processors are busy, it may have begun before the rank notes that it has handed the save over."""
    monkeypatch.setattr(decoupled_engine, "now_ns", lambda: now_ns() + 10**15)
    trace = traced("save")
    decoupled.begin_save([FileState("a.pt", {"a": torch.ones(1)})], tmp_path, trace.op).wait()
    assert all(span["end_ns"] >= span["start_ns"] for span in trace.records.spans())
