"""The command line of the analysis: both ways to run it, output, exit status, start-up time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT, file_of, result
from tests.unit.tools.ckpt_analysis.trace_factory import Options, write_trace
from tools.ckpt_analysis.cli import COMMANDS, main


def run_cli(*arguments: str, cwd: Path = ROOT, module: bool = True) -> subprocess.CompletedProcess[str]:
    start = ["-m", "tools.ckpt_analysis"] if module else [str(ROOT / "tools" / "ckpt_analysis")]
    return subprocess.run([sys.executable, *start, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_both_ways_to_run_it(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    as_module = run_cli("--format", "json", str(trace))
    as_directory = run_cli("--format", "json", str(trace), cwd=tmp_path, module=False)
    assert (as_module.returncode, as_directory.returncode) == (0, 0), as_module.stderr + as_directory.stderr
    assert as_module.stdout == as_directory.stdout
    assert json.loads(as_module.stdout) == result(trace)


@pytest.mark.slow
def test_the_waterfall_of_a_restart(tmp_path: Path) -> None:
    """From the failure on: 18.97 s in all, of which the trace's constants are known (trace_factory)."""
    lines = run_cli("--all", str(write_trace(tmp_path))).stdout.splitlines()
    (first,) = [i for i, line in enumerate(lines) if line.startswith("  to first step, critical rank 2 ")]
    (last,) = [i for i, line in enumerate(lines) if line == "  99.86 % of 18.970 s accounted for"]
    shown = {cells[0]: cells[1:3] for cells in (line.split() for line in lines[first + 1 : last])}
    assert shown == {
        "detect": ["0.500", "0.500"], "stop": ["0.300", "0.800"], "relaunch": ["0.200", "1.000"],
        "launcher": ["13.514", "14.514"], "process_start": ["0.040", "14.554"], "imports": ["3.500", "18.054"],
        "rendezvous": ["0.100", "18.154"], "communicators": ["0.050", "18.204"], "model_build": ["0.200", "18.404"],
        "data_build": ["0.060", "18.464"], "engine_init": ["0.300", "18.764"], "discover": ["0.003", "18.767"],
        "load": ["0.065", "18.832"], "redistribute": ["0.008", "18.840"], "barrier": ["0.004", "18.844"],
        "first_step": ["0.100", "18.944"], "unattributed": ["0.026", "18.970"],
    }  # fmt: skip
    bars = {line.split()[0]: line for line in lines[first + 1 : last] if "#" in line}
    begins = [line.find("#") for line in bars.values()]
    assert sorted(begins) == begins and 28 <= bars["launcher"].count("#") <= 29  # of 40 columns, 71 %
    assert not any("failure to first step" in line for line in _without_supervisor(tmp_path / "other"))


def _without_supervisor(directory: Path) -> list[str]:
    return run_cli(str(write_trace(directory, Options(supervisor=False)))).stdout.splitlines()


@pytest.mark.slow
def test_terminal_report(tmp_path: Path) -> None:
    # A name with glob characters is a name.
    trace = write_trace(tmp_path / "run[1]*" / "restart_trace")
    done = run_cli("--all", str(trace.parent))
    assert done.returncode == 0, done.stderr
    assert "\033" not in done.stdout  # no colour where there is no terminal
    assert "Run 0123456789ab: TP2 PP2 DP2, 8 ranks on 1 host (node0), 2 cycles" in done.stdout
    assert "3 steps had to be trained again (0.330 s of work)" in " ".join(done.stdout.split())
    for heading in (
        "Restart of cycle 1 (",
        "Load global_step5",
        "Save global_step5",
        "Save global_step10",
        "Saves (2)",
    ):
        assert f"\n{heading}" in done.stdout
    _, _, last = done.stdout.partition("\nSave global_step10")
    row = next(line for line in last.splitlines() if re.match(r"\s+fsync ", line))
    assert row.split() == ["fsync", "0.2400", "5", "0.0400", "0.0400", "0.2000", "0.2400", "36.0", "MB", "0.150", "yes"]
    first_screen = run_cli(str(trace.parent)).stdout
    assert done.stdout.startswith(first_screen) and "\nSave " not in first_screen


@pytest.mark.slow
def test_strict(tmp_path: Path) -> None:
    trace = write_trace(tmp_path)
    assert main(["--strict", str(trace)]) == 0
    file_of(trace, 3, 1).unlink()
    assert main(["--strict", str(trace)]) == 1
    assert main([str(trace)]) == 0


def not_a_directory(path: Path) -> None:
    path.write_text("x")


