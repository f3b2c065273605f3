"""The commands of README.md, each run as typed, in a fresh copy of the checkout with an environment of its own.

The first is the demonstration. What it leaves, and what the analysis says of it, is looked at in detail.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.dist.drill_reports import (
    LEAST_ACCOUNTED,
    assert_restarts_agree,
    assert_saves_agree,
    assert_timeline_agrees,
    report_of,
    restarts_of,
)
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
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.metrics.restart_parts import OUTSIDE
from tools.ckpt_analysis.render.json_output import to_dict
from tools.ckpt_analysis.report import Report
from tools.common.formatting import percent

pytestmark = pytest.mark.slow

BLOCKS = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)

# What is cut, because it would take minutes, a network or these tests themselves: command -> what is set before it, and
# what is added to it. The environment is there (SKIP_SETUP), where the first command would install it; a launcher that
# imports once forks the ranks (LAUNCHER); their sequences are short (SEQ_LENGTH); the drill has half of the ranks (DP),
# and one kill of two (it has its own tests); 64 ranks are not started; ckpt-replay repeats nothing; run_tests.sh only
# tells about itself. Everything else is run uncut: torchrun, all analyses, the commands of a 70B run.
_SHORT = "SKIP_SETUP=1 DEVICE=cpu SEQ_LENGTH=16"
_FORKED = f"{_SHORT} LAUNCHER=fork"
CUT = {
    "bash examples_deepspeed/restart_bench/run_tiny_tp2_pp2_dp2.sh": (_FORKED, ""),
    # More iterations than by default: with ranks that wait for their kills a launch does HELD_AFTER and one save more.
    # With its reference run: on a busy machine a kill may come when its save is committed, and none is repeated.
    "bash examples_deepspeed/restart_bench/kill_resume.sh": (f"{_FORKED} DP=1 ITERS=17", "--cycles 1"),
    "MODE=scaled bash examples_deepspeed/restart_bench/run_70b_tp8_pp8.sh": ("DRY_RUN=1", ""),
    "ckpt-replay": ("", "--repeat 1 --steps-between 0"),
    "bash run_tests.sh": ("", "--help"),
}
KILLED_AFTER = 8  # iterations, in the demonstration
HELD_AFTER = 11  # iterations, in the drill


@dataclass(frozen=True)
class Demonstration:
    """One that ended well. `directory` is what it left in `checkout`."""

    checkout: Path
    done: subprocess.CompletedProcess[str]
    directory: Path


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


def run(checkout: Path, commands: str, held_after: int) -> subprocess.CompletedProcess[str]:
    """Run `commands` there. Ranks that are to be killed wait for that once they have done `held_after` iterations."""
    python = str(checkout / ".venv" / "bin" / "python")
    settings = clean() | held_environment(cycles=1, after=held_after) | {"PYTHON": python, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{commands}"],
        cwd=checkout, env=settings, capture_output=True, text=True, timeout=3 * HANGS_S,
    )  # fmt: skip
    assert done.returncode == 0, commands + done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def demo(checkout: Path) -> Demonstration:
    """The first command: TP2 x PP2 x DP2, all ranks killed at iteration 8, resumed from iteration 5."""
    done = run(checkout, cut(BLOCKS[0]), KILLED_AFTER)
    (directory,) = (checkout / "runs" / "tiny").glob("demo-*")
    return Demonstration(checkout, done, directory)


def test_killed_and_resumed_training_is_measured_and_exact(demo: Demonstration, tmp_path: Path) -> None:
    done, directory = demo.done, demo.directory
    assert "cycle 0: sigkill-all at iteration:8 injected into " in done.stderr
    repeated, _, rest = done.stdout.partition("The repeated iterations are identical, to the last bit.")
    assert [line.split()[0] for line in repeated.splitlines()[-3:]] == ["6", "7", "8"]
    # The drill's table. In the terminal the report has it, too, unless a start from cold took much longer.
    assert "sigkill-all" in rest and "sigkill-all" in (directory / "report.json").read_text()

    drill = json.loads((directory / "drill.json").read_text())
    assert "no reference run" in drill["losses_compared_with"] and not (directory / "reference").exists()
    (cycle,) = drill["cycles"]
    assert (cycle["verified"], cycle["resumed_step"], cycle["state_hashes"]) == (True, 5, "equal")
    assert cycle["accounted"] >= LEAST_ACCOUNTED
    report = json.loads((directory / "report.json").read_text())
    assert (report["ranks"]["expected"], report["ranks"]["present"]) == (8, 8)
    saved = [(save["tag"], save["cycle"]) for save in report["saves"]]
    assert saved == [("global_step5", 0), ("global_step10", 1), ("global_step12", 1)]
    restart = report["restarts"][-1]
    assert restart["cycle"] == 1
    assert restart["lost_steps"] == 3
    assert restart["time_to_first_step_s"] > 0
    assert (directory / "report.txt").read_text() in done.stdout
    assert "restart_s" in (directory / "ckpt_report.html").read_text()
    assert "Next, try" in done.stdout

    # Started again where a checkpoint is, the script only resumes, here under its default launcher, with half of the
    # ranks; what there is already is not built again.
    shutil.copytree(directory / "checkpoints", tmp_path / "checkpoints")
    command = BLOCKS[0].strip()
    settings = f"{_SHORT} DP=1 GLOBAL_BATCH=8 SAVE_DIR={tmp_path}/checkpoints"
    again = run(demo.checkout, f"{settings} {command}", KILLED_AFTER)
    assert "resuming from global_step12" in again.stderr
    assert "corpus and tokenizer" in again.stderr and "are there" in again.stderr
    assert "restart_drill" not in again.stderr


@pytest.fixture(scope="module")
def report(demo: Demonstration) -> Report:
    return report_of(demo.directory)


def test_phases_are_those_of_drill_json_and_of_the_records(demo: Demonstration, report: Report) -> None:
    assert_restarts_agree(demo.directory, report)
    assert json.loads((demo.directory / "report.json").read_text()) == to_dict(report)  # the one of the drill


def test_the_timeline_sums_to_the_same(demo: Demonstration, report: Report) -> None:
    assert_timeline_agrees(demo.directory, report)


def test_bytes_and_files_are_those_on_disk(demo: Demonstration, report: Report) -> None:
    assert_saves_agree(demo.directory, report)
    assert {save.tag for save in report.saves} == {"global_step5", "global_step10", "global_step12"}
    (load,) = [load for load in report.loads if load.tag]
    checkpoint = demo.directory / "checkpoints" / "global_step5"
    read: list[tuple[str, int]] = []
    for path in (demo.directory / "trace").glob("rank_*_cycle_001.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        read += [(r["file"], r["bytes"]) for r in records if r.get("detail") == "read"]
    assert all((checkpoint / name).stat().st_size == num_bytes for name, num_bytes in read)
    assert (load.bytes, load.num_files) == (sum(num_bytes for _, num_bytes in read), len(read))
    (restart,) = report.restarts
    inside = {detail.name: detail.bytes for phase in restart.phases for detail in phase.details}
    assert inside["load"] == load.bytes  # what a load reads and then verifies counts once, here too


def test_the_terminal_shows_the_waterfall(
    demo: Demonstration, report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the failure to the first step, part by part; the numbers are drill.json's, to three decimals."""
    assert main(["report", "--all", str(demo.directory / "trace"), "--no-cache"]) == 0
    printed = capsys.readouterr().out
    ((entry, restart),) = restarts_of(demo.directory, report)
    told = dict(entry["phases"])
    told["relaunch"] += told.pop("drill")
    shown = _waterfall(printed)
    assert list(shown)[:4] == list(OUTSIDE) and list(shown)[-2:] == ["first_step", "unattributed"]
    assert {name: took for name, (took, _) in shown.items()} == pytest.approx(told, abs=0.0006)
    untils = [until for _, until in shown.values()]
    # The kernel tells the start of a launcher to 10 ms, and that of one that forks comes soon after the relaunch.
    assert all(after - until > -0.011 for until, after in itertools.pairwise(untils)), untils
    assert shown["unattributed"][1] == pytest.approx(restart.restart_s, abs=0.0006)
    accounted = re.search(r"([\d.]+) % of ([\d.]+) s accounted for", printed)
    assert accounted and f"{accounted[1]} %" == percent(entry["accounted"])


