"""setup_env.sh: what it refuses, and that it is done only once it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unit.script_helpers import run_script


def test_setup_refuses_to_empty_a_directory(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("")
    done = run_script("setup_env.sh", tmp_path, VENV_DIR=str(tmp_path), TORCH_VARIANT="cpu")
    assert done.returncode == 1
    assert "is not empty and no virtual environment" in done.stderr
    assert (tmp_path / "thesis.txt").exists()


def test_setup_names_a_python_that_does_not_work(tmp_path: Path) -> None:
    done = run_script("setup_env.sh", tmp_path, VENV_DIR=str(tmp_path / "venv"), PYTHON="/no/python")
    assert done.returncode == 1
    assert "PYTHON=/no/python is not a working Python 3.10 to 3.12" in done.stderr


@pytest.mark.slow
def test_setup_that_fails_is_not_taken_for_done(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    done = run_script(
        "setup_env.sh",
        tmp_path,
        VENV_DIR=str(venv),
        PYTHON=sys.executable,
        TORCH_VARIANT="cpu",
        PIP_NO_INDEX="1",
        PIP_CONFIG_FILE="/dev/null",
    )
    assert done.returncode == 1
    assert "pip failed" in done.stderr
    assert (venv / "setup.log").exists() and not (venv / ".setup_stamp").exists()


def test_setup_that_is_done_does_and_says_nothing(tmp_path: Path) -> None:
    if not (Path(sys.prefix) / ".setup_stamp").exists():
        pytest.skip("these tests run in an environment that setup_env.sh did not make")
    done = run_script("setup_env.sh", tmp_path, VENV_DIR=sys.prefix)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
