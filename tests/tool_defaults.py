"""Lists the options of commands whose default no test uses, as every test that runs the command gives them.

    python -m tests.tool_defaults [PYTEST_ARGUMENT ...]     # default: the tests of commands, on this host

Such a default is one that only users run. While the tests run, a file in this Python's site-packages has each of their
processes note which options the command lines give that it runs; those that the parser or a check after it refuses are
left out. Required options are listed, too. Tests of other environments, as tests/cluster makes them, are seen if named.
The file goes when this program ends; one that is left by SIGKILL does nothing once the program's directory is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/unit/tools", "tests/unit/restart_trace", "tests/unit/megatron/launch", "tests/unit/test_command_lines.py",
    "tests/unit/test_drill_scripts.py", "tests/dist/test_restart_drill.py", "tests/dist/test_restart_sweep.py",
    "tests/dist/test_ckpt_replay.py", "tests/dist/test_ckpt_plan_real.py", "tests/dist/test_launch.py",
    "tests/dist/test_defaults.py", "tests/dist/test_soak.py", "tests/dist/test_any_job.py",
    "tests/dist/test_memory_shrink.py", "tests/dist/test_readme.py",
)  # fmt: skip
OF_TESTS = ("python -m tests.", "python -m benchmarks.")
ENTRY_POINTS = ("main", "run_program")


def watch(records: str) -> None:
    """Add a line for each command line that this process runs or refuses to its file in the directory `records`.

    A file of each process, as a test may limit how large the files of its processes become.
    """
    parse, refuse, numbers = argparse.ArgumentParser.parse_known_args, argparse.ArgumentParser.error, itertools.count()
    run_by: dict[int, int] = {}  # id of a parser -> number of its last command line

    def note(**what: object) -> None:
        # Processes may outlive the directory.
        with contextlib.suppress(FileNotFoundError), open(f"{records}/{os.getpid()}", "a") as file:
            file.write(json.dumps({"process": os.getpid()} | what) + "\n")

    def parse_noted(self: Any, args: Any = None, namespace: Any = None) -> Any:
        run_by.pop(id(self), None)
        words = list(sys.argv[1:] if args is None else args)
        parsed = parse(self, args, namespace)
        if type(self).__name__ == "CommandParser" and is_run(sys._getframe(1)):
            run_by[id(self)] = next(numbers)
            command = " ".join([self.prog, *selections(self, words)])
            note(number=run_by[id(self)], command=command, given=options_in(self, words))
        return parsed

    def refuse_noted(self: Any, message: str) -> Any:
        if id(self) in run_by:
            note(refused=run_by[id(self)])
        return refuse(self, message)

    argparse.ArgumentParser.parse_known_args = parse_noted
    argparse.ArgumentParser.error = refuse_noted


def is_run(frame: Any) -> bool:
    """Whether a command is called, and not the function alone that reads its command line."""
    while frame is not None and frame.f_code.co_name not in ENTRY_POINTS:
        frame = frame.f_back
    return frame is not None


def options_in(parser: Any, words: list[str]) -> dict[str, bool]:
    """Option -> whether `words` has it, of all that `parser` knows."""
    words = words[: words.index("--")] if "--" in words else words

    def given(name: str) -> bool:
        return any(word.partition("=")[0] == name or len(name) == 2 and word.startswith(name) for word in words)

    actions = [action for action in parser._actions if action.option_strings]
    return {action.option_strings[0]: any(map(given, action.option_strings)) for action in actions}


def selections(parser: Any, words: list[str]) -> list[str]:
    """The options of which a command takes exactly one, and does another thing for each."""
    groups = [group._group_actions for group in parser._mutually_exclusive_groups if group.required]
    names = {name for actions in groups for action in actions for name in action.option_strings}
    return [name for name, given in options_in(parser, words).items() if given and name in names]


def always_given(lines: list[str]) -> dict[str, list[str]]:
    """Command, with the number of its runs -> its options that all of them gave."""
    records = [json.loads(line) for line in lines]
    refused = {(record["process"], record["refused"]) for record in records if "refused" in record}
    found: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if "command" in record and (record["process"], record["number"]) not in refused:
            for option, given in record["given"].items():
                found[record["command"]][option].append(given)
    return {
        f"{command} ({max(map(len, options.values()))} runs)": [name for name in sorted(options) if all(options[name])]
        for command, options in sorted(found.items())
        if not command.startswith(OF_TESTS)
    }


def line_of_site(records: Path) -> str:
    """For a .pth file of site-packages: each interpreter runs `watch` while the directory `records` is there."""
    watched = f"runpy.run_path({__file__!r}, run_name='watch')['watch']({str(records)!r})"
    return f"import os, runpy; os.path.exists({str(records)!r}) and {watched}\n"


def main() -> int:
    """Returns the exit status of pytest."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # end it as an error does, with everything removed
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    watcher = Path(sysconfig.get_path("purelib")) / "tool_defaults.pth"
    with tempfile.TemporaryDirectory() as directory:
        records = Path(directory)
        watcher.write_text(line_of_site(records))
        try:
            tested = subprocess.run([sys.executable, "-m", "pytest", "-q", *(sys.argv[1:] or TESTS)], cwd=ROOT)
        finally:
            watcher.unlink()
        for command, options in always_given(
            [line for file in records.iterdir() for line in file.read_text().splitlines()]
        ).items():
            print(f"{command}: {' '.join(options) or 'each default is used'}")
    return tested.returncode


if __name__ == "__main__":
    sys.exit(main())
