"""Input that is not what it should be, and output that cannot be written: one message, status 2, nothing lost."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.storage import drop_root_rights, fill, small_disk
from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT, file_of, kinds
from tests.unit.tools.ckpt_analysis.trace_factory import RUN_ID, Options, dump, rank_log, write_trace
from tests.unit.tools.ckpt_analysis.upstream_log_factory import upstream_log
from tools.ckpt_analysis.cli import main

pytestmark = pytest.mark.slow  # each starts the command as a process

COMMANDS: dict[str, list[str]] = {
    "report": [], "summary": [], "validate": [], "export": ["-o", "out.csv"], "timeline": ["-o", "out.json"],
    "compare": ["elsewhere"], "project": ["--nodes", "4", "--mtbf-hours", "9"],
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
        (lambda path: path.write_text("x"), "read by `ckpt-analysis import "),
        (lambda path: path.mkdir(), "no restart trace here (it is empty)"),
        (something_else, "no restart trace here (it holds other things)"),
    ],
)
def test_not_a_directory_of_logs(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str], command: str, make: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "logs")
    assert main([command, str(tmp_path / "logs"), *COMMANDS[command]]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and str(tmp_path / "logs") in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
    assert not (tmp_path / "out.csv").exists() and not (tmp_path / "out.json").exists()


def refused_like_anyone(*arguments: str) -> tuple[int, str, str]:
    """Status, stdout and stderr of the command line, run without root's rights to pass over permissions."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.ckpt_analysis", *arguments], cwd=ROOT, capture_output=True, text=True,
        timeout=300, preexec_fn=drop_root_rights,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", ["summary", "report"])
def test_no_permission_for_the_directory(tmp_path: Path, command: str) -> None:
    directory = write_trace(tmp_path / "logs")
    directory.chmod(0)
    status, shown, said = refused_like_anyone(command, str(directory))
    directory.chmod(0o755)
    assert (status, shown) == (2, "") and said.count("\n") == 1
    assert f"{directory}: cannot be read as a directory: Permission denied" in said


def test_no_permission_for_one_file_and_for_all(tmp_path: Path) -> None:
    directory = write_trace(tmp_path / "logs")
    file_of(directory, 3, 1).chmod(0)
    status, shown, _ = refused_like_anyone("summary", str(directory), "--format", "json")
    report = json.loads(shown)
    assert status == 0 and len(report["saves"]) == 2 and len(report["restarts"]) == 1
    assert kinds(report) == ["unreadable_file", "missing_ranks"]
    for path in directory.iterdir():
        path.chmod(0)
    status, shown, said = refused_like_anyone("report", str(directory))
    assert (status, shown) == (2, "") and said.count("\n") == 1
    assert "none of its 17 trace files can be analysed: rank_00000_cycle_000.jsonl: Permission denied" in said


def test_no_permission_to_write(tmp_path: Path) -> None:
    directory = write_trace(tmp_path / "logs")
    place = tmp_path / "place"
    place.mkdir(mode=0o555)
    for command, name in (("report", "page.html"), ("export", "out.csv"), ("timeline", "out.json")):
        status, _, said = refused_like_anyone(command, str(directory), "-o", str(place / name))
        assert status == 2 and said.splitlines() == [
            f"ckpt-analysis: {place / name}: cannot be written: Permission denied; give another path with -o"
        ]
    assert list(place.iterdir()) == []


def changed(rank: int, cycle: int, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def damage(directory: Path) -> None:
        path = file_of(directory, rank, cycle)
        path.write_bytes(change(path.read_bytes()))

    return damage


def binary(length: int) -> bytes:
    return random.Random(length).randbytes(length)


def earlier_run(directory: Path) -> None:
    # Launched earlier: the other one is analysed.
    other = rank_log(Options(run_id="ffffffffffff", wall_ns=Options().wall_ns - 10**15), 0, 0)
    process, *records = other.records
    dump(file_of(directory, 0, 2), [process | {"cycle": 2}, *records])


DEEP = b"[" * 100_000
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "garbage at the end": (
        changed(4, 0, lambda text: text + binary(5000).replace(b"\n", b" ") + b"\n"), "invalid_record"
    ),
    "nothing but garbage": (changed(4, 0, lambda text: binary(20_000)), "no_process_record"),
    "garbage for a first line": (
        changed(4, 0, lambda text: b"\xff\x00" + text[text.find(b"\n") :]), "no_process_record"
    ),
    # What begins as a compressed file does is nothing to unpack.
    "gzip": (changed(4, 0, gzip.compress), "no_process_record"),
    "gzip before records": (changed(4, 0, lambda text: gzip.compress(text) + b"\n" + text), "no_process_record"),
    "zstd before records": (changed(4, 0, lambda text: b"\x28\xb5\x2f\xfd\n" + text), "no_process_record"),
    "nested deeply": (changed(4, 0, lambda text: text + DEEP + b"\n"), "invalid_record"),
    "nothing but nesting": (changed(4, 0, lambda text: DEEP), "no_process_record"),
    "zero bytes": (changed(4, 1, lambda text: b""), "empty_file"),
    "holes": (changed(4, 1, lambda text: text + bytes(9000)), "torn_line"),
    # The number of ranks says how many are expected: one damaged byte must not ask for billions.
    "a number of ranks that cannot be": (
        changed(4, 0, lambda text: text.replace(b'"world_size":8', b'"world_size":80000000000')), "no_process_record"
    ),
    "a layout that cannot be": (
        changed(4, 0, lambda text: text.replace(b'"pp":2,"dp":2}', b'"pp":"2","dp":0}')), "no_process_record"
    ),
    "an earlier run beside it": (earlier_run, "mixed_runs"),
    "another run in one of its files": (
        changed(4, 0, lambda text: text + text.replace(RUN_ID.encode(), b"ffffffffffff")), "mixed_runs"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "kind"), DAMAGES.values(), ids=DAMAGES)
