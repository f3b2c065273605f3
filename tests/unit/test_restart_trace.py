"""The instrument with real files, real processes and real kills."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.restart_trace import clock, cycles
from megatron.restart_trace.probes import make_probe
from megatron.restart_trace.process import RankIdentity, environment, open_rank_trace, versions
from megatron.restart_trace.recorder import NullOperation, NullRecorder, Operation, Recorder
from megatron.restart_trace.schema import check_record
from megatron.restart_trace.sink import JsonlSink
from megatron.restart_trace.startup import Startup, reached_iteration
from megatron.restart_trace.supervisor import open_supervisor_trace

ROOT = Path(__file__).resolve().parents[2]
COMMON = {"run_id": "r", "cycle": 0, "rank": 0, "tp": 0, "pp": 0, "dp": 0}


def read(path: Path) -> list[dict[str, Any]]:
    """All records of a file; each must follow the schema."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        assert check_record(record) == [], record
    return records


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[tuple[Recorder, Path]]:
    path = tmp_path / "rank_00000_cycle_000.jsonl"
    recorder = Recorder(JsonlSink(path), COMMON)
    yield recorder, path
    recorder.close()


def start_python(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A Python process that runs `code` with the project importable."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, **options)


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
        assert (record["op_id"], record["tag"], record["step"]) == (0, "global_step5", 5)
    assert collect["duration_ns"] == collect["end_ns"] - collect["start_ns"] >= 20_000_000
    assert before <= begin["start_ns"] <= collect["start_ns"] <= collect["end_ns"] <= end["end_ns"] <= after
    assert (write["phase"], write["detail"], write["file"], write["bytes"]) == ("flush", "write", "a.pt", 7)
    assert (serialize["duration_ns"], serialize["blocking"]) == (40, False)
    assert (end["bytes"], end["num_files"], end["durable"], end["engine"]) == (7, 1, True, "E")


def test_exceptions_are_recorded_and_passed_on(trace: tuple[Recorder, Path]) -> None:
    recorder, path = trace
    with pytest.raises(OSError, match="disk"), recorder.operation("save") as op, op.span("flush", "fsync"):
        raise OSError(28, "disk full")
    _, span, end = read(path)
    assert span["error"] == end["error"] == "OSError: [Errno 28] disk full"
    assert end["outcome"] == "failed"


def test_failure_reported_by_another_rank(trace: tuple[Recorder, Path]) -> None:
    recorder, path = trace
    with recorder.operation("save") as op:
        op.failure = "rank 3: disk full"
    assert [read(path)[-1][key] for key in ("outcome", "error")] == ["failed", "rank 3: disk full"]


def test_load_learns_its_tag(trace: tuple[Recorder, Path]) -> None:
    recorder, path = trace
    with recorder.operation("load") as op:
        op.label(tag="global_step5", step=5)
    begin, end = read(path)
    assert "tag" not in begin and (end["tag"], end["step"]) == ("global_step5", 5)


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
    assert (event["phase"], event["detail"], event["step"]) == (
        "checkpoint_rejected",
        "global_step8: truncated",
        8,
    )
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


@pytest.mark.parametrize(("real", "null"), [(Recorder, NullRecorder), (Operation, NullOperation)])
def test_null_versions_override_whatever_writes(real: type, null: type) -> None:
    inherited = {
        name
        for name, member in inspect.getmembers(real, inspect.isfunction)
        if not name.startswith("_") and name not in vars(null)
    }
    assert inherited <= {"iteration"}  # which calls write, and that is overridden


def test_off_records_nothing_and_costs_next_to_nothing(tmp_path: Path) -> None:
    identity = RankIdentity(0, 1, 0, (0, 0, 0), (1, 1, 1))
    recorder, cycle = open_rank_trace(
        None, identity, {}, engine_asked="torch", durability="fsync", probes=True
    )
    assert not recorder.enabled and cycle == 0
    startup = Startup(recorder, None, 0, 0, time.monotonic_ns())
    with startup.phase("imports"):
        pass
    startup.iteration_done(1, 0, 1)
    with recorder.operation("save", tag="t") as op:
        assert microseconds_per_span(op) < 20
        op.label(tag="u")
    recorder.iteration(1, 0, 1, loss=1.0)
    recorder.event("load", "checkpoint_rejected")
    recorder.close()
    assert list(tmp_path.iterdir()) == []


def microseconds_per_span(op: Operation) -> float:
    """The best of several batches: what a span costs when nothing else has the processor."""
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter_ns()
        for _ in range(200):
            with op.span("flush", "write", file="mp_rank_00_model_states.pt") as span:
                span.bytes = 1
        best = min(best, (time.perf_counter_ns() - start) / 200 / 1000)
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
        from megatron.restart_trace.recorder import Recorder
        from megatron.restart_trace.sink import JsonlSink
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        common = dict(run_id="r", cycle=0, rank=0, tp=0, pp=0, dp=0)
        recorder = Recorder(JsonlSink(Path(sys.argv[1])), common)
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
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "trained on\n"), err
    assert err.count("trace records are being lost") == 1 and str(path) in err
    first, torn, last, event = path.read_text().splitlines()
    assert json.loads(first)["step"] == 1 and json.loads(last)["step"] == 5
    assert len(torn) == 40
    told = json.loads(event)
    assert check_record(told) == [] and told["phase"] == "records_lost"
    assert told["detail"] == "3 records before this one could not be written"


