"""The GPU tier before anything of it runs: its list of parts, what it refuses, its bundle."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.overhead.cli import parse_arguments as parse_overhead
from megatron.checkpointing.engines.registry import engine_names
from megatron.config.arguments import config_from_args, parse_args
from restart_trace.schema import RANK_FILE_PATTERN
from tests.dist.harness import wait_for
from tests.gpu.page import page
from tests.gpu.parts import ENGINES, ENGINES_HERE, LIMIT_S, PARTS, Part, Setting, Step, part_named
from tests.gpu.runner import FAILED, PASSED, TierError, run_part, write_overview
from tests.unit.tools.ckpt_analysis.metrics.test_device_copies import rank_log
from tests.unit.tools.ckpt_analysis.trace_factory import RANKS, dump
from tools.ckpt_replay.options import parse_arguments as parse_replay
from tools.make_synthetic_dataset import parse_arguments as parse_dataset
from tools.restart_drill.cli import parse_arguments as parse_drill

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "tests" / "gpu"
MARK = "GPU_TIER_TEST"
PARSERS: dict[str, Callable[[list[str]], object]] = {
    "tools.restart_drill": parse_drill, "tools.ckpt_replay": parse_replay, "benchmarks.overhead": parse_overhead,
    "tools.make_synthetic_dataset": parse_dataset,
}  # fmt: skip


def run_tier(*words: object) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(GPU / "run.sh"), *map(str, words)]
    return subprocess.run(
        command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, timeout=300
    )


def setting(tmp_path: Path) -> Setting:
    return Setting(rehearsal=True, out=tmp_path / "out", work=tmp_path / "work")


def test_a_dry_run_lists_every_part_and_touches_nothing(tmp_path: Path) -> None:
    done = run_tier("--dry-run", "--out", tmp_path / "out", "--work", tmp_path / "work")
    assert done.returncode == 0, done.stderr
    listed = dict(re.findall(r"^(\S+) +([\d.]+) min  ", done.stdout, re.MULTILINE))
    assert list(listed)[: len(PARTS)] == [part.name for part in PARTS]
    assert max(part.expected_s for part in PARTS) < LIMIT_S == 540
    assert list(tmp_path.iterdir()) == []


def test_every_engine_that_writes_is_drilled() -> None:
    """`memory`, which only ranks of megatron.launch can save with, in a part of its own."""
    assert set(ENGINES) == set(engine_names()) - {"none", "memory"}
    assert "memory" in {part.name for part in PARTS}
    assert {f"resume-{engine}" for engine in ENGINES} <= {part.name for part in PARTS}


def flags_of(step: Step, place: Setting, *more: str) -> list[str]:
    """Of pretrain_gpt.py, as the step's script gives them."""
    # Without an interpreter, with which a dry run would check that the dataset of an earlier step is there
    shown = {"DRY_RUN": "1", "SKIP_SETUP": "1", "PYTHON": "/none"}
    environment = os.environ | place.environment() | step.environment | shown
    script = step.argv[-1]
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout.splitlines()[-1])
    program = next(i for i, word in enumerate(words) if word.endswith("pretrain_gpt.py"))
    return [*words[program + 1 :], *more]


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
@pytest.mark.parametrize("rehearsal", [False, True], ids=["gpu", "rehearsal"])
def test_every_command_of_every_part_is_accepted(part: Part, rehearsal: bool, tmp_path: Path) -> None:
    """By the parser of what it runs, and its training's flags by that of pretrain_gpt.py, in the sizes of the GPU."""
    place = Setting(rehearsal=rehearsal, out=tmp_path / "out", work=tmp_path / "work")
    trained = 0
    for step in part.steps(place):
        engine = step.engines[0] if step.engines else "torch"
        argv = [",".join(step.engines) if word == ENGINES_HERE else word for word in step.argv]
        if argv[0] == "bash" or "tools.restart_drill" in argv:
            world_size = int(step.environment.get("TP", 1)) * int(step.environment.get("DP", 1))
            flags = flags_of(step, place, "--checkpoint-engine", engine, "--allow-injected-faults")
            config = config_from_args(parse_args(flags), {"RANK": "0", "WORLD_SIZE": str(world_size)})
            assert config.checkpoint.checkpoint_engine == engine
            assert config.parallel.distributed_backend == ("gloo" if rehearsal or world_size > 1 else "nccl")
            trained += 1
        if argv[0] == sys.executable and argv[2] in PARSERS:
            PARSERS[argv[2]](argv[3:])
        else:
            assert argv[0] == "bash" or argv[2] in ("pytest", "tests.gpu.machine")
    assert trained == (0 if part.name in ("engines", "engines-others", "tests", "overhead") else 1)
    assert list(tmp_path.iterdir()) == []


