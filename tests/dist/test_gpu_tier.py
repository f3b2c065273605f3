"""The rehearsal of the GPU tier, and the page that is made of it: no part may fail for a silly reason on a GPU.

All of both ladders: bash tests/gpu/run.sh --rehearse --ladder 1, and 2, which .ci/nightly does, as it does this. The
suite has the commands of all parts, each parsed by its program (tests/unit/test_gpu_tier.py). The parts left out here
differ from these by the name of an engine, of a fault, of a launcher or by a number, and their commands are checked one
by one: `fork`, `memory`, `reshard`, `device-error` and the drills of each engine run what
`shared-gpu` runs, `launch` and `sequence-parallel` what `machine` and `shared-gpu` run, `step-time-4` what `step-time`
runs, `engines` what `engines-others` runs. `overhead` is tests/dist/test_overhead_benchmark.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.dist.harness import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.nightly(minutes=5)]
PARTS = ("facts", "grow", "machine", "step-time", "engines-others", "copies", "tests", "shared-gpu")
PARTS += ("resume-datastates",)
SMALL_BYTES = 2 << 20


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gpu_tier")
    command = ["bash", str(ROOT / "tests/gpu/run.sh"), "--rehearse", "--out", str(place / "out"), *PARTS]
    # The whole suite has this one beside the rehearsal, on a CPU, too: its processes need not be started twice.
    # So are those of torchrun, which starts the README's job and its demonstration; a launcher that forks imports once.
    settings = {"PYTHON": sys.executable, "PYTEST_ADDOPTS": "--deselect tests/gpu/test_determinism.py"}
    settings["LAUNCHER"] = "fork"
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in place.iterdir()) == ["out", "out.tar.gz"]  # no checkpoints are left
    return place / "out"


def test_every_part_passes(out: Path) -> None:
    outcomes = {name: json.loads((out / name / "part.json").read_text())["outcome"] for name in PARTS}
    assert outcomes.pop("resume-datastates") == "left out"  # it is installed where there is CUDA
    assert set(outcomes.values()) == {"passed"}
    drilled = json.loads((out / "shared-gpu" / "drill" / "drill.json").read_text())
    assert [(cycle["verified"], cycle["state_hashes"]) for cycle in drilled["cycles"]] == [(True, "equal")]


def test_what_is_left_is_small(out: Path) -> None:
    files = [path for path in out.rglob("*") if path.is_file()]
    assert files and not [path for path in files if path.stat().st_size > SMALL_BYTES]
    with tarfile.open(out.with_name("out.tar.gz")) as archive:
        assert sorted(archive.getnames()) == sorted(f"out/{path.relative_to(out)}" for path in files)


def test_the_page(out: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.page", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "**A rehearsal on CPUs" in text
    assert "| shared-gpu | yes |" in text
    assert "| fork | the drill: ranks that megatron.launch forks are killed and resumed | not run |" in text
    headings = ("Parts", "Predicted and measured", "Iterations, part `step-time`", "Killed and resumed")
    for heading in (*headings, "Start-up phases of the restarts", "The machine"):
        assert f"\n## {heading}\n" in text
    (iteration,) = [line for line in text.splitlines() if line.startswith("| `step-time`: an iteration |")]
    assert "not observed" not in iteration and "The profile has no kernels of a device." in text
    (copies,) = [line for line in text.splitlines() if line.startswith("| `copies`: to pageable memory |")]
    assert "not observed" in copies
    assert "| imports |" in text and "| first_step |" in text and "`dcp` |" in text
