"""What ends a launch before its ranks have started is one message, which the other nodes get, too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.config.arguments import config_from_args, parse_args
from tests.unit.script_helpers import TINY, run_script
from tools.restart_bench.errors import SettingsError
from tools.restart_bench.interpreter import Interpreter
from tools.restart_bench.presets import Preset
from tools.restart_bench.run import Start, settle
from tools.restart_bench.training import training_flags

# In place of the interpreter: notes what the other nodes are told.
TELLS = """#!/usr/bin/env bash
[[ $* != *" refuse "* ]] || printf '%s\\n' "$@" >>"$NOTES/told"
"""


@pytest.mark.parametrize(
    ("save_dir", "message"),
    [
        ("/dev/null/x", "SAVE_DIR=/dev/null/x: cannot be created: Not a directory; set another"),
        ("{}/save", "{}/save/latest: Is a directory"),  # any other failure of the system
    ],
)
def test_a_failure_of_the_system_is_told_to_the_other_nodes(save_dir: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "save" / "latest").mkdir(parents=True)
    python = tmp_path / "python"
    python.write_text(TELLS)
    python.chmod(0o755)
    done = run_script(
        TINY, tmp_path, DEVICE="cpu", NNODES="2", NODE_RANK="1", GPUS_PER_NODE="4", MASTER_ADDR="127.0.0.1",
        SKIP_SETUP="1", PYTHON=str(python), DATA_PATH="/given", KILL_AT="none", WORK_DIR=str(tmp_path / "work"),
        SAVE_DIR=save_dir.format(tmp_path), NOTES=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.endswith(f"error: {message.format(tmp_path)}\n")
    assert "NODE_RANK=1 is refused on " in (tmp_path / "told").read_text()


def test_without_set_up_the_environment_of_the_checkout_is_used_if_it_is_there(tmp_path: Path) -> None:
    def of(**given: str) -> Interpreter:
        return settle(Start(Preset("tiny", 2, 2), {"VENV_DIR": str(tmp_path), "SKIP_SETUP": "1", **given})).interpreter

    assert (of().path, of().venv) == ("python3", None)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.symlink_to(sys.executable)
    assert (of().path, of().venv) == (str(python), None)  # as it is: nothing makes or updates it
    assert of(PYTHON="/other/python").path == "/other/python"
    assert of(SKIP_SETUP="").venv == tmp_path


def test_another_position_embedding_replaces_that_of_the_preset() -> None:
    given = {"SKIP_SETUP": "1", "CUDA_VISIBLE_DEVICES": ""}
    bloom = "--position-embedding-type alibi --normalization layernorm --embed-layernorm"
    for words, kind in (("", "rotary"), (bloom, "alibi")):
        flags = training_flags(settle(Start(Preset("tiny", 2, 2), {**given, "EXTRA_ARGS": words})))
        env = {"WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0"}
        assert config_from_args(parse_args(flags, env), env).model.position_embedding_type == kind


def test_an_environment_without_its_stamp_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"\.setup_stamp: cannot be read: No such file or directory; run .*setup_env"
    ):
        Interpreter("python", tmp_path, {}).check_torch_build("cuda")
