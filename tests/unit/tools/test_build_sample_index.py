"""tools/build_sample_index.py: the index that a training looks for, before it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.megatron.data.dataset_helpers import dataset_of
from tests.unit.script_helpers import ROOT

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1 --lr 1e-3 "
    "--train-iters 20 --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 9999 --no-query-key-layer-scaling"
)


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.build_sample_index", *FLAGS.split(), *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_index_of_a_blend_is_built_once(tmp_path: Path) -> None:
    data = [dataset_of(tmp_path, [50] * 20, name) for name in ("books", "web")]
    flags = ("--data-path", "0.3", data[0], "0.7", data[1], "--data-cache-path", str(tmp_path / "cache"))
    done = run(*flags)
    assert done.returncode == 0 and "train: 22 samples are indexed" in done.stderr, done.stderr
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert len([name for name in before if name.endswith(".dsc")]) == 3, "two datasets and their blend"
    assert run(*flags).returncode == 0
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}


def test_wrong_flags_and_data_are_one_message() -> None:
    for flags, message in (
        (("--data-path", "/no/such"), "/no/such"),
        (("--data-path", "x", "--micro-batch-size", "0"), "--micro-batch-size 0"),
    ):
        done = run(*flags)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and message in line, done.stderr
