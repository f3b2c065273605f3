"""Presets: run_*.sh scripts of restart_bench. They prepare environment and data, and report the command to be run."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..common.presets import SCRIPTS, SETTINGS
from .launch import DrillError


def expanded(words: list[str]) -> list[str]:
    """`words`, or the command of a preset if they are a single word that names one.

    A name such as `tiny_tp2_pp2_dp2` is short for restart_bench/run_tiny_tp2_pp2_dp2.sh. The script reads its settings
    from the environment. Raises DrillError if there is neither such a preset nor such a program, or the script fails.
    """
    script = script_of(words)
    return words if script is None else command_of(script)


def script_of(words: list[str]) -> Path | None:
    """The script of the preset that `words` name; None for a command. Raises DrillError for an unknown single word."""
    if len(words) != 1:
        return None
    (word,) = words
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
    """Run a preset with COMMAND_TO: it prepares environment and data, and writes the command that it would launch."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "command"
        done = subprocess.run(
            ["bash", str(script)],
            env=SETTINGS | os.environ | {"COMMAND_TO": str(file)},
            stdin=subprocess.DEVNULL,
            stdout=2,  # to stderr of this process: stdout is for the drill's own table
        )
        if done.returncode != 0:
            raise DrillError(f"{script} ended with exit code {done.returncode}; see its output above")
        if not file.exists():
            raise DrillError(f"{script} wrote no command to COMMAND_TO; it must be a preset of restart_bench")
        return [word.decode() for word in file.read_bytes().split(b"\0")[:-1]]
