"""Cycles, clock, process record, probes and start-up of the instrument, with real processes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from restart_trace import clock, cycles
from restart_trace.probes import make_probe
from restart_trace.process import RankIdentity, environment, open_rank_trace, versions
from restart_trace.recorder import Recorder, untraced_recorder
from restart_trace.redaction import redact_command
from restart_trace.sink import JsonlSink
from restart_trace.startup import Startup, reached_iteration
from tests.dist.harness import wait_for
from tests.unit.trace_helpers import PROCESS, ROOT, read, read_process, start_python

# ---------------------------------------------------------------- cycles


@pytest.mark.slow
def test_concurrent_ranks_agree_on_run_and_cycle(tmp_path: Path) -> None:
    code = """
        import sys, time
        from pathlib import Path
        from restart_trace.cycles import claim_cycle
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
        answers = {rank.communicate(timeout=300)[0].strip() for rank in ranks}
        assert len(answers) == 1
        run_id, cycle = answers.pop().split()
        assert int(cycle) == launch
        run_ids.add(run_id)
    assert len(run_ids) == 1
    assert sorted(path.name for path in directory.glob("*cycle*.json")) == ["cycle_000.json", "cycle_001.json"]
    assert list(directory.glob(".*")) == []  # no temporary file is left


def test_same_key_again_is_a_new_cycle_for_a_rank_that_was_there(tmp_path: Path) -> None:
    run_id, cycle = cycles.claim_cycle(tmp_path, "key", 0)
    assert (cycle, cycles.claim_cycle(tmp_path, "key", 1)) == (0, (run_id, 0))
    (tmp_path / "rank_00000_cycle_000.jsonl").touch()
    (tmp_path / "rank_00001_cycle_000.jsonl").touch()
    assert cycles.claim_cycle(tmp_path, "key", 1) == (run_id, 1)
    assert cycles.claim_cycle(tmp_path, "key", 0) == (run_id, 1)


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
OTHER_PARENT = "from restart_trace.cycles import launch_key; import os; print(launch_key(os.environ))"


def key_under_another_parent(env: dict[str, str]) -> str:
    """launch_key as another launcher's child computes it."""
    path = {"PATH": os.environ["PATH"]}
    command = ["sh", "-c", f"'{sys.executable}' -c '{OTHER_PARENT}'; true"]
    return subprocess.run(command, cwd=ROOT, env=path | env, capture_output=True, text=True, timeout=300).stdout.strip()


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, False),  # one node: the launcher process is part of the key
        ({"WORLD_SIZE": "16"}, True),  # two nodes of torchrun: their launchers differ
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "8"}, True),  # two of the deepspeed launcher
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
    assert abs(anchor.wall_ns - anchor.monotonic_ns - before) < 10_000_000_000
    assert 0 <= anchor.error_ns < 10_000_000_000


def test_process_start_is_when_the_process_was_started() -> None:
    before = time.monotonic_ns()
    process = subprocess.Popen(["sleep", "600"])
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
    process = subprocess.Popen([str(program), "600"])
    try:
        while Path(f"/proc/{process.pid}/comm").read_text() != f"{program.name}\n":
            time.sleep(0.001)
        started = clock.process_start_ns(process.pid)
    finally:
        process.kill()
        process.wait()
    tick = 20_000_000
    assert started is not None and before - tick <= started <= time.monotonic_ns() + tick


def test_processes_of_one_boot_share_the_clock() -> None:
    code = "import time; from restart_trace import clock; print(clock.boot_id(), time.monotonic_ns())"
    before = time.monotonic_ns()
    boot_id, moment = start_python(code).communicate(timeout=300)[0].split(" ")
    assert boot_id == clock.boot_id() != ""
    assert before < int(moment) < time.monotonic_ns()


# ---------------------------------------------------------------- process and probes


def test_process_record(tmp_path: Path) -> None:
    identity = RankIdentity(rank=5, world_size=8, local_rank=1, coordinates=(1, 1, 0), layout=(2, 2, 2))
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "NCCL_DEBUG": "INFO", "AWS_SECRET_KEY": "s3"}
    recorder, cycle = open_rank_trace(tmp_path, identity, env, engine_asked="torch", durability="none", probes=False)
    recorder.close()
    record = read_process(tmp_path / "rank_00005_cycle_000.jsonl")
    assert cycle == 0 and record["pid"] == os.getpid()
    assert (record["rank"], record["tp"], record["pp"], record["dp"]) == (5, 1, 1, 0)
    assert record["layout"] == {"tp": 2, "pp": 2, "dp": 2} and record["process_start_source"] == "os"
    assert record["process_start_ns"] < record["monotonic_ns"]
    assert record["environment"]["NCCL_DEBUG"] == "INFO" and "AWS_SECRET_KEY" not in record["environment"]


