"""An engine in a package of its own: the example of docs/engines.md, really installed and trained with."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from megatron.checkpointing.engines.registry import ENTRY_POINT_GROUP
from tests.dist.conftest import data_flags

ROOT = Path(__file__).resolve().parents[5]
EXAMPLE = ROOT / "docs" / "examples" / "plugin_engine"
DATA = ROOT / "tests" / "golden" / "upstream_run" / "data"
TRAINING = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "16", "--bf16",
    "--micro-batch-size", "1", "--train-iters", "4", "--lr", "1e-3", "--log-interval", "1", "--save-interval", "1",
    "--verify-restored-state",
]  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that pip has installed the example into."""
    there = sorted(point.value for point in entry_points(group=ENTRY_POINT_GROUP))
    assert not there, f"these tests need an environment without plug-ins: pip uninstall the packages of {there}"
    directory = tmp_path_factory.mktemp("plugin")
    shutil.copytree(EXAMPLE, directory / "source")  # a build leaves files beside its source
    target = directory / "installed"
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, str(directory / "source")]
    subprocess.run(command, check=True, timeout=300)
    return target


def python(
    installed: Path | None, arguments: Sequence[str | Path], **environment: str
) -> subprocess.CompletedProcess[str]:
    """A Python that has the example installed, or has not."""
    paths = os.pathsep.join([str(ROOT), *([str(installed)] if installed else [])])
    environment |= {"PYTHONPATH": paths, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)


def train(installed: Path | None, save: Path, engine: str, *more: str | Path) -> subprocess.CompletedProcess[str]:
    for name in ("corpus_text_document.bin", "corpus_text_document.idx"):
        shutil.copy(DATA / name, save.parent / name)
    flags = [*TRAINING, *data_flags(save.parent / "corpus_text_document", DATA / "tokenizer.model")]
    flags += ["--save", str(save), "--load", str(save), "--checkpoint-engine", engine]
    return python(installed, [ROOT / "pretrain_gpt.py", *flags, *more])


@pytest.mark.slow
def test_names_of_plugins_are_known(installed: Path) -> None:
    code = (
        "from megatron.checkpointing.engines import registry; import sys; registry.check_engine_name('example')\n"
        "assert not {'torch', 'example_checkpoint_engine'} & set(sys.modules)\n"
        "print(registry.engine_names()[-1], registry.engine_class('example').__name__)\n"
        "for name in ('exmaple', 'example'):\n"
        "    try: registry.check_engine_name(name, in_object_storage=True)\n"
        "    except ValueError as exc: print(exc)"
    )
    found = python(installed, ["-c", code])
    assert found.returncode == 0, found.stderr
    names, refusal, stored = found.stdout.splitlines()[-3:]
    assert names == "example ExampleEngine"
    assert refusal.startswith("--checkpoint-engine exmaple: no such engine; there are: torch (")
    assert refusal.endswith("example (of example_checkpoint_engine:ExampleEngine)")
    assert stored.startswith(
        "--checkpoint-engine example: does not save to object storage: an engine of another package"
    )


@pytest.mark.slow
def test_training_with_a_plugin(installed: Path, tmp_path: Path) -> None:
    """Trained, resumed bit for bit, and without its package a clear error instead of another engine."""
    save = tmp_path / "run"
    first = train(installed, save, "example", "--exit-interval", "2")
    assert first.returncode == 0, first.stdout + first.stderr
    manifest = json.loads((save / "global_step2" / "manifest.json").read_text())
    assert manifest["engine"] == "example"
    checksums = {file["checksum"].partition(":")[0] for file in manifest["files"].values()}
    assert checksums == {"sha256"}

    again = train(installed, save, "torch")  # the plug-in reads its checkpoint, whichever engine saves now
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resumed from iteration 2" in again.stdout + again.stderr
    assert json.loads((save / "global_step4" / "manifest.json").read_text())["engine"] == "torch"

    without = train(None, save, "example")
    assert without.returncode == 2
    assert re.search(r"^error: --checkpoint-engine example: no such engine", without.stderr, re.MULTILINE)
    unreadable = train(None, save, "torch", "--load-tag", "global_step2")
    assert unreadable.returncode == 2 and "example" in unreadable.stderr


@pytest.mark.slow
def test_the_suite_can_be_run_for_a_plugin(installed: Path) -> None:
    """As docs/engines.md tells its author to."""
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml"]
    tests = ROOT / "tests" / "conformance" / "test_engine_contract.py"
    found = python(installed, ["-m", "pytest", *options, tests], CONFORMANCE_ENGINES="example")
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr
    assert re.search(r"\b[4-9]\d passed", found.stdout), found.stdout[-1000:]


def test_the_example_is_short() -> None:
    lines = (EXAMPLE / "example_checkpoint_engine.py").read_text().splitlines()
    assert len(lines) - lines.index("class ExampleEngine(CheckpointEngine):") <= 40
