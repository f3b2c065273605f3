"""Input that is not what it should be, and output that cannot be written: one message, status 2, nothing lost."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.analysis_helpers import ROOT, file_of, kinds
from tests.unit.trace_factory import Options, dump, rank_log, write_trace
from tools.ckpt_analysis.cli import main

NOBODY = 65534
COMMANDS: dict[str, list[str]] = {
    "report": [], "summary": [], "validate": [], "export": ["-o", "out.csv"], "timeline": ["-o", "out.json"],
}  # fmt: skip
FULL = Path("/dev/full")  # every write fails with ENOSPC


def something_else(path: Path) -> None:
    path.mkdir()
    (path / "latest").write_text("global_step10")
    (path / "global_step10").mkdir()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such directory"),
        (lambda path: path.write_text("x"), "cannot be read as a directory: Not a directory"),
        (lambda path: path.mkdir(), "no restart trace here (it is empty)"),
        (something_else, "no restart trace here (it holds other things)"),
    ],
)
def test_not_a_directory_of_logs(
    tmp_path: Path,
    monkeypatch: Any,
    capsys: pytest.CaptureFixture[str],
    command: str,
    make: Any,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "logs")
    assert main([command, str(tmp_path / "logs"), *COMMANDS[command]]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and str(tmp_path / "logs") in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
    assert not (tmp_path / "out.csv").exists() and not (tmp_path / "out.json").exists()


@pytest.fixture
def forbidden(tmp_path: Path) -> Iterator[Path]:
    directory = write_trace(tmp_path / "logs")
    directory.chmod(0)
    yield directory
    directory.chmod(0o755)


def as_nobody(*arguments: str) -> tuple[int, str]:
    """Status and stderr of the command line run by a user whom permissions hold back: root is not."""
    if os.geteuid():
        done = subprocess.run(
            [sys.executable, "-m", "tools.ckpt_analysis", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr
    reading, writing = os.pipe()
    child = os.fork()
    if not child:  # nothing is analysed here, so polars' threads, which a fork lacks, are not missed
        status = 99
        try:
            os.setuid(NOBODY)
            sys.stderr = os.fdopen(writing, "w")
            status = main(list(arguments))
            sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as stream:
        said = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def test_no_permission(forbidden: Path) -> None:
    status, said = as_nobody("summary", str(forbidden))
    assert status == 2 and said.count("\n") == 1
    assert f"{forbidden}: cannot be read as a directory: Permission denied" in said


def garbage(directory: Path) -> None:
    path = file_of(directory, 4, 0)
    path.write_bytes(path.read_bytes() + os.urandom(5000).replace(b"\n", b" ") + b"\n")


def zero_bytes(directory: Path) -> None:
    file_of(directory, 4, 1).write_bytes(b"")


def second_run(directory: Path) -> None:
    # Launched earlier: the other one is analysed.
    other = rank_log(Options(run_id="ffffffffffff", wall_ns=Options().wall_ns - 10**15), 0, 0)
    dump(file_of(directory, 0, 2), [record | {"cycle": 2} for record in other.records])


@pytest.mark.parametrize(
    ("damage", "kind"), [(garbage, "invalid_record"), (zero_bytes, "empty_file"), (second_run, "mixed_runs")]
)
def test_whatever_can_be_analysed_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any, kind: str
) -> None:
    directory = write_trace(tmp_path / "logs")
    damage(directory)
    assert main(["summary", str(directory), "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert kind in kinds(report) and len(report["saves"]) == 2 and len(report["restarts"]) == 1
    assert main(["summary", str(directory), "--strict"]) == 1


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
@pytest.mark.parametrize("command", ["timeline", "export csv", "export parquet"])
def test_no_space_for_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    directory = write_trace(tmp_path / "logs")
    name, _, file_format = command.partition(" ")
    flags = ["--format", file_format] if file_format else []
    assert main([name, str(directory), "-o", str(FULL), *flags]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(FULL) in said and os.strerror(errno.ENOSPC) in said


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
@pytest.mark.parametrize("command", [["report"], ["summary", "--format", "json"], ["validate"]])
def test_no_space_for_what_is_printed(tmp_path: Path, command: list[str]) -> None:
    directory = write_trace(tmp_path / "logs")
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tools.ckpt_analysis", *command, str(directory)], cwd=ROOT, stdout=full,
            stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "ckpt-analysis: standard output: No space left on device\n"


def test_output_that_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_trace(tmp_path / "logs")
    path = tmp_path / "out.json"
    path.write_text("precious")

    def fails(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tools.ckpt_analysis.timeline._write", fails)
    assert main(["timeline", str(directory), "-o", str(path)]) == 2
    assert path.read_text() == "precious" and sorted(p.name for p in tmp_path.iterdir()) == [
        "logs",
        "out.json",
    ]
    assert "No space left" in capsys.readouterr().err
    assert main(["export", str(directory), "-o", str(tmp_path / "nowhere" / "x.csv")]) == 2
    assert "nowhere/x.csv: cannot be written" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    directory = write_trace(tmp_path / "logs")
    command = f"{sys.executable} -m tools.ckpt_analysis summary --all {directory} | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["summary", "--format", "xml", "x"], "--format"),
        (["timeline", "x"], "-o"),
        (["timeline", "x", "-o", "y", "--ranks", "all"], "'all' is no list of ranks"),
        (["export", "x", "-o", "y", "--table", "rows"], "--table"),
        (["validate"], "LOGDIR"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2 and message in capsys.readouterr().err
