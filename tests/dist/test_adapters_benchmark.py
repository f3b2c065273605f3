"""The benchmark of the adapters, end to end, on a state so small that only its working is tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.harness import ROOT

COMMAND = [sys.executable, "-m", "benchmarks.adapters", "--bytes", "4MiB", "--width", "256", "--batch", "8"]


@pytest.mark.nightly(minutes=1)
@pytest.mark.parametrize("output", ["json", "table"])
def test_every_variant_is_measured_and_nothing_is_left(output: str, tmp_path: Path) -> None:
    words = [*COMMAND, "--repeat", "2", "--dir", str(tmp_path), "--format", output]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    if output == "table":
        assert done.stdout.count("lazy") == 2 and done.stdout.count("torch.save + fsync") == 2
        return
    found = json.loads(done.stdout)["samples"]
    variants = {library: {sample["variant"] for sample in samples} for library, samples in found.items()}
    ours = {"torch.save + fsync", "lazy"}
    assert variants == {"dcp": {*ours, "dcp.async_save"}, "deepspeed": ours}
    for sample in [*found["dcp"], *found["deepspeed"]]:
        assert sample["bytes"] > 3e6 and sample["durable_s"] >= sample["call_s"] > 0 and sample["hook_s"] >= 0
