"""A conversion holds one layer at a time, however many there are."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.config import ModelConfig
from megatron.hf.exporting import export
from megatron.hf.importing import import_model
from megatron.parallel.topology import Layout
from tests.unit.megatron.hf.models import LLAMA, drawn, save

LAYERS = 16  # and the limit is that of four: one or two, and what the allocator keeps
# What engine lazy reads through, whatever the model: two blocks for each of its threads.
BUFFERS = {"torch": 0, "lazy": 48 << 20}


def peak_growth(function: Callable[..., Any], *arguments: Any) -> int:
    """Bytes by which the resident memory of this process grows at most during a call."""
    ctypes.CDLL(None).malloc_trim(0)  # memory that is free, and would be used
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident now
    before = _peak()
    function(*arguments)
    return _peak() - before


def _peak() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


@pytest.mark.slow
def test_memory_is_that_of_a_layer_or_two(tmp_path: Path) -> None:
    small = ModelConfig(**LLAMA)
    large = dataclasses.replace(small, num_layers=LAYERS, hidden_size=256, ffn_hidden_size=2048)
    ours = drawn(large)
    sizes = [sum(parameter.nbytes for parameter in module.parameters()) for module in ours.values()]
    for engine, layout in (("torch", Layout(1, 1, 1)), ("lazy", Layout(2, 2, 1))):
        for name, model, modules in (("small", small, drawn(small)), ("large", large, ours)):
            save(tmp_path / engine / name, model, modules, layout, engine)
        grown = [
            peak_growth(export, tmp_path / engine / name, tmp_path / engine / f"{name}_hf", None, 1 << 30)
            for name in ("small", "large")  # what is imported and allocated once is not counted
        ]
        assert grown[1] < 4 * max(sizes) + BUFFERS[engine] < sum(sizes), (engine, grown, max(sizes))
    for name in ("small", "large"):
        grown = peak_growth(import_model, tmp_path / "torch" / f"{name}_hf", tmp_path / name, None, 128)
    assert grown < 4 * max(sizes), (grown, max(sizes))
