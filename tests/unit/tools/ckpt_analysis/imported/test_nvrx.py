"""Files as ft_launcher writes them for each cycle of a job, and a job's restarts imported from them."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tools.ckpt_analysis.__main__ import main
from tools.ckpt_analysis.common.errors import CouldNotRunError
from tools.ckpt_analysis.imported.file import read_run, write_run
from tools.ckpt_analysis.imported.nvrx import read_cycles
from tools.ckpt_analysis.imported.to_report import to_report
from tools.ckpt_analysis.model.imported_run import ImportedRun
from tools.ckpt_analysis.render.json_output import to_dict

ORIGIN = 1_790_000_000  # Unix time


def date(seconds: float) -> str:
    """As utc_iso_now of the writer."""
    return datetime.fromtimestamp(ORIGIN + seconds, timezone.utc).isoformat().replace("+00:00", "Z")


def written(
    directory: Path,
    number: int,
    start: float,
    end: float | None,
    *,
    attempt: int = 0,
    job: str = "4711",
    nodes: str = "node[001-002]",
) -> Path:
    """A file of CycleInfoWriter: NVIDIA/nvidia-resiliency-ext,
    src/nvidia_resiliency_ext/fault_tolerance/cycle_info_writer.py, with the fields of NVRxCycleInfo in
    shared_utils/proto/nvrx_interface.proto. protobuf's JSON has 64-bit integers as strings.
    """
    directory.mkdir(exist_ok=True)
    path = directory / f"cycle_info.{job}.{attempt}.{number}"
    record = {
        "job_id": job,
        "attempt_index": attempt,
        "cycle_number": number,
        "cycle_start_time": date(start),
        "cycle_end_time": "" if end is None else date(end),
        "cycle_log_file": f"/logs/train_cycle{number}.log",
        "active_nodes": nodes,
        "standby_nodes": "node[003]",
        "generation": "0" if end is None else "1",
        "active_ranks": "0-1",
    }
    path.write_text(json.dumps(record, indent=2))
    current = directory / f"cycle_info.{job}.current"
    current.unlink(missing_ok=True)
    current.symlink_to(path.name)
    return path


def downs(run: ImportedRun, directory: Path) -> list[tuple[int, str, float | None]]:
    return [(start.cycle, start.kind, start.down_s) for start in to_report(run, directory).starts]


def notes(run: ImportedRun, directory: Path) -> str:
    return "\n".join(problem.message for problem in to_report(run, directory).problems)


def test_the_files_are_one_job_with_its_restarts(tmp_path: Path) -> None:
    files = tmp_path / "nvrx"
    written(files, 0, 5.5, 1000.25)
    written(files, 1, 1012.5, 2000)
    written(files, 2, 2100, None)
    run = read_cycles(files, 16, None)
    assert [(each.attempt, each.number, each.ranks) for each in run.cycles] == [(0, 0, 16), (0, 1, 16), (0, 2, 16)]
    assert (run.cycles[0].start_unix_s, run.cycles[0].end_unix_s) == (ORIGIN + 5.5, ORIGIN + 1000.25)
    assert run.cycles[0].hosts == ["node001", "node002"] and run.cycles[0].standby_hosts == ["node003"]
    assert run.cycles[1].log == "/logs/train_cycle1.log" and run.cycles[2].end_unix_s is None
    write_run(run, tmp_path / "out")
    assert read_run(tmp_path / "out") == run
    assert downs(run, tmp_path) == [(0, "launch", None), (1, "restart", 12.25), (2, "restart", 100.0)]
    assert "0: 994.8 s, 1: 987.5 s, 2: no end recorded" in notes(run, tmp_path)


def test_what_the_files_do_not_tell_is_null(tmp_path: Path) -> None:
    written(tmp_path, 0, 0, 100)
    written(tmp_path, 1, 110, 200)
    report = to_dict(to_report(read_cycles(tmp_path, 16, None), tmp_path))
    assert report["saves"] == report["loads"] == [] and report["budget"] is None
    counted = {"cycle", "ranks", "phases", "per_rank"}
    (launch,), (restart,) = report["launches"], report["restarts"]
    assert {name for name, value in launch.items() if value is not None} == counted
    assert {name for name, value in restart.items() if value is not None} == counted | {"down_s"}
    assert restart["phases"] == {}


@pytest.mark.parametrize("without", [set(), {0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}], ids=str)
@pytest.mark.parametrize("unended", [set(), {0}, {1}, {2}, {0, 1}, {1, 2}, {0, 1, 2}], ids=str)
def test_a_down_time_needs_the_file_and_the_end_of_the_cycle_before(
    tmp_path: Path, without: set[int], unended: set[int]
) -> None:
    for number in {0, 1, 2, 3} - without:
        written(tmp_path, number, 100 * number, None if number in unended else 100 * number + 60 + number)
    found = downs(read_cycles(tmp_path, 2, None), tmp_path)
    known = {number for number in (1, 2, 3) if number - 1 not in without | unended}
    assert {cycle: down_s for cycle, _, down_s in found if down_s is not None} == {
        number: 100 - 60 - (number - 1) for number in known - without
    }


def test_an_end_that_was_missed_gives_no_time(tmp_path: Path) -> None:
    """The writer dates it with the next start; and a cycle without a file may have run in between."""
    written(tmp_path, 0, 0, 100)
    written(tmp_path, 1, 100.00002, 200)
    written(tmp_path, 3, 300, 400)
    run = read_cycles(tmp_path, 2, None)
    assert downs(run, tmp_path) == [(0, "launch", None), (1, "restart", None), (3, "restart", None)]


def test_attempts_of_the_scheduler_follow_one_another(tmp_path: Path) -> None:
    for attempt, number, start, end in ((0, 0, 0, 100), (0, 1, 110, 200), (1, 0, 5000, 6000), (10, 0, 9000, None)):
        written(tmp_path, number, start, end, attempt=attempt)
    run = read_cycles(tmp_path, 2, None)
    assert downs(run, tmp_path) == [
        (0, "launch", None), (1, "restart", 10.0), (2, "restart", 4800.0), (3, "restart", None),
    ]  # fmt: skip
    assert "includes the time in the queue" in notes(run, tmp_path)


def test_ranks_follow_the_nodes_of_a_cycle(tmp_path: Path) -> None:
    written(tmp_path, 0, 0, 100, nodes="gpu[08-10],login")
    written(tmp_path, 1, 110, None, nodes="gpu[08,10],login")
    run = read_cycles(tmp_path, 24, None)
    assert [(each.hosts, each.ranks) for each in run.cycles] == [
        (["gpu08", "gpu09", "gpu10", "login"], 32), (["gpu08", "gpu10", "login"], 24),
    ]  # fmt: skip
    with pytest.raises(CouldNotRunError, match="--world-size 25: the newest cycle has 3 nodes and cycle 0 has 4"):
        read_cycles(tmp_path, 25, None)


def test_a_job_is_chosen_among_several(tmp_path: Path) -> None:
    written(tmp_path, 0, 0, 100)
    written(tmp_path, 0, 50, 70, job="12.a")
    with pytest.raises(CouldNotRunError, match=r"several jobs \(12.a, 4711\): choose one with --run-id JOB"):
        read_cycles(tmp_path, 2, None)
    with pytest.raises(CouldNotRunError, match="--run-id 9: no such job in .* it holds 12.a, 4711"):
        read_cycles(tmp_path, 2, "9")
    assert read_cycles(tmp_path, 2, "12.a").cycles[0].end_unix_s == ORIGIN + 70


DAMAGED = {
    "torn": (lambda text: text[:40], "is damaged"),
    "list": (lambda text: f"[{text}]", "is not a JSON object"),
    "another cycle": (lambda text: text.replace('"cycle_number": 0', '"cycle_number": 1'), "not those of its name"),
    "no start": (lambda text: text.replace(date(0), ""), "cycle_start_time is missing"),
    "no date": (lambda text: text.replace(date(0), "noon"), "noon"),
    "no zone": (lambda text: text.replace(date(0), date(0)[:-1]), "no date in UTC"),
    "ends first": (lambda text: text.replace(date(100), date(-1)), "before cycle_start_time"),
    "number": (lambda text: text.replace('"node[003]"', "3"), "standby_nodes is no text"),
    "nodes": (lambda text: text.replace("node[003]", "node[3"), "no list of nodes"),
    "too many nodes": (lambda text: text.replace("node[003]", "node[0-99999999999]"), "no list of nodes"),
    "no range": (lambda text: text.replace("node[003]", "node[1-2-3]"), "is damaged"),
    "nested": (lambda text: "[" * 100_000, "is damaged"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    change, message = DAMAGED[name]
    path = written(tmp_path, 0, 0, 100)
    path.write_text(change(path.read_text()))
    with pytest.raises(CouldNotRunError, match=message) as raised:
        read_cycles(tmp_path, 2, None)
    assert str(path) in str(raised.value) and "take it out of the directory" in str(raised.value)


def test_the_command_writes_what_the_others_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "nvrx"
    written(files, 0, 0, 100)
    written(files, 1, 112.5, 200)
    assert main(["import", str(files), "--from", "nvrx"]) == 2
    assert "add --world-size N" in capsys.readouterr().err
    assert main(["import", str(files), "--from", "nvrx", "--world-size", "16"]) == 0
    out = tmp_path / "nvrx-imported"
    assert f"{out / 'imported.json'}: 2 cycles on 16 ranks" in capsys.readouterr().out
    assert main(["--all", str(out)]) == 0
    text = capsys.readouterr().out
    assert "Restart of cycle 1 (16 ranks)" in text and "down for 12.500 s" in text and "None" not in text
    assert "did not reach" not in text
    assert main(["summary", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.count("unknown") == 2 and "unfinished" not in text  # no verdict on a first step that nothing would tell
    assert main(["compare", f"a={out}", f"b={out}"]) == 0 and main(["goodput", str(out)]) == 0
    assert main(["report", "-o", str(tmp_path / "html"), str(out)]) == 0


@pytest.mark.parametrize("given", ["missing", "empty", "file"])
def test_what_is_no_directory_of_such_files_is_refused(tmp_path: Path, given: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(CouldNotRunError, match="cycle_info"):
        read_cycles(tmp_path / given, 2, None)
