"""Command lines that are refused, each with status 2 and a message, before anything is written or launched."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tools.restart_drill import cli
from tools.restart_drill.drill import in_turn, run_drill
from tools.restart_drill.launch import DrillError
from tools.restart_drill.options import parse_arguments

HELPER = "launcher=torchrun,workers=2,engine=lazy,signal=SIGKILL,target=helper,moment=save,next=later"
ONE = [
    ("--cycles 0", "--cycles 0: must be at least 1"),
    ("--at lunch", "lunch: not an injection point"),
    ("--fault flood", "invalid choice: 'flood'"),
    ("--out /", "--out /: already exists"),
    (f"--out {__file__}", "already exists"),
    ("--resume-tp 0", "must be a whole number, at least 1"),
    (
        "--fault sigkill-node --supervisor torchrun",
        "--fault sigkill-node ends the launcher that --supervisor torchrun needs; use --supervisor relaunch",
    ),
    ("--fault disk-full --at mid-load", "--fault disk-full --at mid-load: nothing is saved then"),
    (
        "--fault truncate --at mid-startup --cycles 2",
        "--fault truncate --at mid-startup --cycles 2: nothing is saved between such faults",
    ),
    ("--reference /a --no-reference", "--reference /a with --no-reference: give only one of them"),
    ("--supervisor torchrun --resume-pp 2", "--supervisor torchrun with --resume-tp"),
    ("--supervisor torchrun --cold-cache", "--supervisor torchrun with --resume-tp"),
    ("--soak", "argument --soak: not allowed with argument --fault"),
    ("--sample 3", "--sample 3: has no meaning for --fault; remove one of the two"),
    ("--faults sigterm,sigstop", "--faults sigterm,sigstop: has no meaning for --fault"),
    ("--fault node-loss", "node-loss is a fault of a node; use --supervisor launch and --nodes-command"),
    (
        "--fault node-loss --supervisor launch",
        "node-loss is a fault of a node; use --supervisor launch and --nodes-command",
    ),
    (
        "--supervisor launch --nodes-command mine",
        "--fault sigkill-all reaches no other node; with --nodes-command use one of",
    ),
    ("--supervisor launch --fault sigkill-launcher", "ends the launcher that --supervisor launch needs"),
    ("--supervisor launch --at mid-return", "is for signals to ranks that return; use --supervisor in-process"),
    ("--supervisor in-process --fault bitflip --at mid-return", "--at mid-return: is for signals to ranks that return"),
    ("--supervisor in-process --fault sigkill-node", "ends the launcher that --supervisor in-process needs"),
    ("--supervisor in-process --fault node-loss --nodes-command mine", "add --supervisor launch"),
    ("--persist-interval 0", "must be a whole number, at least 1"),
    ("--node=1,b", "1,b: must be node numbers separated by commas"),
    ("--node=1,0", "--node 1,0: has no effect without --nodes-command; remove it, or give that, too"),
    ("--hang-limit 0", "--hang-limit: 0: must be a number of more than 0"),
    ("--time-limit -1", "--time-limit: -1: must be a number of more than 0"),
    ("--disk-limit nan", "--disk-limit: nan: must be a number of more than 0"),
    ("--nodes-command mine", "--nodes-command mine: only faults of nodes use it"),
    (
        "--supervisor launch --fault node-loss --nodes-command mine --resume-pp 2",
        "--supervisor launch with --resume-tp",
    ),
]
MATRIX = [
    ("--sample 0", "--sample: 0: must be a whole number, at least 1"),
    ("--supervisors slurm", "choose from relaunch, torchrun"),
    ("--supervisors relaunch --nodes-command mine", "only faults of nodes use it"),
    ("--supervisors launch,relaunch --nodes-command mine", "only launch can supervise"),
    ("--faults flood", "--faults flood: choose from sigkill-one,"),
    ("--injection-points noon", "--injection-points noon: choose from mid-step,"),
    ("--moments mid-step", "--moments: no such option"),
    ("--spares 3", "--spares 3: has no effect without --nodes-command"),
    ("--engines torch,slow", "--engines: --checkpoint-engine slow: no such engine"),
]
SOAK = [
    ("--minutes 2 --saves 10", "--minutes 2: sets the duration; remove it, or --saves and --restarts"),
    ("--restarts 2 --engines torch,lazy,dcp-async", "--restarts 2: must be at least 1 for each of the 3 engines"),
    ("--minutes 0", "--minutes: 0: must be a number of more than 0"),
    ("--memory-limit 0", "--memory-limit: 0: must be a number of more than 0"),
    ("--checkpoints s3://bucket/prefix", "--checkpoints s3://bucket/prefix: a soak fills a disk"),
    ("--engines lazy,slow", "--checkpoint-engine slow: no such engine"),
    ("--faults disk-full", "--faults disk-full: these options allow sigkill-one"),
    ("--faults sigkill-all --nodes-command mine --spares 2", "--faults sigkill-all: these options allow"),
    ("--spares 4", "--spares 4: has no effect without --nodes-command"),
    ("--nodes-command mine --spares 1", "--spares 1: must be at least 2"),
    ("--nodes-command mine --spares 2 --checkpoints /d", "--checkpoints /d: disk-full cannot be injected on nodes"),
    ("--cold-cache", "--cold-cache: has no meaning for --soak; remove one of the two"),
    ("--supervisor torchrun", "--supervisor torchrun: a soak needs megatron.launch: use launch or in-process"),
    ("--supervisor in-process --nodes-command mine --spares 2", "--supervisor in-process with --nodes-command: leave"),
    (f"--stop {HELPER}", f"--stop {HELPER}: has no meaning for --soak"),
]
STOPS = [
    ("--stops 0", "--stops: 0: must be a whole number, at least 1"),
    ("--minutes 0", "--minutes: 0: must be a number of more than 0"),
    ("--engines lazy", "--engines lazy: has no meaning for --stops; remove one of the two"),
    ("--supervisor launch", "--supervisor launch: has no meaning for --stops; remove one of the two"),
    ("--memory-limit 1", "--memory-limit 1.0: has no meaning for --stops"),
    ("--nodes-command mine", "--nodes-command mine: has no meaning for --stops"),
    ("--stop signal=SIGHUP", "signal=SIGHUP: give launcher=..."),
]
ALL = {"--fault sigkill-all --at mid-step": ONE, "--matrix": MATRIX, "--soak": SOAK, "--stops 3": STOPS}
REFUSED = [(selection, f"{line} -- train", message) for selection, lines in ALL.items() for line, message in lines] + [
    ("", "-- train", "one of the arguments --fault --matrix --soak --stops is required"),
    ("--fault sigterm", "", "the following arguments are required: --at WHEN and, after --, the training command"),
]


@pytest.mark.parametrize(("selection", "line", "message"), REFUSED)
def test_a_wrong_command_line_is_refused(
    selection: str, line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_arguments([*shlex.split(selection), "--out", str(tmp_path / "new"), *shlex.split(line)])
    assert stopped.value.code == 2 and message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "selection",
    ["--fault storage-fault:503 --at mid-save-write", "--matrix", "--matrix --faults sigkill-one,storage-fault:503"],
)
def test_faults_of_storage_ask_for_its_endpoint_at_once(
    selection: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A matrix would come to them in hours."""
    words = [*shlex.split(selection), "--out", str(tmp_path / "new"), "--checkpoints", "s3://bucket/p", "--", "train"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "")
    with pytest.raises(SystemExit) as stopped:
        parse_arguments(words)
    assert stopped.value.code == 2 and "AWS_ENDPOINT_URL: is not set" in capsys.readouterr().err
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://store")
    assert parse_arguments(words).command == ["train"]


def test_the_training_follows_two_dashes(tmp_path: Path) -> None:
    right = ["--fault", "sigkill-all", "--at", "mid-step", "--out", str(tmp_path / "new"), "--", "train"]
    assert parse_arguments(right).command == ["train"]


def test_checkpoints_of_something_else_are_refused(tmp_path: Path) -> None:
    """A training would resume from them."""
    place = tmp_path / "place"
    (place / "global_step5").mkdir(parents=True)
    plan = cli.base_plan(parse_arguments(["--matrix", "--out", str(tmp_path / "new")]), ["train"])
    with pytest.raises(DrillError, match=f"--checkpoints: {place} is not empty; give a new directory"):
        run_drill(replace(plan, checkpoints=place), in_turn(()), [])
    assert [path.name for path in tmp_path.iterdir()] == ["place"]
