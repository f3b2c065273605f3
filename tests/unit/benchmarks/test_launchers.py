"""The restart measurement's command line, its log reading and its arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.launchers.cli import parse_arguments
from benchmarks.launchers.measure import IterationLines
from benchmarks.launchers.report import analyse, render
from benchmarks.launchers.variants import Setting, command


def test_ratios_are_of_medians_and_judged_by_the_target(tmp_path: Path) -> None:
    samples = {
        "torchrun": [4.0, 9.0, 5.0], "fork": [9.0, 8.0, 7.0], "fork-standby": [0.3, 0.2, 0.4],
        "fork-in-place": [0.4, 0.5, 0.6], "plain": [10.0, 10.5, 2.0],
    }  # fmt: skip
    found = analyse(samples, Setting(tmp_path, 2, "torch", "bf16"), {"processors": 2})
    assert found["variants"]["torchrun"]["ratio"] == 0.5 and found["variants"]["plain"]["ratio"] == 1.0
    assert found["variants"]["fork"]["samples_s"] == [9.0, 8.0, 7.0] and found["rounds"] == 3
    assert (found["variants"]["fork"]["min_s"], found["variants"]["fork"]["max_s"]) == (7.0, 9.0)
    text = render(found)
    assert "8 ranks (TP2 PP2 DP2, bf16)" in text
    lines = {line.split()[0]: line for line in text.splitlines()[2:7]}
    assert "target 0.7: met" in lines["torchrun"] and "target 0.7: MISSED" in lines["fork"]
    assert "target 0.03: met" in lines["fork-standby"] and "target 0.03: MISSED" in lines["fork-in-place"]
    assert "target" not in lines["plain"]
    alone = analyse({"fork": [1.0]}, Setting(tmp_path, 1, "torch", "bf16"), {})
    assert alone["variants"]["fork"]["ratio"] is None and "target" not in render(alone)


def test_iterations_are_read_from_whole_lines_as_they_come(tmp_path: Path) -> None:
    log = IterationLines(tmp_path / "log")
    assert list(log.new()) == []
    log.path.write_text(" iteration        5/      12 | lm loss: 1 |\nwarning: iteration 6\n iteration        6/  ")
    assert list(log.new()) == [5]
    with log.path.open("a") as file:
        file.write("    12 | lm loss: 1 |\n[default7]: iteration        7/      12 | x |\n")
    assert list(log.new()) == [6, 7] and list(log.new()) == []
    assert log.losses == [(5, "1"), (6, "1")]  # as far as they are told
    log.path.write_text(log.path.read_text() + " iteration  8/ 12 | elapsed: 3 | lm loss: 6.1E-01 | x |\n")
    assert list(log.new()) == [8] and log.losses[2:] == [(8, "6.1E-01")]


SHOWN = ("torchrun", "fork", "fork-in-place", "fork-standby")


@pytest.mark.slow
def test_the_demonstration_is_what_its_script_runs(tmp_path: Path) -> None:
    """On the same model, batch and data as the plain script."""
    setting = Setting(tmp_path, 2, "lazy", "fp32")
    commands = {name: command(name, setting, tmp_path / "save") for name in SHOWN}
    plain = command("plain", setting, tmp_path / "save")
    for name, argv in commands.items():
        assert argv[argv.index("--checkpoint-engine") + 1] == "lazy"
        assert not any(word.startswith("RESTART_TRACE_LAUNCH_ID=") for word in argv), name
        for ours, theirs in (
            ("--num-layers", "4"), ("--hidden-size", "128"), ("--ffn-hidden-size", "344"),
            ("--num-attention-heads", "4"),
            ("--num-key-value-heads", "2"), ("--seq-length", "128"), ("--micro-batch-size", "2"),
            ("--global-batch-size", plain[plain.index("--global-batch") + 1]),
            ("--tensor-model-parallel-size", plain[plain.index("--tensor-parallel") + 1]),
            ("--pipeline-model-parallel-size", plain[plain.index("--pipeline-parallel") + 1]),
            ("--train-iters", plain[plain.index("--iterations") + 1]),
            ("--save-interval", plain[plain.index("--save-interval") + 1]),
            ("--data-path", plain[plain.index("--data") + 1]), ("--save", plain[plain.index("--save") + 1]),
        ):  # fmt: skip
            assert argv[argv.index(ours) + 1] == theirs, ours
    assert plain[plain.index("--dtype") + 1] == "fp32" and not any("--bf16" in argv for argv in commands.values())
    bf16 = Setting(tmp_path, 2, "lazy", "bf16")
    assert "--bf16" in command("fork", bf16, tmp_path / "save") and "bf16" in command("plain", bf16, tmp_path / "save")
    assert commands["fork-in-place"][commands["fork-in-place"].index("--max-restarts") + 1] == "1"
    assert [name for name in SHOWN if "--standby" in commands[name]] == ["fork-standby"]
    assert commands["fork"][commands["fork"].index("--max-restarts") + 1] == "0"
    script = (Path(__file__).parents[3] / "benchmarks" / "launchers" / "plain_model.py").read_text()
    for default in ('"--layers", 4', '"--hidden-size", 128', '"--ffn-size", 344', '"--heads", 4', '"--kv-heads", 2',
                    '"--seq-length", 128', '"--micro-batch", 2'):  # fmt: skip
        assert default in script


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--repeat", "0"], "--repeat 0: must be at least 1"),
        (["--dp", "0"], "--dp 0: must be at least 1"),
        (["--time-limit", "0"], "--time-limit 0: must be more than 0"),
        (["--only", "slurm"], "invalid choice: 'slurm'"),
        (["--dir", "/no/such"], "--dir /no/such: is no directory"),
    ],
)
def test_a_wrong_command_line_ends_with_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(parse_arguments, argv, capsys)


def refusal(parse: Callable[[list[str]], object], argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command line that ends with status 2 says."""
    with pytest.raises(SystemExit) as stopped:
        parse(argv)
    assert stopped.value.code == 2
    return capsys.readouterr().err