def _waterfall(printed: str) -> dict[str, tuple[float, float]]:
    """Part -> (took, until) of the table in a terminal report."""
    after = printed.partition("to first step, critical rank")[2].splitlines()[1:]
    rows: dict[str, Any] = {}
    for line in after:
        cells = line.split()
        if "accounted" in line:
            return rows
        rows[cells[0]] = (float(cells[1]), float(cells[2]))
    raise AssertionError("the table has no end")


def test_validate_and_the_page_take_it(demo: Demonstration, tmp_path: Path) -> None:
    trace = str(demo.directory / "trace")
    assert main(["validate", trace, "--quiet"]) == 0
    assert main(["report", trace, "-o", str(tmp_path), "--quiet", "--no-cache"]) == 0
    assert "first step done" in (tmp_path / "ckpt_report.html").read_text()


def test_the_other_commands_work_as_typed(demo: Demonstration) -> None:
    """One after another, as later ones read what earlier ones leave."""
    checkout = demo.checkout
    three, drill, tests = (run(checkout, cut(block), HELD_AFTER).stdout for block in BLOCKS[1:])
    assert "Goodput" in demo.done.stdout and (checkout / "runs" / "report" / "ckpt_report.html").is_file()
    answer, _, own = three.partition("Answer for 13b TP4 PP4 DP1 on ")[2].partition("load, warm files")
    assert "training blocked" in answer and "TorchCheckpointEngine" in own
    assert len(re.findall(r"mid-save-write .*  yes$", drill, re.MULTILINE)) == 1
    (command,) = re.findall(r".*pretrain_gpt\.py .*--hidden-size 8192.*", drill)
    assert '"$NODE_RANK"' in command  # of each node
    assert "run_tests.sh --quick" in tests
    assert sum(len(cut(block).splitlines()) for block in BLOCKS) == sum(len(block.splitlines()) for block in BLOCKS)
    assert all(any(start in block for block in BLOCKS) for start in CUT)
