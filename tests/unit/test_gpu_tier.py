"""The GPU tier before anything of it runs: its list of parts, what it refuses, its bundle."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.overhead.cli import parse_arguments as parse_overhead
from megatron.checkpointing.engines.registry import engine_names
from megatron.config.arguments import config_from_args, parse_args
from tests.dist.harness import HANGS_S, end_all, processes_with, wait_for
from tests.gpu.cuda_modules import CUDA_ALONE, RUN_BY
from tests.gpu.facts import facts
from tests.gpu.files import MOST_BYTES
from tests.gpu.grow import touch
from tests.gpu.ladder import BUDGET_S, RESERVE_S, Limits, ladder, run_parts
from tests.gpu.parts import (
    ENGINES,
    ENGINES_HERE,
    LADDERS,
    LIMIT_S,
    NEEDS_TWO_DEVICES,
    PARTS,
    Part,
    Setting,
    Step,
    part_named,
)
from tests.gpu.runner import FAILED, PASSED, TierError, publish, run_part
from tools.ckpt_replay.options import parse_arguments as parse_replay
from tools.make_synthetic_dataset import parse_arguments as parse_dataset
from tools.restart_bench.presets import preset_named
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


def test_a_dry_run_lists_both_ladders_and_every_other_part_and_touches_nothing(tmp_path: Path) -> None:
    done = run_tier("--dry-run", "--out", tmp_path / "out", "--work", tmp_path / "work")
    assert done.returncode == 0, done.stderr
    listed = re.findall(r"^([a-z]\S*) +[\d.]+ min  (?!in all)", done.stdout, re.MULTILINE)
    ladders = [name for names in LADDERS.values() for name in names]
    assert listed == [*ladders, *(part.name for part in PARTS if part.name not in ladders)]
    sums = re.findall(
        r"^ladder \d +([\d.]+) min  in all, estimated; all is ended at 7.0 min$", done.stdout, re.MULTILINE
    )
    assert len(sums) == 2 and max(map(float, sums)) <= 7
    assert all(f"  {what}\n" in done.stdout for what in NEEDS_TWO_DEVICES)
    assert max(part.expected_s for part in PARTS) < LIMIT_S == 540
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", LADDERS)
def test_a_ladder_is_expected_to_end_by_itself(number: int) -> None:
    """With what it takes to end the last part and to pack the archive; the budget is seven minutes."""
    assert sum(part.expected_s for part in ladder(number, rehearsal=False)) <= BUDGET_S - RESERVE_S < BUDGET_S == 420
    assert all(part.expected_s <= part.limit_s < LIMIT_S for part in ladder(number, rehearsal=False))


def test_every_engine_that_writes_is_drilled() -> None:
    """`memory`, which only ranks of megatron.launch can save with, in a part of its own."""
    assert set(ENGINES) == set(engine_names()) - {"none", "memory"}
    assert "memory" in {part.name for part in PARTS}
    assert {f"resume-{engine}" for engine in ENGINES} <= {part.name for part in PARTS}


def flags_of(step: Step, place: Setting, *more: str) -> list[str]:
    """Of pretrain_gpt.py, as the step's preset gives them."""
    # Without an interpreter, with which a dry run would check that the dataset of an earlier step is there
    shown = {"DRY_RUN": "1", "SKIP_SETUP": "1", "PYTHON": "/none"}
    environment = os.environ | place.environment() | step.environment | shown
    command = [sys.executable, "-m", "tools.restart_bench", "run", step.argv[-1]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANGS_S)
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
        engine = step.engines[0] if step.engines else step.environment.get("ENGINE", "torch")
        argv = [",".join(step.engines) if word == ENGINES_HERE else word for word in step.argv]
        if {"tools.restart_bench", "tools.restart_drill"} & set(argv):
            preset = preset_named(argv[-1])
            assert preset is not None
            world_size = preset.tp * int(step.environment.get("DP", 1))
            flags = flags_of(step, place, "--checkpoint-engine", engine, "--allow-injected-faults")
            config = config_from_args(parse_args(flags), {"RANK": "0", "WORLD_SIZE": str(world_size)})
            assert config.checkpoint.checkpoint_engine == engine
            assert config.parallel.distributed_backend == ("gloo" if rehearsal or world_size > 1 else "nccl")
            trained += 1
        if argv[0] == sys.executable and argv[2] in PARSERS:
            PARSERS[argv[2]](argv[3:])
        else:
            assert argv[2] in (
                "tools.restart_bench",
                "pip",
                "pytest",
                "tests.gpu.machine",
                "tests.gpu.facts",
                "tests.gpu.grow",
            )
    without = ("facts", "install", "grow", "copies", "tests", "engines", "engines-others", "overhead")
    assert trained == (part.name not in without)
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