@pytest.mark.parametrize(
    ("axis", "identity"),
    [
        ("cp", RankIdentity(5, 8, 5, coordinates=(1, 0, 1), layout=(2, 1, 2), sequence=(1, 2))),
        ("ep", RankIdentity(3, 4, 3, coordinates=(1, 0, 1), layout=(2, 1, 2), experts=(1, 2))),
    ],
    ids=["a part of each sequence", "a part of the experts"],
)
def test_a_rank_with_a_part_of_something_says_which(tmp_path: Path, axis: str, identity: RankIdentity) -> None:
    recorder, _ = open_rank_trace(tmp_path, identity, {}, engine_asked="torch", durability="none", probes=False)
    recorder.close()
    (path,) = tmp_path.glob("rank_*.jsonl")
    record = read_process(path)
    assert (record["dp"], record[axis], record["layout"]) == (1, 1, {"tp": 2, "pp": 1, "dp": 2, axis: 2})


@pytest.mark.parametrize("probes", [True, False])
def test_processes_are_probed_if_that_is_asked_for(probes: bool, tmp_path: Path) -> None:
    identity = RankIdentity(rank=0, world_size=1, local_rank=0, coordinates=(0, 0, 0), layout=(1, 1, 1))
    recorder, _ = open_rank_trace(tmp_path, identity, {}, engine_asked="torch", durability="none", probes=probes)
    recorder.begin("save").end()
    recorder.close()
    probed = [record["at"] for record in read(tmp_path / "rank_00000_cycle_000.jsonl") if record["type"] == "probe"]
    assert probed == (["start", "end"] if probes else [])


def test_environment_is_allow_listed() -> None:
    assert environment({"HF_TOKEN": "x", "WANDB_API_KEY": "x", "HOME": "/", "MASTER_ADDR": "h"}) == {"MASTER_ADDR": "h"}
    assert {"python", "kernel", "torch"} <= set(versions())


def test_imports_nothing_heavy() -> None:
    code = (
        "import sys; import restart_trace.startup, restart_trace.process, "
        "restart_trace.supervisor\n"
        "third = {m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names) - {'restart_trace'}\n"
        "print(sorted(m for m in third if not m.startswith('_')))"
    )
    command = [sys.executable, "-S", "-c", code]  # without site-packages nothing else can be there either
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr


