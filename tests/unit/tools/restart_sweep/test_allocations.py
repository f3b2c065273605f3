"""Cells that need the same nodes share a job of Slurm: --submit and --allocation of restart-sweep."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from tools.restart_sweep.cells import cells_of
from tools.restart_sweep.cli import main
from tools.restart_sweep.directory import opened
from tools.restart_sweep.sweep_file import read_sweep

FILE = """\
name: shared
repeats: 2
storage_bytes: 2MiB
time_limit: 1800
runs:
  - {mode: replay, models: [tiny], engines: [torch, lazy], limit_bytes: 1MiB}
  - {mode: train, models: [1b], engines: [none, lazy], layouts: [tp2_pp1, tp2_pp2, tp4_pp2_dp2]}
  - {mode: scaled, models: [tiny], engines: [lazy]}
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUS_PER_NODE", "4")
    path = tmp_path / "shared.yaml"
    path.write_text(FILE)
    return path


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which a program in the place of sbatch writes the arguments of each job, one line each."""
    given, program = tmp_path / "submitted", tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(f"""\
#!{sys.executable}
import pathlib, shlex, sys
given = pathlib.Path({str(given)!r})
with given.open("a") as file:
    file.write(shlex.join(sys.argv[1:]) + "\\n")
number = len(given.read_text().splitlines())
if "--refused-after" in sys.argv and number > 1:
    sys.exit("no such account")
