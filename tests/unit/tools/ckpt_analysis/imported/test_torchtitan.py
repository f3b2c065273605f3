"""Structured logs of torchtitan: lines as its own logger writes them, and in nightly runs those that it does write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT
from tools.ckpt_analysis.common.errors import CouldNotRunError
from tools.ckpt_analysis.imported.importer import import_log
from tools.ckpt_analysis.imported.to_report import to_report
from tools.ckpt_analysis.model.imported_run import Range
from tools.ckpt_analysis.render.json_output import to_dict

VERSION = "0.3.0"
# Loads step 4 (or nothing), trains up to step 7 and saves after step 6, as torchtitan's trainer does.
PROGRAM = """
import sys
from torchtitan.observability import structured_logger as sl
sl.init_structured_logger(source="training", output_dir=sys.argv[1], rank=int(sys.argv[2]))
sl.log_trace_instant("training_start")
with sl.log_trace_span("checkpoint_load"):
    pass
for step in range(5, 8):
    sl.set_step(step, relative_step=step - 4)
    with sl.log_trace_span("step"):
        with sl.log_trace_span("checkpoint_save"):
            if step == 6:
                sl.add_step_tag("checkpoint_save")
"""


def event(rank: int, name: str, ms: float | None = None, **fields: Any) -> str:
    """A line of torchtitan's TraceJsonlFormatter, in its order."""
    value = {} if ms is None else {"value": ms}
    record = {"delta_ms": 0.5, "tid": 7, "rank": rank, "global_rank": rank, "source": "training", "host_name": "node0"}
    record |= fields | {"time_us": 1_790_000_000_000_000, "log_type": "event", "log_type_name": name}
    return json.dumps(record | {"event_name": None} | value | {"seq_id": 3, "message": f"{name} took a while"}) + "\n"


def log_of(rank: int, *, loaded: int = 4, saved: tuple[int, ...] = (6, 8), steps: int = 4) -> str:
    """A load of 1.5 s + rank; steps of 2 s + rank, with 0.1 ms to ask for a save, or 3 s + rank to save, inside."""
    lines = [event(rank, "training_start"), event(rank, "checkpoint_load_end", 1500 + 1000 * rank)]
    for number in range(1, steps + 1):
        step = {"step": loaded + number, "relative_step": number}
        tags = {"step_tags": ["gc", "checkpoint_save"]} if loaded + number in saved else {}
        save_ms = 3000 + 1000 * rank if tags else 0.125
        lines.append(event(rank, "step_start", **step))
        lines.append(event(rank, "checkpoint_save_end", save_ms, **step, **tags))
        lines.append(event(rank, "step_end", 2000 + 1000 * rank + save_ms, **step, **tags))
    return "".join(lines)


def imported(directory: Path, text: str) -> Any:
    (directory / "log.jsonl").write_text(text)
    return import_log(directory / "log.jsonl", 8)


def test_saves_load_and_steps_of_one_rank(tmp_path: Path) -> None:
    run = imported(tmp_path, log_of(0))
    assert [(save.step, save.tag, save.call) for save in run.saves] == [
        (6, "step-6", Range(3.0, None)), (8, "step-8", Range(3.0, None)),
    ]  # fmt: skip
    assert [(load.step, load.found, load.call) for load in run.loads] == [(4, True, Range(1.5, None))]
    assert [(each.step, each.step_s) for each in run.iterations] == [
        (step, pytest.approx(2.0)) for step in (5, 6, 7, 8)
    ]
    report = to_dict(to_report(run, tmp_path))
    assert [(save["outcome"], save["blocked_s"]) for save in report["saves"]] == [("ok", 3.0), ("unknown", 3.0)]
    assert report["loads"][0]["load_s"] == 1.5


def test_several_ranks_are_one_run(tmp_path: Path) -> None:
    """Whether their files follow one another or were merged."""
    run = imported(tmp_path, log_of(0) + log_of(1) + log_of(2))
    assert [save.call for save in run.saves] == [Range(5.0, 3.0)] * 2
    assert [load.call for load in run.loads] == [Range(3.5, 1.5)]
    assert [each.step_s for each in run.iterations] == [pytest.approx(4.0)] * 4
    merged = "".join(
        "".join(lines) for lines in zip(*(log_of(rank).splitlines(keepends=True) for rank in range(3)), strict=True)
    )
    again = imported(tmp_path, merged)
    assert (again.saves, again.loads, again.iterations) == (run.saves, run.loads, run.iterations)


def test_a_fresh_start_has_loaded_nothing_that_is_known(tmp_path: Path) -> None:
    run = imported(tmp_path, log_of(0, loaded=0, saved=()))
    assert run.loads == [] and run.saves == [] and len(run.iterations) == 4


def test_evaluation_is_no_part_of_a_step(tmp_path: Path) -> None:
    step = {"step": 1, "relative_step": 1}
    run = imported(tmp_path, event(0, "eval_end", 500, **step) + event(0, "step_end", 2500, **step))
    assert run.iterations[0].step_s == pytest.approx(2.0)


def test_spans_of_other_names_are_named(tmp_path: Path) -> None:
    others = event(0, "fwd_bwd_end", 500, step=5) + event(0, "fwd_bwd_end", 500, step=6) + event(0, "gc_end", 5)
    run, whole = imported(tmp_path, log_of(0) + others), imported(tmp_path, log_of(0))
    assert run.unused_timers == {"fwd_bwd": 2, "gc": 1}
    assert (run.saves, run.loads, run.iterations) == (whole.saves, whole.loads, whole.iterations)


def test_files_of_two_launches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CouldNotRunError, match="rank 0 ends checkpoint_load a second time, .* several launches"):
        imported(tmp_path, log_of(0) + log_of(0, loaded=8))


@pytest.mark.parametrize(
    "damaged",
    [
        '{"rank": 0, "log_type_name": "step_end"', '{"log_type_name": "step_end"}\n',
        event(-1, "step_end", 3, step=9), event(0, "step_end", step=9), event(0, "step_end", 3, step="9"),
        event(0, "step_end", 3, step=9).replace("3, ", "NaN, "), event(0, "step_end", -3, step=9),
        event(0, "checkpoint_save_end", 3, step=9, step_tags="checkpoint_save"),
        '{"rank": 0, "step": 9, "value": 3, "log_type_name": "step_end", "log_type_name": 7}\n',
    ],
)  # fmt: skip
def test_damaged_lines_say_nothing(tmp_path: Path, damaged: str) -> None:
    run, whole = imported(tmp_path, log_of(0) + damaged), imported(tmp_path, log_of(0))
    assert (run.saves, run.loads, run.iterations) == (whole.saves, whole.loads, whole.iterations)


@pytest.mark.nightly(minutes=1)
def test_lines_of_torchtitans_own_logger(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "titan")]
    subprocess.run([*pip, f"torchtitan=={VERSION}"], check=True, timeout=300)
    for rank in (0, 1):
        program = f"import sys; sys.path.insert(0, {str(tmp_path / 'titan')!r})\n{PROGRAM}"
        command = [sys.executable, "-c", program, str(tmp_path), str(rank)]
        subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    files = sorted((tmp_path / "structured_logs").iterdir())
    run = imported(tmp_path, "".join(path.read_text() for path in files))
    assert len(files) == 2 and [save.step for save in run.saves] == [6] and [load.step for load in run.loads] == [4]
    assert [each.step for each in run.iterations] == [5, 6, 7]
