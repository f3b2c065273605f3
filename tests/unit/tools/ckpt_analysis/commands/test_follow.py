"""`follow`: what a collector has got of a run that went on is what `export` writes of it afterwards."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.otlp_collector import SpanCollector, by_id, exported, span_collector
from tests.unit.stalls import STILL_S, stand_still_in_sleep
from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT, file_of
from tests.unit.tools.ckpt_analysis.trace_factory import Options, ended_trace, record_end, write_trace
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.common.otlp import plain_attributes
from tools.ckpt_analysis.render import otlp_live
from tools.ckpt_analysis.render.otlp_live import Collector, Follower

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs opentelemetry-exporter-otlp-proto-http")
pytestmark = pytest.mark.slow
RUNS = {
    "plain": Options(), "two hosts": Options(hosts=2), "in the background": Options(background_flush=True),
    "killed in a save": Options(save_killed_on=(2, 5)),
}  # fmt: skip
# However slowly this machine lets the collector answer.
PATIENT = """
import sys
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.render import otlp_live
otlp_live._LAST_ANSWER_S = 300.0
sys.exit(main())
"""


@pytest.fixture
def collector() -> Iterator[SpanCollector]:
    with span_collector() as started:
        yield started


def follow(trace: Path, endpoint: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PATIENT, "follow", str(trace), "--otlp", endpoint, *more]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], status: int = 0) -> str:
    """What it printed, after it has ended by itself."""
    _, printed = process.communicate(timeout=300)
    assert process.returncode == status, printed
    return printed


class GrowingTrace:
    """A copy of a trace that gets its lines one after the other, in the order of time of each file."""

    def __init__(self, whole: Path, copy: Path) -> None:
        self._copy = copy
        copy.mkdir()
        self._lines = {path: path.read_bytes().splitlines(keepends=True) for path in sorted(whole.glob("*.jsonl"))}
        for path in whole.glob("*.json"):
            shutil.copy(path, copy)

    def grow(self, pattern: str, until: float = 1.0) -> None:
        """Write the files of this pattern up to a share of their lines, and half a line more."""
        for path, lines in self._lines.items():
            if path.match(pattern):
                number = round(until * len(lines))
                torn = lines[number][:5] if number < len(lines) else b""
                (self._copy / path.name).write_bytes(b"".join(lines[:number]) + torn)


def test_files_that_grow_all_the_time_are_looked_at_no_more_often(tmp_path: Path, collector: SpanCollector) -> None:
    """Else a job of short steps is sent in a request for each of them."""
    trace = GrowingTrace(write_trace(tmp_path / "whole"), tmp_path / "trace")
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        trace.grow("*_cycle_000.jsonl", len(waits) / 10)
        return len(waits) == 8

    sender = Collector(collector.endpoint, print)
    assert otlp_live.follow(Follower(tmp_path / "trace", sender, 0, None, print), wait, None)
    assert sender.sent > 0 and min(waits) > 0


@pytest.mark.parametrize("name", RUNS)
def test_a_collector_gets_while_the_run_goes_on_what_export_writes(
    tmp_path: Path, collector: SpanCollector, name: str
) -> None:
    whole = write_trace(tmp_path / "whole", RUNS[name])
    trace = GrowingTrace(whole, tmp_path / "trace")
    process = follow(tmp_path / "trace", collector.endpoint, "--cycles", "0-")
    trace.grow("*_cycle_000.jsonl", 0.5)
    collector.wait_for("megatron.train.iteration")
    assert not [span for span in collector.spans() if span["name"] == "nvrx.ft.cycle"]
    trace.grow("*_cycle_000.jsonl")
    trace.grow("supervisor_*.jsonl")
    trace.grow("*_cycle_001.jsonl", 0.3)
    collector.wait_for("nvrx.ft.cycle")  # of the first launch, as the second has begun
    trace.grow("*_cycle_001.jsonl")
    process.send_signal(signal.SIGTERM)
    assert ", 0 not" in ended(process)
    expected = exported(whole, tmp_path / "spans.jsonl")
    got = by_id(collector.requests)
    assert got.keys() == expected.keys()
    assert got == expected
    again = tmp_path / "again"
    path = collector.write(tmp_path / "collected.jsonl")
    assert main(["import", "--from", "otlp", str(path), "-o", str(again), "--quiet"]) == 0
    for file in whole.glob("*.jsonl"):
        assert [json.loads(line) for line in (again / file.name).read_text().splitlines()] == [
            json.loads(line) for line in file.read_text().splitlines()
        ]


def test_what_a_collector_that_was_away_has_missed_comes_later(tmp_path: Path, collector: SpanCollector) -> None:
    """There is one warning, and no span twice."""
    trace = write_trace(tmp_path / "trace")
    collector.refuses = True
    process = follow(trace, collector.endpoint, "--cycles", "0-")
    assert process.stderr is not None
    warning = process.stderr.readline()
    assert (
        f"--otlp {collector.endpoint}: the collector takes no spans now (it answers with status 503); training goes on"
        in warning
    )
    collector.refuses = False
    collector.wait_for("megatron.train.iteration", 100)
    process.send_signal(signal.SIGINT)
    assert ended(process) == f"ckpt-analysis: {collector.endpoint}: 527 spans sent, 0 not\n"
    assert by_id(collector.requests) == exported(trace, tmp_path / "spans.jsonl")


def test_without_a_collector_it_ends_with_the_process_that_it_follows(tmp_path: Path) -> None:
    """It warns once. What it watches is no child of it, and is killed."""
    trace = ended_trace(tmp_path / "trace")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        job = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        process = follow(trace, endpoint, "--while-pid", str(job.pid))
        assert process.stderr is not None
        assert "the collector takes no spans now (Connection refused); training" in process.stderr.readline()
        job.kill()
        assert ended(process, 1) == ""
        job.communicate()


def test_by_default_it_follows_the_newest_launch(tmp_path: Path, collector: SpanCollector) -> None:
    trace = ended_trace(tmp_path / "trace")
    assert ended(follow(trace, collector.endpoint, "--while-pid", str(_ended_process()))) == ""
    (root,) = [span for span in collector.spans() if span["name"] == "nvrx.ft.cycle"]
    assert plain_attributes(root["attributes"])["nvrx.cycle"] == 1
    assert {span["traceId"] for span in collector.spans()} == {root["traceId"]}
    assert len([span for span in collector.spans() if span["name"] == "restart_trace.supervisor"]) == 1


def test_ranks_of_other_hosts_are_waited_for_until_they_record_their_end(
    tmp_path: Path, collector: SpanCollector
) -> None:
    """They may write on after the process here has ended; but those of an earlier cycle do not."""
    whole = write_trace(tmp_path / "whole", Options(hosts=2))
    late = [file_of(whole, rank, 1) for rank in (0, 7)]
    for path in whole.glob("rank_*_cycle_001.jsonl"):
        record_end(path)
    trace = GrowingTrace(whole, tmp_path / "trace")
    trace.grow("*.jsonl")
    for path in late:
        trace.grow(path.name, 0.9)
    process = follow(tmp_path / "trace", collector.endpoint, "--cycles", "0-", "--while-pid", str(_ended_process()))
    collector.wait_for("megatron.train.iteration", 20)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(5)  # one quiet second would be over
    for path in late:
        trace.grow(path.name)
    assert ended(process) == ""
    assert by_id(collector.requests) == exported(whole, tmp_path / "spans.jsonl")


@contextmanager
def no_server() -> Iterator[str]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unused.getsockname()[1]}"


@contextmanager
def no_name() -> Iterator[str]:
    yield "http://no-such-host.invalid:4318"


@contextmanager
def no_tls() -> Iterator[str]:
    with span_collector() as plain:
        yield plain.endpoint.replace("http", "https")


@contextmanager
def unknown_certificate() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory, span_collector(new_certificate(Path(directory))) as collector:
        yield collector.endpoint


@contextmanager
def grpc_server() -> Iterator[str]:
    grpc = pytest.importorskip("grpc")
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop(None).wait()


class Late:
    """A follower, of a run that has ended, whose files grow once more at its third look. It lists its looks."""

    is_behind = False

    def __init__(self) -> None:
        self.looks: list[bool] = []

    def poll(self) -> bool:
        self.looks.append(len(self.looks) == 2)
        return self.looks[-1]

    def run_ended(self) -> None:
        self.looks.clear()

    def finish(self) -> bool:
        return True


def test_files_have_time_to_grow_though_the_machine_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    follower: Any = Late()
    stand_still_in_sleep(monkeypatch, 0, lambda _: None)
    monkeypatch.setattr(otlp_live, "_LONGEST_END_S", 2 * STILL_S)
    real, late = time.monotonic, iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: real() + 0.05 * next(late))  # as sleep() returns at once
    assert otlp_live.follow(follower, lambda _: True, None)
    assert True in follower.looks


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (no_server, "Connection refused"),
        (no_name, "(Name or service not known|Temporary failure in name resolution)"),
        (no_tls, r"TLS: wrong version number; does it take http:// alone\?"),
        (unknown_certificate, "TLS: self-signed certificate; its authority's file is OTEL_EXPORTER_OTLP_CERTIFICATE"),
        (grpc_server, "it does not speak HTTP; a port for gRPC, such as 4317, is none for HTTP, such as 4318"),
    ],
)
def test_the_warning_says_why_there_is_no_answer(
    tmp_path: Path, place: Callable[[], AbstractContextManager[str]], why: str
) -> None:
    trace = ended_trace(tmp_path / "trace")
    with place() as endpoint:
        printed = ended(follow(trace, endpoint, "--while-pid", str(_ended_process())), 1)
    assert re.search(rf"^ckpt-analysis: --otlp {endpoint}: the collector takes no spans now \({why}\);", printed)
    assert printed.count("\n") == 1


def test_a_collector_with_a_certificate_of_its_own_is_named_by_opentelemetrys_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if requests has another bundle by its own variable."""
    trace, certificate = ended_trace(tmp_path / "trace"), new_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(new_certificate(tmp_path / "other")))
    with span_collector(certificate) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(certificate))
        assert follow_to_the_end(trace, collector) == ""
        assert by_id(collector.requests) == exported(trace, tmp_path / "spans.jsonl")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(tmp_path / "none.pem"))
        printed = follow_to_the_end(trace, collector, 1)
    assert "takes no spans now (Could not find a suitable TLS CA certificate bundle, invalid path: " in printed


