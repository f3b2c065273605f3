"""The commands of README.md, as typed, in a directory that is like a checkout after the demonstration.

What starts trainings or fills a disk is not run here, but by tests of its own in tests/dist: launch scripts print what
they would run, ckpt-replay checks its arguments, and restart-trace runs `true` in place of the job.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)

# Functions, which come before the programs of .venv/bin that README.md puts on PATH.
IN_PLACE = """
set -euo pipefail
ckpt-replay() {
    python -c 'import sys; from tools.ckpt_replay.options import parse_arguments; parse_arguments(sys.argv[1:])' "$@"
}
restart-trace() {
    local options=()
    until [[ $1 == -- ]]; do
        options+=("$1")
        shift
    done
    shift
    command -v "$1" >/dev/null
    [[ ! $* =~ ([^ ]+\\.py) || -f ${BASH_REMATCH[1]} ]]
    command restart-trace "${options[@]}" -- true
}
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files of this one, this environment as its .venv, and traces of a demonstration."""
    place = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in (".venv", "runs", ".git"):
            (place / path.name).symlink_to(path)
    (place / ".venv").symlink_to(sys.prefix)
    for trace in ("tiny/demo-20260101-120000/trace", "own"):
        shutil.copytree(ROOT / "tests" / "golden" / "trace_tp2_pp2_dp2" / "restart_trace", place / "runs" / trace)
    return place


def test_there_are_commands() -> None:
    assert any("run_tiny_tp2_pp2_dp2.sh" in block for block in BLOCKS)
    assert any("ckpt-analysis" in block for block in BLOCKS)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_the_commands_work_as_typed(block: str, checkout: Path) -> None:
    """The tests that are being run do not run themselves: run_tests.sh tells about itself."""
    script = IN_PLACE + re.sub(r"^(bash run_tests\.sh).*$", r"\1 --help", block, flags=re.MULTILINE)
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL_ENV", "PYTHON"))}
    settings |= {"DRY_RUN": "1", "SKIP_SETUP": "1", "PYTHON": sys.executable, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=checkout, env=settings, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
