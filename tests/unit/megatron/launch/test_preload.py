"""The process that forks ranks, in any build of torch; tests/cuda_build has what only a CUDA build shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.trace_helpers import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "engines"),
    [
        (["--save", "s3://bucket/run"], []), (["--torch-compile"], []), (["--checkpoint-engine=dcp-async"], ["dcp"]),
        pytest.param(["--checkpoint-engine", "torchsnapshot"], ["torchsnapshot"], marks=pytest.mark.nightly(minutes=1)),
        pytest.param(["--checkpoint-engine", "fastpersist"], ["fastpersist"], marks=pytest.mark.nightly(minutes=1)),
    ],
)  # fmt: skip
def test_it_asks_torch_for_no_device_and_starts_no_program(
    tmp_path: Path, flags: list[str], engines: list[str]
) -> None:
    """A rank could not use CUDA then; and compilers that DeepSpeed starts to try its ops take seconds. What the engine
    of the ranks imports may be seconds, too, in each new one."""
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    settings = tmp_path / "aws"
    settings.write_text("[default]\ncredential_process = touch asked\n")  # where a bucket is opened
    own = {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "AWS_CONFIG_FILE": str(settings)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("recorded_preload.py")), *flags],
        cwd=tmp_path, env=environment | own, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"asked": [], "started": [], "engines": engines}
