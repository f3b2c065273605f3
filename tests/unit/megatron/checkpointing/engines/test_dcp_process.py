"""Engine dcp-process: the library's checkpoint process, what ends it, and that it leaves nothing."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from packaging.version import Version

from megatron.checkpointing.engines.base import EngineOptions, FileState, SavedCheckpoint
from megatron.checkpointing.engines.dcp import engine as dcp_engine
from megatron.checkpointing.engines.dcp.engine import DcpProcessEngine
from megatron.checkpointing.engines.errors import CheckpointSaveError
from megatron.checkpointing.engines.registry import create_engine
from restart_trace.recorder import untraced_operation
from tests.descriptors import open_descriptors
from tests.dist import forked_writers
from tests.dist.harness import HANGS_S, ROOT, Zygote, runs, wait_for

pytestmark = pytest.mark.slow

STATES = [FileState(f"{i}.pt", {"a": torch.full((1000,), float(i))}) for i in range(2)]


def dcp_process() -> DcpProcessEngine:
    engine = create_engine("dcp-process", EngineOptions())
    assert isinstance(engine, DcpProcessEngine)
    return engine


def checkpoint_process(engine: DcpProcessEngine) -> psutil.Process:
    assert engine.process is not None and engine.process.pid is not None
    return psutil.Process(engine.process.pid)


@pytest.fixture
def forked(zygote: Zygote) -> Iterator[None]:
    """For a test that asks for it: its processes are forked, and import nothing. Those of other tests, and of the ranks
    that are killed here, begin as users begin them."""
    with forked_writers.installed(zygote.forks):
        yield


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("tensors", [1, 3000], ids=["it waits for an answer", "it sends"])
def test_a_process_that_dies_fails_its_save_whoever_holds_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors: int
) -> None:
    """As a process that another thread forks while this one is being started. Many names do not fit into the buffers
    of the connection."""
    real, held = socket.socketpair, []

    def socketpair() -> tuple[socket.socket, socket.socket]:
        ours, theirs = real()
        held.append(theirs.dup())
        return ours, theirs

    monkeypatch.setattr(socket, "socketpair", socketpair)
    monkeypatch.setattr(dcp_engine, "RESULT_TIMEOUT_S", HANGS_S)
    op, engine = untraced_operation(), dcp_process()
    values = torch.zeros(tensors)
    state = FileState("a.pt", {f"{i:0200}": values[i : i + 1] for i in range(tensors)})
    try:
        engine.save(STATES, tmp_path, op)
        (tmp_path / "killed").mkdir()
        process = checkpoint_process(engine)
        process.send_signal(signal.SIGSTOP)
        pending = engine.begin_save([state], tmp_path / "killed", op)
        select.select(held, [], [], HANGS_S)  # until it has been sent in part, at least
        process.kill()
        with pytest.raises(CheckpointSaveError, match="exit code -9 in the middle of a save"):
            pending.wait()
    finally:
        for each in held:
            each.close()
        engine.close()


@pytest.mark.usefixtures("forked")
def test_a_save_that_is_given_up_waits_for_no_process(tmp_path: Path) -> None:
    op, engine = untraced_operation(), dcp_process()
    try:
        for name in ("first", "given up", "again"):
            (tmp_path / name).mkdir()
            pending = engine.begin_save(STATES, tmp_path / name, op)
            if name != "given up":
                pending.wait()
                process = checkpoint_process(engine)
                process.send_signal(signal.SIGSTOP) if name == "first" else None
                continue
            pending.give_up("another rank has failed")
            with pytest.raises(CheckpointSaveError, match="^another rank has failed$"):
                pending.wait()
            assert not runs(process.pid)
    finally:
        engine.close()


@pytest.mark.usefixtures("forked")
def test_a_process_at_rest_serves_the_next_start(tmp_path: Path) -> None:
    """But not one that writes; and the copies, which are memory of the rank, are given back."""
    op, engine = untraced_operation(), dcp_process()
    try:
        served = []
        for name in ("first", "next start"):
            (tmp_path / name).mkdir()
            pending = engine.begin_save(STATES, tmp_path / name, op)
            saved = {file.name: file for file in pending.wait()}
            pending.give_up("another rank has failed")
            served.append(checkpoint_process(engine))
            assert engine.leave() and engine._held._stager is None
            found = engine.load(["1.pt"], SavedCheckpoint(tmp_path / name, saved), op)
            assert found["1.pt"]["a"][0].item() == 1.0
        assert served[0] == served[1]
        served[0].send_signal(signal.SIGSTOP)
        pending = engine.begin_save(STATES, tmp_path / "writes", op)
        assert not engine.leave() and not runs(served[0].pid)
        with pytest.raises(CheckpointSaveError):
            pending.wait()
    finally:
        engine.close()


def test_a_process_that_was_not_ready_for_a_save_that_was_given_up_serves_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held before its first line."""
    released = tmp_path / "released"
    monkeypatch.setattr(sys, "executable", str(held_interpreter(tmp_path, released)))
    op, engine = untraced_operation(), dcp_process()
    try:
        pending = engine.begin_save(STATES, tmp_path / "given up", op)
        wait_for(lambda: engine.process is not None and engine.process.pid is not None, "the process")
        process = checkpoint_process(engine)
        pending.give_up("another rank has failed")
        with pytest.raises(CheckpointSaveError, match="^another rank has failed$"):
            pending.wait()
        assert engine.leave()
        released.write_text("\n")
        (tmp_path / "next start").mkdir()
        engine.save(STATES, tmp_path / "next start", op)
        assert checkpoint_process(engine) == process
    finally:
        engine.close()


