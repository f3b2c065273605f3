"""The interpreter that training runs with, and the tools of this repository that it runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from .errors import LaunchEnded, SettingsError
from .places import INSTALLED, ROOT, SETUP_SCRIPT
from .settings import Settings

_TOOLS = "megatron_restart_tools"
_PLUGINS = (
    "from megatron.checkpointing.engines import registry; "
    "print(*set(registry.engine_names()) - set(registry.builtin_engines()))"
)


@dataclass(frozen=True)
class Interpreter:
    """`path`: a program, or a name to be looked up. `venv`: what setup_env.sh makes; None: the user's environment."""

    path: str
    venv: Path | None
    environ: Mapping[str, str]

    @classmethod
    def of(cls, given: Settings, environ: Mapping[str, str]) -> Interpreter:
        venv = given.venv_dir or str(ROOT / ".venv")
        made = cls(f"{venv}/bin/python", Path(venv), environ)
        if not (given.skip_setup or INSTALLED):
            return made
        if not given.python and not INSTALLED and made.exists():
            return replace(made, venv=None)
        return cls(given.python or "python3", None, environ)

    def exists(self) -> bool:
        return shutil.which(self.path, path=self.environ.get("PATH")) is not None

    def environment(self) -> dict[str, str]:
        """Of a tool: this repository comes first, and the current directory, where the user is, not at all."""
        path = os.pathsep.join(filter(None, (str(ROOT), self.environ.get("PYTHONPATH"))))
        return {**self.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}

    def module(self, name: str) -> list[str]:
        """The command that runs a module: one of megatron, or a tool by its short name."""
        return [self.path, "-m", name if name.startswith("megatron.") else f"{_TOOLS}.{name}"]

    def run(
        self, module: str, *words: str, environ: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a module in the current directory, so that relative paths stay valid. `environ`: variables to add.

        The returncode is an exit status: 127 if it cannot be started, 128 + N if signal N has ended it.
        """
        env = self.environment() | dict(environ or {})
        try:
            done = subprocess.run([*self.module(module), *words], env=env, text=True, **options)
        except OSError as error:
            return subprocess.CompletedProcess([], 127, "", f"{self.path}: {error.strerror}")
        done.returncode = exit_status_told(done.returncode, module)
        return done

    def set_up(self) -> None:
        """Make or update the environment. Raises LaunchEnded if setup_env.sh, which says why, fails."""
        if self.venv is None:
            return
        made = subprocess.run(["bash", str(SETUP_SCRIPT)], env=dict(self.environ), stdout=2)
        if made.returncode != 0:
            raise LaunchEnded(exit_status_told(made.returncode, SETUP_SCRIPT.name))

    def check_torch_build(self, device: str) -> None:
        """Refuse an environment without CUDA, as one made on a machine without GPUs, such as a login node, is."""
        if device == "cpu" or self.venv is None:
            return
        stamp = self.venv / ".setup_stamp"
        try:
            lines = stamp.read_text().splitlines()
        except OSError as error:
            raise SettingsError(f"{stamp}: cannot be read: {error.strerror}; run {SETUP_SCRIPT} again") from None
        if lines[1:2] != ["cuda"]:
            raise SettingsError(f"the installed torch is a CPU build; run TORCH_VARIANT=cuda {SETUP_SCRIPT} first")

    def plugin_engines(self) -> list[str]:
        """Engines of other packages: only this interpreter knows them."""
        command = [self.path, "-c", _PLUGINS]
        try:
            asked = subprocess.run(command, env=self.environment(), capture_output=True, text=True)
        except OSError:
            return []
        return asked.stdout.split() if asked.returncode == 0 else []


def tool_runner(interpreter: Interpreter) -> Callable[..., int]:
    """Runs a tool of this repository, whose output goes to stderr; returns its exit status."""

    def run_tool(module: str, *words: str) -> int:
        done = interpreter.run(module, *words, stdout=sys.stderr)
        if done.returncode == 127:
            print(done.stderr, file=sys.stderr)
        return done.returncode

    return run_tool


def exit_status(returncode: int) -> int:
    """That of a shell: 128 + N for a process that signal N has ended."""
    return returncode if returncode >= 0 else 128 - returncode


def exit_status_told(returncode: int, name: str) -> int:
    """exit_status of the program `name`, which cannot say itself that a signal has ended it."""
    if returncode < 0:
        print(f"{name} was ended by signal {-returncode} ({signal.strsignal(-returncode)})", file=sys.stderr)
    return exit_status(returncode)


def replace_process(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Become this command. Raises SettingsError if it cannot be run."""
    sys.stdout.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # which this interpreter ignores, and an exec would pass on
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), dict(environ))
    except OSError as error:
        raise SettingsError(f"{command[0]}: cannot be run: {error.strerror}") from None