def test_modules_are_run_by_parts_that_there_are() -> None:
    known = {part.name for part in PARTS} | {"resume-ENGINE", "nothing"}
    assert {part for parts in RUN_BY for part in parts.split(", ")} <= known


def modules_with(pattern: str) -> set[str]:
    uses = re.compile(pattern)
    return {
        str(path.relative_to(ROOT))
        for folder in ("megatron", "restart_trace", "tools")
        for path in (ROOT / folder).rglob("*.py")
        if uses.search(path.read_text())
    }


CUDA_NAMES = (
    r"torch\.cuda\b|torch\.backends\.cuda|\blibcuda|\"nccl\"|\"cuda\"|\bis_cuda\b|pynvml|nvidia-smi|CUDA_VISIBLE_DEVICES"
    r"|\bCUBLAS_|\b(TORCH_)?NCCL_[A-Z]"
)


def test_every_module_that_uses_cuda_is_listed() -> None:
    found = modules_with(
        r"torch\.cuda|\bcuda\.|libcuda|\"nccl\"|\"cuda\"|is_cuda|type [!=]= \"cpu\"|accelerator\(\)\.|\bpin_memory[(=]"
        r"|torch\.(accelerator|Stream|Event)\b|get_device_module|(built|available)_accelerator|accelerator_in_use"
        r"|\"DS_ACCELERATOR\"\] [!=]=|non_blocking=|side_stream\(|current_accelerator\(|\bcudaEvent|\.cpu\(\)|pynvml"
    )
    listed = [name for names in RUN_BY.values() for name in names]
    assert found == set(listed) and len(listed) == len(found)


def test_what_is_cudas_alone_is_listed() -> None:
    """What has a name for any accelerator is called by that, so that ROCm and XPU are no port."""
    assert modules_with(CUDA_NAMES) == CUDA_ALONE


@pytest.mark.slow
def test_without_a_gpu_the_rehearsal_is_named(tmp_path: Path) -> None:
    done = run_tier("--out", tmp_path / "out", "machine")
    assert done.returncode == 2 and "--rehearse" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_there_is_not() -> None:
    done = run_tier("--dry-run", "resume-lazi")
    assert done.returncode == 2 and "resume-lazi: no such part; there are facts, " in done.stderr


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
    ended, never_started = "ended: the part's time was over", "not started: the part's time was over"
    # A machine may be so slow that the time is over before the first step.
    assert steps[0]["why"] in (ended, never_started) and steps[1]["why"] == never_started
    assert left_of(tmp_path) == []


@pytest.mark.slow
def test_engines_that_cannot_be_imported_fail_their_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deepspeed.py").write_text("raise ImportError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    drill = Step("drill", [sys.executable, "-c", "print(1)"], engines=("lazy",))
    parts = [Part("drill", 1, "", lambda _: [drill], needs_device=False), part_of("next", "1", needs_device=False)]
    assert run_parts(parts, setting(tmp_path)) == [FAILED, PASSED]
    (step,) = json.loads((tmp_path / "out" / "drill" / "part.json").read_text())["steps"]
    assert step["why"].startswith("the engines cannot be imported:") and "broken" in step["why"]


def test_a_part_that_is_interrupted_has_no_outcome(tmp_path: Path) -> None:
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
    assert (record["outcome"], [step["step"] for step in record["steps"]]) == (None, ["fine"])