def test_parts_that_resume_differ_in_their_engine_alone(tmp_path: Path) -> None:
    """So that one of them, rehearsed, stands for all."""
    place = setting(tmp_path)

    def without_name(engine: str) -> list[Step]:
        steps = part_named(f"resume-{engine}").steps(place)
        assert steps[-1].engines == (engine,)
        argv = [[word.replace(f"resume-{engine}", "resume") for word in step.argv] for step in steps]
        return [replace(step, argv=words, engines=()) for step, words in zip(steps, argv, strict=True)]

    assert len({repr(without_name(engine)) for engine in ENGINES}) == 1


def test_parts_that_replay_differ_in_their_engines_alone(tmp_path: Path) -> None:
    def without_name(part: str) -> list[Step]:
        steps = part_named(part).steps(setting(tmp_path))
        argv = [[word.replace(f"/{part}/", "/replay/") for word in step.argv] for step in steps]
        return [replace(step, argv=words, engines=()) for step, words in zip(steps, argv, strict=True)]

    assert without_name("engines") == without_name("engines-others")


def rows_of(section: str) -> list[list[str]]:
    """What is in backticks in each cell of the table of a section of docs/gpu.md, but for its head."""
    text = (ROOT / "docs" / "gpu.md").read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[" ".join(re.findall(r"`([^`]+)`", cell)) for cell in row] for row in rows[2:]]


def test_docs_have_every_part_and_name_no_other() -> None:
    names = {re.sub("^resume-.*", "resume-ENGINE", part.name) for part in PARTS}
    assert {name for row in rows_of("The GPU tier") for name in row[0].split()} == names
    known = names | {part.name for part in PARTS}
    for section in ("What has not been run", "Where the code uses CUDA"):
        named = {name for row in rows_of(section) for name in row[-1].split()}
        assert {name for name in named if not name.endswith(".py")} <= known
        assert all((ROOT / name).is_file() for name in named if name.endswith(".py"))


def test_docs_name_every_module_that_uses_cuda() -> None:
    uses = re.compile(
        r"torch\.cuda|\bcuda\.|libcuda|\"nccl\"|\"cuda\"|is_cuda|type [!=]= \"cpu\"|accelerator\(\)\.|\bpin_memory[(=]"
        r"|non_blocking=|side_stream\(|current_accelerator\(|\bcudaEvent|\.cpu\(\)|pynvml"
    )
    found = {
        str(path.relative_to(ROOT))
        for folder in ("megatron", "restart_trace", "tools")
        for path in (ROOT / folder).rglob("*.py")
        if uses.search(path.read_text())
    }
    assert found == {name for row in rows_of("Where the code uses CUDA") for name in row[0].split()}


@pytest.mark.slow
def test_without_a_gpu_the_rehearsal_is_named(tmp_path: Path) -> None:
    done = run_tier("--out", tmp_path / "out", "machine")
    assert done.returncode == 2 and "--rehearse" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_there_is_not() -> None:
    done = run_tier("--dry-run", "resume-lazi")
    assert done.returncode == 2 and "resume-lazi: no such part; there are machine, " in done.stderr


def test_a_step_that_fails_fails_its_part_and_the_others_run(tmp_path: Path) -> None:
    wrong = Step("wrong", [sys.executable, "-c", "import sys; sys.exit('the disk is gone')"])
    right = Step("right", [sys.executable, "-c", "print(1)"], stdout="one")
    part = Part("both", 1, "a failure", lambda _: [wrong, right])
    assert run_part(part, setting(tmp_path)) == FAILED
    record = json.loads((tmp_path / "out" / "both" / "part.json").read_text())
    assert [step["outcome"] for step in record["steps"]] == [FAILED, PASSED]
    assert (record["steps"][0]["why"], record["steps"][0]["log"]) == ("exit status 1", "the disk is gone")
    assert (tmp_path / "out" / "both" / "one").read_text() == "1\n"


def test_a_part_ends_with_its_time_and_leaves_no_process(tmp_path: Path) -> None:
    program = "import subprocess, sys, time; subprocess.Popen(['sleep', '1000']); time.sleep(1000)"
    endless = Step("endless", [sys.executable, "-c", program], {MARK: str(tmp_path)})
    never = Step("never", [sys.executable, "-c", "raise SystemExit('it ran')"])
    part = Part("endless", 1, "nothing", lambda _: [endless, never], limit_s=0.5)
    assert run_part(part, setting(tmp_path)) == FAILED
    steps = json.loads((tmp_path / "out" / "endless" / "part.json").read_text())["steps"]
    assert [step["why"] for step in steps] == [
        "ended: the time of the part was over", "not started: the time of the part was over"
    ]  # fmt: skip
    assert left_of(tmp_path) == []


