"""The rehearsal of the GPU tier, and the page that is made of it: no part may fail for a silly reason on a GPU.

All parts: bash tests/gpu/run.sh --rehearse. Those left out here differ from these by the name of an engine, of a fault
or of a launcher, and their commands are checked one by one (tests/unit/test_gpu_tier.py): `fork`, `memory`, `reshard`
and `device-error` run what `shared-gpu` and `resume-torch` run, `engines` what `engines-others` runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.harness import ROOT

pytestmark = pytest.mark.slow
PARTS = ("machine", "engines-others", "tests", "resume-torch", "shared-gpu", "overhead", "resume-datastates")
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
    assert [path.name for path in place.iterdir()] == ["out"]  # no checkpoints are left
    return place / "out"


def test_every_part_passes(out: Path) -> None:
    outcomes = {name: json.loads((out / name / "part.json").read_text())["outcome"] for name in PARTS}
    assert outcomes.pop("resume-datastates") == "left out"  # it is installed where there is CUDA
    assert set(outcomes.values()) == {"passed"}
    for part in ("resume-torch", "shared-gpu"):
        drilled = json.loads((out / part / "drill" / "drill.json").read_text())
        assert [(cycle["verified"], cycle["state_hashes"]) for cycle in drilled["cycles"]] == [(True, "equal")]


def test_what_is_left_is_small(out: Path) -> None:
    files = [path for path in out.rglob("*") if path.is_file()]
    assert files and not [path for path in files if path.stat().st_size > SMALL_BYTES]


def test_the_page(out: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.page", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "**A rehearsal on CPUs" in text
    assert "| shared-gpu | yes |" in text
    assert "| fork | a rank that megatron.launch forks uses CUDA | not run |" in text
    for heading in ("Parts", "Killed and resumed", "Start-up phases of the restarts", "What the trace costs"):
        assert f"\n## {heading}\n" in text
    assert "| imports |" in text and "| first_step |" in text and "`dcp` |" in text
