"""What a launch says of programs that are missing, that a signal ended, or whose output cannot be written."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.unit.script_helpers import TINY, run_script
from tools.restart_bench.launchers.deepspeed import connections

# Stands in for an interpreter whose tool `ENDED` the kernel ends for want of memory.
ENDED_BY_SIGNAL = """#!/bin/sh
case "$*" in *.{ended}*) kill -9 $$ ;; esac
"""


def interpreter(directory: Path, ended: str) -> dict[str, str]:
    file = directory / "python"
    file.write_text(ENDED_BY_SIGNAL.format(ended=ended))
    file.chmod(0o755)
    return {"SKIP_SETUP": "1", "PYTHON": str(file), "WORK_DIR": str(directory / "work"), "DATA_PATH": ""}


@pytest.mark.parametrize(
    ("mode", "ended", "status", "message"),
    [
        ("replay", "ckpt_replay", 2, ""),
        ("replay", "ckpt_analysis", 2, "the analysis of "),
        ("restart", "restart_drill", 2, "the drill failed; "),
        ("restart", "ckpt_analysis", 2, "the analysis of "),
    ],
)
def test_a_tool_that_a_signal_ends_has_failed(mode: str, ended: str, status: int, message: str, tmp_path: Path) -> None:
    data = {"DATA_PATH": "/given"} if mode == "restart" else {}
    done = run_script(TINY, tmp_path, MODE=mode, **interpreter(tmp_path, ended) | data)
    assert done.returncode == status, done.stderr
    assert f"{ended} was ended by signal 9 (Killed)" in done.stderr and message in done.stderr
    assert "left in" not in done.stderr and "Measured:" not in done.stdout


def test_hosts_without_ssh_are_one_message(tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "env").symlink_to(str(shutil.which("env")))
    (tmp_path / "hosts").write_text("far-1 slots=4\nfar-2 slots=4\n")
    given = {"HOSTFILE": str(tmp_path / "hosts"), "DEVICE": "cpu", "MODE": "train", "PATH": str(commands)}
    done = run_script(TINY, tmp_path, KILL_AT="none", **interpreter(tmp_path, "none") | given | {"DATA_PATH": "/given"})
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line]
    assert done.returncode == 2 and line.endswith("ssh is not on PATH; install it"), done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    file = tmp_path / "none" / "command"
    given = {"MODE": "train", "KILL_AT": "none", "DEVICE": "cpu", "DATA_PATH": "/given", "COMMAND_TO": str(file)}
    done = run_script(TINY, tmp_path, **interpreter(tmp_path, "none") | given)
    assert done.returncode == 2 and f"error: COMMAND_TO={file}: cannot be written: No such file" in done.stderr, done
    assert "Traceback" not in done.stderr


def test_the_hosts_of_pdsh_are_counted_without_other_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pdsh is a child of DeepSpeed's launcher, and has one ssh for each host. Here these are scripts."""
    ssh, pdsh = tmp_path / "ssh", tmp_path / "pdsh"
    ssh.write_text("#!/bin/sh\nread line\n")
    pdsh.write_text(f"#!/bin/sh\nexec 3<&0\n{ssh} <&3 & {ssh} <&3 & wait\n")
    for file in (ssh, pdsh):
        file.chmod(0o755)
    monkeypatch.setenv("PATH", "/nonexistent")
    with subprocess.Popen([str(pdsh)], stdin=subprocess.PIPE) as started:
        deadline = time.monotonic() + 60
        while connections(os.getpid()) != 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        counted = connections(os.getpid())
        assert started.stdin is not None
        started.stdin.close()
    assert counted == 2
