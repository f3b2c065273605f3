"""What threads are in the middle of, as another thread sees it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from restart_trace import under_way
from restart_trace.clock import now_ns
from restart_trace.recorder import untraced_operation
from restart_trace.under_way import OWN_WORK, RANKS, STORAGE, Entry, UnderWay, entries


def mine() -> list[Entry]:
    return [entry for entry in entries().values() if entry.thread == threading.get_ident()]


def test_entries_are_there_while_their_bodies_run_in_the_order_in_which_these_began() -> None:
    with UnderWay(RANKS, "training step", "7"), UnderWay(OWN_WORK, "a part of it", None):
        assert [(entry.depends_on, entry.text) for entry in mine()] == [
            (RANKS, "training step 7"), (OWN_WORK, "a part of it"),
        ]  # fmt: skip
        first, second = mine()
        assert first.since_ns <= second.since_ns <= now_ns() and second.seconds >= 0.0
    assert mine() == []


def test_an_entry_ends_with_an_exception_and_may_be_ended_by_another_thread() -> None:
    number = under_way.begin(OWN_WORK, "an operation", thread=0)
    thread = threading.Thread(target=under_way.end, args=(number,))
    thread.start()
    thread.join()
    try:
        with UnderWay(RANKS, "step"):
            raise ValueError
    except ValueError:
        assert mine() == []
    assert number not in entries()


def test_a_descriptor_is_told_as_its_file(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    with UnderWay(STORAGE, "fsync of", fd):
        assert mine()[0].text == f"fsync of {tmp_path / 'file'}"
        os.close(fd)
        assert mine()[0].text == f"fsync of descriptor {fd}"


def test_a_span_is_an_entry_whether_it_is_recorded_or_not() -> None:
    with untraced_operation().span("load", "read", file="rank_0.pt"):
        assert [entry.text for entry in mine()] == ["load load read rank_0.pt"]
    assert mine() == []