def held_interpreter(directory: Path, released: Path) -> Path:
    """One that waits until somebody writes to the FIFO `released`, which this makes."""
    interpreter = directory / "held"
    interpreter.write_text(f'#!/bin/sh\nread line < {released}\nexec {sys.executable} -X importtime "$@"\n')
    interpreter.chmod(0o700)
    os.mkfifo(released)
    return interpreter


def test_an_engine_without_a_process_serves_no_other_start() -> None:
    assert not dcp_process().leave() and not create_engine("dcp-async", EngineOptions()).leave()


@pytest.mark.usefixtures("forked")
def test_a_process_that_dies_or_hangs_fails_one_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op = untraced_operation()
    engine = dcp_process()
    try:
        for name in ("first", "killed", "again", "hangs", "last"):
            directory = tmp_path / name
            directory.mkdir()
            if name == "killed":
                checkpoint_process(engine).send_signal(signal.SIGSTOP)
                pending = engine.begin_save(STATES, directory, op)
                checkpoint_process(engine).kill()
                with pytest.raises(CheckpointSaveError, match="exit code -9 in the middle of a save"):
                    pending.wait()
                continue
            if name == "hangs":
                checkpoint_process(engine).send_signal(signal.SIGSTOP)
                with monkeypatch.context() as patched:
                    patched.setattr(dcp_engine, "RESULT_TIMEOUT_S", 0.2)
                    with pytest.raises(TimeoutError, match="dcp-process: not written within") as caught:
                        engine.save(STATES, directory, op)
                assert caught.value.errno == errno.ETIMEDOUT
                continue
            saved = {file.name: file for file in engine.save(STATES, directory, op)}
            found = engine.load(["0.pt", "1.pt"], SavedCheckpoint(directory, saved), op)
            assert [found[f"{i}.pt"]["a"][0].item() for i in range(2)] == [0.0, 1.0]
        last = checkpoint_process(engine)
    finally:
        engine.close()
    assert not runs(last.pid)


@contextlib.contextmanager
def room_for_open_files(number: int) -> Iterator[None]:
    """So many more than this process has; its children have the same limit."""
    limits, used = resource.getrlimit(resource.RLIMIT_NOFILE), os.listdir("/proc/self/fd")
    limit = [file for file in range(limits[0]) if str(file) not in used][number]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_save_without_room_for_its_copies_leaves_none(tmp_path: Path) -> None:
    engine, before = dcp_process(), open_descriptors()
    gc.disable()  # what only that would free is kept for long
    try:
        with room_for_open_files(50):
            state = FileState("a.pt", [torch.ones(10) for _ in range(200)])
            pending = engine.begin_save([state], tmp_path, untraced_operation())
        assert open_descriptors() - before == set()
    finally:
        gc.enable()
        engine.close()
    with pytest.raises(OSError, match="Too many open files.*ulimit -n"):
        pending.wait()


@pytest.mark.usefixtures("forked")
def test_a_storage_takes_one_open_file(tmp_path: Path) -> None:
    """Also in the process, and while it gets a state again, but for torch before 2.13, which copies each state anew."""
    engine, states = dcp_process(), [FileState("a.pt", [torch.ones(10) for _ in range(200)])]
    keeps_copies = Version(torch.__version__) >= Version("2.13")
    try:
        with room_for_open_files(250 if keeps_copies else 450):
            for name in ("first", "second", "third", "fourth"):
                (tmp_path / name).mkdir()
                engine.save(states, tmp_path / name, untraced_operation())
    finally:
        engine.close()


def test_an_engine_closes_while_its_process_comes_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = tmp_path / "never_ready"
    interpreter.write_text("#!/bin/sh\nexec sleep 600\n")
    interpreter.chmod(0o700)
    engine = dcp_process()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(interpreter))
        pending = engine.begin_save(STATES, tmp_path, untraced_operation())
        wait_for(lambda: engine.process is not None and engine.process.pid is not None, "the process")
    starting = checkpoint_process(engine)
    engine.close()
    assert not runs(starting.pid)
    with pytest.raises(CheckpointSaveError, match="exit code -9"):
        pending.wait()


