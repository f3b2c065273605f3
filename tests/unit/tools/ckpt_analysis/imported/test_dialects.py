"""Logs of Megatron-LM, and of programs whose words are not known: no save is judged by words that they do not print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.tools.ckpt_analysis.upstream_log_factory import upstream_log
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.common.errors import CouldNotRunError
from tools.ckpt_analysis.imported.importer import import_log
from tools.ckpt_analysis.imported.to_report import to_report
from tools.ckpt_analysis.model.imported_run import ImportedRun, Range
from tools.ckpt_analysis.render.json_output import to_dict

# The launch line and what follows "to DIR" or precedes it, as the versions print them.
LAUNCHES = {
    "core v0.4": "using world size: 8, data-parallel size: 2, context-parallel size: 1 tensor-model-parallel size: 2, "
    "pipeline-model-parallel size: 2 ",
    "core v0.9": "using world size: 8, data-parallel size: 2, context-parallel size: 1, tensor-model-parallel size: 2, "
    "encoder-tensor-model-parallel size: 0, pipeline-model-parallel size: 2, encoder-pipeline-model-parallel size: 0",
    "core v0.12": "using world size: 8, data-parallel size: 1, context-parallel size: 2, hierarchical context-parallel "
    "sizes: Nonetensor-model-parallel size: 2, encoder-tensor-model-parallel size: 0, pipeline-model-parallel size: 2, "
    "encoder-pipeline-model-parallel size: 0",
    "core v0.19": "using world size: 8, data-parallel size: 2, context-parallel size: 1, hierarchical context-parallel "
    "sizes: None, tensor-model-parallel size: 2, pipeline-model-parallel size: 2",
}
DATE = "[2026-03-01 12:00:00.123456] "
ENDS = {
    "old": "  successfully saved checkpoint at iteration {step:7d} to /scratch/run",
    "plain": "  successfully saved checkpoint from iteration {step:7d} to /scratch/run",
    "places": "  successfully saved checkpoint from iteration {step:7d} to /scratch/run [ t 1/2, p 1/2 ]",
    "dated": f"  {DATE}successfully saved checkpoint from iteration {{step:7d}} to /scratch/run "
    "[ t 1/2, gtp_remat 1/1, p 1/2 ]",
    "local": "  successfully saved local checkpoint from iteration {step:7d}",
}


def log_of(launch: str, end: str, *, asynchronous: bool = False, ended: int = 3, timers: bool = True) -> str:
    """A log of three saves, of which `ended` say so; asynchronous ones after the next one has begun."""
    lines = [launch, "  successfully loaded checkpoint from /scratch/run [ t 1/2, p 1/2 ] at iteration 4"]
    lines.append("    load-checkpoint ................................: (1200.50, 1250.75)")
    ends = [end.format(step=step) for step in (5, 6, 7)][:ended]
    for place, step in enumerate((5, 6, 7)):
        lines += [
            f" {DATE}iteration {step:8d}/      60 | consumed samples: 4 | "
            "elapsed time per iteration (ms): 500.0 | lm loss: 9.500000E+00 |",
            f"{DATE}saving checkpoint at iteration {step:7d} to /scratch/run in torch_dist format",
        ]
        if asynchronous:
            lines.append(f"  {DATE}scheduled an async checkpoint save at iteration {step:7d} to /scratch/run")
        lines += ends[place : place + 1] if not asynchronous else ends[place - 1 : place] if place else []
        if timers:
            lines += ["(min, max) time across ranks (ms):"]
            lines += [f"    save-checkpoint ................................: (1000.00, {1000 + step}.00)"]
    lines += ends[2:] if asynchronous else []
    return "\n".join(lines) + "\n"


def imported(text: str, tmp_path: Path, world_size: int | None = None) -> ImportedRun:
    log = tmp_path / "train.log"
    log.write_text(text)
    return import_log(log, world_size)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_layouts_of_megatron_lm(tmp_path: Path, launch: str) -> None:
    run = imported(log_of(LAUNCHES[launch], ENDS["places"]), tmp_path)
    assert run.launched.world_size == 8
    assert run.launched.layout == {"tp": 2, "pp": 2, "dp": 1 if launch == "core v0.12" else 2}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_saves_of_megatron_lm(tmp_path: Path, end: str, asynchronous: bool) -> None:
    text = log_of(LAUNCHES["core v0.19"], ENDS[end], asynchronous=asynchronous)
    report = to_dict(to_report(imported(text, tmp_path), tmp_path))
    assert [(save["step"], save["outcome"], save["wall"]["max_s"]) for save in report["saves"]] == [
        (5, "ok", 1.005), (6, "ok", 1.006), (7, "ok", 1.007)
    ]  # fmt: skip
    assert [load["step"] for load in report["loads"]] == [4]
    assert ("saves were asynchronous" in str(report["problems"])) == asynchronous


def test_a_save_of_megatron_lm_that_did_not_end_is_unfinished(tmp_path: Path) -> None:
    text = log_of(LAUNCHES["core v0.19"], ENDS["places"], asynchronous=True, ended=2)
    assert [save.completed for save in imported(text, tmp_path).saves] == [True, True, False]


def test_encoder_ranks_are_no_product_of_the_sizes(tmp_path: Path) -> None:
    launch = LAUNCHES["core v0.9"].replace("size: 8,", "size: 12,")
    launched = imported(log_of(launch.removesuffix("0") + "1", ENDS["places"]), tmp_path).launched
    assert (launched.world_size, launched.layout) == (12, {})


@pytest.mark.parametrize(("timers", "outcome"), [(True, "ok"), (False, "unknown")])
def test_no_save_is_judged_in_words_that_are_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], timers: bool, outcome: str
) -> None:
    text = log_of("8 ranks are there", "checkpoint {step} is safe", timers=timers)
    with pytest.raises(CouldNotRunError, match="give --world-size N"):
        imported(text, tmp_path)
    run = imported(text, tmp_path, world_size=8)
    report = to_report(run, tmp_path)
    assert [save.outcome for save in report.saves] == [outcome] * 3
    assert main(["import", str(tmp_path / "train.log"), "--world-size", "8", "-o", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    for command in ("report", "summary", "compare"):
        directory = str(tmp_path / "run")
        several = [f"a={directory}", f"b={directory}"] if command == "compare" else [directory]
        assert main([command, *several]) == 0
        shown = capsys.readouterr().out
        assert "did not complete" not in shown and "did not end well" not in shown and "nfinished" not in shown
    assert ("saves completed is not known" in str([p.message for p in report.problems])) == (not timers)


LM_2 = """using world size: 4, data-parallel-size: 1, tensor-model-parallel size: 2, pipeline-model-parallel size: 2
 loading checkpoint from /scratch/run at iteration 40
  successfully loaded checkpoint from /scratch/run at iteration 40
