"""The page that is made of what the GPU tier has written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from restart_trace.schema import RANK_FILE_PATTERN
from tests.gpu.page import page
from tests.gpu.parts import part_named
from tests.gpu.predictions import PREDICTIONS, Prediction
from tests.gpu.runner import PASSED
from tests.unit.tools.ckpt_analysis.metrics.test_device_copies import rank_log
from tests.unit.tools.ckpt_analysis.trace_factory import RANKS, dump

LOG_LINE = (
    " iteration {0:8d}/      15 | consumed samples:            4 | consumed tokens:         8192 | elapsed time per "
    "iteration (ms): {1:.1f} | learning rate: 1.000E-04 | global batch size:     4 | lm loss: 6.5E+00 | grad norm: 1.0 "
    "| actual seqlen:  2048 | number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: "
    "4.0 | tokens per gpu per second (tgs): 8.0 | TFLOPs: {2:.2f} |\n"
)


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"])
def test_predictions_stand_beside_what_is_measured(tmp_path: Path, device: str) -> None:
    """Iterations that are warm and not profiled; what deviates by half is marked, what was not observed is no zero."""
    step_time, copies = tmp_path / "step-time", tmp_path / "copies"
    (step_time / "trace").mkdir(parents=True)
    copies.mkdir()
    slow = {1: 9000.0, 2: 500.0, 3: 500.0, 13: 800.0, 14: 800.0, 15: 800.0}
    lines = [LOG_LINE.format(number, slow.get(number, 110.0), 400) for number in range(1, 16)]
    (step_time / "training.log").write_text("[rank 0] INFO: begins\n" + "".join(lines))
    events = [{"cat": "kernel", "name": "gemm", "dur": 3e5}, {"cat": "kernel", "name": "norm", "dur": 1e5}] * 2
    events = [event | {"args": {}} for event in events]
    events += attention_events("cudnn_attention", 1, 0.006) + attention_events("cudnn_attention_backward", 2, 0.024)
    with gzip.open(step_time / "trace" / "profile_rank_00000_iterations_13-15.json.gz", "wt") as file:
        json.dump({"traceEvents": [*events, {"cat": "cpu_op", "name": "aten::mm", "dur": 9e9}]}, file)
    said = {"device_to_host_GBps": "45", "pageable_GBps": "not observed: it reads 0"}
    properties = "".join(f'<property name="{name}" value="{value}"/>' for name, value in said.items())
    case = f'<testcase classname="tests.gpu.test_c" name="test_x"><properties>{properties}</properties></testcase>'
    (copies / "junit.xml").write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
    (tmp_path / "machine").mkdir()
    machine = {"device": device, "nvidia_smi": None, "processors": 16, "memory_bytes": 1 << 37, "kernel": "6.1"}
    machine |= {"python": "3.12", "packages": {}, "filesystem": "ext4", "cuda": "13.0", "nccl": "2.28"}
    (tmp_path / "machine" / "machine.json").write_text(json.dumps(machine))
    parts = [recorded_part("step-time"), recorded_part("copies")]
    text = page(tmp_path, parts)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text if line.startswith("| `")]
    found = {row[0]: row[2:4] for row in rows if len(row) == 5}
    assert found["`step-time`: an iteration"] == ["0.11", marked("`step-time`: an iteration", 0.11)]
    mfu = ["40.4", marked("`step-time`: MFU, 1 micro-batch", 40.4)] if "HBM3" in device else ["-", "not observed"]
    assert found["`step-time`: MFU, 1 micro-batch"] == mfu
    assert any("its MFU is not computed" in line for line in text) is ("PCIe" in device)
    assert found["`step-time-4`: an iteration"] == ["-", "not observed"]
    assert found["`copies`: a save's copies to pinned memory"] == ["45", ""]
    assert found["`copies`: to pageable memory"] == ["-", "not observed"]
    assert found["`step-time`: attention's kernels"] == ["0.01", marked("`step-time`: attention's kernels", 0.01)]
    assert found["`step-time-4`: attention's kernels"] == ["-", "not observed"]
    told = "Attention: `cudnn_attention` (forward calls in an iteration: 1). Its kernels in an iteration: "
    assert f"{told}forward 0.0020 s, backward 0.0080 s." in text
    assert ["`gemm`", "72.3", "0.6000", "2"] in rows
    assert "| `test_c.test_x` | passed | device_to_host_GBps 45, pageable_GBps not observed: it reads 0 |" in text


def attention_events(operator: str, correlation: int, seconds: float) -> list[dict[str, Any]]:
    """As torch.profiler writes three calls of a backend, of which one launches a kernel, on a machine with a device."""
    name, thread, begin = f"aten::_scaled_dot_product_{operator}", {"pid": 9, "tid": 9}, 1000.0 * correlation
    calls = [thread | {"cat": "cpu_op", "name": name, "ts": begin + 100.0 * i, "dur": 50.0} for i in range(3)]
    numbers = {"correlation": correlation}
    launch = thread | {
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "ts": begin + 120.0,
        "dur": 5.0,
        "args": numbers,
    }
    other = launch | {"ts": begin + 160.0, "args": {"correlation": 7}}  # between the calls
    kernel = {"cat": "kernel", "name": "sdpa", "pid": 0, "tid": 7, "ts": 900.0, "dur": seconds * 1e6, "args": numbers}
    return [*calls, launch, other, kernel]


def marked(what: str, measured: float) -> str:
    (prediction,) = [one for one in PREDICTIONS if one.what == what]
    return "**deviates by half**" if abs(measured / prediction.predicted - 1) >= 0.5 else ""


def test_what_deviates_by_half() -> None:
    one = Prediction("w", "s", 2.0, "r", lambda _: None)
    assert [one.deviates(value) for value in (None, 1.0, 1.01, 2.0, 2.99, 3.0)] == [
        None,
        True,
        False,
        False,
        False,
        True,
    ]


def test_why_parts_of_a_ladder_were_not_run_is_on_the_page(tmp_path: Path) -> None:
    reason = "3 s were left of the ladder's time, and it is expected to take 100 s"
    told = {"machine": {"outcome": PASSED, "why": None}, "tests": {"outcome": None, "why": reason}}
    (tmp_path / "ladder_1.json").write_text(json.dumps({"parts": told}))
    shows = part_named("tests").shows
    assert f"| tests | {shows} | not run |  | {reason} |" in page(tmp_path, [recorded_part("machine")])


def recorded_part(name: str) -> dict[str, object]:
    """The record of a part that has passed."""
    record = {"part": name, "shows": "s", "rehearsal": False, "version": "1", "began": "2026-01-01T00:00:00Z"}
    return record | {"outcome": PASSED, "seconds": 1.0, "steps": []}


@pytest.mark.slow
def test_the_page_has_what_the_device_measured_of_a_drill(tmp_path: Path) -> None:
    """Which the rehearsal cannot have; the trace is that of the tests of `device_copies`."""
    drill = tmp_path / "resume-lazy" / "drill"
    (drill / "trace").mkdir(parents=True)
    for rank in range(RANKS):
        dump(drill / "trace" / RANK_FILE_PATTERN.format(rank=rank, cycle=0), rank_log(rank).records)
    cycle = {"cycle": 0, "verified": True, "losses": "equal", "state_hashes": "equal", "cache": "cold"}
    (drill / "drill.json").write_text(json.dumps({"cycles": [cycle]}))
    lines = page(tmp_path, [recorded_part("resume-lazy")])
    (head,) = [line for line in lines if "device peak GB" in line]
    (row,) = [line for line in lines if line.startswith("| resume-lazy | yes |")]
    told = dict(zip(*([cell.strip() for cell in line.split("|")] for line in (head, row)), strict=True))
    names = ("copies GB/s", "of the bus", "beside training", "device peak GB")
    assert [told[name] for name in names] == ["10.00", "0.50", "0.88", "47.00"]
