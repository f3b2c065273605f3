"""setup_env.sh: what it refuses, and that it is done only once it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points, requires
from pathlib import Path

import pytest

from tests.unit.script_helpers import run_script

REPOSITORY = Path(__file__).parents[2]


def test_setup_refuses_to_empty_a_directory(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("")
    done = run_script("setup_env.sh", tmp_path, VENV_DIR=str(tmp_path), TORCH_VARIANT="cpu")
    assert done.returncode == 1
    assert "is not empty and not a virtual environment" in done.stderr
    assert (tmp_path / "thesis.txt").exists()


def test_setup_names_a_python_that_does_not_work(tmp_path: Path) -> None:
    done = run_script("setup_env.sh", tmp_path, VENV_DIR=str(tmp_path / "venv"), PYTHON="/no/python")
    assert done.returncode == 1
    assert "PYTHON=/no/python is not a working Python 3.10 to 3.12" in done.stderr


def test_setup_refuses_an_extra_that_there_is_not(tmp_path: Path) -> None:
    done = run_script("setup_env.sh", tmp_path, VENV_DIR=str(tmp_path / "venv"), EXTRAS="s3,tensorbord")
    assert done.returncode == 1 and not (tmp_path / "venv").exists()
    assert "EXTRAS: there is no extra tensorbord; there are train tensorboard engines s3" in done.stderr


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


def test_what_the_test_command_runs_is_installed_by_the_set_up() -> None:
    """A tool that somebody installed by hand works on that machine and is missing in the next clone."""
    commands = set(re.findall(r'"\$bin/([\w-]+)"', (REPOSITORY / "run_tests.sh").read_text())) - {"python"}
    dev = [line for line in requires("megatron-restart") or [] if re.search(r"""extra == ['"]dev['"]""", line)]
    required = {re.split(r"[^\w-]", line)[0] for line in dev}
    providers = {script.name: script.dist.name for script in entry_points(group="console_scripts") if script.dist}
    # Tools without a Python entry point (ruff) are distributed under their command's name.
    missing = {name for name in commands if providers.get(name, name) not in required}
    assert commands and not missing


@pytest.mark.parametrize("other_exists", [True, False])
def test_the_environment_of_another_checkout_is_left_as_it_is(other_exists: bool, tmp_path: Path) -> None:
    """Installing this checkout there would make the other one's commands run this one's code."""
    other, venv = tmp_path / "other checkout", tmp_path / "venv"
    installed = venv / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "megatron_restart-0.1.dist-info"
    installed.mkdir(parents=True)
    (venv / "bin").mkdir()
    python = venv / "bin" / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" != pip ] || exit 1\nexec {sys.executable} "$@"\n')  # else pip would install
    python.chmod(0o755)
    (venv / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
    (installed / "direct_url.json").write_text(json.dumps({"url": other.as_uri(), "dir_info": {"editable": True}}))
    if other_exists:
        other.mkdir()
        (other / "setup.py").touch()
    before = sorted(venv.rglob("*"))
    done = run_script("setup_env.sh", tmp_path, VENV_DIR=str(venv), TORCH_VARIANT="cpu", PYTHON="/no/python")
    assert done.returncode == 1 and sorted(venv.rglob("*")) == before
    belongs = f"VENV_DIR={venv} is the environment of the checkout {other}; give this one ({REPOSITORY}) a directory"
    assert (belongs in done.stderr) is other_exists, done.stderr
    assert ("PYTHON=/no/python is not a working" in done.stderr) is not other_exists, done.stderr


@pytest.mark.slow
def test_another_version_of_torch_takes_the_place_of_the_pinned_one(tmp_path: Path) -> None:
    """With the other pins as they are; the environment is then out of date for another version, and for none."""
    venv, pins = tmp_path / "venv", tmp_path / "pins"
    python = venv / "bin" / "python"
    python.parent.mkdir(parents=True)
    # pip keeps the constraints that it gets, and installs nothing; compileall and others do nothing.
    python.write_text(
        "#!/bin/bash\n[[ $3 == install ]] || exit 0\n"
        f'for word in "$@"; do [[ $last != -c ]] || cat "$word" >{pins}; last=$word; done\n'
    )
    python.chmod(0o755)
    settings = {"VENV_DIR": str(venv), "TORCH_VARIANT": "cuda"}
    done = run_script("setup_env.sh", tmp_path, **settings, TORCH_VERSION="2.14.1")
    assert done.returncode == 0, done.stderr
    pinned = (REPOSITORY / "constraints.txt").read_text()
    assert pins.read_text() == re.sub(r"(?m)^torch==.*$", "torch==2.14.1", pinned) != pinned
    assert run_script("setup_env.sh", tmp_path, **settings, TORCH_VERSION="2.14.1").stderr == ""
    for other in ({"TORCH_VERSION": "2.14.0"}, {}):
        pins.unlink()
        assert "ready: " in run_script("setup_env.sh", tmp_path, **settings, **other).stderr and pins.exists()


@pytest.mark.slow
def test_an_environment_keeps_its_extras_and_says_what_is_done(tmp_path: Path) -> None:
    """First what a user needs, then what the tests need, too; then both commands find it up to date."""
    venv, asked, said = tmp_path / "venv", tmp_path / "asked", tmp_path / "said"
    python = venv / "bin" / "python"
    python.parent.mkdir(parents=True)
    # pip says what it downloads, and is silent until the set-up has said how large the environment is.
    python.write_text(
        '#!/bin/bash\n[[ $3 == install && ${!#} == */* ]] || exit 0\necho "  Downloading a.whl (2.1 MB)"\n'
        f'echo "${{!#}}" >>{asked}\n'
        f'until grep -q "a.whl (2.1 MB)" {said} && grep -q "so far" {said}; do sleep 0.1; done\n'
    )
    python.chmod(0o755)

    def set_up(extras: str) -> str:
        environ = {**os.environ, "VENV_DIR": str(venv), "TORCH_VARIANT": "cpu", "EXTRAS": extras}
        script = REPOSITORY / "examples_deepspeed" / "restart_bench" / "setup_env.sh"
        with said.open("w") as output:
            done = subprocess.run(["bash", str(script)], env=environ, stderr=output, timeout=300)
        assert done.returncode == 0, said.read_text()
        return said.read_text()

    assert re.search(rf"\[set-up +\d+s\] {venv}: \S+ installed so far\n", set_up(""))
    assert set_up("") == ""
    assert "ready: " in set_up("dev")
    assert (set_up(""), set_up("dev"), set_up("engines,dev")) == ("", "", "")
    assert asked.read_text().split() == [f"{REPOSITORY}[train,engines]", f"{REPOSITORY}[train,engines,dev]"]