time (ms) | load-checkpoint: 812.31
done with setup ...time (ms) | model-and-optimizer-setup: 3111.39 | train/valid/test-data-iterators-setup: 415.50
 iteration       41/     300 | consumed samples:   656 | elapsed time per iteration (ms): 1996.1 | lm loss: 6.07E+00 |
time (ms) | forward-compute: 51.73 | backward-compute: 136.70 | optimizer: 7.01
 iteration       42/     300 | consumed samples:   672 | elapsed time per iteration (ms): 1990.2 | lm loss: 6.05E+00 |
time (ms) | forward-compute: 50.73 | backward-compute: 135.70 | optimizer: 7.02
saving checkpoint at iteration      42 to /scratch/run
[2021-08-08 01:00:44,221] [INFO] [logging.py:68:log_dist] [Rank 0] Saving model checkpoint: /scratch/run/global_step42/mp_rank_00_model_states.pt
  successfully saved checkpoint at iteration      42 to /scratch/run
time (ms) | save-checkpoint: 57514.53
time (ms) | save-checkpoint: 4.00
"""  # noqa: E501
DEEPSPEED = """[2024-05-01 10:00:00,100] [INFO] [torch_checkpoint_engine.py:27:load] [Torch] Loading checkpoint from /run/global_step3/a.pt...
[2024-05-01 10:00:01,350] [INFO] [torch_checkpoint_engine.py:29:load] [Torch] Loaded checkpoint from /run/global_step3/a.pt.
[2024-05-01 10:00:09,000] [INFO] [logging.py:96:log_dist] [Rank 0] step=4, skipped=0, lr=[0.001], mom=[[0.9, 0.99]]
[2024-05-01 10:00:10,000] [INFO] [logging.py:96:log_dist] [Rank 0] [Torch] Checkpoint global_step4 is about to be saved!
[2024-05-01 10:00:12,000] [INFO] [torch_checkpoint_engine.py:33:commit] [Torch] Checkpoint global_step4 is ready now!
[2024-05-01 10:00:12,250] [INFO] [torch_checkpoint_engine.py:33:commit] [Torch] Checkpoint global_step4 is ready now!
[2024-05-01 10:00:20,000] [INFO] [logging.py:96:log_dist] [Rank 0] [Torch] Checkpoint best is about to be saved!
[2024-05-01 10:00:20,500] [INFO] [torch_checkpoint_engine.py:33:commit] [Torch] Checkpoint best is ready now!
[2024-05-01 10:00:30,000] [INFO] [logging.py:96:log_dist] [Rank 0] [Torch] Checkpoint best is about to be saved!
"""  # noqa: E501


def test_timers_that_one_rank_prints_in_one_line(tmp_path: Path) -> None:
    """As Megatron-LM 2.x and BigScience do. A timer of no save, and one that is none of these, are named."""
    run = imported(LM_2, tmp_path)
    report = to_dict(to_report(run, tmp_path))
    (save,), (load,) = report["saves"], report["loads"]
    assert (save["step"], save["outcome"], save["wall"]["max_s"], save["wall"]["min_s"]) == (42, "ok", 57.51453, None)
    assert (load["step"], load["wall"]["max_s"]) == (40, 0.81231)
    setup = {name: took.max_s for name, took in run.setup.items()}
    assert setup == pytest.approx(
        {"model-and-optimizer-setup": 3.11139, "train/valid/test-data-iterators-setup": 0.4155}
    )
    assert run.unused_timers == {"backward-compute": 2, "forward-compute": 2, "optimizer": 2, "save-checkpoint": 1}
    assert "forward-compute (2), optimizer (2), save-checkpoint (1)" in str(report["problems"])


ALL_RANKS = """\
times across ranks (ms):
  {name}:
     rank  0: 1500.25
     rank  1: 1000.50
     rank 10: 2000.75
  forward-compute:
     rank  0: 9000.00
     rank  1: 9.00
     rank 10: 9.00