def new_certificate(directory: Path) -> Path:
    """A certificate that signs itself, of 127.0.0.1, with its key, in one file."""
    path = directory / "certificate.pem"
    names = ["-subj", "/CN=collector", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", path, "-out", path, *names],
        check=True, capture_output=True,
    )  # fmt: skip
    return path


def test_headers_are_those_of_opentelemetrys_environment(
    tmp_path: Path, collector: SpanCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-scope=team")
    trace = ended_trace(tmp_path / "trace")
    assert ended(follow(trace, collector.endpoint, "--while-pid", str(_ended_process()))) == ""
    assert {headers.get("x-scope") for headers in collector.headers} == {"team"}


def test_many_events_of_a_process_are_in_spans_that_a_collector_takes(tmp_path: Path, collector: SpanCollector) -> None:
    trace = ended_trace(tmp_path / "trace")
    path = file_of(trace, 0, 1)
    samples = [
        {"type": "sample", "time_ns": 1_000_500_000_000 + i, "values": {"rss_bytes": i, "load": 0.5}}
        for i in range(600)
    ]
    path.write_text(path.read_text() + "".join(json.dumps(sample) + "\n" for sample in samples))
    expected = exported(trace, tmp_path / "spans.jsonl")
    assert max(len(events) for *_, events, _ in expected.values()) == 256
    assert ended(follow(trace, collector.endpoint, "--cycles", "0-", "--while-pid", str(_ended_process()))) == ""
    assert by_id(collector.requests) == expected


def follow_to_the_end(trace: Path, collector: SpanCollector, status: int = 0) -> str:
    """What it prints of all cycles of a run that has ended."""
    return ended(follow(trace, collector.endpoint, "--cycles", "0-", "--while-pid", str(_ended_process())), status)


def test_a_span_that_a_collector_refuses_is_dropped_and_told(tmp_path: Path, collector: SpanCollector) -> None:
    """Those of the same request arrive."""
    trace = ended_trace(tmp_path / "trace")
    collector.refused = {"python.imports": 400}
    printed = follow_to_the_end(trace, collector, 1)
    assert printed.count("the collector refuses spans (it answers with status 400); training goes on") == 1
    expected = exported(trace, tmp_path / "spans.jsonl")
    assert by_id(collector.requests) == {key: span for key, span in expected.items() if span[2] != "python.imports"}


def test_requests_that_a_collector_does_not_allow_end(tmp_path: Path, collector: SpanCollector) -> None:
    trace = ended_trace(tmp_path / "trace")
    wrong = f"{collector.endpoint}/other"
    printed = ended(follow(trace, wrong, "--while-pid", str(_ended_process())), 1)
    assert "the collector refuses spans" in printed and "status 404" in printed


@pytest.mark.parametrize("in_process_record", [False, True])
def test_lines_longer_than_one_look_are_read(tmp_path: Path, collector: SpanCollector, in_process_record: bool) -> None:
    trace = ended_trace(tmp_path / "trace")
    path = file_of(trace, 0, 1)
    first, rest = path.read_text().split("\n", 1)
    blanks = " " * (3 << 20)  # JSON allows them
    path.write_text(f"{blanks}{first}\n{rest}" if in_process_record else f"{first}\n{blanks}{rest}")
    assert follow_to_the_end(trace, collector) == ""
    assert by_id(collector.requests) == exported(trace, tmp_path / "spans.jsonl")


def test_a_slow_collector_gets_each_span_once(tmp_path: Path, collector: SpanCollector) -> None:
    """Its answers take longer than a connection may."""
    trace = write_trace(tmp_path / "trace")
    collector.answers_after_s = 4.0
    process = follow(trace, collector.endpoint, "--cycles", "0-")
    collector.wait_for("nvrx.ft.cycle")
    collector.answers_after_s = 0.0
    process.send_signal(signal.SIGTERM)
    assert ", 0 not" in ended(process)
    assert by_id(collector.requests) == exported(trace, tmp_path / "spans.jsonl")


def test_files_that_cannot_be_read_are_told_once_each(tmp_path: Path, collector: SpanCollector) -> None:
    trace = ended_trace(tmp_path / "trace")
    damaged, older = file_of(trace, 0, 1), file_of(trace, 1, 1)
    damaged.write_text("x" + damaged.read_text())
    first, rest = older.read_text().split("\n", 1)
    older.write_text(json.dumps(json.loads(first) | {"v": 11}) + "\n" + rest)
    printed = follow_to_the_end(trace, collector, 1).splitlines()
    assert len(printed) == 2
    assert f"{damaged.name}: line 1: not a JSON record: the file is left out" in printed[0]
    assert f"{older.name}: line 1: has schema version 11; this tool reads version" in printed[1]
    assert by_id(collector.requests) == exported(trace, tmp_path / "spans.jsonl")


def test_directories_are_read_as_by_export(tmp_path: Path, collector: SpanCollector) -> None:
    """The files of DIR/restart_trace are the trace only if DIR itself has no rank files."""
    trace = ended_trace(tmp_path / "trace")
    (trace / "restart_trace").mkdir()
    assert follow_to_the_end(trace, collector) == ""
    assert by_id(collector.requests) == exported(trace, tmp_path / "spans.jsonl")
    (tmp_path / "empty").mkdir()
    assert "no restart trace here (it is empty)" in follow_to_the_end(tmp_path / "empty", collector, 1)
    (tmp_path / "empty" / "imported.json").write_text("{}")
    assert "an imported run has operations and no spans" in follow_to_the_end(tmp_path / "empty", collector, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--otlp", "collector:4317"], "'collector:4317' is no URL of a collector: write it as http://HOST:4318"),
        (["--otlp", "http://c:4318?token=x"], "'http://c:4318?token=x' is no URL of a collector"),
        (["--otlp", "http://c", "--cycles", "x"], "'x' is no cycle: write 3, or 3-"),
        (["--otlp", "http://c", "--run-id", "x"], "--run-id: applies to single traces, not to a run that goes on"),
        (["--otlp", "http://c", "--while-pid", "0"], "0: is no process; give its id"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "tools.ckpt_analysis", "follow", str(tmp_path), *arguments]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 2 and message in process.stderr


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL=grpc: spans are sent by http/protobuf"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/json: spans are sent by http/protobuf alone: set it to that",
        ),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, ""),
    ],
)
def test_another_protocol_is_refused(
    tmp_path: Path, collector: SpanCollector, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], named: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    trace = ended_trace(tmp_path / "trace")
    printed = ended(follow(trace, collector.endpoint, "--while-pid", str(_ended_process())), 2 if named else 0)
    assert named in printed and bool(printed) == bool(named)


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    """None in sys.modules is how Python itself says that a module is not to be had."""
    code = "import sys; sys.modules['opentelemetry'] = None; from tools.ckpt_analysis.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "follow", str(tmp_path), "--otlp", "http://c"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (
        process.returncode == 2 and "is not installed: the extra otlp: pip install opentelemetry-sdk" in process.stderr
    )


def _ended_process() -> int:
    """Pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid
