"""A trace as OpenTelemetry spans and back: nothing is lost, and the file is what OpenTelemetry's own classes read."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restart_trace.schema import CYCLE_FILE_PATTERN, RECORD_FIELDS
from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT, file_of, kinds, result
from tests.unit.tools.ckpt_analysis.trace_factory import RANKS, RUN_ID, Options, write_trace
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.common.otlp import any_value, plain_value
from tools.ckpt_analysis.render.otlp_spans import GOODPUT, NVIDIA_NAMES

GOLDEN = ROOT / "tests" / "golden" / "trace_tp2_pp2_dp2" / "restart_trace"
RUNS = {
    "plain": Options(),
    "two hosts": Options(hosts=2, load_inside_engine_init=True),
    "in the background": Options(background_flush=True, durable=False, reject_newest=True),
    "a failed save": Options(save_fails_on=(3,), cores="0-1", cpu_limit=1.5),
    "ranks that return": Options(returned=(0, 1, 2, 3, 4, 6, 7)),
    "killed in a save": Options(save_killed_on=(2, 5), supervisor=False, instrument="hooks"),
}


def exported(trace: Path, directory: Path) -> Path:
    path = directory / "spans.jsonl"
    assert main(["export", str(trace), "-o", str(path), "--format", "otlp", "--quiet"]) == 0
    return path


def imported(spans: Path, directory: Path) -> Path:
    assert main(["import", "--from", "otlp", str(spans), "-o", str(directory), "--quiet"]) == 0
    return directory


def content(directory: Path) -> dict[str, list[Any]]:
    """File name -> its records, or the content of a claim."""
    files = [path for path in directory.iterdir() if path.suffix in (".jsonl", ".json")]
    return {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in files}


def spans_of(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    entries = [entry for line in lines for entry in line["resourceSpans"]]
    return [span for entry in entries for scope in entry["scopeSpans"] for span in scope["spans"]]


def held_by(span: dict[str, Any]) -> dict[str, Any]:
    return {pair["key"]: plain_value(pair["value"]) for pair in span["attributes"]}


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_lost(tmp_path: Path, name: str) -> None:
    trace = write_trace(tmp_path / "trace", RUNS[name])
    again = imported(exported(trace, tmp_path), tmp_path / "again")
    assert content(again) == content(trace)
    assert result(again) == result(trace)


def test_the_span_of_a_process_begins_with_its_start(tmp_path: Path) -> None:
    """Not with the process, which was there in the cycle before if its rank has returned."""
    trace = write_trace(tmp_path / "trace", Options(returned=(0, 1)))
    named: dict[str, list[int]] = {}
    for span in spans_of(exported(trace, tmp_path)):
        named.setdefault(span["name"], []).append(int(span["startTimeUnixNano"]))
    assert sorted(named["restart_trace.process"]) == sorted(named["megatron.startup"])


def test_nothing_of_a_recorded_trace_is_lost(tmp_path: Path) -> None:
    """It has the records that trace_factory does not write: probes, labels of tiers, steps with losses."""
    again = imported(exported(GOLDEN, tmp_path), tmp_path / "again")
    assert content(again) == content(GOLDEN)


def test_every_record_type_comes_back(tmp_path: Path) -> None:
    """A rank's file with one record of each type that has one, and each of its fields."""
    trace = write_trace(tmp_path / "trace")
    path = file_of(trace, 0, 0)
    more: list[dict[str, Any]] = [
        {"type": "coordinates", "tp": 0, "pp": 0, "dp": 0, "cp": 0, "layout": {"tp": 2, "pp": 2, "dp": 2, "cp": 1}},
        {"type": "sample", "time_ns": 1_000_500_000_000, "values": {"rss_bytes": 12, "load": 0.5, "zero_s": 0.0}},
        {"type": "probe", "op": 0, "at": "end", "time_ns": 1_000_500_000_001, "values": {}},
        {"type": "operation_label", "op": 0, "tag": "a/ä\u202e", "tier": "peer"},
        {"op": 0, "phase": "data_skip", "start_ns": 1, "end_ns": 9, "duration_ns": 0, "batches": 3, "error": "E: x"},
    ]
    path.write_text(path.read_text() + "".join(json.dumps(record) + "\n" for record in more))
    again = imported(exported(trace, tmp_path), tmp_path / "again")
    assert content(again) == content(trace)
    found = {record.get("type", "span") for records in content(again).values() for record in records}
    assert set(RECORD_FIELDS) <= found