WRITE_SPANS_FOREVER = """
    import os, sys
    from pathlib import Path
    from megatron.restart_trace.recorder import Recorder
    from megatron.restart_trace.sink import JsonlSink
    common = dict(run_id="r", cycle=0, rank=0, tp=0, pp=0, dp=0)
    with Recorder(JsonlSink(Path(sys.argv[1])), common).operation("save") as op:
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
    assert process.wait(timeout=60) == -signal.SIGKILL
    told = int([line for line in acknowledged if line.endswith("\n")][-1])
    content = path.read_bytes()
    lines = content.split(b"\n")
    whole, torn = [json.loads(line) for line in lines[:-1]], lines[-1]
    spans = [int(record["file"].removeprefix("file")) for record in whole if record["type"] == "span"]
    assert spans == list(range(len(spans)))
    # Everything that the process told us of is there; at most the next record is too, or a part of it.
    assert told + 1 <= len(spans) <= told + 2
    assert len(torn) < 1000


# ---------------------------------------------------------------- cycles


def test_concurrent_ranks_agree_on_run_and_cycle(tmp_path: Path) -> None:
    code = """
        import sys, time
        from pathlib import Path
        from megatron.restart_trace.cycles import claim_cycle
        directory, key, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
        while not Path(sys.argv[4]).exists():
            time.sleep(0.001)
        run_id, cycle = claim_cycle(directory, key, rank)
        (directory / f"rank_{rank:05d}_cycle_{cycle:03d}.jsonl").touch()
        print(run_id, cycle)
    """
    directory = tmp_path / "trace"
    run_ids = set()
    for launch in range(2):
        gate = tmp_path / f"go{launch}"
        ranks = [start_python(code, directory, f"launch{launch}", rank, gate) for rank in range(6)]
        time.sleep(0.2)
        gate.touch()
        answers = {rank.communicate(timeout=60)[0].strip() for rank in ranks}
        assert len(answers) == 1
        run_id, cycle = answers.pop().split()
        assert int(cycle) == launch
        run_ids.add(run_id)
    assert len(run_ids) == 1
    assert sorted(path.name for path in directory.glob("*cycle*.json")) == [
        "cycle_000.json",
        "cycle_001.json",
    ]
    assert list(directory.glob(".*")) == []  # no temporary file is left


def test_same_key_again_is_a_new_cycle_for_a_rank_that_was_there(tmp_path: Path) -> None:
    run_id, cycle = cycles.claim_cycle(tmp_path, "key", 0)
    assert (cycle, cycles.claim_cycle(tmp_path, "key", 1)) == (0, (run_id, 0))
    (tmp_path / "rank_00000_cycle_000.jsonl").touch()
    (tmp_path / "rank_00001_cycle_000.jsonl").touch()
    assert cycles.claim_cycle(tmp_path, "key", 1) == (run_id, 1)
    assert cycles.claim_cycle(tmp_path, "key", 0) == (run_id, 1)


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
OTHER_PARENT = (
    "from megatron.restart_trace.cycles import launch_key; import os; print(launch_key(os.environ))"
)


def key_under_another_parent(env: dict[str, str]) -> str:
    """launch_key as another launcher's child computes it."""
    path = {"PATH": os.environ["PATH"]}
    command = ["sh", "-c", f"'{sys.executable}' -c '{OTHER_PARENT}'; true"]
    return subprocess.run(
        command, cwd=ROOT, env=path | env, capture_output=True, text=True, timeout=60
    ).stdout.strip()


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, False),  # one node: the launcher process is part of the key
        ({"WORLD_SIZE": "16"}, True),  # two nodes of torchrun: their launchers differ
        (
            {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "8"},
            True,
        ),  # two of the deepspeed launcher
        ({"LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "8"}, False),
        ({"LOCAL_WORLD_SIZE": ""}, True),  # srun: nobody says how many share this node
        ({"RESTART_TRACE_LAUNCH_ID": "job7"}, True),
    ],
)
def test_launch_key_across_launcher_processes(changes: dict[str, str], same: bool) -> None:
    env = TORCHRUN | changes
    assert (cycles.launch_key(env) == key_under_another_parent(env)) is same


