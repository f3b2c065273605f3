"""The scripts find a Python to read settings with, and keep the paths by which they were called."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.script_helpers import BENCH, ROOT, TINY

TOO_OLD = '#!/bin/sh\n[ "$1" != --version ] || echo Python 3.9.1\nexit 1\n'  # stands in for a Python 3.9


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Of a machine whose only Python is too old, and without .venv."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("bash", "basename", "cksum", "cat", "cut", "dirname", "env", "sed"):
        os.symlink(str(shutil.which(name)), commands / name)
    executable(commands / "python3", TOO_OLD)
    return {"PATH": str(commands), "VENV_DIR": str(tmp_path / "none"), "HOME": str(tmp_path)}


def executable(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


def start(environ: dict[str, str], script: str = TINY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(BENCH / script), "--version"], env=environ, capture_output=True, text=True, timeout=60
    )


def test_the_interpreter_to_train_with_also_reads_settings_where_no_other_can(environ: dict[str, str]) -> None:
    done = start(environ)
    assert done.returncode == 2 and "error: no Python 3.10 or later is in " in done.stderr, done
    done = start({**environ, "PYTHON": sys.executable})
    assert done.returncode == 0 and done.stdout.startswith("megatron-restart "), done
    done = start({**environ, "PYTHON": "/nonexistent/python"})
    assert done.returncode == 2 and "or in PYTHON=/nonexistent/python; " in done.stderr, done


def test_the_python_of_an_image_does_not_start_a_launch(environ: dict[str, str], tmp_path: Path) -> None:
    image = executable(tmp_path / "python_in_image", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    assert start({**environ, "PYTHON": str(image)}).returncode == 2


def test_a_command_of_path_is_started_once(environ: dict[str, str], tmp_path: Path) -> None:
    """It may be a slow script that finds the interpreter, as that of pyenv."""
    executable(tmp_path / "bin" / "python3", f'#!/bin/sh\necho >>{tmp_path}/started\nexec {sys.executable} "$@"\n')
    assert start(environ).returncode == 0
    assert (tmp_path / "started").read_text() == "\n"


def test_an_environment_with_a_python_that_is_too_old_is_refused_by_name(
    environ: dict[str, str], tmp_path: Path
) -> None:
    venv = tmp_path / "old"
    executable(venv / "bin" / "python", TOO_OLD)
    (venv / "lib" / "python3.9").mkdir(parents=True)
    with_old = {**environ, "VENV_DIR": str(venv), "PYTHON": sys.executable}
    done = start(with_old)  # which says later that it cannot train with that
    assert done.returncode == 0, done
    done = subprocess.run(
        ["bash", str(BENCH / "setup_env.sh")], env=with_old, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert f"VENV_DIR={venv} has Python 3.9.1, and Python 3.10 to 3.12 is needed" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_job_names_the_checkout_and_the_directory_as_the_user_does(tmp_path: Path) -> None:
    """Other nodes may have them mounted elsewhere than this one, under the same name."""
    checkout, here = tmp_path / "checkout", tmp_path / "here"
    checkout.symlink_to(ROOT)
    (tmp_path / "physical").mkdir()
    here.symlink_to(tmp_path / "physical")
    script = checkout / "examples_deepspeed" / "restart_bench" / "submit.sh"
    done = subprocess.run(
        ["bash", "-c", f"cd {here} && bash {script} 1b_tp1_pp1 --scheduler slurm"],
        env={"PATH": os.environ["PATH"], "DRY_RUN": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"cd {here}" in lines and f"exec bash {script.with_name('run_1b_tp1_pp1.sh')}" in lines
    assert lines[-1].endswith(f" {checkout}/runs/1b_tp1_pp1_dp1/job.slurm")
    assert str(ROOT) not in done.stdout


def test_an_environment_is_up_to_date_by_any_path_of_its_checkout(environ: dict[str, str], tmp_path: Path) -> None:
    """The scripts call setup_env.sh by another path than a user does who has a symbolic link to the checkout."""
    versions = b"".join((ROOT / name).read_bytes() for name in ("setup.py", "constraints.txt"))
    summed = subprocess.run(["cksum"], input=versions + f"{ROOT}\n".encode(), capture_output=True).stdout
    venv = tmp_path / "venv"
    executable(venv / "bin" / "python", TOO_OLD)  # so that it is refused if it is not up to date
    (venv / ".setup_stamp").write_bytes(summed + b"cpu\ntrain,engines\n")
    (tmp_path / "checkout").symlink_to(ROOT)
    for checkout in (ROOT, tmp_path / "checkout"):
        script = checkout / "examples_deepspeed" / "restart_bench" / "setup_env.sh"
        done = subprocess.run(
            ["bash", str(script)], env={**environ, "VENV_DIR": str(venv)}, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
