"""The commands of README.md, each run as typed, in a fresh copy of the checkout with an environment of its own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.dist.harness import HANGS_S
from tests.dist.hold import held_environment
from tests.unit.fresh_environment import (
    ROOT,
    clean,
    copy_of_the_checkout,
    link_requirements,
    link_script,
    make_environment,
    required,
    site_packages,
)

pytestmark = pytest.mark.slow

BLOCKS = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)

# What is cut, because it would take minutes, a network or these tests themselves: command -> what is set before it, and
# what is added to it. The environment is there (SKIP_SETUP), where the first command would install it; a launcher that
# imports once forks the ranks (LAUNCHER), half as many (DP); one kill of two (the drill has tests of its own);
# 64 ranks are not started; ckpt-replay repeats nothing; run_tests.sh only tells about itself. Everything else is run
# uncut: torchrun, all analyses, the commands of a 70B run.
_FORKED = "SKIP_SETUP=1 DEVICE=cpu LAUNCHER=fork DP=1"
CUT = {
    "bash examples_deepspeed/restart_bench/run_tiny_tp2_pp2_dp2.sh": (_FORKED, ""),
    # More iterations than by default: with ranks that wait for their kills a launch does HELD_AFTER and one save more.
    # With its reference run: on a busy machine a kill may come when its save is committed, and none is repeated.
    "bash examples_deepspeed/restart_bench/kill_resume.sh": (f"{_FORKED} ITERS=17", "--cycles 1"),
    "MODE=scaled bash examples_deepspeed/restart_bench/run_70b_tp8_pp8.sh": ("DRY_RUN=1", ""),
    "ckpt-replay": ("", "--repeat 1 --steps-between 0"),
    "bash run_tests.sh": ("", "--help"),
}
HELD_AFTER = 11  # iterations


def cut(block: str) -> str:
    lines = [line.partition("  #")[0] for line in block.splitlines()]
    for number, line in enumerate(lines):
        for start, (settings, more) in CUT.items():
            if line.startswith(start):
                lines[number] = f"{settings} {line} {more}".strip()
    return "\n".join(lines)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = copy_of_the_checkout(tmp_path_factory.mktemp("fresh") / "checkout")
    environment = make_environment(place / ".venv", "-e", str(place))
    link_requirements(required(site_packages(environment)), site_packages(environment), set(), extra="train")
    link_script(environment, "torchrun", "torch")
    return place


def test_the_commands_work_as_typed(checkout: Path) -> None:
    """One after another, as later ones read what earlier ones leave. Ranks that are to be killed wait for that."""
    python = str(checkout / ".venv" / "bin" / "python")
    settings = clean() | held_environment(cycles=1, after=HELD_AFTER) | {"PYTHON": python, "DS_ACCELERATOR": "cpu"}
    told = []
    for block in BLOCKS:
        done = subprocess.run(
            ["bash", "-c", f"set -euo pipefail\n{cut(block)}"],
            cwd=checkout, env=settings, capture_output=True, text=True, timeout=3 * HANGS_S,
        )  # fmt: skip
        assert done.returncode == 0, block + done.stdout[-3000:] + done.stderr[-3000:]
        told.append(done.stdout)
    demonstration, three, drill, tests = told
    assert "The repeated iterations are identical, to the last bit." in demonstration
    assert "Goodput" in demonstration and (checkout / "runs" / "report" / "ckpt_report.html").is_file()
    answer, _, own = three.partition("Answer for 13b TP4 PP4 DP1 on ")[2].partition("load, warm files")
    assert "training blocked" in answer and "TorchCheckpointEngine" in own
    assert len(re.findall(r"mid-save-write .*  yes$", drill, re.MULTILINE)) == 1
    assert len(re.findall(r"pretrain_gpt\.py .*--hidden-size 8192", drill)) == 8  # nodes of eight GPUs
    assert "run_tests.sh --quick" in tests
    assert sum(len(cut(block).splitlines()) for block in BLOCKS) == sum(len(block.splitlines()) for block in BLOCKS)
    assert all(any(start in block for block in BLOCKS) for start in CUT)
