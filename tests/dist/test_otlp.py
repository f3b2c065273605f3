"""--otlp: a collector gets the spans of a job while it runs, and the job does not notice."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron.parallel.topology import Layout
from restart_trace.follower import end_follower, start_follower
from restart_trace.supervisor import open_supervisor_trace
from tests.dist.harness import HANGS_S, LLAMA_STYLE, ROOT, Zygote, kill_all, wait_for
from tests.dist.light_starts import IMPORTS, light_starts
from tests.dist.tiny_runs import MODEL, NO_DROPOUT, SINGLE, TRAINING, Launcher, buffered_saving
from tests.otlp_collector import SpanCollector, by_id, exported, span_collector
from tests.unit.tools.ckpt_analysis.trace_factory import ended_trace

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs opentelemetry-exporter-otlp-proto-http")
pytestmark = pytest.mark.slow
RUN = [*MODEL, *LLAMA_STYLE, *TRAINING, *NO_DROPOUT, "--bf16"]
RANKS = 2
# A rank that saves once, and goes on until it gets a line.
JOB = """
import os, sys
os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
import torch
torch.save({"a": torch.zeros(8)}, sys.argv[1])
print("saved", flush=True)
sys.stdin.readline()
sys.exit(3)
"""


@pytest.fixture
def collector() -> Iterator[SpanCollector]:
    with span_collector() as started:
        yield started


@pytest.fixture
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


def followers(trace: Path) -> list[psutil.Process]:
    """The processes that read this trace for a collector."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "follow" in words and str(trace) in words:
            found.append(process)
    return found


def test_a_restart_of_the_trainer_is_one_trace_of_all_ranks(
    launcher: Launcher, collector: SpanCollector, tmp_path: Path
) -> None:
    save = tmp_path / "run"
    trace = save / "restart_trace"
    layout = Layout(tp=1, pp=1, dp=RANKS)
    command = [*RUN, *buffered_saving(save, 1), "--train-iters", "100000", "--otlp"]

    def kill_it_once_a_save_was_sent(pids: list[int]) -> None:
        collector.wait_for("megatron.checkpoint.save.finalize")
        kill_all(pids)

    killed = launcher.run(layout, *command, collector.endpoint, during=kill_it_once_a_save_was_sent)
    assert set(killed.exit_codes) == {-signal.SIGKILL}
    with open_supervisor_trace(trace) as supervisor:
        for phase in ("detected", "stopped", "relaunched"):
            supervisor.failure(phase, cycle=0)
    wait_for(lambda: not followers(trace), "the end of the process that sends")
    seen = len(by_id(collector.requests))
    launcher.train(layout, *command, f"{collector.endpoint}/v1/traces", "--load", save, "--exit-interval", "1")
    wait_for(lambda: not followers(trace), "the end of the process that sends")
    got, expected = by_id(collector.requests), exported(trace, tmp_path / "spans.jsonl")
    assert got.keys() == expected.keys() and got == expected
    roots = [ids[0] for _, ids, name, *_ in got.values() if name == "nvrx.ft.cycle"]
    assert len(set(roots)) == 2 and len(got) > seen
    restart = [(name, held.get("restart_trace.file")) for held, ids, name, *_ in got.values() if ids[0] == roots[1]]
    assert {file for _, file in restart} == {
        None, "supervisor_000.jsonl", *(f"rank_{rank:05d}_cycle_001.jsonl" for rank in range(RANKS))
    }  # fmt: skip


def test_without_a_collector_the_trainer_trains_and_warns_once(launcher: Launcher, tmp_path: Path) -> None:
    save = tmp_path / "run"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        run = launcher.train(SINGLE, *RUN, *buffered_saving(save, 1), "--otlp", endpoint, "--train-iters", "3")
        wait_for(lambda: not followers(save / "restart_trace"), "the end of the process that sends")
    warning = f"--otlp {endpoint}: the collector takes no spans now (Connection refused); training goes on"
    assert run.output.count(warning) == 1
    assert exported(save / "restart_trace", tmp_path / "spans.jsonl")


