"""What tests/torch_versions.sh does with a version that can be installed, and with one that cannot."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = re.findall(r'"torch>=([0-9.]+)"', (ROOT / "setup.py").read_text())[0] + ".0"
# Makes environments whose Python prints its arguments, and has one version of torch alone.
PYTHON = """#!/bin/bash
case "$2 $3" in
"venv --without-pip")
    mkdir -p "$4/bin" "$4/lib/python3.11/site-packages"
    printf '#!/bin/bash\necho ran "$@"\nexit %s' "$TESTS_END_WITH" >"$4/bin/python"
    chmod +x "$4/bin/python" ;;
"pip --python") [[ ${!#} == torch==2.14.1 ]] || { echo "ERROR: $PIP_SAYS ${!#}" && exit 1; } ;;
"tests.conformance.scripts.exchange "*) echo ours "$@" ;;
*) echo "$EVERYTHING_ELSE" ;;
esac
"""
NONE = "No matching distribution found for"


def run(
    directory: Path, *versions: str, pip_says: str = NONE, status: int = 0, everything_else: str = "/everything/else"
) -> subprocess.CompletedProcess[str]:
    python = directory / "all" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    settings = {"VENV_DIR": str(directory / "all"), "TORCH_VENVS": str(directory / "torch")}
    settings |= {"PIP_SAYS": pip_says, "TESTS_END_WITH": str(status), "EVERYTHING_ELSE": everything_else}
    environment = {**os.environ, **settings}
    command = ["bash", "tests/torch_versions.sh", *versions]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_oldest_and_a_newer_version_are_tested_and_one_that_no_index_has_is_named(tmp_path: Path) -> None:
    done = run(tmp_path)
    missing, there, ran, *exchanged = done.stdout.splitlines()
    assert missing == f"== torch {OLDEST} is not to be had: no package index of pip's has it for this Python"
    assert (there, done.returncode, done.stderr) == ("== torch 2.14.1", 0, "")
    assert ran.startswith("ran -m pytest ") and ran.endswith(" tests/conformance tests/unit")
    assert [(words[0], words[-2]) for words in map(str.split, exchanged)] == [
        ("ours", "save"), ("ran", "load"), ("ran", "save"), ("ours", "load")
    ]  # fmt: skip
    (packages,) = (tmp_path / "torch" / "2.14.1").glob("lib/*/site-packages/everything_else.pth")
    assert packages.read_text() == "import site; site.addsitedir('/everything/else')\n"


def test_an_environment_is_kept_for_another_checkout_and_has_all_else_of_that_one(tmp_path: Path) -> None:
    run(tmp_path, "2.14.1")
    environment = tmp_path / "torch" / "2.14.1"
    of_torch = environment / "lib" / "of_torch"
    of_torch.touch()
    done = run(tmp_path, "2.14.1", everything_else="/of/another")
    assert (done.returncode, done.stderr) == (0, "") and of_torch.exists()
    (packages,) = environment.glob("lib/*/site-packages/everything_else.pth")
    assert packages.read_text() == "import site; site.addsitedir('/of/another')\n"


@pytest.mark.parametrize(
    ("versions", "pip_says", "tests", "status", "message"),
    [
        (["2.14.1"], NONE, 1, 1, ""),
        ([OLDEST], "could not connect for", 0, 1, f"ERROR: could not connect for torch=={OLDEST}"),
        (["2.14"], NONE, 0, 2, "torch_versions.sh: error: 2.14: give versions, as 2.14.1"),
    ],
    ids=["tests fail", "pip fails", "no version"],
)
def test_what_is_no_success(
    versions: list[str], pip_says: str, tests: int, status: int, message: str, tmp_path: Path
) -> None:
    done = run(tmp_path, *versions, pip_says=pip_says, status=tests)
    assert (done.returncode, done.stderr.strip()) == (status, message)
