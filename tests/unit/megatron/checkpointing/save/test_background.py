"""The hand-over between the training thread and the thread that commits: who waits for whom, and who records what."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpointing.engines.base import PendingSave, SavedFile
from megatron.checkpointing.save.background import THREAD_NAME, BackgroundSave, BackgroundSaves, release_before_steps
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation, Recorder
from restart_trace.sink import JsonlSink
from tests.dist.harness import HANGS_S
from tests.unit.trace_helpers import PROCESS, read


class Pending(PendingSave):
    """Released when told; notes on which threads."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.releasable = threading.Event()
        self.releasable.set()
        self.released: list[str] = []
        self.waiting: list[bool] = []

    def set_waiting(self, waits: bool) -> None:
        self.waiting.append(waits)

    def release_state(self) -> None:
        self.asked.set()
        self.releasable.wait()
        self.released.append(threading.current_thread().name)

    def wait(self) -> list[SavedFile]:
        return []


class Job:
    """A trace, and saves that end when they are let."""

    def __init__(self, path: Path, sink: type[JsonlSink] = JsonlSink) -> None:
        self.path = path
        self.recorder = Recorder(sink(path), PROCESS)
        self.saves = BackgroundSaves()
        self.may_end = threading.Event()
        self.pending = Pending()
        self.error: str | None = None

    def begin(self, step: int = 1) -> BackgroundSave:
        op = self.recorder.begin("save", step=step)

        def finish() -> str | None:
            self.may_end.wait()
            return self.error

        save = BackgroundSave(step, op, self.pending, finish, now_ns())
        self.saves.begin(save)
        return save

    def operation(self, step: int) -> Operation:
        return self.recorder.begin("save", step=step)

    def records(self, record_type: str, step: int = 1) -> list[dict[str, Any]]:
        return [r for r in read(self.path) if r["type"] == record_type and r["step"] == step]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "trace.jsonl")