def test_a_wrong_endpoint_is_refused_before_the_imports(dataset: list[str], tmp_path: Path) -> None:
    words = [*dataset, *RUN, *buffered_saving(tmp_path / "run", 1), "--train-iters", "3", "--otlp"]
    refused, accepted = light_starts([[*words, "collector:4317"], [*words, "http://collector:4318"]])
    assert refused.exit_code == 2
    assert "--otlp collector:4317: is no URL of a collector: write it as http://HOST:4318" in refused.output
    assert accepted.exit_code == IMPORTS, accepted.output


def test_a_job_that_ends_at_once_is_sent(collector: SpanCollector, tmp_path: Path) -> None:
    """It ends before the process that sends has begun to read."""
    trace = ended_trace(tmp_path / "trace")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as job:
        follower = start_follower(trace, collector.endpoint, "0-", job.pid)
        end_follower(follower)
        assert follower.wait(HANGS_S) == 0
        job.communicate(b"\n")
    assert by_id(collector.requests) == exported(trace, tmp_path / "spans.jsonl")


def restart_trace(*words: str, before: str = "pass") -> subprocess.Popen[str]:
    main = f"import sys; {before}; from restart_trace.run import main; sys.exit(main())"
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", main, *words]
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_a_job_of_others_is_sent_while_it_runs(collector: SpanCollector, tmp_path: Path) -> None:
    """The command is the only child that it knows of, and its exit status is passed on."""
    trace, script = tmp_path / "trace", tmp_path / "job.py"
    script.write_text(JOB)
    words = ["run", "--trace-dir", str(trace), "--otlp", collector.endpoint, "--", sys.executable, str(script)]
    for _ in range(2):  # the second time, what is there was sent
        job = restart_trace(*words, str(tmp_path / "a.pt"))
        assert job.stdout is not None and job.stdout.readline() == "saved\n"
        assert psutil.Process(job.pid).children() == []
        collector.wait_for("python.imports")
        job.communicate("\n", timeout=HANGS_S)
        assert job.returncode == 3
        wait_for(lambda: not followers(trace), "the end of the process that sends")
    got, expected = by_id(collector.requests), exported(trace, tmp_path / "spans.jsonl")
    assert got.keys() == expected.keys() and got == expected
    assert len([span for span in got.values() if span[2] == "nvrx.ft.cycle"]) == 2


def test_nothing_is_left_of_a_command_that_cannot_be_started(collector: SpanCollector, tmp_path: Path) -> None:
    """The process that sends would say that its directory is missing."""
    trace = tmp_path / "trace"
    job = restart_trace("run", "--trace-dir", str(trace), "--otlp", collector.endpoint, "--", "no-such-command")
    said = job.communicate(timeout=HANGS_S)[1]  # until the last process that has its stderr has ended
    assert job.returncode == 127 and said == "restart-trace: no-such-command: No such file or directory\n"
    assert list(tmp_path.iterdir()) == followers(trace) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--otlp", "collector:4317", "--", "true"], "--otlp collector:4317: is no URL of a collector"),
        (["--otlp", "http://c", "run", "--", "true"], "--otlp comes after run"),
    ],
)
def test_a_wrong_endpoint_is_refused_before_the_command_starts(words: list[str], message: str) -> None:
    job = restart_trace(*words)
    assert message in job.communicate(timeout=HANGS_S)[1] and job.returncode == 2


def test_a_missing_extra_is_named_before_the_command_starts(tmp_path: Path) -> None:
    """None in sys.modules is how Python itself says that a module is not to be had."""
    words = [
        "run",
        "--trace-dir",
        str(tmp_path / "trace"),
        "--otlp",
        "http://c:4318",
        "--",
        "touch",
        str(tmp_path / "x"),
    ]
    job = restart_trace(*words, before="sys.modules['opentelemetry'] = None")
    message = "--otlp http://c:4318: opentelemetry-sdk is not installed (the extra otlp): pip install opentelemetry-sdk"
    assert message in job.communicate(timeout=HANGS_S)[1] and job.returncode == 2
    assert list(tmp_path.iterdir()) == []