def test_launch_key_is_the_same_on_all_ranks_of_a_node() -> None:
    keys = [cycles.launch_key(TORCHRUN | {"RANK": str(rank)}) for _ in range(100) for rank in range(8)]
    assert len(set(keys)) == 1


def test_launch_key_of_restarts_in_place() -> None:
    again = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert cycles.launch_key(again) != cycles.launch_key(TORCHRUN)
    explicit = {"RESTART_TRACE_LAUNCH_ID": "job7"}
    assert cycles.launch_key(again | explicit) != cycles.launch_key(TORCHRUN | explicit)


# ---------------------------------------------------------------- clock


def test_anchor_ties_both_clocks() -> None:
    before = time.time_ns() - time.monotonic_ns()
    anchor = clock.read_anchor()
    assert abs(anchor.wall_ns - anchor.monotonic_ns - before) < 50_000_000
    assert 0 <= anchor.error_ns < 50_000_000


def test_process_start_is_when_the_process_was_started() -> None:
    before = time.monotonic_ns()
    process = subprocess.Popen(["sleep", "60"])
    after = time.monotonic_ns()
    try:
        started = clock.process_start_ns(process.pid)
    finally:
        process.kill()
        process.wait()
    tick = 20_000_000
    assert started is not None and before - tick <= started <= after + tick
    assert {clock.process_start_ns() for _ in range(1000)} == {clock.process_start_ns()}  # without jitter
    assert clock.process_start_ns(process.pid) is None  # gone