def test_lines_that_are_no_records_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "trace")
    path = file_of(trace, 1, 1)
    whole = content(trace)
    path.write_text(path.read_text() + '{"type":"iteration"}\n{"type":')
    spans = tmp_path / "spans.jsonl"
    assert main(["export", str(trace), "-o", str(spans), "--format", "otlp"]) == 0
    assert "; 2 lines of the trace are invalid" in capsys.readouterr().err
    again = imported(spans, tmp_path / "again")
    assert content(again) == whole and kinds(result(again)) == kinds(result(write_trace(tmp_path / "whole")))


def test_a_claim_with_null_comes_back(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    path = trace / CYCLE_FILE_PATTERN.format(cycle=0)
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "launch_key": None, "more": [None, {"a": None}]}) + "\n"
    )
    assert content(imported(exported(trace, tmp_path), tmp_path / "again")) == content(trace)


@pytest.mark.parametrize("number", ["1" + 30 * "0", "1e999"])
def test_a_claim_that_no_span_can_hold_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: str
) -> None:
    trace = write_trace(tmp_path / "trace")
    (trace / CYCLE_FILE_PATTERN.format(cycle=1)).write_text(f'{{"wall_ns":{number}}}')
    assert main(["export", str(trace), "-o", str(tmp_path / "spans.jsonl"), "--format", "otlp"]) == 2
    error = capsys.readouterr().err
    assert f"{CYCLE_FILE_PATTERN.format(cycle=1)}: OTLP cannot hold" in error and "64" in error
    assert not (tmp_path / "spans.jsonl").exists()


def _of_run(trace: Path, run_id: str) -> Path:
    for path in trace.iterdir():
        path.write_text(path.read_text().replace(RUN_ID, run_id))
    return trace


def test_of_several_runs_one_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {
        RUN_ID: write_trace(tmp_path / "one"),
        "other": _of_run(write_trace(tmp_path / "other", Options(save_fails_on=(3,))), "other"),
    }
    both = tmp_path / "both.jsonl"
    both.write_text("".join(exported(trace, tmp_path).read_text() for trace in runs.values()))
    read = ["import", "--from", "otlp", str(both), "-o", str(tmp_path / "out")]
    assert main(read) == 2
    assert f"holds spans of 2 runs, {RUN_ID}, other: choose one with --run-id" in capsys.readouterr().err
    assert main([*read, "--run-id", "third"]) == 2
    assert f"--run-id third: no such run in {both}; it holds {RUN_ID}, other" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    for run_id, trace in runs.items():
        out = tmp_path / f"again-{run_id}"
        assert main([*read[:-1], str(out), "--run-id", run_id, "--quiet"]) == 0
        assert content(out) == content(trace)


