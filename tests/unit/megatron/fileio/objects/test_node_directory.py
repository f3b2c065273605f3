"""Directories that are shared by the processes of a node, and end with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from megatron.fileio.objects.node_directory import NodeDirectory, new_name, remove_abandoned
from tests.faults.injection import Fault, run_traced

HOLD = """
import sys
from pathlib import Path
from megatron.fileio.objects.node_directory import NodeDirectory
held = NodeDirectory(Path(sys.argv[1]), sys.argv[2])
(held.path / "file").touch()
print("there", flush=True)
sys.stdin.read()
"""


def test_the_last_to_leave_removes_it(tmp_path: Path) -> None:
    name = new_name("save_rank_00000")
    one, other = NodeDirectory(tmp_path, name), NodeDirectory(tmp_path, name)
    (one.path / "file").touch()
    one.leave()
    assert (other.path / "file").exists()
    other.leave()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_was_left_is_not_left_again(tmp_path: Path) -> None:
    """A rank that returns closes what an error of its training has closed before: the descriptor is another file's."""
    one = NodeDirectory(tmp_path, new_name("save_rank_00000"))
    one.leave()
    with (tmp_path / "other").open("w") as other:
        one.leave()
        other.write("still open")
    assert (tmp_path / "other").read_text() == "still open"


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    name = new_name("load")
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path), name], stdin=-1, stdout=-1) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"there\n"
        remove_abandoned(tmp_path)
        assert (tmp_path / name / "file").exists()
        holder.send_signal(signal.SIGKILL)
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_without_a_lock_is_left_while_it_may_be_being_made(tmp_path: Path) -> None:
    young, old = new_name("load"), new_name("load")
    (tmp_path / young).mkdir()
    (tmp_path / old).mkdir()
    os.utime(tmp_path / old, (0, 0))
    remove_abandoned(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [young]
    remove_abandoned(tmp_path / "none")


def test_what_else_lies_in_the_users_directory_stays(tmp_path: Path) -> None:
    """--storage-cache may be one that the user has other things in."""
    root, precious = tmp_path / "scratch", tmp_path / "precious"
    for directory in (root / "thesis", root / "locked", precious):
        directory.mkdir(parents=True)
        (directory / "file").write_text("mine")
        os.utime(directory, (0, 0))
    for directory in (root / "locked", precious):
        (directory / ".lock").touch()
    link = root / f"restart_storage_load_{'0' * 32}"
    link.symlink_to(precious)
    remove_abandoned(root)
    assert sorted(path.name for path in root.iterdir()) == sorted(["locked", link.name, "thesis"])
    assert all((directory / "file").exists() for directory in (root / "thesis", root / "locked", precious))


def test_a_lock_whose_close_fails_hides_no_other_error(tmp_path: Path) -> None:
    """As on NFS: it is closed all the same."""

    def leave() -> None:
        NodeDirectory(tmp_path, new_name("load")).leave()

    traced = run_traced(leave, lambda path: ".lock" in path, None)
    closes = traced.calls.count("close")
    assert traced.raised is None and closes, traced
    failed = run_traced(leave, lambda path: ".lock" in path, Fault("close", closes, "late EIO"))
    assert failed.hit is not None and failed.raised is None
