"""Hooks of megatron-core's asynchronous save: they stop no publication, and each save that is published ends."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from restart_trace.clock import now_ns
from restart_trace.hooks import megatron_core
from restart_trace.hooks.session import Session
from restart_trace.reading import read_records
from restart_trace.recorder import Recorder

Request = SimpleNamespace


class Library(ModuleType):
    """Stands in for megatron.core.dist_checkpointing.serialization: what it calls, and in which order."""

    def __init__(self) -> None:
        super().__init__("megatron.core.dist_checkpointing.serialization")
        self.called: list[str] = []

        def save(checkpoint_dir: str) -> Request:
            calls = [lambda: self.called.append("files"), lambda: self.called.append("metadata")]
            return Request(finalize_fns=calls)

        def load(checkpoint_dir: str) -> None: ...

        self.save, self.load = save, load


def finalize(request: Request) -> None:
    """As megatron.core.dist_checkpointing.strategies.async_utils does it."""
    for function in request.finalize_fns:
        function()


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setenv("RESTART_TRACE_HOOKS_PID", str(os.getpid()))  # which it would leave in the environment
    session = Session(tmp_path / "trace", now_ns())
    session.open(0, 1)
    return session


@pytest.fixture
def library(session: Session) -> Library:
    library = Library()
    megatron_core.hook(session, library)
    return library


def saves(tmp_path: Path) -> dict[str, tuple[list[dict[str, Any]], str | None]]:
    """Tag of each save -> (its spans, how it ended: None if it did not)."""
    trace = list(read_records(tmp_path / "trace" / "rank_00000_cycle_000.jsonl"))
    tags = {r["op"]: r["tag"] for r in trace if r["type"] == "operation_label"}
    ends = {r["op"]: r.get("error", r["outcome"]) for r in trace if r["type"] == "operation_end"}
    return {
        tag: ([r for r in trace if r["type"] == "span" and r["op"] == op], ends.get(op)) for op, tag in tags.items()
    }


def test_a_save_ends_when_it_is_published(library: Library, session: Session, tmp_path: Path) -> None:
    request = library.save("/a/first")
    request.finalize_fns.append(lambda: library.called.append("the program's"))
    finalize(request)
    assert library.called == ["files", "metadata", "the program's"] and session.running() is None
    spans, ended = saves(tmp_path)["first"]
    assert [(s["phase"], s["blocking"]) for s in spans] == [
        ("library_call", True), ("library_call", False), ("commit", True),
    ]  # fmt: skip
    assert spans[1]["end_ns"] <= spans[2]["start_ns"] and ended == "ok"


def test_a_hook_that_fails_does_not_stop_the_publication(
    library: Library, session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [library.save("/a/first"), library.save("/a/second")]

    def write(*_: Any, **__: Any) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(Recorder, "write", write)
    for request in requests:
        finalize(request)
    assert library.called == ["files", "metadata"] * 2 and session.running() is None
    assert [record.getMessage().count("finalize_fns") for record in caplog.records] == [1]


def test_a_library_that_cannot_publish_ends_the_save(session: Session, tmp_path: Path) -> None:
    library = Library()

    def full() -> None:
        raise OSError("full")

    library.save = lambda checkpoint_dir: Request(finalize_fns=[full])
    megatron_core.hook(session, library)
    with pytest.raises(OSError, match="full"):
        finalize(library.save("/a/first"))
    assert session.running() is None
    spans, ended = saves(tmp_path)["first"]
    assert ended == "OSError: full" and [s["phase"] for s in spans] == ["library_call", "library_call", "commit"]


def test_a_save_that_is_published_within_another_ends_and_that_one_goes_on(
    library: Library, session: Session, tmp_path: Path
) -> None:
    first = library.save("/a/first")
    second = session.begin("save")
    assert second is not None
    with session.until_end(second), second.phase("library_call"):
        second.operation.label(tag="second")
        finalize(first)
        assert session.running() is second
    found = saves(tmp_path)
    spans, ended = found["first"]
    assert ended == "ok" and [s["blocking"] for s in spans] == [True, False, False]  # the other one blocks
    assert found["second"][1] == "ok" and [s["phase"] for s in found["second"][0]] == ["library_call"]


def test_a_save_that_is_published_within_itself_ends_once(library: Library, session: Session, tmp_path: Path) -> None:
    """As in a function that the user names, and that waits for the save that it began."""
    whole = session.begin("save")
    assert whole is not None
    with session.until_end(whole):
        whole.operation.label(tag="first")
        finalize(library.save("/a/first"))
        with whole.phase("barrier"):
            pass
    spans, ended = saves(tmp_path)["first"]
    assert ended == "ok" and [s["phase"] for s in spans][-1] == "barrier"
    trace = read_records(tmp_path / "trace" / "rank_00000_cycle_000.jsonl")
    assert [r["type"] for r in trace if r.get("op") == spans[0]["op"]].count("operation_end") == 1
