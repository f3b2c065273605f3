"""Fills planned tensors with random bits or floats, no two pages alike, and computes their checksums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from isal import isal_zlib

from megatron.checkpointing.engines.base import FileState

from ..common.tensor_trees import map_tensors, tensors_of
from .plan import ReplayError

_SHARD, _MASTERS = "optimizer_state_dict", "single_partition_of_fp32_groups"  # of DeepSpeed's shards
_PATTERN_BYTES = 4 << 20
# (integer of the same size, bits behind the exponent, bits of it)
_EXPONENTS = {
    torch.float64: (torch.int64, 52, 11), torch.float32: (torch.int32, 23, 8), torch.bfloat16: (torch.int16, 7, 8),
    torch.float16: (torch.int16, 10, 5),
}  # fmt: skip
_DEVIATION = 0.02  # as weights are initialised
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed number: multiples of it never repeat
_PAGE = 4096
_ALIGNMENT = 512  # of tensors within a flat buffer; a multiple of every element size


def materialise(
    files: list[FileState], seed: int, device: torch.device, *, like_trained: bool = False
) -> list[FileState]:
    """`files` with memory behind their meta tensors, filled with bits that `seed` determines.

    The weights (the files of layers) are views of one flat buffer, as DeepSpeed's optimizer leaves them.
    `like_trained`: the exponents of floats are those of a normal distribution, which compress as a trained model's do.
    """
    source = _Bits(seed, device)
    made: dict[int, torch.Tensor] = {}
    weights = [t for file in files if file.name.startswith("layer_") for _, t in tensors_of(file.state)]
    _fill_flat(weights, source, made)

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "meta":
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = source.tensor(tensor).requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    found = [replace(file, state=map_tensors(file.state, real)) for file in files]
    if like_trained:
        for tensor in made.values():
            _draw_exponents(tensor.detach())
    return found


def _draw_exponents(tensor: torch.Tensor) -> None:
    """Replace the exponents of random floats, which are drawn evenly, by those of N(0, 0.02) at the same quantiles."""
    if tensor.dtype not in _EXPONENTS or not tensor.numel():
        return
    as_integer, shift, width = _EXPONENTS[tensor.dtype]
    quantiles = (torch.arange(1 << width, dtype=torch.float64) + 0.5) / (1 << width)
    drawn = torch.erfinv(quantiles) * (2**0.5 * _DEVIATION)
    biased = (drawn.log2().floor() + (1 << width - 1) - 1).clamp(min=0)
    table, mask = biased.to(as_integer).to(tensor.device), (1 << width) - 1
    for part in tensor.view(as_integer).reshape(-1).split(_PATTERN_BYTES):
        exponents = table[((part >> shift) & mask).long()]
        part.bitwise_and_(~(mask << shift)).bitwise_or_(exponents << shift)


def live_before_load(files: list[FileState], seed: int, device: torch.device) -> list[FileState]:
    """The part of the planned `files` that training has in memory when it loads, with values other than the saved ones.

    Weights and master weights: before its first step the optimizer has no moments.
    """
    there: list[FileState] = []
    for file in files:
        state = file.state if file.name.startswith(("layer_", "small_tensors_")) else {}
        if _SHARD in file.state:
            state = {_SHARD: {_MASTERS: file.state[_SHARD][_MASTERS]}}
        there.append(FileState(file.name, state))
    return materialise(there, seed, device)


def _fill_flat(planned: list[torch.Tensor], source: _Bits, made: dict[int, torch.Tensor]) -> None:
    """Put all of `planned` into one buffer; adds each tensor's view of it to `made`."""
    starts: dict[int, int] = {}
    total = 0
    for tensor in planned:
        if id(tensor) not in starts:
            starts[id(tensor)] = total
            total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    flat = source.memory(total)
    for tensor in planned:
        start = starts[id(tensor)]
        made[id(tensor)] = _as(flat[start : start + tensor.nbytes], tensor)


def _as(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return memory.view(like.dtype).view(like.shape)


class _Bits:
    """A sequence of random words; a different multiple of an odd constant is added to each copy."""

    def __init__(self, seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(-(1 << 62), 1 << 62, (_PATTERN_BYTES // 8,), dtype=torch.int64, generator=generator)
        self._pattern = words.to(device)
        self._device = device
        self._used = 0

    def memory(self, num_bytes: int) -> torch.Tensor:
        """`num_bytes` random bytes as uint8, in memory of exactly that size."""
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        whole = num_bytes // 8 * 8
        for part in memory[:whole].view(torch.int64).split(len(self._pattern)):
            self._used += 1
            torch.add(self._pattern[: len(part)], _wrapped(self._used * _GOLDEN), out=part)
        memory[whole:] = self._used % 251
        return memory

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        memory = self.memory(like.nbytes)
        return _as(memory.bitwise_and_(1) if like.dtype == torch.bool else memory, like)


def _wrapped(value: int) -> int:
    """`value` as a signed 64-bit number, modulo 2^64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _bytes_of(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else b""


def fingerprints(states: Mapping[str, Any]) -> dict[str, str]:
    """Per tensor "file/path" -> type, shape and CRC-32 of its bytes; holds one tensor at a time on the host."""
    return {
        f"{name}:{'/'.join(map(str, path))}": f"{tensor.dtype} {list(tensor.shape)} "
        f"{isal_zlib.crc32(_bytes_of(tensor)):08x}"
        for name, state in states.items()
        for path, tensor in tensors_of(state)
    }


def check_restored(states: Mapping[str, Any], saved: Mapping[str, str], directory: Path | str) -> None:
    """Raise ReplayError naming the first tensor that differs from what was saved, by type, shape and CRC-32."""
    found = fingerprints(states)
    for name, expected in saved.items():
        if found.get(name) != expected:
            raise ReplayError(f"{directory}: {name} was saved as {expected} and restored as {found.get(name)}")
    extra = sorted(found.keys() - saved.keys())
    if extra:
        raise ReplayError(f"{directory}: {extra[0]} was restored, and never saved")


def alter(files: list[FileState]) -> None:
    """Change every page of every tensor in place, as an optimizer step does: an inconsistent save shows."""
    seen: set[int] = set()
    for file in files:
        for _, tensor in tensors_of(file.state):
            if id(tensor) in seen or not tensor.numel() or not tensor.is_contiguous():
                continue
            seen.add(id(tensor))
            flat = tensor.detach().reshape(-1)
            touched = flat.view(torch.uint8)[::_PAGE] if tensor.dtype != torch.bool else flat[::_PAGE]
            touched.copy_(~touched)
