"""Directories that appear when they are complete, on file systems with locks and without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.fileio.new_directory import new_directory, remove_unfinished
from tests.dist.harness import ROOT
from tests.faults.injection import Fault, run_traced

OWNER, ANOTHER = "1" * 32, "2" * 32
# As where a file system has no locks (ENOLCK of NFS, ENOTSUP).
NO_LOCKS = "#include <errno.h>\nint flock(int fd, int operation) { errno = %s; return -1; }\n"
WRITES = """
import sys
from pathlib import Path
from megatron.fileio.new_directory import new_directory
with new_directory(Path(sys.argv[1]), owner=sys.argv[2], generation=int(sys.argv[3])) as directory:
    (directory / "config.json").write_text("{}")
    print("written", flush=True)
    sys.stdin.read()
"""


@contextmanager
def writer(
    out: Path, owner: str = "", preload: Path | None = None, generation: int = 3
) -> Iterator[subprocess.Popen[str]]:
    """A process that has written, and publishes when its input ends."""
    env = os.environ | ({} if preload is None else {"LD_PRELOAD": str(preload)})
    command = [sys.executable, "-c", WRITES, str(out), owner, str(generation)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "written\n"
            yield process
        finally:
            process.kill()


@pytest.fixture(params=["ENOLCK", "ENOTSUP"])
def no_locks(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    directory = tmp_path / "library"
    directory.mkdir()
    (directory / "flock.c").write_text(NO_LOCKS % request.param)
    built = directory / "flock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, directory / "flock.c"], check=True)
    return built


@pytest.mark.slow
def test_without_locks_nothing_that_others_may_be_writing_is_removed(tmp_path: Path, no_locks: Path) -> None:
    """An owner's leftovers are removed there, too, since one process at a time writes for it."""
    models = tmp_path / "models"
    with writer(models / "a", preload=no_locks) as first, writer(models / "a", preload=no_locks) as second:
        assert len(list(models.iterdir())) == 2
        for process in (first, second):
            process.communicate("")
        assert (first.returncode, second.returncode) == (0, 1), "the first has the name"
    with writer(models / "b", owner=OWNER, preload=no_locks) as mine, writer(models / "b", owner=ANOTHER):
        mine.send_signal(signal.SIGKILL)
        mine.wait()
        assert len(list(models.glob(".incomplete_b_*"))) == 2
        remove_unfinished(models, OWNER, 3)
        assert [path.name[:-8] for path in models.glob(".incomplete_b_*")] == [f".incomplete_b_{ANOTHER}_00000003_"]
    remove_unfinished(models, "", 3)  # of nobody knows whom
    assert len(list(models.glob(".incomplete_b_*"))) == 1


@pytest.mark.slow
def test_one_that_is_removed_while_it_is_written_is_never_published(tmp_path: Path) -> None:
    """A launch that was superseded may still be writing."""
    with writer(tmp_path / "a", owner=OWNER) as process:
        remove_unfinished(tmp_path, OWNER, 3)
        assert list(tmp_path.iterdir()) == []
        _, said = process.communicate("")
        assert process.returncode == 1 and "FileNotFoundError" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_launch_that_was_superseded_removes_nothing_of_the_owner(tmp_path: Path) -> None:
    """It may not know that yet, and begin or end an export."""
    with writer(tmp_path / "a", owner=OWNER, generation=4) as process:
        remove_unfinished(tmp_path, OWNER, 3)
        process.communicate("")
        assert process.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_is_to_be_replaced_has_its_name_back_after_an_error(tmp_path: Path) -> None:
    out = tmp_path / "a"
    out.mkdir()
    (out / "old").touch()

    def replaced() -> None:
        with new_directory(out, owner=OWNER, replace=True) as directory:
            (directory / "new").touch()

    for number in (1, 2):  # of the old one, of the new one
        traced = run_traced(replaced, lambda path: path.startswith(str(tmp_path)), Fault("rename", number, "EIO"))
        assert traced.hit is not None and "OSError: [Errno 5]" in str(traced.raised), traced
        assert [path.name for path in tmp_path.iterdir()] == ["a"] and [path.name for path in out.iterdir()] == ["old"]


def test_of_a_link_or_a_file_that_is_replaced_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / "kept").touch()
    (tmp_path / "link").symlink_to(tmp_path / "users")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with new_directory(tmp_path / name, owner=OWNER, replace=True) as directory:
            (directory / "new").touch()
        assert [path.name for path in (tmp_path / name).iterdir()] == ["new"]
    (tmp_path / f".incomplete_b_{OWNER}_00000003_abcd1234").symlink_to(tmp_path / "users")
    remove_unfinished(tmp_path, OWNER, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "users"]
    assert [path.name for path in (tmp_path / "users").iterdir()] == ["kept"]


def test_what_is_replaced_stays_until_then(tmp_path: Path) -> None:
    out = tmp_path / "a"
    for number in range(2):
        with new_directory(out, owner=OWNER, replace=True) as directory:
            assert out.exists() == bool(number)
            (directory / f"file{number}").touch()
    assert [path.name for path in out.iterdir()] == ["file1"] and [path.name for path in tmp_path.iterdir()] == ["a"]
    with pytest.raises(OSError, match="not empty"), new_directory(out) as directory:
        (directory / "file2").touch()
    assert [path.name for path in out.iterdir()] == ["file1"] and [path.name for path in tmp_path.iterdir()] == ["a"]
