"""What the comparison of copies makes of a trace and of a counter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.replication_traffic.__main__ import main
from benchmarks.replication_traffic.figures import analyse, render
from benchmarks.replication_traffic.plan import INTERLEAVE, NAIVE, NONE, Plan
from benchmarks.replication_traffic.results import write_results

S = 1_000_000_000
LINK = 1e9  # bytes a second
STEPS = {NONE: S, INTERLEAVE: S + S // 25, NAIVE: 2 * S}
PLAN = Plan("", warm_up=10, rounds=2, block=4, settle=1, compute_s=0.0, gathered_bytes=0)


def trace() -> tuple[list[dict[str, object]], list[list[int]]]:
    """Steps as long as STEPS says of the save before, each but `none` with a copy; the link is idle half of a step."""
    records: list[dict[str, object]] = []
    sent, now, before = [[0, 0]], 0, NONE
    for step in range(1, PLAN.iterations + 1):
        length = STEPS[before]
        records.append({"type": "iteration", "step": step, "start_ns": now, "end_ns": now + S})
        sent += [[now + length // 2, sent[-1][1]], [now + length, sent[-1][1] + length // 2]]
        now, before = now + length, PLAN.variant(step)
        if before != NONE:
            records.append({"type": "operation_begin", "operation": "save", "op": step, "step": step, "start_ns": now})
            records.append({"op": step, "phase": "replicate", "bytes": 100, "start_ns": now, "end_ns": now + S // 2})
            records.append({"op": step, "phase": "barrier", "start_ns": now, "end_ns": now + S // 4})
        if before == INTERLEAVE:
            detail = "interleave: waited 0.100 s; 10 of 100 bytes at once"
            records.append({"type": "event", "operation": "save", "phase": "replicate", "detail": detail, "step": step})
    return records, sent


def test_a_save_is_charged_to_the_step_after_it() -> None:
    records, sent = trace()
    found = analyse(records, sent, PLAN, LINK)
    assert PLAN.iterations == 10 + 2 * 3 * 4
    for name, length in STEPS.items():
        one = found.variants[name]
        steps = [seconds for block in one.steps for seconds in block]
        assert steps == [length / S] * len(steps) and len(one.steps[0]) == 3
        assert one.idle == [length / 2 / S] * len(steps)
        assert one.sent == [length // 2] * len(steps)
    assert found.variants[NONE].copied == [] and set(found.variants[NAIVE].copied) == {0.5}
    assert set(found.variants[NAIVE].blocked) == {0.25}
    assert (found.copy_bytes, found.at_once) == (100, 0.1)
    text = render(found, {"load_average_1_min": 0.5, "processors": 2})
    assert (
        "interleave takes 1.040 of the step without checkpoints (target: at most 1.05: met); 10% of its bytes" in text
    )
    assert "| naive | 2.000 | 2.000 to 2.000 | 2.000 (2.000 to 2.000) | 1.000 | 1000.0 | 0.500 | 0.250 |" in text


def test_results_are_named_as_geminis_artifact_names_them(tmp_path: Path) -> None:
    records, sent = trace()
    write_results(analyse(records, sent, PLAN, LINK), tmp_path / "gemini")
    found = json.loads((tmp_path / "gemini" / "results.json").read_text())["GPT"]
    counted = {name: len(times) for name, times in found.pop("step_times").items()}
    assert counted == {NONE: 6, INTERLEAVE: 6, NAIVE: 5}, "the last step has no end"
    assert found == {
        "checkpoint_size": 100 / 1e6,
        "idle_time": 0.5,
        "checkpoint_time": 0.5,
        "gemini_idle_time": 0.52,
        "naive_idle_time": 1.0,
    }
    for number, title in ((7, "Iteration time"), (8, "Network idle time")):
        figure = (tmp_path / "gemini" / f"Figure_{number}.svg").read_text()
        assert all(f"<!-- {text}" in figure for text in (title, NONE, INTERLEAVE, NAIVE))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--settle", "10"], "--settle 10: leaves nothing of --block 10"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (
            ["--zero-stage", "3", "--gather-mb", "6"],
            "--gather-mb 6: with --zero-stage 3 DeepSpeed gathers; drop the flag",
        ),
        ([], "HOSTFILE is not set"),
    ],
)
def test_what_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOSTFILE", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert message in capsys.readouterr().err
