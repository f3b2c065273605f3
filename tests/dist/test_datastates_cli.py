"""`--checkpoint-engine datastates` from the command line of a machine with neither its library nor a CUDA device."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from isal import isal_zlib

from megatron.checkpointing.engines.base import SavedFile
from megatron.checkpointing.store.manifest import Manifest
from megatron.parallel.topology import Layout
from tests.dist.harness import LLAMA_STYLE, ROOT, Zygote
from tests.dist.tiny_runs import (
    MODEL,
    NO_DROPOUT,
    SINGLE,
    TRAINING,
    Launcher,
    from_iteration,
    load_file,
    losses_of_ranks,
    saving,
    state_files,
)
from tests.unit.megatron.checkpointing.engines.datastates_files import WRITERS, write

USAGE_ERROR = 2
LAYOUT = Layout(tp=1, pp=2, dp=2)


@pytest.fixture
def launcher(zygote: Zygote, tmp_path: Path, dataset: list[str]) -> Launcher:
    flags = [*dataset, *MODEL, *TRAINING, *LLAMA_STYLE, *NO_DROPOUT, "--bf16", "--train-iters", "4"]
    return Launcher(zygote, flags, tmp_path)


def one_error(output: str, exit_code: int) -> str:
    errors = re.findall(r"^error.*", output, re.MULTILINE)
    assert exit_code == USAGE_ERROR and len(errors) == 1 and "Traceback" not in output, (exit_code, output)
    return errors[0].removeprefix("error: ")


def test_saving_without_the_package(launcher: Launcher) -> None:
    save = launcher.directory / "save"
    run = launcher.run(SINGLE, *saving(save, 2), "--checkpoint-engine", "datastates")
    assert one_error(run.output, run.exit_codes[0]) == (
        "--checkpoint-engine datastates: package datastates is not installed; it is not on PyPI: clone "
        "https://github.com/DataStates/datastates-llm and install it from there (it needs the CUDA toolkit and a CUDA "
        "build of torch), or use another engine; loading needs neither"
    )
    assert not list(save.glob("global_step*"))


def test_saving_without_a_device(launcher: Launcher) -> None:
    package = launcher.directory / "package" / "datastates"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("class CheckpointEngine: pass\n")
    places = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(package.parent)}
    places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DS_ACCELERATOR": "cpu"}
    result = subprocess.run(
        [
            sys.executable, str(ROOT / "pretrain_gpt.py"), *launcher.dataset,
            *saving(launcher.directory / "save", 2), "--checkpoint-engine", "datastates",
        ],
        env=os.environ | places, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert one_error(result.stdout + result.stderr, result.returncode) == (
        "--checkpoint-engine datastates: there is no CUDA device here, and saving needs one; use another engine, or "
        "run where there is one; loading needs none"
    )


@pytest.mark.parametrize("layout", list(WRITERS))
def test_training_goes_on_from_its_files(launcher: Launcher, layout: str) -> None:
    """A checkpoint in the library's format, written by the test, goes on as the same one of torch does."""
    torch_run, other = launcher.directory / "torch", launcher.directory / "datastates"
    launcher.train(LAYOUT, *saving(torch_run, 2))
    tag = torch_run / "global_step2"
    shutil.rmtree(torch_run / "global_step4")
    convert(tag, other / tag.name, layout)
    (other / "latest").write_text(tag.name)
    again = launcher.directory / "again"
    launcher.train(
        LAYOUT, "--load", other, "--checkpoint-engine", "datastates", "--verify-restored-state",
        "--restart-trace-dir", again / "restart_trace",
    )  # fmt: skip
    expected = from_iteration(losses_of_ranks(torch_run, LAYOUT), 3)
    assert from_iteration(losses_of_ranks(again, LAYOUT), 3) == expected and all(expected)


def convert(source: Path, target: Path, layout: str) -> None:
    """The checkpoint `source` in files of DataStates, with a manifest that says so."""
    target.mkdir(parents=True)
    manifest = Manifest.from_json((source / "manifest.json").read_text())
    files = dict(manifest.files)
    for path in source.glob("tensor_hashes*"):
        shutil.copy(path, target / path.name)
    for name in state_files(source):
        content = write(target / name, layout, load_file(source / name))
        files[name] = SavedFile(name, len(content), f"crc32:{isal_zlib.crc32(content):08x}")
    manifest.files.update(files)
    fields = {**vars(manifest), "engine": "datastates", "files": files}
    (target / "manifest.json").write_text(Manifest(**fields).to_json())
