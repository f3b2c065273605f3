"""Metrics for Prometheus: what its own parsers and a real server make of the file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote

import pytest

from benchmarks.synthetic_traces.shape import Shape
from benchmarks.synthetic_traces.write import write_run
from megatron.net.free_port import free_port
from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT, result
from tests.unit.tools.ckpt_analysis.metrics.test_absent_records import strip
from tests.unit.tools.ckpt_analysis.render.html.report_pages import analysis_of
from tests.unit.tools.ckpt_analysis.trace_factory import ENGINE, RUN_ID, Options, write_trace
from tests.unit.tools.ckpt_analysis.upstream_log_factory import upstream_log
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.render.prometheus import PREFIX, families

DASHBOARD = ROOT / "docs" / "grafana" / "restart_trace.json"
Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def exported(trace: Path, path: Path) -> Path:
    assert main(["export", str(trace), "-o", str(path), "--quiet"]) == 0
    return path


def parsed(path: Path) -> Values:
    """(name, labels) -> value, as Prometheus' client for Python reads them; every sample has the run's id."""
    parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus-client")
    values: Values = {}
    for family in parser.text_string_to_metric_families(path.read_text()):
        assert family.documentation and family.type in ("counter", "gauge", "summary") and family.samples
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run_id") and sample.timestamp is None  # the collector refuses times
            key = sample.name.removeprefix(PREFIX), frozenset(labels.items())
            assert key not in values
            values[key] = sample.value
    return values


def value(values: Values, name: str, **labels: str) -> float:
    return values[name, frozenset(labels.items())]


def test_values_are_those_of_the_report(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    report, values = result(trace), parsed(exported(trace, tmp_path / "run.prom"))
    (restart,), (load,), saves = report["restarts"], report["loads"], report["saves"]
    assert value(values, "restart_seconds", quantile="1") == restart["restart_s"]
    assert value(values, "blocked_seconds_sum") == sum(save["blocked_s"] for save in saves)
    assert value(values, "blocked_seconds_count") == len(saves) == 2
    assert value(values, "load_io_bytes_per_second", quantile="0.5") == pytest.approx(load["io_GBps"] * 1e9)
    assert value(values, "save_bytes", quantile="1") == saves[0]["bytes"]
    fsync = {"operation": "save", "phase": "flush", "detail": "fsync"}
    assert value(values, "phase_seconds", quantile="1", **fsync) == 0.24
    assert value(values, "wall_seconds", part="restarting") == report["budget"]["restarting_s"]
    assert value(values, "goodput_ratio", definition="goodput", by="megatron-restart") == report["budget"]["goodput"]
    assert value(values, "badput_ratio", type="tpu_initialization") == pytest.approx(0.3 / report["budget"]["wall_s"])
    assert value(values, "operations_total", operation="save", outcome="ok") == 2
    assert value(values, "last_step") == 12 and value(values, "last_checkpoint_step") == 10
    moments = ("start", "last_checkpoint", "last_step")
    started, saved, stepped = (value(values, f"{moment}_timestamp_seconds") for moment in moments)
    assert started < saved < stepped and stepped - started == pytest.approx(report["budget"]["wall_s"], abs=0.01)
    assert value(values, "run_info", layout="TP2 PP2 DP2", engine=ENGINE) == 1


@pytest.mark.parametrize("absent", [("steps", "first steps"), ("ends of saves", "ends of loads")])
def test_what_is_not_known_has_no_sample(tmp_path: Path, absent: tuple[str, ...]) -> None:
    trace = write_trace(tmp_path / "trace", Options(instrument="hooks"))
    strip(trace, absent)
    names = {name for name, _ in parsed(exported(trace, tmp_path / "run.prom"))}
    if "steps" in absent:
        assert not names & {
            "wall_seconds",
            "goodput_ratio",
            "badput_ratio",
            "last_step",
            "iteration_seconds",
            "restart_seconds",
        }
    else:
        assert not names & {"durable_seconds", "load_seconds", "save_bytes"}


def test_any_text_is_a_label(tmp_path: Path) -> None:
    trace, name = write_trace(tmp_path / "trace"), 'a"b\\c\nd{}=,ä'
    for path in trace.glob("rank_*.jsonl"):
        path.write_text(path.read_text().replace(f'"engine_used":"{ENGINE}"', f'"engine_used":{json.dumps(name)}'))
    values = parsed(exported(trace, tmp_path / "run.prom"))
    assert value(values, "run_info", layout="TP2 PP2 DP2", engine=name) == 1


def test_the_file_is_replaced_as_one(tmp_path: Path) -> None:
    """The collector reads whatever ends in .prom: there is never another one, nor half of one."""
    trace, out = write_trace(tmp_path / "trace"), tmp_path / "collected"
    out.mkdir()
    (out / "run.prom").write_text("old")
    assert exported(trace, out / "run.prom").read_text().startswith("# HELP ")
    assert [path.name for path in out.iterdir()] == ["run.prom"]
    assert main(["export", str(trace), "-o", str(out / "x.prom"), "--table", "spans"]) == 2
    assert not (out / "x.prom").exists()


def test_an_imported_log_has_metrics(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(upstream_log())
    assert main(["import", str(tmp_path / "train.log"), "-o", str(tmp_path / "run"), "--quiet"]) == 0
    names = {name for name, _ in parsed(exported(tmp_path / "run", tmp_path / "run.prom"))}
    assert {"blocked_seconds_sum", "iteration_seconds_count"} <= names and "goodput_ratio" not in names


def _runs(tmp_path: Path) -> list[Path]:
    write_run(tmp_path / "large", Shape(ranks=16, saves=4, asynchronous=True))
    return [write_trace(tmp_path / "small"), tmp_path / "large"]


def test_names_and_labels_are_those_of_the_page(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "prometheus.md").read_text()
    rows = re.findall(r"^\| (gauge|counter|summary) \|([^|]*)\|([^|]*)\|", text, re.MULTILINE)
    word = re.compile(r"`(\w+)`")
    pairs = [(name, (kind, set(word.findall(held)))) for kind, held, names in rows for name in word.findall(names)]
    documented = dict(pairs)
    assert len(documented) == len(pairs)
    for trace in _runs(tmp_path):
        for family in families(analysis_of(trace)):
            labels = {label for _, held, _ in family.samples for label in held} - {"quantile"}
            kind, known = documented[family.name]
            assert family.kind == kind and labels in (known, set()), family.name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool of the package prometheus")
def test_promtool_finds_no_fault(tmp_path: Path) -> None:
    for number, trace in enumerate(_runs(tmp_path)):
        text = exported(trace, tmp_path / f"{number}.prom").read_bytes()
        checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=300)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool of the package prometheus")
@pytest.mark.parametrize(("saved_at", "fires"), [(None, True), (0, True), (3000, False)])
def test_the_alert_of_the_page_fires_if_nothing_is_saved(tmp_path: Path, saved_at: int | None, fires: bool) -> None:
    """The step ends at 3600, the run began at 0; `saved_at`: when its only checkpoint was saved."""
    moments = {"start": 0, "last_step": 3600} | ({} if saved_at is None else {"last_checkpoint": saved_at})
    check_alert(tmp_path, 0, moments, "0m", 3600 if fires else None)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool of the package prometheus")
@pytest.mark.parametrize(("step_at", "since_s"), [(None, 3600), (0, 3600), (1500, 2100), (1801, None)])
def test_the_alert_of_the_page_fires_without_a_step(tmp_path: Path, step_at: int | None, since_s: int | None) -> None:
    """It is 3600, and the run began at 0; `step_at`: when its only step ended."""
    moments = {"start": 0} | ({} if step_at is None else {"last_step": step_at})
    check_alert(tmp_path, 1, moments, "60m", since_s)


def check_alert(directory: Path, number: int, moments: dict[str, int], time: str, value: int | None) -> None:
    """Alert `number` of the page has this value at `time`, or does not fire; `moments`: the metrics of time."""
    page = (ROOT / "docs" / "prometheus.md").read_text()
    expressions = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert len(expressions) == 2
    series = [
        {"series": f'{PREFIX}{name}_timestamp_seconds{{run_id="a",instance="b"}}', "values": f"{at}x60"}
        for name, at in moments.items()
    ]
    expected = [] if value is None else [{"labels": '{run_id="a",instance="b"}', "value": value}]
    case = {"expr": expressions[number], "eval_time": time, "exp_samples": expected}
    tests = {"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [case]}]}
    (directory / "tests.yml").write_text(json.dumps(tests))  # JSON is YAML
    checked = subprocess.run(
        ["promtool", "test", "rules", str(directory / "tests.yml")], capture_output=True, text=True, timeout=300
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@contextmanager
def served(directory: Path) -> Iterator[int]:
    """An HTTP server of the files in `directory`; yields its port."""

    class Quiet(SimpleHTTPRequestHandler):
        extensions_map = {".prom": "text/plain; version=0.0.4"}

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(directory))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@dataclass(frozen=True)
class Server:
    """A Prometheus: its process, which writes the log, and its port."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path


