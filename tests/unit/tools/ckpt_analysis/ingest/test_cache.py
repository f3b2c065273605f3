"""The Parquet cache: the same answer, never a stale one, and no trouble where it cannot be kept."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tools.ckpt_analysis.analysis_helpers import file_of
from tests.unit.tools.ckpt_analysis.trace_factory import Options, dump, rank_log, write_trace
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.common.progress import Progress
from tools.ckpt_analysis.ingest import cache as cache_module
from tools.ckpt_analysis.ingest.cache import DIRECTORY, Cache
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.render.json_output import to_dict
from tools.ckpt_analysis.report import analyse


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A damaged trace, so that problems are kept too, that was written a while ago."""
    directory = write_trace(tmp_path / "trace", Options(hosts=2))
    path = file_of(directory, 2, 1)
    path.write_bytes(path.read_bytes() + b"garbage\n" + b'{"ty')
    file_of(directory, 5, 0).write_bytes(b"")
    return settled(directory)


def settled(directory: Path) -> Path:
    before = time.time() - 60
    for path in directory.glob("*.jsonl"):
        os.utime(path, (before, before))
    return directory


def report(directory: Path, where: Path | None = None, run_id: str | None = None) -> dict[str, Any]:
    kept = Cache(where, Progress(quiet=False), from_bytes=0)
    return to_dict(analyse(load_trace(directory, run_id, cache=kept)).report)


def entries(directory: Path) -> list[Path]:
    return sorted(p for p in directory.iterdir() if p.is_dir()) if directory.exists() else []


def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the logs were read")

    monkeypatch.setattr("tools.ckpt_analysis.ingest.load.read_records", fail)


@pytest.mark.slow
def test_second_look_reads_no_log_and_says_the_same(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = to_dict(analyse(load_trace(trace)).report)
    assert report(trace) == without and len(entries(trace / DIRECTORY)) == 1
    elsewhere = tmp_path / "cache"
    assert report(trace, elsewhere) == without and len(entries(elsewhere)) == 1
    no_reading(monkeypatch)
    assert report(trace) == without
    assert report(trace, elsewhere) == without


def appended(path: Path) -> None:
    log = rank_log(Options(hosts=2), 0, 1)
    log.records.clear()
    log.iteration(13)
    with path.open("a") as stream:
        stream.write(json.dumps(log.records[0]) + "\n")


def rewritten(path: Path) -> None:
    status = path.stat()
    path.write_text(path.read_text().replace("global_step10", "global_step11"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def replaced(path: Path) -> None:
    """Another file of the same size and time: only the inode tells."""
    status, text = path.stat(), path.read_text()
    copy = path.with_suffix(".new")
    copy.write_text(text.replace("global_step10", "global_step11"))
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    copy.replace(path)


def removed(path: Path) -> None:
    path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("change", [appended, rewritten, replaced, removed])
def test_never_stale(trace: Path, change: Any) -> None:
    before = report(trace)
    change(file_of(trace, 0, 1))
    after = report(trace)
    assert after == to_dict(analyse(load_trace(trace)).report)
    if change is not appended:
        assert after != before
    assert len(entries(trace / DIRECTORY)) == 1  # the entry of the earlier state is gone


def test_another_version_of_the_tool_reads_anew(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report(trace)
    monkeypatch.setattr(cache_module, "CACHE_VERSION", cache_module.CACHE_VERSION + 1)
    no_reading(monkeypatch)
    with pytest.raises(AssertionError, match="the logs were read"):
        report(trace)


def test_a_run_that_is_still_writing_is_not_kept(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.utime(file_of(trace, 0, 1))
    report(trace)
    assert not (trace / DIRECTORY).exists()
    assert "still being written" in capsys.readouterr().err


def test_both_runs_of_a_directory_come_from_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_trace(tmp_path / "trace")
    process, *records = rank_log(Options(run_id="ffffffffffff"), 0, 0).records
    dump(file_of(directory, 0, 2), [process | {"cycle": 2}, *records])
    settled(directory)
    assert {report(directory)["run_id"] for _ in range(2)} == {"0123456789ab"}
    no_reading(monkeypatch)
    assert report(directory, run_id="ffffffffffff")["run_id"] == "ffffffffffff"


@pytest.mark.slow
@pytest.mark.parametrize("damage", [b"", b"not Parquet", None])
def test_a_damaged_entry_is_made_anew(trace: Path, capsys: pytest.CaptureFixture[str], damage: bytes | None) -> None:
    expected = report(trace)
    (entry,) = entries(trace / DIRECTORY)
    if damage is None:
        (entry / "facts.json").write_text("{")
    else:
        (entry / "spans.parquet").write_bytes(damage)
    assert report(trace) == expected
    assert "damaged" in capsys.readouterr().err
    report(trace)
    assert capsys.readouterr().err == ""


def test_an_unreadable_file_may_become_readable(trace: Path) -> None:
    path = file_of(trace, 6, 1)
    text = path.read_bytes()
    path.unlink()
    path.mkdir()
    os.utime(path, (1, 1))
    assert "unreadable_file" in [p["kind"] for p in report(trace)["problems"]]
    assert entries(trace / DIRECTORY) == []
    path.rmdir()
    path.write_bytes(text)


def test_where_nothing_can_be_kept_there_is_a_remark(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert report(trace, blocked) == to_dict(analyse(load_trace(trace)).report)
    said = capsys.readouterr().err
    assert "no Parquet cache was kept" in said and "--cache-dir" in said and said.count("\n") == 1, said


def test_small_logs_get_no_cache(trace: Path, tmp_path: Path) -> None:
    assert main([str(trace), "--cache-dir", str(tmp_path / "cache")]) == 0
    assert not (tmp_path / "cache").exists() and not (trace / DIRECTORY).exists()


@pytest.mark.slow
def test_flags(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Cache, "__init__", _init_for_small(Cache.__init__))
    assert main(["summary", str(trace), "--no-cache"]) == 0 and not (trace / DIRECTORY).exists()
    assert main(["summary", str(trace), "--cache-dir", str(tmp_path / "cache")]) == 0
    assert len(entries(tmp_path / "cache")) == 1 and not (trace / DIRECTORY).exists()
    assert main(["summary", str(trace)]) == 0 and len(entries(trace / DIRECTORY)) == 1
    os.utime(file_of(trace, 0, 1))
    capsys.readouterr()
    assert main(["summary", str(trace), "--quiet"]) == 0 and capsys.readouterr().err == ""


def _init_for_small(original: Any) -> Any:
    def init(self: Cache, directory: Path | None, progress: Progress, from_bytes: int = 0) -> None:
        original(self, directory, progress, from_bytes)

    return init


def test_what_is_no_entry_stays(trace: Path, tmp_path: Path) -> None:
    """The cache may be a link to a directory in which its user has other things."""
    place = tmp_path / "place"
    for name in ("x" * 32, ".git"):
        (place / name).mkdir(parents=True)
        (place / name / "file").write_text("mine")
        os.utime(place / name, (0, 0))
    (trace / DIRECTORY).symlink_to(place)
    report(trace)
    assert len(entries(place)) == 3
    assert all((place / name / "file").read_text() == "mine" for name in ("x" * 32, ".git"))
