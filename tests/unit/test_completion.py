"""Tab completion: a real bash completes commands, flags and values, and the file has those of the parsers."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.completion import COMMANDS, FILE, actions_of, completed_names, parser_of, parser_of_analysis, values_of
from tests.unit.script_helpers import ROOT


class Shell:
    """An interactive bash with the completion, on a terminal of its own."""

    def __init__(self, directory: Path) -> None:
        self._terminal, other = pty.openpty()
        environment = {"PATH": os.environ["PATH"], "HOME": str(directory), "TERM": "dumb", "INPUTRC": "/dev/null"}
        self._bash = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"], env=environment, cwd=directory, stdin=other, stdout=other,
            stderr=other, start_new_session=True,
        )  # fmt: skip
        os.close(other)
        self.type(f"bind 'set bell-style none'; source {FILE}; PS1=no''w:\n")
        self.read_until("now:")  # the prompt: until then the terminal, not bash, takes what is typed

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def read_until(self, text: str) -> str:
        read, deadline = "", time.monotonic() + 300
        while text not in read:
            assert time.monotonic() < deadline and self._bash.poll() is None, read
            if select.select([self._terminal], [], [], 1)[0]:
                read += os.read(self._terminal, 4096).decode()
        return read

    def close(self) -> None:
        self._bash.kill()
        self._bash.wait()
        os.close(self._terminal)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / "replay_of_disk.json").touch()
    opened = Shell(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("ckpt-plan --recompute-", "ckpt-plan --recompute-on "),
        ("ckpt-replay --oper", "ckpt-replay --operations "),
        ("ckpt-replay --operations save_a", "ckpt-replay --operations save_and_load "),
        ("ckpt-analysis comp", "ckpt-analysis compare "),
        ("ckpt-analysis compare --fail", "ckpt-analysis compare --fail-if "),
        ("ckpt-analysis compare replay", "ckpt-analysis compare replay_of_disk.json "),
        ("ckpt-analysis . --stri", "ckpt-analysis . --strict "),
        ("ckpt-plan --engine laz", "ckpt-plan --engine lazy "),
        ("ckpt-plan --model 70", "ckpt-plan --model 70b "),
        ("ckpt-plan --step-time h2", "ckpt-plan --step-time h200 "),
        ("restart-drill --engines laz", "restart-drill --engines lazy "),
        ("ckpt-analysis replay", "ckpt-analysis replay_of_disk.json "),
        ("restart-drill --fault bitf", "restart-drill --fault bitflip "),
        ("restart-drill --conf", "restart-drill --config "),
        ("restart-sweep --conf", "restart-sweep --config "),
        ("restart-sweep --config rep", "restart-sweep --config replay_of_disk.json "),
        ("restart-launch --nproc", "restart-launch --nproc-per-node "),
        ("restart-trace run --trace-d", "restart-trace run --trace-dir "),
    ],
)
def test_bash_completes(typed: str, completed: str, shell: Shell) -> None:
    shell.type(f"{typed}\t#\n")  # what follows shows where the completion ended, and that it did
    assert f"{completed}#" in shell.read_until("#")


def test_every_command_is_completed() -> None:
    scripts = re.findall(r'f?"([a-z-]+) = [^"]+:\w+"', (ROOT / "setup.py").read_text())
    assert sorted(scripts) == sorted([*COMMANDS, "ckpt-analysis"])


def test_the_file_has_the_options_of_the_parsers_and_their_values() -> None:
    text = FILE.read_text()
    for command in (None, *COMMANDS):
        for action in actions_of(parser_of_analysis() if command is None else parser_of(command)):
            words = [*completed_names(action), *map(str, values_of(action) or ())]
            missing = [word for word in words if not re.search(rf"[( ]{re.escape(word)}[ )]", text)]
            assert not missing, f"{command}: {missing}; see CONTRIBUTING.md, Add an option"
