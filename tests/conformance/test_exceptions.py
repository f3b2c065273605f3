"""The engines that cannot go through the suite on this machine do what they say instead."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.checkpointing.engines.base import EngineOptions, FileState, SavedCheckpoint
from megatron.checkpointing.engines.errors import CheckpointError, EngineUnavailableError
from megatron.checkpointing.engines.registry import builtin_engines, create_engine, engine_names
from restart_trace.recorder import untraced_operation
from tests.conformance.subjects import all_engines
from tests.dist.conftest import data_flags
from tests.dist.harness import ROOT
from tests.engines import EXCEPTIONS, EXPECTED

MODEL = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16",
    "--micro-batch-size", "1", "--train-iters", "2", "--lr", "1e-3",
]  # fmt: skip
DATA = ROOT / "tests" / "golden" / "upstream_run" / "data"


def refused(tmp_path: Path, engine: str, *, without: str = "") -> str:
    """The one error with which a training with that engine ends, exit code 2.

    The package `without` cannot be imported there, as if it were not installed.
    """
    (tmp_path / "hidden").mkdir()
    hide = f"import sys\nsys.modules[{without!r}] = None\n" if without else ""
    (tmp_path / "hidden" / "sitecustomize.py").write_text(hide)
    for name in ("corpus_text_document.bin", "corpus_text_document.idx"):
        (tmp_path / name).write_bytes((DATA / name).read_bytes())
    data = data_flags(tmp_path / "corpus_text_document", DATA / "tokenizer.model")
    save = ["--save", str(tmp_path / "save"), "--save-interval", "1", "--checkpoint-engine", engine]
    environment = {"PYTHONPATH": str(tmp_path / "hidden"), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *MODEL, *data, *save],
        env=os.environ | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    said = result.stdout + result.stderr
    assert result.returncode == 2 and "Traceback" not in said, (result.returncode, said)
    errors = re.findall(r"^error.*", said, re.MULTILINE)
    assert len(errors) == 1, said
    assert not list((tmp_path).glob("save/global_step*"))
    return errors[0].removeprefix("error: ")


def test_every_engine_is_in_the_suite() -> None:
    """Or has a reason why it cannot be put through it."""
    assert sorted([*EXPECTED, *EXCEPTIONS]) == sorted(all_engines())


def test_unknown_engine(tmp_path: Path) -> None:
    found = refused(tmp_path, "fast")
    assert found.startswith("--checkpoint-engine fast: no such engine; there are: torch (")
    assert all(f" {name} (" in found for name in engine_names())


NEED_A_PACKAGE = [name for name, entry in builtin_engines().items() if entry.requires]


@pytest.mark.parametrize("name", NEED_A_PACKAGE)
def test_engine_whose_package_is_missing(tmp_path: Path, name: str) -> None:
    """Never another engine in its place."""
    entry = builtin_engines()[name]
    (package,) = entry.requires
    found = refused(tmp_path, name, without=package)
    missing = f"--checkpoint-engine {name}: package {package} is not installed; install it ({entry.install})"
    assert found.startswith(missing)
    assert not (tmp_path / "save").exists()


def test_none_writes_nothing_and_reads_nothing(tmp_path: Path) -> None:
    engine, op = create_engine("none", EngineOptions()), untraced_operation()
    engine.check_can_save()
    pending = engine.begin_save([FileState("a", {"weight": torch.ones(3)})], tmp_path, op)
    pending.release_state()
    assert pending.wait() == [] and list(tmp_path.iterdir()) == []
    assert (op.bytes, op.num_files, op.durable, engine.writes_files) == (0, 0, False, False)
    (tmp_path / "a").write_bytes(b"1")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/a: --checkpoint-engine none cannot load"):
        engine.load(["a"], SavedCheckpoint(tmp_path), op)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, so it may well be able to save")
def test_datastates_says_what_it_needs(tmp_path: Path) -> None:
    engine = create_engine("datastates", EngineOptions())
    try:
        with pytest.raises(EngineUnavailableError) as caught:
            engine.check_can_save()
    finally:
        engine.close()
    assert str(caught.value).startswith("--checkpoint-engine datastates: ")
    assert refused(tmp_path, "datastates") == str(caught.value)


def test_the_reasons_are_those_of_the_table() -> None:
    document = (ROOT / "docs" / "engines.md").read_text()
    for name, reason in EXCEPTIONS.items():
        assert re.search(rf"^\| `{name}` \|.*{reason}", document, re.MULTILINE), f"{name}: {reason}"
