"""Presets: the run_*.sh scripts of restart_bench, which prepare everything and tell the command that they would run."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..common.presets import SCRIPTS, SETTINGS
from .launch import DrillError


def expanded(words: list[str]) -> list[str]:
    """The command that `words` mean: itself, or what the script runs that a single word names.

    A name as `tiny_tp2_pp2_dp2` is short for restart_bench/run_tiny_tp2_pp2_dp2.sh. The environment is the script's
    settings. Raises DrillError if there is neither such a preset nor such a program, or the script fails.
    """
    if len(words) != 1:
        return words
    script = _script(words[0])
    return words if script is None else command_of(script)


def _script(word: str) -> Path | None:
    path = SCRIPTS / f"run_{word}.sh"
    if path.is_file():
        return path
    path = Path(word)
    named_so = path.name.startswith("run_") and path.suffix == ".sh"
    if named_so and path.is_file() and "common.sh" in path.read_text():
        return path
    if shutil.which(word) is None:
        names = sorted(path.stem.removeprefix("run_") for path in SCRIPTS.glob("run_*.sh"))
        raise DrillError(f"{word}: no program and no preset; there are {', '.join(names)}")
    return None


def command_of(script: Path) -> list[str]:
    """Have a preset prepare its environment and its data, and read the command that it would launch then."""
    with tempfile.TemporaryDirectory() as directory:
        told = Path(directory) / "command"
        done = subprocess.run(
            ["bash", str(script)],
            env=SETTINGS | os.environ | {"COMMAND_TO": str(told)},
            stdin=subprocess.DEVNULL,
            stdout=2,  # of this process: its messages are none of ours
        )
        if done.returncode != 0:
            raise DrillError(f"{script} ended with exit code {done.returncode}; what it printed says why")
        if not told.exists():
            raise DrillError(f"{script} told no command in COMMAND_TO; it must be a preset of restart_bench")
        return [word.decode() for word in told.read_bytes().split(b"\0")[:-1]]