print(f"7{{number}};name")
""")
    program.chmod(0o755)
    squeue = program.with_name("squeue")
    squeue.write_text(
        '#!/bin/sh\n[ $# = 4 ] && [ $1 = --clusters=name ] && [ -z "$SQUEUE_STATES" ] && cat '
        + shlex.quote(f"{given}.left")
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return given


@pytest.mark.slow
def test_a_dry_run_tells_the_hours_of_each_allocation(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", str(asked)]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("allocations, as --submit"))
    assert lines[first + 1 : first + 5] == [
        "  1x0 (nodes x GPUs): 8 cells, at most 4 hours and 0 GPU-hours",
        "  1x4 (nodes x GPUs): 8 cells, at most 4 hours and 16 GPU-hours",
        "  4x4 (nodes x GPUs): 4 cells, at most 2 hours and 32 GPU-hours",
        "",
    ]
    assert lines[-1] == "GPU-hours: at most 48: 12 cells in allocations of whole nodes, at most 16 GPUs at a time"


@pytest.mark.slow
def test_each_allocation_is_a_job_and_its_cells_are_chosen_in_it(
    asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--submit", "--dry-run", str(asked), "--out", str(tmp_path / "out"), "--engines", "lazy", "--retry-failed"]
    assert main([*words, "--", "--account", "physics"]) == 0
    jobs = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [[word for word in job if word.startswith(("--nodes", "--gpus", "--time"))] for job in jobs] == [
        ["--nodes=1", "--time=3:10:00"],
        ["--nodes=1", "--gpus-per-node=4", "--time=2:10:00"],
        ["--nodes=4", "--gpus-per-node=4", "--time=1:10:00"],
    ]
    assert all(
        {"--dependency=singleton", "--job-name=sweep_shared", "--account", "physics"} <= set(job) for job in jobs
    )
    programs = [shlex.split(job[-1].removeprefix("--wrap=exec ")) for job in jobs]
    assert ["LAUNCHER=srun" in program for program in programs] == [False, True, True]
    modes = []
    for program in programs:
        words = program[program.index(str(asked)) :]
        assert "GPUS_PER_NODE=4" in program and "--retry-failed" in words
        assert main([*words, "--dry-run"]) == 0
        cells = [line.split() for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]
        modes.append({" ".join(cell[3:6]) for cell in cells})
    assert modes == [
        {"the storage itself", "replay tiny tp2_pp2_dp1", "scaled tiny tp2_pp2_dp1"},
        {"train 1b tp2_pp1_dp1", "train 1b tp2_pp2_dp1"},
        {"train 1b tp4_pp2_dp2"},
    ]


def test_jobs_are_handed_over_and_their_output_is_named(
    asked: Path, sbatch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path)
    words = ["--submit", str(asked), "--out", "new/out", "--dir", "scratch", "--models", "1b", "--no-report"]
    assert main([*words, "--", "--account", "physics"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("restart-sweep: job 71: 2 cells on 1x0") and told[2].startswith(
        "restart-sweep: job 73: 4"
    )
    assert told[1].endswith(f"its output: {tmp_path}/new/out.slurm-72.out") and (tmp_path / "new").is_dir()
    jobs = [shlex.split(line) for line in sbatch.read_text().splitlines()]
    own = [
        ["--nodes=1", "--ntasks-per-node=4", "--time=1:10:00"],
        ["--nodes=1", "--ntasks-per-node=4", "--gpus-per-node=4", "--time=4:10:00"],
        ["--nodes=4", "--ntasks-per-node=4", "--gpus-per-node=4", "--time=2:10:00"],
    ]
    for job, nodes in zip(jobs, own, strict=True):
        assert set(job[:-1]) == {
            "--parsable", "--job-name=sweep_shared", "--dependency=singleton", *nodes, "--requeue",
            "--open-mode=append", "--signal=B:TERM@60", f"--output={tmp_path}/new/out.slurm-%j.out",
            "--account", "physics",
        }  # fmt: skip
    of_sweep = [str(asked), "--out", f"{tmp_path}/new/out", "--dir", f"{tmp_path}/scratch", "--models", "1b"]
    for job, name, launcher in zip(
        jobs, ("1x0", "1x4", "4x4"), ([], ["LAUNCHER=srun"], ["LAUNCHER=srun"]), strict=True
    ):
        assert job[-1].startswith("--wrap=exec env ")
        program = [sys.executable, "-m", "tools.restart_sweep", *of_sweep, "--no-report", "--allocation", name]
        assert shlex.split(job[-1].removeprefix("--wrap=exec env ")) == ["GPUS_PER_NODE=4", *launcher, *program]


def test_jobs_of_cpu_ranks_ask_for_no_gpus(
    asked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEVICE", "cpu")
    assert main(["--submit", "--dry-run", str(asked)]) == 0
    jobs = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    # Replays share a node with the trainings that fit one.
    assert [job[-1].rpartition("--allocation ")[2] for job in jobs] == ["1x0", "4x0"]
    assert not any(word.startswith("--gpus") for job in jobs for word in job)
    assert all("--ntasks-per-node=4" in job for job in jobs)


def test_what_sbatch_refuses_is_told_with_the_jobs_before_it(
    asked: Path, sbatch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--submit", str(asked), "--out", str(tmp_path / "out"), "--", "--refused-after", "1"]) == 2
    said = capsys.readouterr().err
    assert "sbatch refused " in said and said.endswith(": no such account; submitted before: 71\n")
    assert len(sbatch.read_text().splitlines()) == 2


def test_cells_whose_job_waits_or_runs_are_not_submitted_again(
    asked: Path, sbatch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, left = tmp_path / "out[1]", Path(f"{sbatch}.left")
    words = ["--submit", str(asked), "--out", str(out)]
    assert main([*words, "--models", "1b"]) == 0  # jobs 71 to 73; without --models more cells on 1x0
    left.write_text("CLUSTER: name\n71 PENDING\n72 COMPLETING\n73 RUNNING\n99 RUNNING\n")
    capsys.readouterr()
    assert main(words) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[0].endswith(" cells have jobs that wait or run, and get no others: 71, 73")
    assert [line.partition("; ")[0] for line in told[1:]] == [
        "restart-sweep: job 74: 6 cells on 1x0 (nodes x GPUs)", "restart-sweep: job 75: 8 cells on 1x4 (nodes x GPUs)",
    ]  # fmt: skip
    left.write_text("71 PENDING\n73 RUNNING\n74 PENDING\n75 PENDING\n")
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")  # a user's: it hides jobs that wait
    assert main(words) == 0 and len(sbatch.read_text().splitlines()) == 5
    assert main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out == ""


def test_a_failure_is_repeated_by_a_job_that_repeats_failures(
    asked: Path, sbatch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, left = tmp_path / "out", Path(f"{sbatch}.left")
    words = ["--submit", str(asked), "--out", str(out), "--models", "1b"]
    assert main(words) == 0
    left.write_text("71 RUNNING\n72 PENDING\n73 PENDING\n")
    sweep = read_sweep(asked)
    with opened(out, sweep, cells_of(sweep), None) as directory:
        directory.begin_cell(cells_of(sweep)[0])
        directory.end_cell(cells_of(sweep)[0], {"status": "failed"})
    assert main([*words, "--retry-failed"]) == 0  # what job 71 measured it does not measure again
    assert "restart-sweep: job 74: 1 cell on 1x0" in capsys.readouterr().err
    left.write_text("74 PENDING\n72 PENDING\n73 PENDING\n71 RUNNING\n")
    assert main([*words, "--retry-failed"]) == 0
    assert capsys.readouterr().err.endswith("get no others: 71, 72, 73, 74\n")


def test_jobs_of_which_nothing_is_known_are_not_doubled(
    asked: Path, sbatch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--submit", str(asked), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    assert main(words) == 2  # squeue fails
    said = capsys.readouterr().err
    assert "squeue cannot tell which jobs of earlier submissions are left: cat: " in said
    assert main([*words, "--dry-run"]) == 0  # where there may be no Slurm
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 3 and "these are the jobs without those" in shown.err
    note = Path(f"{tmp_path / 'out'}.slurm-71.json")
    note.write_text("{")
    assert main(words) == 2
    assert f"{note}: says not which cells its job has" in capsys.readouterr().err
    assert len(sbatch.read_text().splitlines()) == 3


def test_what_has_a_result_is_not_submitted_again(
    asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked.write_text(FILE.replace("repeats: 2", "repeats: 1"))
    out = tmp_path / "out"
    words = ["--submit", "--dry-run", str(asked), "--out", str(out), "--models", "1b", "--engines", "lazy"]

    def hours(status: int = 0) -> tuple[list[str], str]:
        assert main(words) == status
        told = capsys.readouterr()
        jobs = map(shlex.split, told.out.splitlines())
        return [word for job in jobs for word in job if word.startswith("--time")], told.err

    assert hours() == (["--time=0:40:00", "--time=1:10:00", "--time=0:40:00"], "")
    sweep = read_sweep(asked)
    cells = [cell for cell in cells_of(sweep) if cell.mode == "storage" or cell.engine == "lazy"]
    with opened(out, sweep, cells_of(sweep), None) as directory:
        for cell in cells[1:]:
            directory.begin_cell(cell)
            directory.end_cell(cell, {"status": "failed" if cell.layout == "tp4_pp2_dp2" else "ok"})
        failed = "restart-sweep: 1 of 4 cells failed; --retry-failed submits them again\n"
        assert hours() == (["--time=0:40:00"], failed)
        directory.begin_cell(cells[0])
        directory.end_cell(cells[0], {"status": "ok"})
    assert hours(status=1) == ([], failed)
    words.append("--retry-failed")
    assert hours() == (["--time=0:40:00"], "")
    with opened(out, sweep, cells_of(sweep), None) as directory:
        (again,) = directory.failed(cells)
        directory.move_failures_aside(cells)
        directory.begin_cell(again)
        directory.end_cell(again, {"status": "ok"})
    assert hours() == ([], f"restart-sweep: every cell has its result in {out}: there is nothing to submit\n")


def test_what_no_job_could_write_to_is_refused_before_one_is_submitted(
    asked: Path, sbatch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    another, file = tmp_path / "another", tmp_path / "file"
    with opened(another, sweep := read_sweep(asked), cells_of(sweep), None):
        pass
    asked.write_text(FILE.replace("repeats: 2", "repeats: 3"))
    file.touch()
    for words, said in (
        (["--out", another], "holds another sweep"),
        (["--out", another, "--dry-run"], "holds another sweep"),
        (["--out", file], "is no directory"),
        (["--out", tmp_path / "new", "--dir", tmp_path / "none"], "none: is no directory; make it first"),
        (["--out", tmp_path / "new", "--dir", "s3://bucket/sweep"], "asks for what object storage does not have"),
    ):
        assert main(["--submit", str(asked), *map(str, words)]) == 2, words
        assert said in capsys.readouterr().err
    assert not sbatch.exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "option", ["--dependency=afterok:7", "--dependency", "--depend=afterok:7", "-d", "-dafterok:7"]
)
def test_an_order_that_would_replace_that_of_the_jobs_is_refused(
    asked: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--submit", "--dry-run", str(asked), "--", "--account", "x", option, "afterok:7"])
    said = capsys.readouterr().err
    assert f"-- {option}: the jobs of a sweep wait for each other by --dependency=singleton; leave it out" in said


@pytest.mark.parametrize(
    ("changed", "words", "said"),
    [
        ({}, ["--allocation", "9x9", "--dry-run"], "--allocation 9x9: no cell needs it; there are 1x0, 1x4, 4x4"),
        ({"GPUS_PER_NODE": "no"}, ["--submit"], "GPUS_PER_NODE=no: give a whole number, at least 1"),
        ({"HOSTFILE": "hosts"}, ["--submit"], "HOSTFILE: a job of --submit runs on the hosts that Slurm allocates"),
        ({"LAUNCHER": "torchrun"}, ["--submit"], "LAUNCHER=torchrun: in a job of --submit srun starts the ranks"),
        ({"PATH": "/none"}, ["--submit"], "--submit: sbatch is not on PATH; submit where it is, or add --dry-run"),
    ],
)
def test_what_cannot_be_submitted(
    asked: Path,
    changed: dict[str, str],
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    assert main([str(asked), "--out", str(asked.parent / "out"), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_launcher_of_the_file_and_options_without_submit_are_refused(
    asked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked.write_text(FILE.replace("tp4_pp2_dp2]", "tp4_pp2_dp2], launcher: fork"))
    assert main(["--submit", "--dry-run", str(asked)]) == 2
    assert "--submit: the file has launcher: fork" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--dry-run", str(asked), "--", "--account", "x"])
    assert "-- --account: options of sbatch go with --submit" in capsys.readouterr().err
