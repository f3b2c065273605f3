"""--config FILE: the settings of a file, what of it is refused, and what the environment overrides."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.unit.script_helpers import BENCH, TINY, run_script, split_command
from tools.restart_bench.errors import SettingsError
from tools.restart_bench.settings_file import read, taken_from, with_settings_of
from tools.restart_drill.cli import main as drill
from tools.restart_sweep.cli import main as sweep

PRESET = "run_7b_tp4_pp2.sh"


def written(directory: Path, text: str) -> str:
    file = directory / "my.conf"
    file.write_text(text)
    return str(file)


def values(directory: Path, text: str) -> dict[str, str]:
    return {name: value for name, (_, value) in read(Path(written(directory, text))).items()}


def test_lines(tmp_path: Path) -> None:
    text = "# mine\n\nENGINE=lazy\n  DP = 2\t\nEXTRA_ARGS = --lr 1 --x=y # z\n".replace(" # z", "")
    assert values(tmp_path, text) == {"ENGINE": "lazy", "DP": "2", "EXTRA_ARGS": "--lr 1 --x=y"}
    assert values(tmp_path, "\ufeffDP=2\n") == {"DP": "2"}, "editors begin files with a mark of the byte order"
    assert values(tmp_path, "WORK_DIR = \" a # b \"\nSAVE_DIR='it \"is\"'\nHOSTFILE=\n") == {
        "WORK_DIR": " a # b ", "SAVE_DIR": 'it "is"', "HOSTFILE": "",
    }  # fmt: skip


@pytest.mark.parametrize("value", ["$(touch x)", "`touch x`", "$HOME", "a~", "a; touch x", "\\n", "&& touch x", "%s*"])
def test_nothing_in_a_value_is_expanded(value: str, tmp_path: Path) -> None:
    assert values(tmp_path, f"WORK_DIR={value}") == {"WORK_DIR": value}
    file = written(tmp_path, f"WORK_DIR={value}\nGPUS_PER_NODE=8\nDEVICE=cuda\nDRY_RUN=1\n")
    done = run_script(PRESET, tmp_path, "--config", file)
    assert done.returncode == 0, done.stderr
    command = split_command(done.stdout.splitlines()[0])
    assert f"{value}/checkpoints" in command.training
    assert [path.name for path in tmp_path.iterdir()] == ["my.conf"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ENGINE=lazy\nSAVE_INTERVALL=5", ":2: SAVE_INTERVALL: there is no such setting; did you mean SAVE_INTERVAL?"),
        ("ENGIN=secret", ":1: ENGIN: there is no such setting; did you mean ENGINE?"),
        ("engine=lazy", ":1: engine: there is no such setting; did you mean ENGINE?"),
        ("OUT_DIR=/x", ":1: OUT_DIR: there is no such setting"),
        ("SAVE_DIR=~/x", ":1: SAVE_DIR: ~ is not expanded in the file; write the path in full"),
        ("EXTRA_ARGS='--tensorboard-dir ~ada/x'", ":1: EXTRA_ARGS: ~ is not expanded in the file; write the path"),
        ("WORK_DIR=a\t# b", ":1: WORK_DIR: put the whole value in quotes, and a comment on a line of its own"),
        ("NCCL_DEBUG=INFO", ":1: NCCL_DEBUG: there is no such setting"),
        ("TP=4", ":1: TP: the preset fixes it"),
        ("\n\nDP=two", ":3: DP=two: give a whole number, at least 1"),
        ("DP=1\nDP=2", ":2: DP: line 1 has it already"),
        ("DP", ":1: is no line NAME = VALUE"),
        ("export DP=2", ":1: is no line NAME = VALUE"),
        ("[settings]", ":1: is no line NAME = VALUE"),
        ("WORK_DIR=a # b", ":1: WORK_DIR: put the whole value in quotes"),
        ("WORK_DIR='a' b", ":1: WORK_DIR: put the whole value in quotes"),
        ("WORK_DIR=a\x1bb", ":1: WORK_DIR: the value has a control character"),
        ("MEGATRON_LAUNCH_SECRET=a", ":1: MEGATRON_LAUNCH_SECRET: others may read the file; chmod 600"),
    ],
)
def test_what_is_refused_by_file_and_line(text: str, message: str, tmp_path: Path) -> None:
    file = written(tmp_path, text)
    os.chmod(file, 0o644)
    with pytest.raises(SettingsError) as refused:
        read(Path(file))
    assert str(refused.value).startswith(f"{file}{message}") and "secret" not in str(refused.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "my.conf").write_bytes(b"DP=\xff")
    with pytest.raises(SettingsError, match="is not text in UTF-8"):
        read(tmp_path / "my.conf")
    done = run_script(PRESET, tmp_path, "--config", "none.conf")
    assert done.returncode == 2 and done.stderr == f"{PRESET}: error: none.conf: No such file or directory\n"


def test_the_environment_overrides_the_file_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, "ENGINE=lazy\nDP=2\nITERS=7\n")
    found = with_settings_of(file, {"ENGINE": "dcp", "DP": "2", "ITERS": "", "HOME": "/h"})
    assert found == {"ENGINE": "dcp", "DP": "2", "ITERS": "7", "HOME": "/h"}
    assert capsys.readouterr().err == f"{file}:1: ENGINE: the environment has another value, which counts\n"


def test_where_the_option_stands() -> None:
    assert taken_from(["a", "--config", "f", "--", "--config", "g"]) == (["a", "--", "--config", "g"], "f")
    assert taken_from(["--config=f=g", "a"]) == (["a"], "f=g")
    assert taken_from(["a", "--", "b"]) == (["a", "--", "b"], None)
    for words in (["--config"], ["--config="], ["--config", "f", "--config", "g"]):
        with pytest.raises(SettingsError, match="^--config"):
            taken_from(words)


def test_scripts_take_a_file_in_place_of_variables(tmp_path: Path) -> None:
    settings = {"ENGINE": "lazy", "DP": "2", "WORK_DIR": str(tmp_path / "work"), "GPUS_PER_NODE": "8", "DRY_RUN": "1"}
    file = written(tmp_path, "".join(f"{name} = {value}\n" for name, value in settings.items()))
    by_file, by_variables = run_script(PRESET, tmp_path, "--config", file), run_script(PRESET, tmp_path, **settings)
    assert by_file.returncode == 0, by_file.stderr
    shown = [re.sub(r"RESTART_TRACE_LAUNCH_ID=\S+", "", done.stdout) for done in (by_file, by_variables)]
    assert shown[0] == shown[1] != ""
    words = ["7b_tp4_pp2", "--scheduler", "slurm"]
    jobs = [run_script("submit.sh", tmp_path, *words, "--config", file)]
    jobs.append(run_script("submit.sh", tmp_path, *words, **settings))
    assert jobs[0].returncode == 0, jobs[0].stderr
    assert jobs[0].stdout == jobs[1].stdout and "export ENGINE=lazy" in jobs[0].stdout
    wrong = run_script(TINY, tmp_path, "--config", written(tmp_path, "ENGINE=lasy\nSEQ_LENGHT=3\n"))
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "my.conf:2: SEQ_LENGHT: there is no such setting; did you mean SEQ_LENGTH?" in wrong.stderr


def test_a_drill_takes_the_settings_of_its_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE", "")
    monkeypatch.setenv("KILL_AT", "")
    words = ["--fault", "sigkill-all", "--at", "mid-step", "--out", str(tmp_path / "out"), "--dry-run"]
    file = written(tmp_path, "ENGINE=lazy\n")
    assert drill([*words, "--config", file, "--", "tiny_tp2_pp2_dp2"]) == 0
    assert os.environ["ENGINE"] == "lazy"
    assert drill([*words, "--config", file, "--", "true", "x"]) == 2
    assert "has settings of a preset, and true is none" in capsys.readouterr().err
    for name, value in (("KILL_AT", "3"), ("MODE", "replay")):
        monkeypatch.setenv(name, "")
        assert drill([*words, "--config", written(tmp_path, f"{name}={value}"), "--", "tiny_tp2_pp2_dp2"]) == 2
        assert f"my.conf:1: {name}: has no effect here; leave it out" in capsys.readouterr().err


def test_a_sweep_takes_what_its_cells_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = BENCH / "sweeps" / "tiny.yaml"
    for text, message in (
        ("PYTHON=/p", "my.conf:1: PYTHON: has no effect here"),
        ("ITERS=3", "ITERS=3: a sweep does not take this setting from the environment or --config"),
    ):
        monkeypatch.setenv("ITERS", "")
        assert sweep(["--config", written(tmp_path, text), "--dry-run", str(asked)]) == 2
        assert message in capsys.readouterr().err