def test_whatever_can_be_analysed_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any, kind: str
) -> None:
    directory = write_trace(tmp_path / "logs")
    damage(directory)
    assert main(["summary", str(directory), "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert kind in kinds(report) and len(report["saves"]) == 2 and len(report["restarts"]) == 1
    assert main(["summary", str(directory), "--strict"]) == 1
    capsys.readouterr()
    assert main(["validate", str(directory)]) == 1
    shown = capsys.readouterr().out
    assert "rank_00004_cycle_00" in shown or kind in shown


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "validate"])
@pytest.mark.parametrize(
    "content", [binary(5000), b"", DEEP, b'{"a": 1}\n', b"[1, 2]\n", gzip.compress(b"{}\n", mtime=0)]
)
def test_nothing_that_can_be_analysed(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str], command: str, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    for rank in (0, 1):
        file_of(tmp_path / "logs", rank, 0).write_bytes(content)
    assert main([command, "logs", *COMMANDS[command]]) == 2
    captured = capsys.readouterr()
    assert "logs: none of its 2 trace files can be analysed: rank_00000_cycle_000.jsonl: " in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_validate_lists_what_nothing_can_be_made_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file_of(tmp_path, 0, 0).write_bytes(b"")
    file_of(tmp_path, 1, 0).write_bytes(DEEP + b"\n")
    assert main(["validate", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "rank_00000_cycle_000.jsonl: has no records",
        "rank_00001_cycle_000.jsonl:1: not a JSON record",
        f"{tmp_path}: 2 files, 1 records: 2 problems",
    ]


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
@pytest.mark.parametrize("command", ["timeline", "export csv", "export parquet", "report"])
def test_no_space_for_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    directory = write_trace(tmp_path / "logs")
    name, _, file_format = command.partition(" ")
    flags = ["--format", file_format] if file_format else []
    place = tmp_path / "full.html"  # a page's name ends so
    place.symlink_to(FULL)
    assert main([name, str(directory), "-o", str(place), *flags]) == 2
    said = capsys.readouterr().err
    assert said == (
        f"ckpt-analysis: {place}: cannot be written: {os.strerror(errno.ENOSPC)}; give another path with -o\n"
    )


def test_no_space_for_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a disk of 256 KiB: the summary is printed, and nothing of the page is left behind. Nor of an import."""
    directory, log = write_trace(tmp_path / "logs"), tmp_path / "a.log"
    log.write_text(upstream_log())
    disk = tmp_path / "disk"
    with small_disk(disk, 1 << 18) as mounted:
        if not mounted:
            pytest.skip("no file system may be mounted here: run as root, with CAP_SYS_ADMIN")
        for flags, begin in (
            ([str(directory)], "Run "),
            ([f"x={directory}", f"y={directory}"], "Comparison of 2 runs"),
        ):
            assert main(["report", *flags, "-o", str(disk / "page.html")]) == 2
            captured = capsys.readouterr()
            assert begin in captured.out and list(disk.iterdir()) == []
            assert captured.err == (
                f"ckpt-analysis: {disk / 'page.html'}: cannot be written: No space left on device; give another "
                "path with -o\n"
            )
        fill(disk / "ballast")
        assert main(["import", str(log), "-o", str(disk / "run")]) == 2
        assert "cannot be written: No space left on device" in capsys.readouterr().err
        assert [path.name for path in disk.rglob("*") if path.is_file()] == ["ballast"]


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
@pytest.mark.parametrize("command", [["report"], ["summary", "--format", "json"], ["validate"]])
def test_no_space_for_what_is_printed(tmp_path: Path, command: list[str]) -> None:
    directory = write_trace(tmp_path / "logs")
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tools.ckpt_analysis", *command, str(directory)], cwd=ROOT, stdout=full,
            stderr=subprocess.PIPE, text=True, timeout=300,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "ckpt-analysis: standard output: No space left on device\n"


def test_output_that_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_trace(tmp_path / "logs")
    path = tmp_path / "out.json"
    path.write_text("precious")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # bytes: the write fails, as on a full disk
    try:
        assert main(["timeline", str(directory), "-o", str(path), "--no-cache"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "precious" and sorted(p.name for p in tmp_path.iterdir()) == ["logs", "out.json"]
    assert "File too large" in capsys.readouterr().err
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