def test_process_start_of_a_name_with_parentheses(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    shutil.copy(shutil.which("sleep") or "", program)
    before = time.monotonic_ns()
    process = subprocess.Popen([str(program), "60"])
    try:
        time.sleep(0.05)  # until it has its name
        started = clock.process_start_ns(process.pid)
    finally:
        process.kill()
        process.wait()
    assert started is not None and abs(started - before) < 500_000_000


def test_processes_of_one_boot_share_the_clock() -> None:
    code = (
        "import time; from megatron.restart_trace import clock; print(clock.boot_id(), time.monotonic_ns())"
    )
    before = time.monotonic_ns()
    boot_id, moment = start_python(code).communicate(timeout=60)[0].split(" ")
    assert boot_id == clock.boot_id() != ""
    assert before < int(moment) < time.monotonic_ns()


# ---------------------------------------------------------------- process and probes


def test_process_record(tmp_path: Path) -> None:
    identity = RankIdentity(rank=5, world_size=8, local_rank=1, coordinates=(1, 1, 0), layout=(2, 2, 2))
    env = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "8",
        "NCCL_DEBUG": "INFO",
        "AWS_SECRET_KEY": "s3",
    }
    recorder, cycle = open_rank_trace(
        tmp_path, identity, env, engine_asked="torch", durability="none", probes=False
    )
    recorder.close()
    (record,) = read(tmp_path / "rank_00005_cycle_000.jsonl")
    assert cycle == 0 and record["pid"] == os.getpid()
    assert (record["rank"], record["tp"], record["pp"], record["dp"]) == (5, 1, 1, 0)
    assert record["layout"] == {"tp": 2, "pp": 2, "dp": 2} and record["process_start_source"] == "os"
    assert record["process_start_ns"] < record["monotonic_ns"]
    assert record["environment"]["NCCL_DEBUG"] == "INFO" and "AWS_SECRET_KEY" not in record["environment"]


def test_environment_is_allow_listed() -> None:
    assert environment({"HF_TOKEN": "x", "WANDB_API_KEY": "x", "HOME": "/", "MASTER_ADDR": "h"}) == {
        "MASTER_ADDR": "h"
    }
    assert {"python", "kernel", "torch"} <= set(versions())


