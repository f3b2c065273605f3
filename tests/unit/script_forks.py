"""Runs commands of the launch scripts, each in a fork of a process that has imported them, and nothing else.

A fork of pytest's own process, which has the imports of all tests, takes ten times as long as such a command. What the
command asks another tool is forked too: a start and the imports of each take a tenth of a second of a processor. Run as
a program: reads one JSON request per line from stdin ({"words", "cwd", "environ"}), and answers {"status", "stdout",
"stderr"}, status as subprocess has it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.training import check_run
from tools.ckpt_plan import cli as ckpt_plan
from tools.restart_bench.cli import main
from tools.restart_bench.interpreter import Interpreter

Main = Callable[[Sequence[str]], int | None]

ROOT = Path(__file__).resolve().parents[2]
ASKED: dict[str, Main] = {"ckpt_plan": ckpt_plan.main, "megatron.training.check_run": check_run.main}
start_tool = Interpreter.run


@functools.cache
def server() -> subprocess.Popen[str]:
    """It ends with this process, whose end closes its stdin."""
    command = [sys.executable, "-m", "tests.unit.script_forks"]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_forked(words: Sequence[str], cwd: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The command as its own process does it, which may replace itself by another program, but without a new start."""
    answering = server()
    assert answering.stdin is not None and answering.stdout is not None
    try:
        answering.stdin.write(json.dumps({"words": [*words], "cwd": str(cwd), "environ": environ}) + "\n")
        answering.stdin.flush()
        line = answering.stdout.readline()
        assert line, f"the process that runs commands ended with {answering.wait()}"
    except BaseException:  # the time limit of a test included: the next command must not be given this one's answer
        server.cache_clear()
        answering.kill()
        answering.wait()
        raise
    told = json.loads(line)
    return subprocess.CompletedProcess([*words], told["status"], told["stdout"], told["stderr"])


def _become(tool: Main, words: Sequence[str], environ: Mapping[str, str], stdout: int, stderr: int) -> None:
    """In the forked process."""
    status = 70
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True)
        os.environ.clear()
        os.environ.update(environ)
        status = tool(words) or 0
    except SystemExit as end:
        assert isinstance(end.code, int)
        status = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _fork(
    tool: Main, words: Sequence[str], environ: Mapping[str, str], *, one_stream: bool = False
) -> subprocess.CompletedProcess[str]:
    """`one_stream`: stderr goes where stdout does."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        pid = os.fork()
        if pid == 0:
            _become(tool, words, environ, stdout.fileno(), (stdout if one_stream else stderr).fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess([], status, stdout.read().decode(), stderr.read().decode())


def ask_tool(
    self: Interpreter, module: str, *words: str, environ: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """What Interpreter.run does, without a start if the interpreter is this one and the tool one of ASKED."""
    found = shutil.which(self.path, path=self.environ.get("PATH"))
    streams = options.get("stdout"), options.get("stderr")
    read = streams in ((subprocess.PIPE, subprocess.STDOUT), (subprocess.PIPE, subprocess.DEVNULL))
    if found != sys.executable or module not in ASKED or not read:
        return start_tool(self, module, *words, environ=environ, **options)
    env = self.environment() | dict(environ or {})
    return _fork(ASKED[module], words, env, one_stream=streams[1] == subprocess.STDOUT)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    def command(words: Sequence[str]) -> int:
        os.chdir(request["cwd"])
        return main(words)

    done = _fork(command, request["words"], request["environ"])
    return {"status": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


if __name__ == "__main__":
    Interpreter.run = ask_tool
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)
