"""Recorder and sink of the instrument, with real files and real kills."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from restart_trace.process import RankIdentity, open_rank_trace
from restart_trace.recorder import Operation, Recorder, untraced_operation
from restart_trace.schema import check_record, type_of
from restart_trace.sink import JsonlSink
from restart_trace.startup import Startup
from tests.unit.trace_helpers import PROCESS, read, start_python


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[tuple[Recorder, Path]]:
    path = tmp_path / "rank_00000_cycle_000.jsonl"
    recorder = Recorder(JsonlSink(path), PROCESS)
    yield recorder, path
    recorder.close()


# ---------------------------------------------------------------- recorder


def test_operation_with_spans(trace: tuple[Recorder, Path]) -> None:
    recorder, path = trace
    before = time.monotonic_ns()
    with recorder.operation("save", tag="global_step5", step=5, engine="E") as op:
        with op.span("collect"):
            time.sleep(0.02)
        with op.span("flush", "write", file="a.pt") as span:
            span.bytes = 7
        op.add("serialize", None, before, before + 100, duration_ns=40, blocking=False)
        op.bytes, op.num_files, op.durable = 7, 1, True
    after = time.monotonic_ns()
    begin, collect, write, serialize, end = read(path)
    assert [begin["type"], end["type"], end["outcome"]] == ["operation_begin", "operation_end", "ok"]
    for record in (begin, collect, write, serialize, end):
        assert (record["op"], record["tag"], record["step"]) == (0, "global_step5", 5)
    assert collect["duration_ns"] == collect["end_ns"] - collect["start_ns"] >= 20_000_000
    assert before <= begin["start_ns"] <= collect["start_ns"] <= collect["end_ns"] <= end["end_ns"] <= after
    assert (write["phase"], write["detail"], write["file"], write["bytes"]) == ("flush", "write", "a.pt", 7)
    assert (serialize["duration_ns"], serialize["blocking"]) == (40, False)
    assert (end["bytes"], end["num_files"], end["durable"], end["engine"]) == (7, 1, True, "E")


def test_an_operation_says_what_it_is_where_that_is_known(trace: tuple[Recorder, Path]) -> None:
    recorder, path = trace
    recorder.begin("save").end()
    recorder.begin("save", inferred=True).end()
    recorder.begin("save", weights_only=True).end()
    recorder.begin("save", ranks=1).end()
    begun = [record for record in read(path) if record["type"] == "operation_begin"]
    names = ("inferred", "weights_only", "ranks")
    assert [{name: r[name] for name in names if name in r} for r in begun] == [
        {}, {"inferred": True}, {"weights_only": True}, {"ranks": 1},
    ]  # fmt: skip


def test_spans_of_a_contiguous_operation_follow_one_another(trace: tuple[Recorder, Path]) -> None:
    """Nothing lies between spans of the thread that began it; what is within one counts from where that was opened, and
    another thread, which may have waited, counts from where it began itself.
    """
    recorder, path = trace
    with recorder.operation("load", contiguous=True) as op:
        time.sleep(0.01)
        with op.span("discover"):
            time.sleep(0.01)
        with op.span("load", "read"):
            time.sleep(0.01)
            with op.span("load", "verify"):
                pass
        for _ in range(2):
            thread = threading.Thread(target=_span_of_thread, args=(op,))
            thread.start()
            thread.join()
        with op.span("barrier"):
            pass
    begin, discover, verify, read_span, *others, barrier, _ = read(path)
    assert discover["start_ns"] == begin["start_ns"]
    assert read_span["start_ns"] == discover["end_ns"]
    assert verify["start_ns"] >= read_span["start_ns"] + 10_000_000
    assert barrier["start_ns"] == read_span["end_ns"]
    first, second = others[:2], others[2:]
    assert first[1]["start_ns"] > first[0]["end_ns"] and second[0]["start_ns"] > first[1]["end_ns"]


def _span_of_thread(op: Operation) -> None:
    for _ in range(2):
        with op.span("load", "host_to_device"):
            pass


def test_exceptions_are_recorded_and_passed_on(trace: tuple[Recorder, Path]) -> None:
    recorder, path = trace
    with pytest.raises(OSError, match="disk"), recorder.operation("save") as op, op.span("flush", "fsync"):
        raise OSError(28, "disk full")
    _, span, end = read(path)
    assert span["error"] == end["error"] == "OSError: [Errno 28] disk full"
    assert end["outcome"] == "failed"


def test_a_signal_handler_may_record_while_a_record_is_written(trace: tuple[Recorder, Path]) -> None:
    """As a program does that saves when it is told to stop: the thread must not wait for itself."""
    recorder, path = trace

    class Interrupted:
        def __str__(self) -> str:
            signal.raise_signal(signal.SIGUSR1)
            return "written"

    def save(*_: object) -> None:
        with recorder.operation("save"):
            pass

    before = signal.signal(signal.SIGUSR1, save)
    try:
        recorder.write("event", operation="save", phase="notice", detail=Interrupted(), time_ns=1, wall_ns=1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [record["type"] for record in read(path)] == ["operation_begin", "operation_end", "event"]


def test_failure_reported_by_another_rank(trace: tuple[Recorder, Path]) -> None:
    recorder, path = trace
    with recorder.operation("save") as op:
        op.failure = "rank 3: disk full"
    assert [read(path)[-1][key] for key in ("outcome", "error")] == ["failed", "rank 3: disk full"]


def test_load_learns_its_tag(trace: tuple[Recorder, Path]) -> None:
    recorder, path = trace
    with recorder.operation("load") as op:
        op.label(tag="global_step5", step=5)
        op.label(tag="global_step5", engine="E")
        op.label(engine="E")  # nothing new
    begin, label, engine, end = read(path)
    assert "tag" not in begin and "engine" not in label
    assert (engine["type"], engine["engine"]) == ("operation_label", "E")
    assert (end["tag"], end["step"], end["engine"]) == ("global_step5", 5, "E")


def test_a_record_carries_only_its_own_fields(trace: tuple[Recorder, Path]) -> None:
    recorder, path = trace
    with recorder.operation("save", tag="global_step5", step=5, engine="E") as op:
        op.add("collect", None, 10, 20)
        op.add("serialize", None, 10, 20, duration_ns=4, blocking=False, thread="writer")
    _, _, collect, serialize, end = [json.loads(line) for line in path.read_text().splitlines()]
    assert collect == {"op": 0, "phase": "collect", "start_ns": 10, "end_ns": 20}
    assert serialize == {
        "op": 0, "phase": "serialize", "start_ns": 10, "end_ns": 20, "duration_ns": 4, "thread": "writer",
        "blocking": False,
    }  # fmt: skip
    assert end == {"type": "operation_end", "op": 0, "end_ns": end["end_ns"], "outcome": "ok"}


@pytest.mark.parametrize(("phase", "detail"), [("colect", None), ("flush", None), ("collect", "write")])
def test_unknown_phases_are_refused(trace: tuple[Recorder, Path], phase: str, detail: str | None) -> None:
    with pytest.raises(ValueError, match=phase), trace[0].operation("save") as op:
        op.add(phase, detail, 0, 1)


def test_iterations_and_events(trace: tuple[Recorder, Path]) -> None:
    recorder, path = trace
    recorder.iteration(1, 10, 20, loss=2.5)
    recorder.iteration(2, 20, 30, loss=float("nan"))
    recorder.event("load", "checkpoint_rejected", "global_step8: truncated", 8)
    first, second, event = read(path)
    assert first["loss"] == 2.5 and "loss" not in second
    assert path.read_text().splitlines()[2] == '{"type":"iteration","step":2,"start_ns":20,"end_ns":30}'
    assert (event["phase"], event["detail"], event["step"]) == ("checkpoint_rejected", "global_step8: truncated", 8)
    assert abs(event["wall_ns"] - time.time_ns()) < 60e9


def test_threads_share_a_file(trace: tuple[Recorder, Path]) -> None:
    recorder, path = trace
    with recorder.operation("save") as op:

        def work() -> None:
            for index in range(200):
                with op.span("flush", "write", file=f"f{index}", blocking=False):
                    pass

        threads = [threading.Thread(target=work, name=f"writer{number}") for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    spans = [record for record in read(path) if record["type"] == "span"]
    assert len(spans) == 800 and {span["thread"] for span in spans} == {f"writer{n}" for n in range(4)}


def test_off_records_nothing_and_costs_next_to_nothing(tmp_path: Path) -> None:
    identity = RankIdentity(0, 1, 0, (0, 0, 0), (1, 1, 1))
    recorder, cycle = open_rank_trace(None, identity, {}, engine_asked="torch", durability="fsync", probes=True)
    assert not recorder.enabled and cycle == 0
    startup = Startup(recorder, None, 0, 0, time.monotonic_ns())
    with startup.phase("imports"):
        pass
    startup.iteration_done(1, 0, 1)
    with recorder.operation("save", tag="t") as op:
        assert microseconds_per_span(op) < 50  # 1
        op.label(tag="u")
    recorder.iteration(1, 0, 1, loss=1.0)
    recorder.event("load", "checkpoint_rejected")
    recorder.close()
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_fails_costs_its_samples_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers: list[dict[str, float]] = [{"rss_bytes": 1.0}]

    def probe() -> dict[str, float]:
        if not answers:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return answers.pop()

    path = tmp_path / "trace.jsonl"
    recorder = Recorder(JsonlSink(path), PROCESS, probe)
    for step in range(3):
        with recorder.operation("save", tag="t", step=step) as op:
            op.measure(link_bytes=5.0)
        if step == 1:
            answers += [{"rss_bytes": 2.0}] * 2
    recorder.close()
    ends = [record["outcome"] for record in read(path) if record["type"] == "operation_end"]
    probes = [record["values"] for record in read(path) if record["type"] == "probe"]
    assert ends == ["ok"] * 3
    assert probes == [
        {"rss_bytes": 1.0}, {"link_bytes": 5.0}, {"link_bytes": 5.0}, {"rss_bytes": 2.0},
        {"rss_bytes": 2.0, "link_bytes": 5.0},
    ]  # fmt: skip
    (said,) = [record.getMessage() for record in caplog.records]
    assert "Too many open files" in said


def test_an_untraced_operation_serves_saves_and_loads() -> None:
    op = untraced_operation()
    with op.span("flush", "write"), op.span("load", "read") as span:
        span.bytes = 1
    op.was_read_ahead(5)
    op.end()


def microseconds_per_span(op: Operation) -> float:
    """Processor time, the best of several batches."""
    best = float("inf")
    for _ in range(10):
        start = time.thread_time_ns()
        for _ in range(200):
            with op.span("flush", "write", file="mp_rank_00_model_states.pt") as span:
                span.bytes = 1
        best = min(best, (time.thread_time_ns() - start) / 200 / 1000)
    return best


def test_cost_of_a_span(trace: tuple[Recorder, Path], record_property: Any) -> None:
    with trace[0].operation("save", tag="global_step5", step=5, engine="E") as op:
        cost = microseconds_per_span(op)
    record_property("microseconds_per_span", cost)
    # A save of 1 s with 100 spans may then lose 1 % to its trace at most; some 15 us are usual.
    assert cost < 100, f"{cost:.1f} us per span"


# ---------------------------------------------------------------- sink


def test_an_existing_file_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("kept\n")
    with pytest.raises(FileExistsError):
        JsonlSink(path)
    assert path.read_text() == "kept\n"


def test_unwritable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        JsonlSink(tmp_path / "file" / "x.jsonl")


def test_full_disk_loses_records_but_not_the_training(tmp_path: Path) -> None:
    """A limit on the file size makes write(2) come back short and then fail, as a full disk does."""
    code = """
        import resource, signal, sys
        from pathlib import Path
        from restart_trace.recorder import Recorder
        from restart_trace.sink import JsonlSink
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        recorder = Recorder(JsonlSink(Path(sys.argv[1])), {})
        recorder.iteration(1, 0, 1)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (Path(sys.argv[1]).stat().st_size + 40, hard))
        for step in range(2, 5):
            recorder.iteration(step, 0, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        recorder.iteration(5, 0, 1)
        print("trained on")
    """
    path = tmp_path / "x.jsonl"
    process = start_python(code, path, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (0, "trained on\n"), err
    assert err.count("trace records are being lost") == 1 and str(path) in err
    _, first, last, event = path.read_text().splitlines()  # and no part of a record
    assert json.loads(first)["step"] == 1 and json.loads(last)["step"] == 5
    told = json.loads(event)
    assert check_record(told) == [] and told["phase"] == "records_lost"
    assert told["detail"] == "3 records before this one could not be written"


@pytest.mark.parametrize("missing", [1, 40])  # bytes that the disk does not take; 1: all but the end of the line
def test_what_is_owed_is_written_once_however_much_of_it_a_full_disk_took(tmp_path: Path, missing: int) -> None:
    code = """
        import resource, signal, sys
        from pathlib import Path
        from restart_trace.recorder import Recorder
        from restart_trace.sink import JsonlSink
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        path, missing = Path(sys.argv[1]), int(sys.argv[2])
        Recorder(JsonlSink(path), {"run_id": "x" * 100}).close()
        size = path.stat().st_size
        path.unlink()
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - missing, hard))
        recorder = Recorder(JsonlSink(path), {"run_id": "x" * 100})
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        recorder.begin("save").end()
    """
    path = tmp_path / "x.jsonl"
    process = start_python(code, path, missing, stderr=subprocess.PIPE)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "trace records are being lost" in err
    types = [json.loads(line)["type"] for line in path.read_text().splitlines()]
    assert types == ["process", "operation_begin", "operation_end"]


class FullDisk:
    """A sink that takes nothing until it has room."""

    def __init__(self) -> None:
        self.has_room = False
        self.room = 0  # for so many records all the same
        self.taken: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> bool:
        takes = self.has_room or self.room > 0
        if takes:
            self.taken.append(record)
            self.room -= 1
        return takes

    def close(self) -> None:
        return None


def test_what_later_records_refer_to_is_written_as_soon_as_there_is_room() -> None:
    sink = FullDisk()
    op = Recorder(sink, PROCESS).begin("save", tag="global_step5")
    with op.span("collect"):
        pass
    sink.has_room = True
    with op.span("device_to_host"):
        pass
    process, begin, span, event = sink.taken
    assert (process["type"], process["run_id"]) == ("process", PROCESS["run_id"])
    assert (begin["type"], begin["tag"]) == ("operation_begin", "global_step5")
    assert span["phase"] == "device_to_host" and event["detail"].startswith("1 records before this one")


def test_labels_and_the_number_of_lost_records_outlive_a_full_disk() -> None:
    sink = FullDisk()
    sink.has_room = True
    recorder = Recorder(sink, PROCESS)
    op = recorder.begin("load")
    sink.has_room = False
    op.label(tag="global_step5", step=5)
    recorder.iteration(1, 0, 1)
    recorder.iteration(2, 0, 1)
    taken, sink.room = (len(sink.taken), 2)  # for the label and one more, not for what says how many are missing
    op.end()
    sink.has_room = True
    recorder.iteration(3, 0, 1)
    label, end, lost, iteration = sink.taken[taken:]
    assert (label["type"], label["tag"], end["type"]) == ("operation_label", "global_step5", "operation_end")
    assert lost["detail"].startswith("2 records before this one") and iteration["step"] == 3


def test_a_forked_process_writes_nothing_to_the_file_of_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    code = """
        import os, sys
        from pathlib import Path
        from restart_trace.recorder import Recorder
        from restart_trace.sink import JsonlSink
        recorder = Recorder(JsonlSink(Path(sys.argv[1])), {})
        child = os.fork()
        recorder.iteration(2 if child else 1, 0, 1)
        if child:
            os.waitpid(child, 0)
    """
    process = start_python(code, path, stderr=subprocess.PIPE)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0 and f"was forked from process {process.pid}, to which the file" in err
    assert [json.loads(line).get("step") for line in path.read_text().splitlines()] == [None, 2]


WRITE_SPANS_FOREVER = """
    import os, sys
    from pathlib import Path
    from restart_trace.recorder import Recorder
    from restart_trace.sink import JsonlSink
    with Recorder(JsonlSink(Path(sys.argv[1])), {}).operation("save") as op:
        index = 0
        while True:
            with op.span("flush", "write", file=f"file{index}"):
                pass
            os.write(1, b"%d\\n" % index)
            index += 1
"""


@pytest.mark.parametrize("delay_ms", [1, 3, 7, 20, 50])
def test_sigkill_loses_at_most_the_record_in_flight(tmp_path: Path, delay_ms: int) -> None:
    path = tmp_path / "x.jsonl"
    process = start_python(WRITE_SPANS_FOREVER, path)
    assert process.stdout is not None
    acknowledged = [process.stdout.readline()]
    killer = threading.Timer(delay_ms / 1000, process.send_signal, [signal.SIGKILL])
    killer.start()
    acknowledged += process.stdout.readlines()
    assert process.wait(timeout=300) == -signal.SIGKILL
    told = int([line for line in acknowledged if line.endswith("\n")][-1])
    content = path.read_bytes()
    lines = content.split(b"\n")
    whole, torn = [json.loads(line) for line in lines[:-1]], lines[-1]
    spans = [int(record["file"].removeprefix("file")) for record in whole if type_of(record) == "span"]
    assert spans == list(range(len(spans)))
    # Everything that the process told us of is there; at most the next record is too, or a part of it.
    assert told + 1 <= len(spans) <= told + 2
    assert len(torn) < 1000
