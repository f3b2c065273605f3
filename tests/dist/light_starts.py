"""Starts of pretrain_gpt.py up to the import of torch: what they refuse, they refuse before it.

Run as a program: one process imports what a start has before torch, reads a JSON list of command lines from stdin, and
forks for each. It answers with a JSON list of {"exit_code", "output"}; exit code IMPORTS: all was accepted, and torch
was asked for, where the start ends here. So a start costs some tens of milliseconds.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = 99


class LightStart(NamedTuple):
    """How a start ended, and what it printed."""

    exit_code: int
    output: str


def light_starts(command_lines: Sequence[Sequence[str]]) -> list[LightStart]:
    """The starts with these arguments, one after the other."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.dist.light_starts"],
        input=json.dumps([list(map(str, words)) for words in command_lines]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        check=True,
    )
    return [LightStart(**one) for one in json.loads(found.stdout)]


class _EndAtTorch(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "torch":
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(IMPORTS)


def _start(words: list[str]) -> LightStart:
    with tempfile.TemporaryFile("w+") as log:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                sys.argv = ["pretrain_gpt.py", *words]
                runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        log.seek(0)
        return LightStart(code, log.read())


def _serve() -> None:
    sys.path.insert(0, str(ROOT))
    import megatron.checkpointing.preflight.compatibility
    import megatron.startup.preflight
    import megatron.training  # noqa: F401

    assert "torch" not in sys.modules
    sys.meta_path.insert(0, _EndAtTorch())
    print(json.dumps([_start(words)._asdict() for words in json.load(sys.stdin)]))


if __name__ == "__main__":
    _serve()