def test_a_closed_engine_starts_no_process(tmp_path: Path) -> None:
    """Also for a save whose copies are ready only then: nobody would end it before the rank does."""
    engine = dcp_process()
    engine.close()
    try:
        pending = engine.begin_save(STATES, tmp_path, untraced_operation())
        with pytest.raises(CheckpointSaveError, match="was closed before the state was written"):
            pending.wait()
        assert engine.process is not None and engine.process.pid is None
    finally:
        engine.close()


@pytest.mark.usefixtures("forked")
def test_one_engine_closes_while_another_saves(tmp_path: Path) -> None:
    saving, closing, op = dcp_process(), dcp_process(), untraced_operation()
    directories = [tmp_path / name for name in ("first", "closing", "second")]
    for directory in directories:
        directory.mkdir()
    try:
        saving.save(STATES, directories[0], op)
        closing.save(STATES, directories[1], op)
        held = checkpoint_process(saving)
        held.send_signal(signal.SIGSTOP)
        pending = saving.begin_save(STATES, directories[2], op)
        closing.close()
        held.send_signal(signal.SIGCONT)
        saved = {file.name: file for file in pending.wait()}
        found = saving.load(["1.pt"], SavedCheckpoint(directories[2], saved), op)
        assert found["1.pt"]["a"][0].item() == 1.0
    finally:
        saving.close()
        closing.close()


@pytest.mark.parametrize("when", ["it answers", "it waits"])
def test_the_process_ends_without_a_word_when_its_connection_ends(when: str) -> None:
    """As when the rank is killed, where the process may notice that first: the log of the job is the rank's."""
    ours, theirs = socket.socketpair()
    code = "import sys; from megatron.checkpointing.engines.dcp.process import main; main(*map(int, sys.argv[1:]))"
    with theirs:
        arguments = [str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], cwd=ROOT, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE
        )
    if when == "it waits":
        ours.recv(1)  # its first answer is that it is ready
    ours.close()
    assert process.communicate(timeout=HANGS_S) == (None, b"")
    assert process.returncode == 0


@pytest.mark.parametrize("held", [False, True], ids=["alone", "connection held open"])
def test_no_process_outlives_a_killed_rank(zygote: Zygote, tmp_path: Path, held: bool) -> None:
    """Also one whose end of the connection a child of the rank still holds open: that does not tell of its end."""
    said = kill_rank(zygote, tmp_path, f"""
        engine.save(STATES, DIRECTORY, untraced_operation())
        if {held} and os.fork() == 0:
            os.setsid()
            time.sleep(600)
    """, 1 + held)  # fmt: skip
    assert said == ""


def test_no_process_outlives_a_rank_that_was_killed_while_it_came_up(zygote: Zygote, tmp_path: Path) -> None:
    """The process is held before its first line until the rank is gone."""
    released = tmp_path / "released"
    interpreter = held_interpreter(tmp_path, released)
    imported = kill_rank(zygote, tmp_path, f"""
        sys.executable = {str(interpreter)!r}
        pending = engine.begin_save(STATES, DIRECTORY, untraced_operation())
        while engine.process.pid is None:
            time.sleep(0.01)
    """, 1, lambda: released.write_text("\n"))  # fmt: skip
    assert "parent_process" in imported and "torch" not in imported


def kill_rank(
    zygote: Zygote, directory: Path, body: str, processes: int, after: Callable[[], object] = lambda: None
) -> str:
    """Run `body` with an engine in a rank, and kill that when it has so many processes. What was printed meanwhile, and
    until the checkpoint process has ended."""
    code = f"""
        import os, sys, time, torch, warnings
        from pathlib import Path
        from megatron.checkpointing.engines.base import EngineOptions, FileState
        from megatron.checkpointing.engines.registry import create_engine
        from restart_trace.recorder import untraced_operation

        warnings.simplefilter("ignore")
        DIRECTORY = Path({str(directory)!r})
        STATES = [FileState("a.pt", {{"a": torch.ones(10)}})]
        engine = create_engine("dcp-process", EngineOptions(fsync=False))
    """
    script, saved = directory / "rank.py", directory / "saved"
    told = f"Path({str(saved)!r}).write_text(str(engine.process.pid))\ntime.sleep(600)\n"
    script.write_text(textwrap.dedent(code) + textwrap.dedent(body) + told)

    def kill(ranks: list[int]) -> None:
        rank, left = psutil.Process(ranks[0]), list[psutil.Process]()
        try:
            wait_for(lambda: not runs(rank.pid) or (saved.is_file() and saved.read_text() != ""), "the save")
            left += rank.children(recursive=True)
            assert len(left) == processes
            rank.kill()
            wait_for(lambda: not runs(rank.pid), "the end of the rank")
            after()
            (process,) = (it for it in left if it.pid == int(saved.read_text()))
            wait_for(lambda: not runs(process.pid), "its end")
        finally:
            for each in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()

    return zygote.run([], 1, directory / "logs", script=str(script), during=kill).output