def test_probes_surround_the_operation(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    recorder = Recorder(JsonlSink(path), PROCESS, make_probe(0))
    with recorder.operation("save"):
        (tmp_path / "data").write_bytes(b"x" * 1_000_000)
    begin, start, end, stop = read(path)
    assert [r["type"] for r in (begin, start, end, stop)] == ["operation_begin", "probe", "operation_end", "probe"]
    assert (start["at"], stop["at"], start["op"], stop["op"]) == ("start", "end", 0, 0)
    assert start["time_ns"] <= begin["start_ns"] <= end["end_ns"] <= stop["time_ns"]
    assert start["values"]["rss_bytes"] > 1_000_000
    written = [probe["values"]["io_write_calls_bytes"] for probe in (start, stop)]
    assert 1_000_000 <= written[1] - written[0] < 1_100_000
    assert all(name.endswith(("_bytes", "_percent", "_bytes_per_s")) for name in stop["values"])


def test_samples_are_taken_while_an_operation_runs(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    recorder = Recorder(JsonlSink(path), PROCESS)
    recorder.sample_every(0.01, make_probe(0, bus=True))
    with recorder.operation("save"):
        (tmp_path / "data").write_bytes(b"x" * 1_000_000)
        wait_for(lambda: len(samples_after_begin(path)) >= 3, "three samples of a save")
    recorder.close()
    wait_for(lambda: not is_sampling(), "the end of the sampling thread")
    taken = [record for record in read(path) if record["type"] == "sample"]
    times = [sample["time_ns"] for sample in taken]
    assert times == sorted(times)
    assert all(sample["values"]["rss_bytes"] > 1_000_000 for sample in taken)
    untraced_recorder().sample_every(0.01, make_probe(0))
    assert not is_sampling()


def test_a_sample_that_cannot_be_taken_is_missing_and_the_next_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of /proc while a process has no open file left."""
    number = itertools.count()

    def probe() -> dict[str, float]:
        if (at := next(number)) in (0, 1, 3):
            raise OSError(24, "Too many open files")
        return {"rss_bytes": float(at)}

    path = tmp_path / "x.jsonl"
    recorder = Recorder(JsonlSink(path), PROCESS)
    recorder.sample_every(0.01, probe)
    wait_for(lambda: sum(record["type"] == "sample" for record in read(path)) >= 3, "three samples")
    recorder.close()
    taken = [record["values"]["rss_bytes"] for record in read(path) if record["type"] == "sample"]
    assert taken[:3] == [2.0, 4.0, 5.0]
    assert caplog.text.count("Too many open files") == 1


def is_sampling() -> bool:
    return "restart-trace-sampler" in {thread.name for thread in threading.enumerate()}


def samples_after_begin(path: Path) -> list[Any]:
    types = [record["type"] for record in read(path)]
    return [kind for kind in types[types.index("operation_begin") :] if kind == "sample"]


# ---------------------------------------------------------------- start-up


def test_startup_from_the_start_of_the_process(tmp_path: Path) -> None:
    code = """
        import sys, time
        from pathlib import Path
        entered = time.monotonic_ns()
        time.sleep(0.1)
        from restart_trace.process import RankIdentity, open_rank_trace
        from restart_trace.startup import Startup
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
        assert start_python(code, tmp_path, *steps).wait(timeout=300) == 0
        path = tmp_path / f"rank_00000_cycle_00{cycle}.jsonl"
        records = read(path)
        spans = {record["phase"]: record for record in records if record["type"] == "span"}
        (begin,) = [record for record in records if record["type"] == "operation_begin"]
        (end,) = [record for record in records if record["type"] == "operation_end"]
        iterations = {record["step"]: record for record in records if record["type"] == "iteration"}
        tick = 20_000_000  # a process may seem to start a clock tick before it did
        assert before - tick <= begin["start_ns"] <= spans["imports"]["start_ns"]
        assert begin["start_ns"] == read_process(path)["process_start_ns"] == spans["process_start"]["start_ns"]
        assert spans["process_start"]["duration_ns"] > 100_000_000  # the interpreter and what came before the trace
        assert spans["imports"]["duration_ns"] >= 50_000_000
        assert spans["first_step"]["end_ns"] == iterations[steps[0]]["end_ns"] <= end["end_ns"]
        if cycle == 0:
            assert "caught_up" not in spans
        else:
            assert spans["caught_up"]["start_ns"] == spans["first_step"]["end_ns"]
            assert spans["caught_up"]["end_ns"] == iterations[3]["end_ns"]


def test_a_phase_that_another_one_interrupts(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    startup = Startup(Recorder(JsonlSink(path), PROCESS), None, 0, 0, time.monotonic_ns())
    with startup.phase_around("engine_init") as inner:
        for detail in ("tensor", "data", "tensor"):
            time.sleep(0.01)
            with inner.phase("communicators", detail):
                time.sleep(0.02)
    pieces = read(path)[-7:]
    init, made = ("engine_init", None), [("communicators", detail) for detail in ("tensor", "data", "tensor")]
    assert [(piece["phase"], piece.get("detail")) for piece in pieces] == [
        init, made[0], init, made[1], init, made[2], init,
    ]  # fmt: skip
    assert all(piece["end_ns"] == later["start_ns"] for piece, later in pairwise(pieces))
    took = [piece["duration_ns"] for piece in pieces]
    assert took == [piece["end_ns"] - piece["start_ns"] for piece in pieces]
    assert min(took[0:6:2]) >= 10_000_000 and min(took[1::2]) >= 20_000_000


def test_phases_of_a_contiguous_start_leave_nothing_out(tmp_path: Path) -> None:
    """Up to the end of the first iteration; a load in between is an operation of its own, which no phase covers."""
    path = tmp_path / "x.jsonl"
    recorder = Recorder(JsonlSink(path), PROCESS)
    startup = Startup(recorder, None, 0, 0, time.monotonic_ns(), contiguous=True)
    with startup.phase_around("imports") as inner, inner.phase("cuda_context"):
        pass
    with startup.phase("rendezvous"):
        pass
    with (
        startup.phase_beside_operation("engine_init"),
        recorder.operation("load", contiguous=True) as op,
        op.span("discover"),
    ):
        pass
    with startup.phase_beside_operation("engine_init"):  # no operation in this one
        pass
    startup.iteration_done(1, time.monotonic_ns(), time.monotonic_ns())
    records = read(path)
    spans = [r for r in records if r["type"] == "span" and r["operation"] == "startup"]
    (load,) = [r for r in records if r["type"] == "operation_begin" and r["operation"] == "load"]
    (loaded,) = [r for r in records if r["type"] == "operation_end" and r["operation"] == "load"]
    imports = ["imports", "cuda_context", "imports"]
    phases = ["process_start", *imports, "rendezvous", "engine_init", "engine_init", "engine_init", "first_step"]
    assert [span["phase"] for span in spans] == phases
    begins = [span["start_ns"] for span in spans[1:]]
    assert begins == [
        *(span["end_ns"] for span in spans[:5]),
        loaded["end_ns"],
        *(span["end_ns"] for span in spans[6:8]),
    ]
    assert spans[5]["end_ns"] == load["start_ns"]


def iteration_line(step: int) -> str:
    return json.dumps({"type": "iteration", "step": step}, separators=(",", ":")) + "\n"


def test_reached_iteration(tmp_path: Path) -> None:
    path = tmp_path / "rank_00003_cycle_000.jsonl"
    assert reached_iteration(tmp_path, 3, 1) is None
    path.write_text(iteration_line(7) + iteration_line(8) + iteration_line(9)[:-5])
    assert reached_iteration(tmp_path, 3, 1) == 8  # the torn one was not finished
    assert reached_iteration(tmp_path, 3, 0) is None
    span = '{"op":0,"file":"' + "x" * 300 + '"}\n'
    path.write_text(iteration_line(8) + 2000 * span)
    assert reached_iteration(tmp_path, 3, 1) == 8  # a big save came after it
    (tmp_path / "rank_00003_cycle_001.jsonl").write_text(span)
    assert reached_iteration(tmp_path, 3, 2) == 8  # cycle 1 died before its first iteration


def test_reached_iteration_of_another_layout(tmp_path: Path) -> None:
    (tmp_path / "rank_00000_cycle_000.jsonl").write_text(iteration_line(8))
    assert reached_iteration(tmp_path, 12, 1) == 8


@pytest.mark.parametrize(
    "name", ["NCCL_AUTH_TOKEN", "GLOO_SECRET", "TORCHELASTIC_API_KEY", "RESTART_TRACE_TOKEN", "OMP_KEY", "NCCL_COMM_ID"]
)
def test_a_variable_is_recorded_by_its_whole_name_alone(name: str) -> None:
    assert environment({name: "hunter2", "NCCL_DEBUG": "INFO"}) == {"NCCL_DEBUG": "INFO"}


def test_passwords_in_addresses_are_not_recorded() -> None:
    env = {"MASTER_ADDR": "tcp://user:hunter2@node1", "TORCHELASTIC_RUN_ID": "job:hunter2@queue"}
    assert environment(env)["MASTER_ADDR"] == "tcp://user:***@node1"
    assert "hunter2" not in cycles.launch_key(env | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"})


@pytest.mark.parametrize(
    ("words", "recorded"),
    [
        (["--wandb-api-key", "hunter2", "--lr", "1"], ["--wandb-api-key", "***", "--lr", "1"]),
        (["--hub-token=hunter2"], ["--hub-token=***"]),
        (["key=hunter2", "AWS_SECRET_ACCESS_KEY=hunter2"], ["key=***", "AWS_SECRET_ACCESS_KEY=***"]),
        (["s3://me:hunter2@host/bucket", "https://hunter2@host"], ["s3://me:***@host/bucket", "https://***@host"]),
        (["-c", "export DB_PASSWORD=hunter2; run"], ["-c", "export DB_PASSWORD=***; run"]),
        (["Authorization: Bearer hunter2"], ["Authorization: ***"]),
        (['{"api_key": "hunter2", "n": 1}'], ['{"api_key": "***", "n": 1}']),
        (["--token", "--next"], ["--token", "--next"]),
        (["--train-tokens", "5", "--tokenizer-type", "T"], ["--train-tokens", "5", "--tokenizer-type", "T"]),
        (["--num-key-value-heads", "8"], ["--num-key-value-heads", "8"]),
        (["\udcff"], ["?"]),
    ],
)
def test_secrets_of_a_command_line(words: list[str], recorded: list[str]) -> None:
    assert redact_command(words) == recorded


CYCLE = """
import os, sys
from itertools import pairwise
from pathlib import Path
from restart_trace.cycles import claim_cycle, launch_key
print(claim_cycle(Path(sys.argv[1]), launch_key(os.environ), int(os.environ["RANK"]))[1])
"""


@pytest.mark.parametrize(
    "outside", [{}, {"RANK": "0"}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}], ids=["none", "node", "single"]
)
def test_ranks_in_wrappers_are_one_launch(tmp_path: Path, outside: dict[str, str]) -> None:
    """Each has another parent then; what started the wrappers is the same for all."""
    words = ["sh", "-c", '"$@"; true', "wrapper", sys.executable, "-c", CYCLE, str(tmp_path)]
    starter = f"""
        import os, subprocess
        for rank in "01":
            env = os.environ | {{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}}
            subprocess.run({words!r}, env=env, check=True)
    """
    ours = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    env = ours | outside  # as a container may have them, of its node
    command = [sys.executable, "-c", textwrap.dedent(starter)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0"]
