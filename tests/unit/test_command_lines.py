"""Every command and script: --help and --version before anything else, and a hint for what is mistyped."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

from restart_trace.command_line import VERSION_TEXT, CommandParser
from restart_trace.version import __version__
from tests.unit.script_helpers import BENCH, ROOT
from tools.ckpt_analysis.cli import COMMANDS
from tools.ckpt_analysis.cli import main as analysis
from tools.ckpt_plan.cli import main as plan

CONSOLE_SCRIPTS = sorted(
    script.name
    for script in entry_points(group="console_scripts")
    if script.dist is not None and script.dist.name == "megatron-restart"
)
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for folder in ("tools", "benchmarks", "megatron/adapters", "megatron/launch", "restart_trace")
    for path in (ROOT / folder).rglob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
# Started by commands with arguments that nobody types.
CHILD_PROCESSES = {
    "tools.ckpt_replay.worker", "benchmarks.reshard.rank", "benchmarks.overhead.rank",
    "benchmarks.launchers.plain_deepspeed", "benchmarks.adapters.job", "megatron.launch.rank",
    "megatron.launch.check_hosts", "benchmarks.scaling.simulated_ranks",
    "benchmarks.replication_traffic.zero1", "benchmarks.replication_traffic.zero3",
    "tools.restart_drill.soak.snapshot", "benchmarks.restart_scoreboard.torchft_ddp",
    "benchmarks.restart_scoreboard.nvrx_inprocess",
}  # fmt: skip
SCRIPTS = [
    *sorted(path for path in BENCH.rglob("*.*") if path.suffix in (".sh", ".sbatch") and path.read_text()[:2] == "#!"),
    ROOT / "run_tests.sh",
]
HELP_HAS = ("examples:", "exit status:")
HEAVY = ("torch", "deepspeed", "polars", "pandas", "scipy", "plotly")


@pytest.fixture(scope="module")
def without_heavy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which to import what takes long is an error."""
    place = tmp_path_factory.mktemp("heavy")
    for name in HEAVY:
        (place / f"{name}.py").write_text(f"raise RuntimeError('{name} is imported')\n")
    return {**os.environ, "PYTHONPATH": str(place)}


def run(*words: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def check(command: Sequence[object], env: dict[str, str] | None = None) -> str:
    """--version and --help of `command`; returns the latter."""
    version = run(*command, "--version", env=env)
    assert (version.returncode, version.stdout) == (0, f"{VERSION_TEXT}\n"), version.stderr
    told = run(*command, "--help", env=env)
    assert (told.returncode, told.stderr) == (0, "")
    assert all(word in told.stdout for word in HELP_HAS)
    return told.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_answer_before_they_do_anything(script: Path) -> None:
    check(["bash", script])


@pytest.mark.slow
@pytest.mark.parametrize("name", CONSOLE_SCRIPTS)
def test_console_scripts_answer_at_once(name: str, without_heavy: dict[str, str]) -> None:
    """By their own names; what they start is among the modules, which answer --version, too."""
    told = run(Path(sys.executable).with_name(name), "--help", env=without_heavy)
    assert (told.returncode, told.stderr) == (0, "") and f"usage: {name} " in told.stdout


# Runs each module of its arguments as `python -m MODULE` does, with each option in a fork of its own, and prints one
# line of JSON for each: module, option, exit status, stdout, stderr. It has imported nothing of ours when it forks.
FORKS = """
import argparse, contextlib, dataclasses, importlib.metadata, io, json, logging
import os, runpy, subprocess, sys, traceback, typing
for module in sys.argv[1:]:
    for option in ("--version", "--help"):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        out, err, status = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            sys.argv = [module, option]
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as exit_:
                status = exit_.code or 0
            except BaseException:
                status = 1
                traceback.print_exc()
        print(json.dumps([module, option, status, out.getvalue(), err.getvalue()]), flush=True)
        sys.exit()
"""


@pytest.mark.slow
def test_modules_that_are_commands_answer_at_once(without_heavy: dict[str, str]) -> None:
    modules = sorted({*MODULES} - CHILD_PROCESSES)
    forked = run(sys.executable, "-c", FORKS, *modules, env=without_heavy)
    assert (forked.returncode, forked.stderr) == (0, "")
    answers = [json.loads(line) for line in forked.stdout.splitlines()]
    assert [answer[:2] for answer in answers] == [[module, o] for module in modules for o in ("--version", "--help")]
    wrong = [
        (module, option, status, told, error)
        for module, option, status, told, error in answers
        if (status, error) != (0, "")
        or (told != f"{VERSION_TEXT}\n" if option == "--version" else not all(word in told for word in HELP_HAS))
    ]
    assert not wrong


def test_the_trainer_answers_at_once(without_heavy: dict[str, str]) -> None:
    check([sys.executable, "pretrain_gpt.py"], without_heavy)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_analysis_show_defaults_one_way(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        analysis([command, "--help"])
    told = capsys.readouterr().out
    assert "examples:" in told and "exit status:" in told
    # The only default without the word would be one in parentheses at the end of a line.
    assert not re.search(r"(?<!default:) \(?\d+\)$", told, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--modle", "70b"), "--modle: no such option; did you mean --model?"),
        (("--model", "70b", "extra"), "unexpected argument 'extra'"),
        (("--format", "jsn"), "did you mean json?"),
    ],
)
def test_what_is_mistyped_is_refused_with_what_was_meant(
    words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        plan(words)
    assert message in capsys.readouterr().err


def test_a_mistyped_option_is_named_before_what_is_missing_because_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser("command")
    parser.add_argument("--dir", required=True, type=int, default=3, help="the number")
    assert "the number (default: 3)" in parser.format_help()
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args([])
    short = capsys.readouterr().err.splitlines()
    assert len(short) == 2 and short[-1] == "command: error: the following arguments are required: --dir; see --help"
    for number in range(20):
        parser.add_argument(f"--option-{number}")
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--dri", "4"])
    assert capsys.readouterr().err == "command: error: --dri: no such option; did you mean --dir?\n"


@pytest.mark.parametrize("words", ["--moments a b -- train", "--moments a b --out x -- train --flag"])
def test_a_word_between_options_and_command_is_named(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser("drill")
    parser.add_argument("--moments")
    parser.add_argument("--out")
    parser.add_argument("command", nargs="+")
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(words.split())
    assert "unexpected argument 'b' before --" in capsys.readouterr().err
    assert parser.parse_args(["--moments", "a", "--", "train", "--flag"]).command == ["train", "--flag"]
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--moments", "a"])
    assert "the following arguments are required: command" in capsys.readouterr().err


def test_a_mistyped_subcommand_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analysis(["comprae", str(tmp_path), str(tmp_path)]) == 2
    assert "did you mean compare?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "argument", "message"),
    [
        ("run_tiny_tp2_pp2_dp2.sh", "--hlep", "did you mean --help?"),
        ("setup_env.sh", "TORCH_VARIANT=cpu", "settings are environment variables: TORCH_VARIANT=cpu bash"),
    ],
)
def test_scripts_refuse_arguments(script: str, argument: str, message: str) -> None:
    refused = run("bash", BENCH / script, argument)
    assert refused.returncode == 2 and message in refused.stderr


def test_the_version_is_the_same_everywhere() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert version("megatron-restart") == __version__
