"""What the hooks make of torch.save and torch.load, with torch itself; test_hooks.py needs no torch."""

from __future__ import annotations

import io
import os
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.serialization import config

from restart_trace.clock import now_ns
from restart_trace.hooks import distributed_checkpoint
from restart_trace.hooks.background import Background
from restart_trace.hooks.distributed_checkpoint import CheckpointHooks
from restart_trace.hooks.guard import wrap
from restart_trace.hooks.serialization import Serialization
from restart_trace.hooks.session import Session
from restart_trace.reading import read_records
from restart_trace.recorder import Operation
from tests.unit.restart_trace.programs import python


def test_a_file_is_mapped_if_torchs_setting_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch maps no file object: within a load that is traced it has to get the path."""
    monkeypatch.setenv("RESTART_TRACE_HOOKS_PID", str(os.getpid()))  # which it would leave in the environment
    session = Session(tmp_path / "trace", now_ns())
    session.open(0, 1)
    module = SimpleNamespace(__name__="torch", load=torch.load)
    wrap(module, "load", Serialization(session).load)
    torch.save(torch.arange(4), tmp_path / "a.pt")
    running = session.begin("load")
    assert running is not None
    with config.patch("load.mmap", True), session.until_end(running):  # type: ignore[attr-defined]  # torch puts it there
        assert module.load(tmp_path / "a.pt").tolist() == [0, 1, 2, 3]
    trace = list(read_records(tmp_path / "trace" / "rank_00000_cycle_000.jsonl"))
    assert [r["phase"] for r in trace if r["type"] == "span" and r["operation"] == "load"] == ["library_call"]


@pytest.mark.parametrize("kind", ["save", "load"])
def test_what_a_librarys_call_does_with_files_stays_its_call(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor has a call without a file, beside any save or load, a phase: of both, torch gets what the program gave."""
    monkeypatch.setenv("RESTART_TRACE_HOOKS_PID", str(os.getpid()))  # which it would leave in the environment
    session = Session(tmp_path / "trace", now_ns())
    session.open(0, 1)
    given: list[Any] = []

    def load(f: Any, mmap: bool | None = None) -> torch.Tensor:
        given.append(f)
        return torch.load(f, mmap=mmap)

    module = SimpleNamespace(__name__="torch", load=load, save=torch.save)
    wrap(module, "load", Serialization(session).load)
    wrap(module, "save", Serialization(session).save)
    buffer, path = io.BytesIO(), tmp_path / "a.pt"
    running = session.begin(kind)
    assert running is not None
    with session.until_end(running), running.library_call():
        module.save(torch.arange(4), path)
        assert module.load(path).tolist() == [0, 1, 2, 3]
    module.save(torch.arange(4), buffer)
    buffer.seek(0)
    assert module.load(buffer).tolist() == [0, 1, 2, 3]
    assert given == [path, buffer]
    trace = list(read_records(tmp_path / "trace" / "rank_00000_cycle_000.jsonl"))
    assert [r["phase"] for r in trace if r["type"] == "span" and r["operation"] == kind] == ["library_call"]
    assert {r["operation"] for r in trace if r["type"] == "operation_begin"} <= {kind, "startup"}


def test_a_save_whose_copy_fails_is_not_taken_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP's async_save raises before it has handed over anything; the program goes on and saves again."""
    monkeypatch.setenv("RESTART_TRACE_HOOKS_PID", str(os.getpid()))  # which it would leave in the environment
    session = Session(tmp_path / "trace", now_ns())
    session.open(0, 1)

    class Saver:
        @staticmethod
        def async_save(state: object, checkpoint_id: str, storage_writer: None = None, **_: Any) -> Future[None]:
            if state is None:
                raise RuntimeError("no memory for the copy")
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(Saver.save, state, checkpoint_id)

        @staticmethod
        def save(state: object, checkpoint_id: str, storage_writer: None = None) -> None:
            with session.phase("flush", "write"):
                pass

    hooks = CheckpointHooks(session)
    monkeypatch.setattr(distributed_checkpoint, "_ranks", lambda arguments: 1)
    wrap(Saver, "async_save", hooks.async_save)
    wrap(Saver, "save", hooks.save)
    with pytest.raises(RuntimeError, match="no memory"):
        Saver.async_save(None, str(tmp_path / "first"))
    Saver.async_save({}, str(tmp_path / "second")).result()
    trace = list(read_records(tmp_path / "trace" / "rank_00000_cycle_000.jsonl"))
    ended = {r["op"]: r["outcome"] for r in trace if r["type"] == "operation_end"}
    assert list(ended.values()) == ["failed", "ok"]
    assert [list(ended)[1]] == [r["op"] for r in trace if r["type"] == "span" and r["phase"] == "flush"]


def test_a_wait_is_noted_once_where_it_ends_with_the_save() -> None:
    background = Background()
    noted: list[str] = []

    class Save:
        start_ns = 0

        def add(self, phase: str, *_: object, **__: object) -> None:
            noted.append(phase)
            if len(noted) == 1:
                save_ends.start()
                save_ends.join(0.2)  # it has to wait until the training thread has noted the end of its wait

    save = cast(Operation, Save())
    save_ends = threading.Thread(target=background.ends, args=(save,))
    background.given_to(save, "future")
    with background.awaited("future"):
        pass
    save_ends.join()
    assert noted == ["wait_previous"]


def test_a_thread_of_a_pool_keeps_no_result() -> None:
    """It may be a copy of a whole state."""
    background, future = Background(), Future[None]()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(background.works_for, future).result()
        pool.submit(int).result()  # the thread has let go of what it did before
        kept = weakref.ref(future)
        del future
        assert kept() is None


@pytest.mark.slow
def test_files_that_ranks_name_after_themselves_are_one_save(tmp_path: Path) -> None:
    """By the same tag on all ranks; other numbers, and those of other ranks, stay."""
    names = ("state_rank_01_of_2.pt", "rank1.pt", "Rank-10.pt", "rank_0.pt", "model1.pt")
    code = f"""
        import restart_trace.hooks
        restart_trace.hooks.install("trace")
        import torch
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight])
        for name in {names}:
            torch.save([], name)
            weight.sum().backward()  # what follows is another save
            optimizer.step()
    """
    done = python(code, tmp_path, RANK="1", WORLD_SIZE="2")
    assert done.returncode == 0, done.stderr
    records = read_records(tmp_path / "trace" / "rank_00001_cycle_000.jsonl")
    tags = [record["tag"] for record in records if record["type"] == "operation_end" and record["operation"] == "save"]
    assert tags == ["state_rank_*_of_2.pt", "rank*.pt", "Rank-10.pt", "rank_0.pt", "model1.pt"]