def something_else(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("x")


def only_garbage(path: Path) -> None:
    path.mkdir()
    file_of(path, 0, 0).write_bytes(b"\x00" * 100)


def only_empty(path: Path) -> None:
    path.mkdir()
    file_of(path, 0, 0).write_bytes(b"")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such directory"),
        (not_a_directory, "is a file. Give the directory of a trace; the log"),
        (lambda path: path.mkdir(), "no restart trace here (it is empty)"),
        (something_else, "no restart trace here (it holds other things)"),
        (only_garbage, "can be analysed: rank_00000_cycle_000.jsonl: line 1: not a JSON record"),
        (only_empty, "can be analysed: rank_00000_cycle_000.jsonl: has no records"),
    ],
)
def test_could_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, message: str) -> None:
    make(tmp_path / "logs")
    assert main([str(tmp_path / "logs")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and str(tmp_path / "logs") in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""


def test_traces_below_the_directory_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As below runs/tiny after several demonstrations: the newest three, at most two levels below."""
    for number in range(5):
        trace = write_trace(tmp_path / f"demo-{number}" / "trace")
        os.utime(trace, (number, number))
    write_trace(tmp_path / "a" / "b" / "too_deep")
    assert main([str(tmp_path)]) == 2
    named = " or ".join([", ".join(str(tmp_path / f"demo-{n}" / "trace") for n in (4, 3)), f"{tmp_path}/demo-2/trace"])
    assert capsys.readouterr().err == (
        f"ckpt-analysis: {tmp_path}: no restart trace here (it holds other things): did you mean {named}?\n"
    )
    assert main(["summary", str(tmp_path / "demo-4")]) == 2
    assert f": did you mean {tmp_path / 'demo-4' / 'trace'}?\n" in capsys.readouterr().err


def test_the_search_for_traces_below_is_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(250):
        (tmp_path / f"{number:03d}").mkdir()
        os.utime(tmp_path / f"{number:03d}", (1000 + number, 1000 + number))
    trace = write_trace(tmp_path / "older")
    os.utime(trace, (1, 1))
    assert main([str(tmp_path)]) == 2
    assert "looked for rank_RRRRR_cycle_CCC.jsonl in it" in capsys.readouterr().err
    os.utime(trace)
    assert main([str(tmp_path)]) == 2
    assert f"did you mean {trace}?" in capsys.readouterr().err


@pytest.mark.slow
def test_flags_of_all_commands_may_stand_before_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(write_trace(tmp_path / "trace"))
    assert main(["--quiet", "--no-cache", "goodput", trace]) == 0
    assert capsys.readouterr().out.startswith("Goodput of ")
    assert main(["--quiet", "--run-id", "goodput", trace]) == 2  # a value
    assert main(["--quiet", "goodpu", trace]) == 2
    assert "goodpu: neither a command nor a directory; did you mean goodput?" in capsys.readouterr().err


def test_an_empty_trace_directory_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As restart-trace leaves it if nothing was traced."""
    assert main([str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "(it is empty): no rank was traced" in told and "RANK" in told and "-E, -I or -S" in told


@pytest.mark.parametrize("arguments", [["--help"], *([command, "--help"] for command in COMMANDS)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """So it answers at once."""
    code = (
        "import sys\n"
        "from tools.ckpt_analysis.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit: pass\n"
        "print(len(sys.modules), *{'torch', 'polars', 'numpy', 'tqdm', 'plotly', 'jinja2'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    count, *heavy = done.stdout.splitlines()[-1].split()
    assert heavy == [] and int(count) < 250
    assert "examples:" in done.stdout and "exit status" in done.stdout


@pytest.mark.slow
def test_a_report_does_not_wait_for_scipy(tmp_path: Path) -> None:
    """Only tests of repeats, projections and fits need it; importing it takes longer than a small report."""
    write_trace(tmp_path / "logs")
    code = (
        "import sys; from tools.ckpt_analysis.cli import main\n"
        f"print(main(['report', {str(tmp_path / 'logs')!r}, '-o', {str(tmp_path / 'out.html')!r}, '--quiet']))\n"
        "print([module for module in sys.modules if module.split('.')[0] == 'scipy'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-2:] == ["0", "[]"], done.stdout + done.stderr


@pytest.mark.slow
def test_never_imports_torch_and_of_the_project_only_small_modules(tmp_path: Path) -> None:
    write_trace(tmp_path)
    code = (
        "import sys; from tools.ckpt_analysis.cli import main\n"
        f"main([{str(tmp_path)!r}]); main(['--format', 'json', {str(tmp_path)!r}])\n"
        "ours = ('torch', 'megatron', 'restart_trace')\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ours))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    small = ("command_line", "regular", "schema", "version")
    assert done.stdout.splitlines()[-1] == str(["restart_trace", *(f"restart_trace.{name}" for name in small)]), (
        done.stderr
    )