def test_two_records_of_one_line_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two exports of one run are the same spans twice; traces that only share the run's id are not."""
    first = exported(write_trace(tmp_path / "one"), tmp_path).read_text()
    other = exported(write_trace(tmp_path / "two", Options(save_fails_on=(3,))), tmp_path).read_text()
    spans = tmp_path / "both.jsonl"
    spans.write_text(first + first)
    assert content(imported(spans, tmp_path / "again")) == content(tmp_path / "one")
    spans.write_text(first + other)
    assert main(["import", "--from", "otlp", str(spans), "-o", str(tmp_path / "out")]) == 2
    assert "is two different records" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_spans_come_through_a_pipe(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    command = [sys.executable, "-m", "tools.ckpt_analysis", "import", "--from", "otlp", "-"]
    spans = exported(trace, tmp_path).read_bytes()
    refused = subprocess.run(command, cwd=ROOT, input=spans, capture_output=True, timeout=300)
    assert refused.returncode == 2 and b"-: is a pipe, which has no directory: give one with -o" in refused.stderr
    again = tmp_path / "again"
    subprocess.run([*command, "-o", str(again), "--quiet"], cwd=ROOT, input=spans, check=True, timeout=300)
    assert content(again) == content(trace)


def test_one_trace_per_launch_over_all_ranks_and_the_supervisor(tmp_path: Path) -> None:
    spans = spans_of(exported(write_trace(tmp_path / "trace"), tmp_path))
    assert len({span["spanId"] for span in spans}) == len(spans)
    by_trace: dict[str, dict[str, dict[str, Any]]] = {}
    for span in spans:
        assert re.fullmatch("[0-9a-f]{32}", span["traceId"]) and re.fullmatch("[0-9a-f]{16}", span["spanId"])
        by_trace.setdefault(span["traceId"], {})[span["spanId"]] = span
    assert len(by_trace) == 2
    for cycle, mine in enumerate(by_trace.values()):
        (root,) = [span for span in mine.values() if "parentSpanId" not in span]
        assert root["name"] == "nvrx.ft.cycle" and held_by(root)["nvrx.cycle"] == cycle
        for span in mine.values():
            if span is not root:
                parent = mine[span["parentSpanId"]]
                assert int(parent["startTimeUnixNano"]) <= int(span["startTimeUnixNano"])
            assert int(root["endTimeUnixNano"]) >= int(span["endTimeUnixNano"]) >= int(span["startTimeUnixNano"])
        processes = [held_by(span) for span in mine.values() if span["name"] == "restart_trace.process"]
        assert sorted(held["nvrx.rank"] for held in processes) == [*range(RANKS)]
    (supervisor,) = [span for span in spans if span["name"] == "restart_trace.supervisor"]
    assert supervisor["traceId"] == list(by_trace)[1]  # of the restart, not of the launch that failed
    assert [event["name"] for event in supervisor["events"]] == ["injected", "nvrx.ft.fault", "stopped", "relaunched"]


def test_time_in_which_training_stands_still_is_marked(tmp_path: Path) -> None:
    """NVIDIA's label: true of what holds training up, false of training and of what runs beside it."""
    spans = spans_of(exported(write_trace(tmp_path / "trace", Options(background_flush=True)), tmp_path))
    marks: dict[str, set[bool]] = {}
    for span in spans:
        if GOODPUT in (held := held_by(span)):
            marks.setdefault(span["name"], set()).add(held[GOODPUT])
    assert marks["megatron.train.iteration"] == marks["restart_trace.save"] == {False}
    assert marks["restart_trace.save.flush.fsync"] == {False} and marks["restart_trace.save.serialize"] == {True}
    assert marks["megatron.startup"] == marks["megatron.checkpoint.load.io_read"] == {True}
    names = {span["name"] for span in spans_of(exported(write_trace(tmp_path / "blocking"), tmp_path))}
    assert set(NVIDIA_NAMES.values()) - {"python.startup"} <= names | {"megatron.startup.dataloader"}


def test_failures_are_errors(tmp_path: Path) -> None:
    spans = spans_of(exported(write_trace(tmp_path / "trace", Options(save_fails_on=(3,))), tmp_path))
    failed = [span["status"] for span in spans if "status" in span]
    assert len(failed) == RANKS and {status["code"] for status in failed} == {2}
    assert all("No space left on device" in status["message"] for status in failed)


def _with_base64_ids(value: Any, change: Any) -> Any:
    if isinstance(value, list):
        return [_with_base64_ids(item, change) for item in value]
    if not isinstance(value, dict):
        return value
    ids = ("traceId", "spanId", "parentSpanId")
    return {key: change(item) if key in ids else _with_base64_ids(item, change) for key, item in value.items()}


def test_opentelemetrys_own_classes_read_it(tmp_path: Path) -> None:
    """What they write of it, as a collector does, is imported as well. OTLP/JSON has ids in hex, protobuf in base64."""
    trace_pb2 = pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2", reason="needs opentelemetry-proto")
    from google.protobuf import json_format

    trace = write_trace(tmp_path / "trace", Options(hosts=2))
    (trace / CYCLE_FILE_PATTERN.format(cycle=0)).write_text('{"cycle":0,"launch_key":null}')
    path = exported(trace, tmp_path)
    lines = []
    for line in path.read_text().splitlines():
        data = _with_base64_ids(json.loads(line), lambda text: base64.b64encode(bytes.fromhex(text)).decode())
        message = json_format.ParseDict(data, trace_pb2.TracesData())
        for entry in message.resource_spans:
            for span in entry.scope_spans[0].spans:
                assert len(span.trace_id) == 16 and len(span.span_id) == 8 and span.start_time_unix_nano > 0
        lines.append(json_format.MessageToDict(trace_pb2.TracesData.FromString(message.SerializeToString())))
    rewritten = tmp_path / "rewritten.json"
    whole = {"resourceSpans": [entry for line in lines for entry in line["resourceSpans"]]}
    rewritten.write_text(
        json.dumps(_with_base64_ids(whole, lambda text: base64.b64decode(text).hex()), indent=1), encoding="utf-8"
    )
    assert content(imported(rewritten, tmp_path / "again")) == content(trace)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(JSON_VALUES)
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    found = plain_value(json.loads(json.dumps(any_value(value))))
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no spans of restart_trace"),
        ("no JSON", "is no OTLP/JSON of a restart trace"),
        ("[1]", "no list resourceSpans"),
        ('{"resourceSpans":[{"resource":{"attributes":[{"key":"service.name"}]}}]}', "no AnyValue"),
        ('{"resourceSpans":[{"resource":{},"scopeSpans":[{"spans":[{"name":"other"}]}]}]}', "has no spans of restart"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    (tmp_path / "spans.json").write_text(text)
    assert main(["import", "--from", "otlp", str(tmp_path / "spans.json"), "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and "export --format otlp" in error and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["../rank_00000_cycle_000.jsonl", "rank_00000_cycle_000.jsonl/../../x.jsonl", "x.jsonl"]
)
def test_a_file_names_no_place_outside_of_the_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = exported(write_trace(tmp_path / "trace"), tmp_path)
    path.write_text(path.read_text().replace("rank_00000_cycle_000.jsonl", name))
    assert main(["import", "--from", "otlp", str(path), "-o", str(tmp_path / "out")]) == 2
    assert "is no name of a trace file" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_record_that_breaks_the_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = exported(write_trace(tmp_path / "trace"), tmp_path)
    path.write_text(
        path.read_text().replace(
            '"restart_trace.op","value":{"intValue":"0"}', '"restart_trace.x","value":{"intValue":"0"}'
        )
    )
    assert main(["import", "--from", "otlp", str(path), "-o", str(tmp_path / "out")]) == 2
    assert "missing field op" in capsys.readouterr().err


def test_flags_that_have_no_effect_and_directories_in_use_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "trace")
    path = exported(trace, tmp_path)
    export = ["export", str(trace), "-o", str(tmp_path / "x"), "--format", "otlp", "--table", "spans"]
    read = ["import", "--from", "otlp", str(path)]
    told = {
        "--table spans": export, "--world-size": [*read, "--world-size", "8"], "--force": [*read, "--force"],
        "holds a run already": [*read, "-o", str(trace)],
        "--run-id x: a log holds one run": ["import", str(path), "--run-id", "x"],
    }  # fmt: skip
    for message, command in told.items():
        assert main(command) == 2
        assert message in capsys.readouterr().err
    assert main([*read, "--quiet"]) == 0 and (tmp_path / "spans-imported" / CYCLE_FILE_PATTERN.format(cycle=1)).exists()


def test_names_are_those_of_the_page() -> None:
    text = (ROOT / "docs" / "opentelemetry.md").read_text()
    rows = re.findall(r'^\| `(\w+)` \| (?:`([\w/]+)`)? *\| `"([\w.]+)"` \|', text, re.MULTILINE)
    documented = {(operation, *(path.split("/") + ["", ""])[:2]): name for operation, path, name in rows}
    assert documented == NVIDIA_NAMES