@pytest.fixture
def waited_for_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Its saves end once training waits for them, and not before."""
    span = Operation.span

    def ending_span(self: Operation, phase: str, *args: Any, **kwargs: Any) -> Any:
        if phase in ("wait_previous", "barrier"):
            job.may_end.set()
        return span(self, phase, *args, **kwargs)

    monkeypatch.setattr(Operation, "span", ending_span)
    return job


def test_training_hears_of_a_save_once_it_is_over(job: Job) -> None:
    save = job.begin()
    assert job.saves.finished() == [] and job.saves.pending is save
    job.may_end.set()
    save.wait()
    assert job.saves.finished() == [save] and job.saves.finished() == []
    assert job.saves.pending is None and save.error is None and save.total_ns > 0


def test_drain_is_a_blocking_span_within_the_operation_of_the_save(waited_for_job: Job) -> None:
    job = waited_for_job
    save = job.begin()
    job.saves.drain()
    (span,), (end,) = job.records("span"), job.records("operation_end")
    assert (span["phase"], span["blocking"], span["thread"]) == ("wait_previous", True, "MainThread")
    assert end["start_ns"] <= span["start_ns"] < span["end_ns"] <= end["end_ns"]
    assert span["duration_ns"] <= save.blocked_ns < end["end_ns"] - end["start_ns"]
    assert job.pending.released == ["MainThread"]
    assert job.pending.waiting == [True, False]


def test_a_save_is_over_though_its_end_cannot_be_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(JsonlSink):
        def write(self, record: dict[str, Any]) -> bool:
            if record["type"] == "operation_end":
                raise OSError("the trace is broken")
            return super().write(record)

    job = Job(tmp_path / "trace.jsonl", Broken)
    job.may_end.set()
    save = job.begin()
    assert save.wait_at_most(HANGS_S)
    job.saves.drain()
    assert job.saves.finished() == [save] and save.error is None
    assert "the end of the save of step 1 is missing in the trace" in caplog.text


def test_there_is_no_pending_save_without_its_thread(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="new thread"):
        patched.setattr(threading.Thread, "start", refused)
        job.begin()
    assert job.saves.drain_after_error(0.0)


def test_next_save_waits_in_its_own_operation(waited_for_job: Job) -> None:
    job = waited_for_job
    job.begin(1)
    job.saves.wait_previous(job.operation(2))
    (end,), (span,) = job.records("operation_end", 1), job.records("span", 2)
    assert span["phase"] == "wait_previous" and span["blocking"] and span["end_ns"] >= end["end_ns"]
    assert job.records("span", 1) == []
    assert job.pending.waiting == [True, False]


def test_draining_nothing_records_nothing(job: Job) -> None:
    job.saves.drain()
    job.saves.wait_previous(job.operation(1))
    assert job.saves.drain_after_error(0.0)
    job.may_end.set()
    save = job.begin(2)
    while not save.over:
        time.sleep(0.001)
    job.saves.drain()
    assert job.records("span", 1) == job.records("span", 2) == []


def test_failure_ends_the_operation_and_is_told(job: Job) -> None:
    job.error = "checkpoint global_step1 was not saved: rank 1: OSError: full"
    save = job.begin()
    job.may_end.set()
    job.saves.drain()
    assert job.saves.finished()[0].error == save.error == job.error
    (end,) = job.records("operation_end")
    assert end["outcome"] == "failed" and end["error"] == f"CheckpointSaveError: {job.error}"


def test_commit_thread_that_breaks_is_a_failed_save(job: Job) -> None:
    def broken() -> str | None:
        raise SystemExit(-1)

    save = BackgroundSave(1, job.operation(1), None, broken, now_ns())
    job.saves.begin(save)
    job.saves.drain()
    assert save.error == "SystemExit: -1"


def test_state_is_released_once_and_only_while_it_is_needed(job: Job) -> None:
    save = job.begin()
    job.saves.release_state()
    job.saves.release_state()
    save.release_state()
    assert job.pending.released == ["MainThread"] and save.blocked_ns > 0
    job.may_end.set()
    job.saves.drain()
    late, job.pending = job.pending, Pending()
    save = job.begin(2)
    while not save.over:
        time.sleep(0.001)
    job.saves.release_state()
    assert job.pending.released == [] and late.released == ["MainThread"]


def test_operation_does_not_end_while_the_state_is_being_released(job: Job) -> None:
    """What the engine records as blocking then has to lie within it."""
    save = job.begin()
    job.pending.releasable.clear()
    releasing = threading.Thread(target=job.saves.release_state)
    releasing.start()
    assert job.pending.asked.wait(300)
    job.may_end.set()
    time.sleep(0.05)
    assert not save.over and job.records("operation_end") == []
    job.pending.releasable.set()
    releasing.join()
    job.saves.drain()
    assert len(job.records("operation_end")) == 1


def test_error_in_training_waits_for_a_limited_time(job: Job) -> None:
    job.begin()
    job.pending.releasable.clear()
    assert not job.saves.drain_after_error(0.05)
    assert job.saves.pending is not None and job.pending.asked.wait(300)
    job.pending.releasable.set()
    job.may_end.set()
    assert job.saves.drain_after_error(300.0)
    assert job.pending.released == ["ckpt-release"]  # never on the thread that must get away


def test_optimizer_steps_on_released_state_only(job: Job) -> None:
    steps: list[tuple[Any, ...]] = []

    def step(*args: Any, **kwargs: Any) -> str:
        steps.append((args, kwargs, list(job.pending.released)))
        return "result"

    engine = SimpleNamespace(optimizer=SimpleNamespace(step=step))
    release_before_steps(engine, job.saves)
    assert engine.optimizer.step(1, closure=2) == "result"
    job.begin()
    engine.optimizer.step()
    engine.optimizer.step()
    assert steps == [((1,), {"closure": 2}, []), ((), {}, ["MainThread"]), ((), {}, ["MainThread"])]
    job.may_end.set()
    job.saves.drain()


def test_the_last_step_before_the_next_save_waits_for_the_save_before(waited_for_job: Job) -> None:
    """A failure is to lose at most what lies between two saves, and the step in flight."""
    job, over = waited_for_job, list[bool]()
    saves = job.saves
    engine = SimpleNamespace(optimizer=SimpleNamespace(step=lambda: over.append(saves.pending is None)))
    checked: list[int] = []
    release_before_steps(engine, saves, over_within=2, check=lambda: checked.append(len(over)))
    for step in (2, 4):
        job.may_end.clear()
        saves.finished()
        job.begin(step)
        engine.optimizer.step()
        engine.optimizer.step()
    assert over == [False, True, False, True] and checked == [1, 3]
    spans = [r for step in (2, 4) for r in job.records("span", step)]
    assert [(r["step"], r["phase"], r["blocking"]) for r in spans] == [(2, "barrier", True), (4, "barrier", True)]


def test_daemon_thread_has_a_telling_name(job: Job) -> None:
    job.begin()
    (thread,) = [t for t in threading.enumerate() if t.name == THREAD_NAME]
    assert thread.daemon
    job.may_end.set()
    job.saves.drain()


# ---------------------------------------------------------------- one recorder, several threads


def in_threads(work: Any, count: int = 8) -> None:
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_operations_of_many_threads_have_numbers_of_their_own(job: Job) -> None:
    in_threads(lambda i: [job.recorder.begin("save", step=i).end() for _ in range(50)])
    numbers = [r["op"] for r in read(job.path) if r["type"] == "operation_end"]
    assert sorted(numbers) == list(range(400))


def test_labels_may_change_while_spans_are_written(job: Job) -> None:
    op = job.recorder.begin("load")

    def work(i: int) -> None:
        for step in range(100):
            if i % 2:
                op.label(tag=f"global_step{step}", step=step, engine="Reader")
            else:
                op.add("discover", None, 1, 2)

    in_threads(work)
    op.end()
    assert sum(r["type"] == "span" for r in read(job.path)) == 400
    assert read(job.path)[-1]["engine"] == "Reader" and read(job.path)[-1]["step"] == 99


def test_lost_records_are_counted_over_all_threads(tmp_path: Path) -> None:
    """A sink that refuses everything until it has room again."""

    class Full:
        def __init__(self) -> None:
            self.room = False
            self.taken: list[dict[str, Any]] = []

        def write(self, record: dict[str, Any]) -> bool:
            time.sleep(0)  # let another thread in
            if self.room:
                self.taken.append(record)
            return self.room

        def close(self) -> None:
            return None

    sink = Full()
    recorder = Recorder(sink, PROCESS)
    in_threads(lambda i: [recorder.iteration(step, 0, 1) for step in range(100)])
    sink.room = True
    recorder.iteration(1, 0, 1)
    assert [r.get("detail") for r in sink.taken] == [None, None, "800 records before this one could not be written"]


def test_closed_recorder_writes_nothing_more(job: Job) -> None:
    """A commit thread may still be at work when the process ends; the descriptor may be another file's by then."""
    op = job.recorder.begin("save", step=1)
    job.recorder.close()
    job.recorder.close()
    op.end()
    assert job.records("operation_end") == []


def test_ranges_are_closed_by_the_thread_that_opened_them(job: Job) -> None:
    opened: list[tuple[str, int]] = []
    ranges = SimpleNamespace(
        range_push=lambda message: opened.append((message, threading.get_ident())),
        range_pop=lambda: opened.append(("pop", threading.get_ident())),
    )
    job.recorder.nvtx = ranges  # pyright: ignore[reportAttributeAccessIssue]
    op = job.recorder.begin("save", step=1)
    with op.span("collect"):
        pass
    mine = threading.get_ident()
    assert opened == [("save/collect", mine), ("pop", mine)]
    span = op.span("barrier")
    span.__enter__()
    closing = threading.Thread(target=span.__exit__, args=(None, None, None))
    closing.start()
    closing.join()
    assert opened[2:] == [("save/barrier", mine)]
    assert [r["phase"] for r in job.records("span")] == ["collect", "barrier"]