def left_of(tmp_path: Path) -> list[int]:
    return [process.pid for process in processes_with(MARK, str(tmp_path))]


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
    assert publish(setting(tmp_path), {}).count("\n") == 2  # of the tier's own parts alone, and none of those ran


ENDLESS = "import time; time.sleep(1000)"


def part_of(name: str, program: str, expected_s: int = 1, *, needs_device: bool = True) -> Part:
    step = Step("step", [sys.executable, "-c", program])
    return Part(name, expected_s, "nothing", lambda _: [step], needs_device=needs_device)


def archived(archive: Path) -> dict[str, bytes]:
    """Names in the archive, without that of its directory, and what is in the files."""
    with tarfile.open(archive) as packed:
        files = {name: packed.extractfile(name) for name in packed.getnames()}
        return {name.partition("/")[2]: file.read() for name, file in files.items() if file is not None}


def with_archive(tmp_path: Path) -> Setting:
    return replace(setting(tmp_path), archive=tmp_path / "out.tar.gz")


def test_a_part_that_the_end_of_a_ladder_cuts_off_has_no_outcome(tmp_path: Path) -> None:
    place = with_archive(tmp_path)
    assert run_part(part_of("cut", ENDLESS), place, time.monotonic() + 1) is None
    record = json.loads((tmp_path / "out" / "cut" / "part.json").read_text())
    assert record["outcome"] is None
    assert record["steps"][0]["why"] in (f"{how}: the ladder's time was over" for how in ("ended", "not started"))
    (place.out / "cut").rename(place.out / "machine")  # a part of the tier, which the overview lists
    assert "| cut | not finished |" in publish(place, {})


@dataclass(frozen=True)
class UntilThereIs(Limits):
    """The time of the ladder is over once there is this file."""

    file: Path

    def left_s(self) -> float:
        return 0.0 if self.file.exists() else super().left_s()


def test_what_the_end_of_a_ladder_leaves_is_not_run_and_has_not_failed(tmp_path: Path) -> None:
    over = tmp_path / "over"
    parts = [part_of("first", f"open({str(over)!r}, 'w')", needs_device=False), part_of("left", "print(1)")]
    limits = UntilThereIs(time.monotonic(), 1e6, over)
    assert run_parts(parts, with_archive(tmp_path), limits, 1) == [PASSED, None]
    told = json.loads(archived(tmp_path / "out.tar.gz")["ladder_1.json"])["parts"]
    assert {name: part["outcome"] for name, part in told.items()} == {"first": PASSED, "left": None}
    assert told["left"]["why"] == "0 s were left of the ladder's time, and it is expected to take 1 s"
    assert not (tmp_path / "out" / "left").exists()


@pytest.mark.slow
def test_a_part_that_does_not_fit_is_passed_over_for_a_shorter_one(tmp_path: Path) -> None:
    parts = [part_of("long", ENDLESS, 10**7), part_of("short", "print(1)")]
    assert run_parts(parts, with_archive(tmp_path), Limits(time.monotonic(), 1e6), 1) == [None, PASSED]


@pytest.mark.slow
def test_the_archive_is_complete_whenever_a_ladder_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from tests.gpu.ladder import run_parts\n"
        "from tests.gpu.parts import Part, Setting, Step\n"
        "def part(name, program):\n"
        "    return Part(name, 1, '', lambda _: [Step('step', [sys.executable, '-c', program, str(place)])])\n"
        "place = Path(sys.argv[1])\n"
        "first = part('first', 'print(1)')\n"
        "begun = 'import pathlib, sys, time; pathlib.Path(sys.argv[1], str(1)).touch(); time.sleep(1000)'\n"
        "long = part('long', begun)\n"
        "run_parts([first, long], Setting(True, place / 'out', place / 'work', place / 'out.tar.gz'), None, 2)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, env=os.environ | {MARK: str(tmp_path)}
    ) as process:
        wait_for(lambda: (tmp_path / "1").exists(), "the second part")
        process.kill()
    end_all(lambda: processes_with(MARK, str(tmp_path)))
    files = archived(tmp_path / "out.tar.gz")
    told = json.loads(files["ladder_2.json"])["parts"]
    assert {name: part["outcome"] for name, part in told.items()} == {"first": PASSED, "long": None}
    assert json.loads(files["first/part.json"])["outcome"] == PASSED
    assert "| long | not run | | its turn has not come |" in files["overview.md"].decode()