def test_a_part_that_is_interrupted_has_failed(tmp_path: Path) -> None:
    program = (
        "import signal, sys; from pathlib import Path; from tests.gpu.parts import Part, Setting, Step\n"
        "from tests.gpu.runner import run_part\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "begun = 'import pathlib, time; pathlib.Path(sys.argv[1], sys.argv[2]).touch(); time.sleep(1000)'\n"
        "steps = [Step('fine', [sys.executable, '-c', 'print(1)']), Step('long', [sys.executable, '-c',\n"
        "    'import sys; ' + begun, sys.argv[1], 'begun'])]\n"
        "run_part(Part('cut', 1, '', lambda _: steps), Setting(True, Path(sys.argv[1]), Path(sys.argv[1], 'work')))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {MARK: str(tmp_path)}) as process:
        wait_for(lambda: (tmp_path / "begun").exists(), "the second step")
        process.terminate()
    assert process.returncode == 143 and left_of(tmp_path) == []
    record = json.loads((tmp_path / "cut" / "part.json").read_text())
    assert (record["outcome"], [step["step"] for step in record["steps"]]) == (FAILED, ["fine"])


def left_of(tmp_path: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(tmp_path):
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def test_a_part_that_is_run_again_replaces_itself_alone(tmp_path: Path) -> None:
    for name in ("one", "other", "one"):
        assert run_part(Part(name, 1, "nothing", lambda _: []), setting(tmp_path)) == PASSED
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["one", "other"]
    mine = tmp_path / "out" / "precious"
    mine.mkdir()
    (mine / "file").touch()
    with pytest.raises(TierError, match="give another directory"):
        run_part(Part("precious", 1, "nothing", lambda _: []), setting(tmp_path))
    assert (mine / "file").exists()
    assert write_overview(setting(tmp_path)).count("\n") == 2  # of the tier's own parts alone, and none of those ran


@pytest.mark.slow
def test_the_page_has_what_the_device_measured_of_a_drill(tmp_path: Path) -> None:
    """Which the rehearsal cannot have; the trace is that of the tests of `device_copies`."""
    drill = tmp_path / "resume-lazy" / "drill"
    (drill / "trace").mkdir(parents=True)
    for rank in range(RANKS):
        dump(drill / "trace" / RANK_FILE_PATTERN.format(rank=rank, cycle=0), rank_log(rank).records)
    cycle = {"cycle": 0, "verified": True, "losses": "equal", "state_hashes": "equal", "cache": "cold"}
    (drill / "drill.json").write_text(json.dumps({"cycles": [cycle]}))
    part = {"part": "resume-lazy", "shows": "s", "rehearsal": False, "version": "1", "began": "2026-01-01T00:00:00Z"}
    part |= {"outcome": PASSED, "seconds": 1.0, "steps": []}
    lines = page(tmp_path, [part])
    (head,) = [line for line in lines if "device peak GB" in line]
    (row,) = [line for line in lines if line.startswith("| resume-lazy | yes |")]
    told = dict(zip(*([cell.strip() for cell in line.split("|")] for line in (head, row)), strict=True))
    names = ("copies GB/s", "of the bus", "beside training", "device peak GB")
    assert [told[name] for name in names] == ["10.00", "0.50", "0.88", "47.00"]


def test_gpu_marked_tests_are_where_the_tier_runs_them() -> None:
    elsewhere = [path for path in (ROOT / "tests").rglob("*.py") if GPU not in path.parents]
    assert not [path for path in elsewhere if "mark." + "gpu" in path.read_text()]


def closure(names: list[str], version: str, *, beside: frozenset[str] = frozenset()) -> frozenset[str]:
    """These packages and all that they need under this Python, without those that are there."""
    environment = {"python_version": version, "python_full_version": f"{version}.0", "extra": ""}
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found or name in beside:
            continue
        found.add(name)
        needs = map(Requirement, metadata.requires(name) or [])
        waiting += [canonicalize_name(n.name) for n in needs if n.marker is None or n.marker.evaluate(environment)]
    return frozenset(found)


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_bundle_holds_all_that_is_needed(version: str) -> None:
    lines = (GPU / "requirements.txt").read_text().splitlines()
    required = [Requirement(line).name for line in lines if not line.startswith("#")]
    told = re.search(r"^BUNDLED=\((.*?)\)", (GPU / "bundle.sh").read_text(), re.MULTILINE | re.DOTALL)
    assert told
    bundled = {canonicalize_name(name) for name in told[1].split()} | {"deepspeed"}
    torch = closure(["torch"], version)
    needed = closure(required, version, beside=torch)
    assert needed <= bundled, f"not in bundle.sh: {sorted(needed - bundled)}"
    assert bundled - torch <= needed, f"bundle.sh brings what nothing needs: {sorted(bundled - torch - needed)}"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "give one argument"), (["a", "b"], "give one argument"), (["--fast"], "give one argument"),
        ([str(GPU)], f"{GPU} is there already"), (["--python", "3.12"], "give one argument"),
        (["--python"], "--python ''"), (["--python", "3.9", "a"], "--python '3.9': give 3.12 or 3.13"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_makes_no_bundle(words: list[str], error: str) -> None:
    done = subprocess.run(["bash", str(GPU / "bundle.sh"), *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith(f"bundle.sh: error: {error}")
