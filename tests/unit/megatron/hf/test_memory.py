"""A conversion holds one layer at a time, however many there are."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config import ModelConfig
from megatron.parallel.topology import Layout
from tests.dist.harness import ROOT
from tests.unit.megatron.hf.models import LLAMA, drawn, save
from tests.unit.megatron.hf.peak_memory import SIZES

LAYERS = 16
# What engine lazy reads through, whatever the model: two blocks for each of its threads.
BUFFERS = {"torch": 0, "lazy": 48 << 20, "import": 0}
# Settings of glibc's malloc, bytes: larger blocks are mapped and unmapped by themselves.
RETURNS_AT_ONCE = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
LAYOUTS = {"torch": Layout(1, 1, 1), "lazy": Layout(2, 2, 1)}


@pytest.mark.slow
def test_memory_is_that_of_a_layer_or_two(tmp_path: Path) -> None:
    """In a process whose allocator returns what is freed at once: else its peak is that of what it keeps, too."""
    small = ModelConfig(**LLAMA)
    large = dataclasses.replace(small, num_layers=LAYERS, hidden_size=256, ffn_hidden_size=2048)
    ours = {"small": (small, drawn(small)), "large": (large, drawn(large))}
    for engine, layout in LAYOUTS.items():
        for size in SIZES:
            save(tmp_path / engine / size, *ours[size], layout, engine)
    measure = [sys.executable, "-m", "tests.unit.megatron.hf.peak_memory", str(tmp_path), *LAYOUTS]
    done = subprocess.run(measure, cwd=ROOT, env=os.environ | RETURNS_AT_ONCE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout.splitlines()[-1])
    sizes = [sum(parameter.nbytes for parameter in module.parameters()) for module in ours["large"][1].values()]
    for name, buffers in BUFFERS.items():
        assert grown[name] < 2 * max(sizes) + buffers < sum(sizes), (grown, max(sizes))
