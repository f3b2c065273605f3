"""Runs commands of the launch scripts, each in a fork of a process that has imported them, and nothing else.

A fork of pytest's own process, which has the imports of all tests, takes ten times as long as such a command. Run as a
program: reads one JSON request per line from stdin ({"words", "cwd", "environ"}), and answers {"status", "stdout",
"stderr"}, status as subprocess has it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.restart_bench.cli import main

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def _server() -> subprocess.Popen[str]:
    """It ends with this process, whose end closes its stdin."""
    command = [sys.executable, "-m", "tests.unit.script_forks"]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_forked(words: Sequence[str], cwd: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The command as its own process does it, which may replace itself by another program, but without a new start."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps({"words": [*words], "cwd": str(cwd), "environ": environ}) + "\n")
    server.stdin.flush()
    line = server.stdout.readline()
    assert line, f"the process that runs commands ended with {server.wait()}"
    told = json.loads(line)
    return subprocess.CompletedProcess([*words], told["status"], told["stdout"], told["stderr"])


def _become(request: dict[str, Any], stdout: int, stderr: int) -> None:
    """In the forked process."""
    status = 70
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"))
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), line_buffering=True)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environ"])
        status = main(request["words"])
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _run(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        pid = os.fork()
        if pid == 0:
            _become(request, stdout.fileno(), stderr.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for file in (stdout, stderr):
            file.seek(0)
        return {"status": status, "stdout": stdout.read().decode(), "stderr": stderr.read().decode()}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)