def test_imports_nothing_heavy() -> None:
    code = (
        "import sys; import megatron.restart_trace.startup, megatron.restart_trace.process, "
        "megatron.restart_trace.supervisor\n"
        "third = {m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names) - {'megatron'}\n"
        "print(sorted(m for m in third if not m.startswith('_')))"
    )
    command = [sys.executable, "-S", "-c", code]  # without site-packages nothing else can be there either
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_probes_surround_the_operation(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    recorder = Recorder(JsonlSink(path), COMMON, make_probe(0))
    with recorder.operation("save"):
        (tmp_path / "data").write_bytes(b"x" * 1_000_000)
    start, begin, end, stop = read(path)
    assert [r["type"] for r in (start, begin, end, stop)] == [
        "probe",
        "operation_begin",
        "operation_end",
        "probe",
    ]
    assert (start["at"], stop["at"], start["op_id"], stop["op_id"]) == ("start", "end", 0, 0)
    assert start["time_ns"] <= begin["start_ns"] <= end["end_ns"] <= stop["time_ns"]
    assert start["values"]["rss_bytes"] > 1_000_000
    written = [probe["values"]["io_write_calls_bytes"] for probe in (start, stop)]
    assert 1_000_000 <= written[1] - written[0] < 1_100_000
    assert all(name.endswith(("_bytes", "_percent", "_bytes_per_s")) for name in stop["values"])


# ---------------------------------------------------------------- start-up


def test_startup_from_the_start_of_the_process(tmp_path: Path) -> None:
    code = """
        import sys, time
        from pathlib import Path
        entered = time.monotonic_ns()
        time.sleep(0.1)
        from megatron.restart_trace.process import RankIdentity, open_rank_trace
        from megatron.restart_trace.startup import Startup
        directory = Path(sys.argv[1])
        identity = RankIdentity(0, 1, 0, (0, 0, 0), (1, 1, 1))
        asked = dict(engine_asked="torch", durability="fsync", probes=False)
        recorder, cycle = open_rank_trace(directory, identity, {}, **asked)
        startup = Startup(recorder, directory, 0, cycle, entered)
        with startup.phase("imports"):
            time.sleep(0.05)
        loop = time.monotonic_ns()
        for step in map(int, sys.argv[2:]):
            start = time.monotonic_ns()
            time.sleep(0.01)
            end = time.monotonic_ns()
            startup.iteration_done(step, loop, end)
            recorder.iteration(step, start, end)
    """
    for cycle, steps in ((0, (1, 2, 3)), (1, (2, 3, 4))):
        before = time.monotonic_ns()
        assert start_python(code, tmp_path, *steps).wait(timeout=60) == 0
        records = read(tmp_path / f"rank_00000_cycle_00{cycle}.jsonl")
        spans = {record["phase"]: record for record in records if record["type"] == "span"}
        (begin,) = [record for record in records if record["type"] == "operation_begin"]
        (end,) = [record for record in records if record["type"] == "operation_end"]
        iterations = {record["step"]: record for record in records if record["type"] == "iteration"}
        assert abs(begin["start_ns"] - before) < 500_000_000  # fork, in ticks of 10 ms
        assert begin["start_ns"] == records[0]["process_start_ns"] == spans["process_start"]["start_ns"]
        assert (
            spans["process_start"]["duration_ns"] > 100_000_000
        )  # the interpreter and what came before the trace
        assert spans["imports"]["duration_ns"] >= 50_000_000
        assert spans["first_step"]["end_ns"] == iterations[steps[0]]["end_ns"] <= end["end_ns"]
        if cycle == 0:
            assert "caught_up" not in spans
        else:
            assert spans["caught_up"]["start_ns"] == spans["first_step"]["end_ns"]
            assert spans["caught_up"]["end_ns"] == iterations[3]["end_ns"]


def iteration_line(step: int) -> str:
    return json.dumps({"v": 1, "type": "iteration", "step": step}, separators=(",", ":")) + "\n"


def test_reached_iteration(tmp_path: Path) -> None:
    path = tmp_path / "rank_00003_cycle_000.jsonl"
    assert reached_iteration(tmp_path, 3, 1) is None
    path.write_text(iteration_line(7) + iteration_line(8) + iteration_line(9)[:-5])
    assert reached_iteration(tmp_path, 3, 1) == 8  # the torn one was not finished
    assert reached_iteration(tmp_path, 3, 0) is None
    span = '{"v":1,"type":"span","file":"' + "x" * 300 + '"}\n'
    path.write_text(iteration_line(8) + 2000 * span)
    assert reached_iteration(tmp_path, 3, 1) == 8  # a big save came after it
    (tmp_path / "rank_00003_cycle_001.jsonl").write_text(span)
    assert reached_iteration(tmp_path, 3, 2) == 8  # cycle 1 died before its first iteration


def test_reached_iteration_of_another_layout(tmp_path: Path) -> None:
    (tmp_path / "rank_00000_cycle_000.jsonl").write_text(iteration_line(8))
    assert reached_iteration(tmp_path, 12, 1) == 8


# ---------------------------------------------------------------- supervisor


def test_supervisor(tmp_path: Path) -> None:
    run_id, _ = cycles.claim_cycle(tmp_path, "key", 0)
    for number in range(2):
        with open_supervisor_trace(tmp_path) as supervisor:
            supervisor.failure("injected", cycle=0, detail="sigkill", iteration=8)
            supervisor.failure("detected", cycle=0)
        process, injected, detected = read(tmp_path / f"supervisor_00{number}.jsonl")
        assert (process["type"], process["role"], process["rank"]) == ("process", "supervisor", -1)
        assert {record["run_id"] for record in (process, injected, detected)} == {run_id}
        assert (injected["phase"], injected["detail"], injected["step"]) == ("injected", "sigkill", 8)
        assert injected["time_ns"] <= detected["time_ns"]


def test_supervisor_of_nothing(tmp_path: Path) -> None:
    with (
        open_supervisor_trace(tmp_path) as supervisor,
        pytest.raises(ValueError, match="no run has been traced"),
    ):
        supervisor.failure("injected", cycle=0)


# ---------------------------------------------------------------- a real kill, and the analysis of it

WORKER = """
    import os, sys, time
    from pathlib import Path
    entered = time.monotonic_ns()
    from megatron.restart_trace.process import RankIdentity, open_rank_trace
    from megatron.restart_trace.startup import Startup
    directory, rank, first, last, saved_at = Path(sys.argv[1]), *map(int, sys.argv[2:])
    identity = RankIdentity(rank, 2, rank, (0, 0, rank), (1, 1, 2))
    env = dict(os.environ, RESTART_TRACE_LAUNCH_ID=f"from{first}")
    asked = dict(engine_asked="torch", durability="fsync", probes=True)
    recorder, cycle = open_rank_trace(directory, identity, env, **asked)
    startup = Startup(recorder, directory, rank, cycle, entered)
    recorder.write("runtime", engine_used="TorchEngine", engine_asked="torch")
    if cycle:
        with recorder.operation("load", engine="TorchEngine") as op:
            with op.span("discover"):
                op.label(tag=f"global_step{first - 1}", step=first - 1)
            with op.span("load", "read", file="f") as span:
                span.bytes = op.bytes = 10
    loop = time.monotonic_ns()
    for step in range(first, last + 1):
        start = time.monotonic_ns()
        time.sleep(0.01)
        end = time.monotonic_ns()
        startup.iteration_done(step, loop, end)
        recorder.iteration(step, start, end, loss=5 / step)
        if step == saved_at:
            with recorder.operation("save", tag=f"global_step{step}", step=step, engine="TorchEngine") as op:
                with op.span("flush", "write", file=f"f{rank}") as span:
                    time.sleep(0.02)
                    span.bytes = op.bytes = 1000
                with op.span("commit", "publish"):
                    op.num_files, op.durable = 1, True
    if not cycle:
        op = recorder.begin("save", tag="global_step99", step=99)
        with op.span("collect"):
            pass
        print("ready", flush=True)
        time.sleep(60)
"""


def test_a_killed_and_resumed_run_is_understood(tmp_path: Path) -> None:
    pytest.importorskip("polars", reason="the analysis needs the extra `analysis`")
    from tools.ckpt_analysis.json_output import to_dict
    from tools.ckpt_analysis.load import load_trace
    from tools.ckpt_analysis.report import analyse

    with open_supervisor_trace(tmp_path) as supervisor:
        ranks = [start_python(WORKER, tmp_path, rank, 1, 8, 5) for rank in range(2)]
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        supervisor.failure("injected", cycle=0, detail="sigkill", iteration=8)
        injected = time.monotonic()
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait(timeout=60)
        supervisor.failure("stopped", cycle=0)
        supervisor.failure("relaunched", cycle=0)
    ranks = [start_python(WORKER, tmp_path, rank, 6, 12, 10) for rank in range(2)]
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    whole = time.monotonic() - injected

    report = to_dict(analyse(load_trace(tmp_path)))
    assert [problem["kind"] for problem in report["problems"]] == ["unfinished_operation"]
    assert report["problems"][0]["data"]["last_phases"] == {"collect": [0, 1]}
    assert [(save["tag"], save["outcome"]) for save in report["saves"]] == [
        ("global_step5", "ok"),
        ("global_step99", "unfinished"),
        ("global_step10", "ok"),
    ]
    assert report["saves"][0]["bytes"] == 2000 and 0.02 <= report["saves"][0]["durable_s"] < 10
    (restart,) = report["restarts"]
    assert (restart["resumed_step"], restart["reached_step"], restart["lost_steps"]) == (5, 8, 3)
    assert (restart["repeated_steps"], restart["equal_losses"]) == (3, 3)
    assert 0.03 <= restart["lost_work_s"] < 10
    tick = 0.02  # a process may seem to start a clock tick before it did
    assert 0.01 < restart["time_to_first_step_s"] < restart["restart_s"] + tick
    assert restart["restart_s"] < restart["failure_to_caught_up_s"] < whole
    assert restart["time_to_first_step_s"] < restart["caught_up_s"] < whole + tick
    assert restart["failure"]["relaunched_s"] >= restart["failure"]["stopped_s"] > 0
    assert report["loads"][0]["tag"] == "global_step5"
