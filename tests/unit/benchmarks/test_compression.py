"""Compression restores every bit, and what it saves is computed from its ratio and speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.compression.__main__ import main, parse_arguments
from benchmarks.compression.break_even import LINKS_MBPS, STORED, Rate, best
from benchmarks.compression.entropy import bits_of_planes
from benchmarks.compression.masters import rounded, share_of_rounded
from benchmarks.compression.planes import Bytes, add, join, split, subtract
from benchmarks.compression.saving import Link, save
from benchmarks.compression.tensors import Kind, kinds_of, read, sample
from benchmarks.compression.ways import WAYS, Way
from megatron.checkpointing.engines.base import EngineOptions, FileState
from megatron.checkpointing.engines.lazy.engine import LazyEngine
from restart_trace.recorder import untraced_operation

NUMEL = 3000
WEIGHT: dict[str, Any] = {"name": "2.weight", "shape": [NUMEL], "dim": None, "ranges": None}
KINDS = ("master", "exp_avg", "exp_avg_sq")


def checkpoint(directory: Path, seed: int) -> Path:
    """Of engine lazy: a bf16 weight, its master weight behind some padding, and moments."""
    generator = torch.Generator().manual_seed(seed)
    values = {kind: torch.randn(NUMEL + 8, generator=generator) * 0.02 for kind in KINDS}
    fragment = WEIGHT | {"local_shape": [NUMEL], "start": 0, "numel": NUMEL, "offset": 8}
    placements = {(kind,): {"kind": kind, "fragments": [fragment], "padding": 8} for kind in KINDS}
    weight = values["master"][8:].to(torch.bfloat16)
    files = [
        FileState("layer_02-model_00-model_states.pt", {"weight": weight}, {("weight",): WEIGHT}),
        FileState("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", {**values, "step": torch.tensor(3.0)}, placements),
    ]
    directory.mkdir()
    engine = LazyEngine(EngineOptions(fsync=False))
    engine.save(files, directory, untraced_operation())
    return directory


def bits(data: bytes, width: int) -> Bytes:
    return np.frombuffer(data[: len(data) // width * width], np.uint8)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=400), st.sampled_from([2, 4]))
def test_planes_restore_any_bits(data: bytes, width: int) -> None:
    values = bits(data, width)
    assert join(split(values, width), width).tobytes() == values.tobytes()
    earlier = values[::-1].copy()
    assert add(subtract(values, earlier, width), earlier, width).tobytes() == values.tobytes()


def test_the_first_plane_has_the_exponents() -> None:
    single = np.frombuffer(np.array([1.5, -2.0, 0.0], np.float32).tobytes(), np.uint8)
    assert list(split(single, 4)[:3]) == [127, 128, 0]
    half = np.frombuffer(torch.tensor([1.5, -2.0, 0.0], dtype=torch.bfloat16).view(torch.uint8).numpy(), np.uint8)
    assert list(split(half, 2)[:3]) == [127, 128, 0]


def test_a_small_difference_has_zeros_in_its_first_planes() -> None:
    values, earlier = np.array([1.0, 2.0], np.float32), np.array([1.00001, 1.99999], np.float32)
    found = subtract(values.view(np.uint8), earlier.view(np.uint8), 4)
    assert list(split(found, 4)[:4]) == [0, 0, 0, 0]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.binary(min_size=4, max_size=4000),
    st.sampled_from([2, 4]),
    st.sampled_from(["", "exponent", "planes"]),
    st.sampled_from(["", "xor", "difference"]),
)
def test_every_way_restores_any_bits(data: bytes, width: int, grouping: str, delta: str) -> None:
    way, block = Way("zlib", grouping, delta), bits(data, width)
    earlier = block[::-1].copy() if delta else None
    assert way.unpack(way.pack(block, earlier, width), earlier, width).tobytes() == block.tobytes()


def test_weights_are_rounded_as_torch_does() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.randn(10_000, generator=generator), torch.tensor([0.0, -0.0])])
    ties = (values.view(torch.int32) & ~0xFFFF | 0x8000).view(torch.float32)
    for master in (values, ties):
        expected = master.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(rounded(master.numpy().view(np.uint32)), expected)


def test_the_tensors_of_a_checkpoint_by_kind(tmp_path: Path) -> None:
    saved = checkpoint(tmp_path / "saved", 0)
    kinds = kinds_of(saved)
    assert {name: (kind.width, kind.num_bytes) for name, kind in kinds.items()} == {
        "weights": (2, 2 * NUMEL), **dict.fromkeys(KINDS, (4, 4 * (NUMEL + 8)))
    }  # fmt: skip
    blocks = sample(kinds["exp_avg"], 1024, 1e9)
    expected = torch.randn(2 * (NUMEL + 8), generator=torch.Generator().manual_seed(0))[NUMEL + 8 :] * 0.02
    assert np.concatenate(read(blocks)).shape == (4 * (NUMEL + 8),) and expected.shape == (NUMEL + 8,)
    assert len(sample(kinds["exp_avg"], 1024, 2048)) == 2
    assert share_of_rounded(saved) == 1.0


def test_a_weight_that_is_not_its_master_is_noticed(tmp_path: Path) -> None:
    saved = checkpoint(tmp_path / "saved", 0)
    (weight,) = kinds_of(saved)["weights"].extents
    with weight.path.open("r+b") as file:
        file.seek(weight.start)
        first = file.read(1)[0]
        file.seek(weight.start)
        file.write(bytes([first ^ 1]))
    assert share_of_rounded(saved) == (NUMEL - 1) / NUMEL


def test_the_entropy_of_planes() -> None:
    values = np.frombuffer(np.array([1.0, 2.0, 1.0, 2.0], np.float32).tobytes(), np.uint8)
    assert bits_of_planes([values], 4) == [1.0, 0.0, 0.0, 0.0]


def test_the_slower_of_compression_and_transfer_decides() -> None:
    rates = {"master": {"fast": Rate(0.8, 1000, 2000), "small": Rate(0.5, 100, 400)}}
    found = best({"master": 1.0}, rates, link=100, cores=1)
    assert found.ways == {"master": "fast"} and (found.save, found.load) == (0.8, 0.8)
    found = best({"master": 1.0}, rates, link=100, cores=2)
    assert found.ways == {"master": "small"} and (found.save, found.load) == (0.5, 0.5)
    assert best({"master": 1.0}, rates, link=2000, cores=1).ways == {"master": STORED}


def test_a_save_takes_as_long_as_the_link_needs() -> None:
    block = np.zeros(40_000, np.uint8)
    blocks, widths = {"master": [block, block]}, {"master": 4}
    assert save(blocks, widths, {"master": STORED}, Link(1.0), threads=2) >= 0.08


def test_the_command_measures_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now, earlier = checkpoint(tmp_path / "now", 0), checkpoint(tmp_path / "earlier", 1)
    assert WAYS["exponent-zlib"].codec == "zlib"
    flags = [str(now), "--earlier", str(earlier), "--only", "exponent-zlib", "--repeat", "2", "--block", "4096"]
    assert main([*flags, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == 2 * NUMEL + 3 * 4 * (NUMEL + 8) and found["rounded_masters"] == 1.0
    way = found["kinds"]["weights"]["ways"]["exponent-zlib"]
    assert 0.5 < way["ratio"] < 0.9 and len(way["compress_s"]) == len(way["decompress_s"]) == 2
    assert {row["link"] for row in found["links"]["with an earlier one"]} == set(LINKS_MBPS)
    assert all(len(one["seconds"]) == 2 for one in found["saves"])
    assert main([*flags, "--no-saves"]) == 0
    assert "exponent-zlib" in capsys.readouterr().out


def test_a_directory_without_a_checkpoint_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--only", "exponent-zlib"]) == 2
    assert "global_stepN" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--block", "6"], ["--only", "xor-planes-zstd-1"], ["--repeat", "0"]])
def test_wrong_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["some", *flags])
    assert flags[0] in capsys.readouterr().err


def test_a_kind_has_the_bytes_of_its_tensors() -> None:
    assert Kind("master", 4, ()).num_bytes == 0