@contextmanager
def prometheus(directory: Path, target_port: int) -> Iterator[Server]:
    """A Prometheus that scrapes /run.prom of that port each second."""
    scrape = [
        {"job_name": "run", "metrics_path": "/run.prom", "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}]}
    ]
    config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": scrape}
    (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    command = ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    with (directory / "log").open("w") as log:
        server = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield Server(server, port, directory / "log")
    finally:
        server.terminate()
        server.wait(timeout=300)


def asked(server: Server, query: str) -> list[dict[str, Any]]:
    """The answer to a query, as soon as there is one. Fails if the server has ended, and after five minutes."""
    url = f"http://127.0.0.1:{server.port}/api/v1/query?query={quote(query)}"
    ends = time.monotonic() + 300
    while server.process.poll() is None and time.monotonic() < ends:
        try:
            with urllib.request.urlopen(url, timeout=300) as answer:
                found = json.load(answer)["data"]["result"]
        except OSError:
            found = []
        if found:
            return found
        time.sleep(0.2)
    state = "no answer" if server.process.poll() is None else f"ended with {server.process.returncode}"
    pytest.fail(f"Prometheus: {state}: {server.log.read_text()[-2000:]}")


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the package prometheus")
def test_a_server_that_has_ended_is_not_asked_for_ever(tmp_path: Path) -> None:
    with prometheus(tmp_path, target_port=1) as server:
        server.process.terminate()
        with pytest.raises(pytest.fail.Exception, match="ended with"):
            asked(server, "up")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the package prometheus")
def test_a_prometheus_server_collects_them(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    report = result(trace)
    (tmp_path / "served").mkdir()
    exported(trace, tmp_path / "served" / "run.prom")
    with served(tmp_path / "served") as target, prometheus(tmp_path, target) as server:
        (goodput,) = asked(server, 'restart_trace_goodput_ratio{definition="goodput"}')
        assert goodput["metric"]["run_id"] == RUN_ID
        assert float(goodput["value"][1]) == report["budget"]["goodput"]
        (mean,) = asked(server, "restart_trace_blocked_seconds_sum / restart_trace_blocked_seconds_count")
        blocked = [save["blocked_s"] for save in report["saves"]]
        assert float(mean["value"][1]) == pytest.approx(sum(blocked) / len(blocked))
        (wall,) = asked(server, 'sum(restart_trace_wall_seconds{part!="idle"})')
        assert float(wall["value"][1]) == pytest.approx(report["budget"]["wall_s"])


def queries(dashboard: dict[str, Any]) -> dict[str, str]:
    """The queries of all panels, by panel and number."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the package prometheus")
def test_every_query_of_the_dashboard_finds_the_run(tmp_path: Path) -> None:
    """Its variable is the label of the runs; each query has an answer for this run, and none for another."""
    trace = write_trace(tmp_path / "trace")
    (tmp_path / "served").mkdir()
    exported(trace, tmp_path / "served" / "run.prom")
    dashboard = json.loads(DASHBOARD.read_text())
    (variable,) = [one["query"]["query"] for one in dashboard["templating"]["list"] if one["name"] == "run_id"]
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable).groups()  # type: ignore[union-attr]
    with served(tmp_path / "served") as target, prometheus(tmp_path, target) as server:
        assert [found["metric"][label] for found in asked(server, metric)] == [RUN_ID]
        for name, query in queries(dashboard).items():
            assert '{run_id="$run_id"' in query, name
            for found in asked(server, query.replace("$run_id", RUN_ID)):
                assert found["metric"]["run_id"] == RUN_ID, name
            absent = f"absent({query.replace('$run_id', 'another')})"
            assert asked(server, absent)[0]["value"][1] == "1", name


def test_the_dashboard_names_labels_that_its_queries_have(tmp_path: Path) -> None:
    values = parsed(exported(write_trace(tmp_path / "trace"), tmp_path / "run.prom"))
    known = {label for _, labels in values for label, _ in labels}
    dashboard = json.loads(DASHBOARD.read_text())
    legends = [target["legendFormat"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert set(re.findall(r"{{(\w+)}}", " ".join(legends))) <= known
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids) and all(panel["description"] for panel in dashboard["panels"])
