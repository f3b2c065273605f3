"""FIFOs, sockets and devices where files belong: said, and waited for by nobody."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from restart_trace.cycles import newest_cycle
from restart_trace.startup import reached_iteration
from tests.unit.hostile import blocking_fails
from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT, file_of, kinds, problem, result
from tests.unit.tools.ckpt_analysis.trace_factory import write_trace
from tests.unit.tools.ckpt_analysis.upstream_log_factory import upstream_log
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.common.progress import Progress
from tools.ckpt_analysis.ingest.cache import DIRECTORY, Cache
from tools.ckpt_analysis.ingest.load import load_trace


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # addresses are short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo, "socket": make_socket, "device": lambda path: path.symlink_to("/dev/zero"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """A test that waits for ever fails."""
    with blocking_fails():
        yield


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["rank", "supervisor"])
def test_a_trace_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str) -> None:
    directory = write_trace(tmp_path / "logs")
    path = file_of(directory, 7, 0) if name == "rank" else directory / "supervisor_000.jsonl"
    path.unlink()
    SPECIAL[kind](path)
    report = result(directory)
    assert "unreadable_file" in kinds(report) and len(report["saves"]) == 2
    assert problem(report, "unreadable_file")["data"] == {"file": path.name}
    assert main(["validate", str(directory)]) == 1
    assert f"{path.name}: " in capsys.readouterr().out


@pytest.mark.parametrize("kind", SPECIAL)
def test_an_import_and_a_cache_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    (tmp_path / "run").mkdir()
    SPECIAL[kind](tmp_path / "run" / "imported.json")
    assert main(["summary", str(tmp_path / "run")]) == 2
    directory = write_trace(tmp_path / "logs")
    for path in directory.iterdir():
        os.utime(path, (1, 1))
    cache = Cache(None, Progress(quiet=True), from_bytes=0)
    first = load_trace(directory, cache=cache)
    for name in ("spans.parquet", "facts.json"):
        (entry,) = (directory / DIRECTORY).iterdir()
        (entry / name).unlink()
        SPECIAL[kind](entry / name)
        assert load_trace(directory, cache=cache).records.spans.equals(first.records.spans)


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_log_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    SPECIAL[kind](tmp_path / "train.log")
    assert main(["import", str(tmp_path / "train.log"), "-o", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(tmp_path / "train.log") in said
    assert not (tmp_path / "run").exists()


def test_a_log_through_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "tools.ckpt_analysis", "import", "-", "--quiet"]
    text = upstream_log()
    done = subprocess.run([*command, "-o", str(tmp_path / "run")], cwd=ROOT, input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert main(["summary", str(tmp_path / "run")]) == 0
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)
    assert done.returncode == 2 and "which has no directory: give one with -o" in done.stderr


@pytest.mark.parametrize("kind", SPECIAL)
def test_the_recorder_waits_for_no_file_of_an_earlier_cycle(tmp_path: Path, kind: str) -> None:
    SPECIAL[kind](file_of(tmp_path, 0, 0))
    assert reached_iteration(tmp_path, 0, 1) is None
    SPECIAL[kind](tmp_path / "cycle_000.json")
    with pytest.raises(OSError, match="cycle_000.json"):
        newest_cycle(tmp_path)


@pytest.mark.parametrize("content", ["{}", "[", "[]", '{"run_id": 1, "launch_key": "x"}', "null"])
def test_a_damaged_claim_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "cycle_000.json").write_text(content)
    with pytest.raises(OSError, match="is not a cycle file; remove it"):
        newest_cycle(tmp_path)


@pytest.mark.parametrize("line", [b'{"type":"iteration","step":[]}', b'{"type":"iteration"}', b'{"type":"iteration",}'])
def test_a_damaged_iteration_of_an_earlier_cycle_is_passed_over(tmp_path: Path, line: bytes) -> None:
    file_of(tmp_path, 0, 0).write_bytes(b'{"type":"iteration","step":4}\n' + line + b"\n")
    assert reached_iteration(tmp_path, 0, 1) == 4