def test_a_large_file_stays_out_of_the_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = with_archive(tmp_path)
    (place.out / "facts").mkdir(parents=True)
    (place.out / "facts" / "small").touch()
    with (place.out / "facts" / "large").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    publish(place, {})
    assert sorted(archived(tmp_path / "out.tar.gz")) == ["facts/small", "overview.md"]
    assert "facts/large is not in the archive" in capsys.readouterr().err


@pytest.mark.slow
def test_without_a_device_a_ladder_runs_what_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    place = replace(with_archive(tmp_path), rehearsal=False)
    parts = [part_of("plain", "print(1)", needs_device=False), part_of("device", "print(1)")]
    assert run_parts(parts, place, None, 1) == [PASSED, None]
    assert "| device | not run | | torch sees no CUDA device here" in (tmp_path / "out" / "overview.md").read_text()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--ladder", "3"], "--ladder: invalid choice: 3"),
        (["--ladder", "1", "tests"], "--ladder 1: has its own parts; drop it, or tests"),
        (["--budget", "60"], "--budget 60: is that of a ladder"),
        (["--ladder", "1", "--budget", "20"], "--budget 20: the last 20 s end and pack"),
        (["--bundle", "/nowhere"], "--bundle /nowhere: there is no wheel"),
    ],
)  # fmt: skip
def test_a_wrong_command_line(words: list[str], error: str) -> None:
    done = run_tier("--dry-run", *words)
    assert done.returncode == 2 and error in done.stderr


def test_what_a_machine_does_not_show_is_null_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'card, 1.0, 80 MiB, 1 MiB, 5, [N/A], 16, 16, 9 MHz, 7 W, Enabled, [N/A], Disabled, 9.0'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    found = facts([tmp_path])
    assert found["nvidia_smi"][0] | {"name": "card", "pcie.link.gen.current": None} == found["nvidia_smi"][0]
    for name, reason in (("nvcc", "nvcc is not on PATH"), ("CUDA_HOME", "CUDA_HOME is not set")):
        assert (found[name], found["not_observed"][name]) == (None, reason)
    assert set(found["not_observed"]) == {name for name, value in found.items() if value is None}


def test_memory_is_touched_and_told(tmp_path: Path) -> None:
    told = touch(3 << 20, 1e6, tmp_path / "grow.json")
    assert told == json.loads((tmp_path / "grow.json").read_text())
    assert told["touched_bytes"] == told["wanted_bytes"] == 3 << 20
    assert len(told["seconds"]) == 1 and told["first_GBps"] > 0 and told["again_GBps"] > 0
    none = touch(3 << 20, 0, tmp_path / "grow.json")
    assert (none["touched_bytes"], none["first_GBps"]) == (0, None)


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
        (["--check"], "--check : give a directory"), (["--check", "/nowhere"], "--check /nowhere: give a directory"),
        (["--python"], "--python ''"), (["--python", "3.9", "a"], "--python '3.9': give 3.12 or 3.13"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_makes_no_bundle(words: list[str], error: str) -> None:
    done = subprocess.run(["bash", str(GPU / "bundle.sh"), *words], capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 2 and done.stderr.startswith(f"bundle.sh: error: {error}")


@pytest.mark.parametrize(("mib", "status"), [(1, 0), (64, 1)])
def test_a_bundle_that_cannot_be_carried_with_the_files_is_refused(mib: int, status: int, tmp_path: Path) -> None:
    with (tmp_path / "a.whl").open("wb") as file:
        file.truncate(mib << 20)
    words = ["bash", str(GPU / "bundle.sh"), "--check", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == status
    assert re.search(rf"[1-9][\d.]* MiB of files and {mib}.0 MiB of wheels", done.stdout + done.stderr)