"""


def test_timers_of_all_ranks(tmp_path: Path) -> None:
    """As Megatron-LM prints them with --timing-log-option all (megatron/core/timers.py, _get_all_ranks_time_string)."""
    setup = "model-and-optimizer-setup"
    blocks = (ALL_RANKS.format(name=name) for name in ("load-checkpoint", setup, "save-checkpoint", "save-checkpoint"))
    loaded, built, saved, again = blocks
    log = log_of(LAUNCHES["core v0.9"], ENDS["plain"], timers=False).replace("load-checkpoint .", "other .")
    run = imported(loaded + built + log + saved + again, tmp_path)
    took = Range(2.00075, 1.0005)
    assert ([load.call for load in run.loads], run.setup[setup], run.saves[-1].call) == ([took], took, took)
    assert run.unused_timers == {"forward-compute": 4, "other": 1, "save-checkpoint": 1}


def test_times_that_belong_to_nothing_are_named(tmp_path: Path) -> None:
    """Before any save, a second set-up, and a name that is so long that no dots follow it."""
    long = "a-timer-with-a-name-that-is-longer-than-the-column-of-names"
    lines = [
        "[Torch] CkptTime a.pt 0.5", "Waited for all snapshots to complete in 0.5s",
        "Checkpoint Save GB: 1.0, GB/Sec: 2.0, Latency(second): 0.5", f"    {long} : (1.00, 2.00)",
        *["time (ms) | model-and-optimizer-setup: 3.0"] * 2,
    ]  # fmt: skip
    run = imported("\n".join([*lines, log_of(LAUNCHES["core v0.9"], ENDS["plain"])]), tmp_path)
    assert run.unused_timers == {
        "Checkpoint Save": 1, "CkptTime": 1, long: 1, "model-and-optimizer-setup": 1,
        "wait of the checkpointing engine": 1,
    }  # fmt: skip
    assert all(f"{name} (1)" in str(to_dict(to_report(run, tmp_path))["problems"]) for name in run.unused_timers)


def test_dated_lines_of_deepspeed_are_times(tmp_path: Path) -> None:
    """Of a job that prints nothing else of its saves: from the first line to the last rank's."""
    run = imported(DEEPSPEED, tmp_path, world_size=2)
    report = to_dict(to_report(run, tmp_path))
    assert [(s["tag"], s["step"], s["outcome"], s["wall"] and s["wall"]["max_s"]) for s in report["saves"]] == [
        ("global_step4", 4, "ok", 2.25), ("best", None, "ok", 0.5), ("best", None, "unfinished", None),
    ]  # fmt: skip
    assert [(load["step"], load["wall"]["max_s"]) for load in report["loads"]] == [(3, 1.25)]
    assert run.engine == "Torch" and "by the dates in the log" in str(report["problems"])


def test_a_timer_counts_before_dates(tmp_path: Path) -> None:
    timed = DEEPSPEED + "    save-checkpoint ................................: (2300.00, 2301.00)\n"
    newest = imported(timed, tmp_path, world_size=2).saves[-1]
    assert (newest.call and newest.call.max_s, newest.dated) == (2.301, False)


def altered_imports() -> list[tuple[str, object]]:
    places = ("run_id", "launched", "engine", "parameters", "arguments", "versions", "saves", "loads", "iterations",
              "setup", "timers", "unused_timers", "to_first_step_s", "listing")  # fmt: skip
    return [(place, value) for place in places for value in (True, "x", 1 << 70, [1], {"a": []}, -0.5)]


@pytest.mark.parametrize(("field", "value"), altered_imports())
def test_an_altered_import_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: object
) -> None:
    log = tmp_path / "train.log"
    log.write_text(upstream_log())
    assert main(["import", str(log), "-o", str(tmp_path / "run"), "--quiet"]) == 0
    path = tmp_path / "run" / "imported.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    assert main(["summary", str(tmp_path / "run")]) in (0, 2)
    said = capsys.readouterr().err
    assert said.count("\n") <= 1 and ("is damaged" in said or not said)
