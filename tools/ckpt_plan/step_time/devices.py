"""What the prediction knows of devices: published peaks, and the shares of them that programs reach.

Each assumption has its source beside it. Standard library only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Facts of a device, and the assumptions made of it. A share is a part of the peak, in (0, 1].

    Rates of links are of one device and one direction. Microseconds are added to each operation.
    """

    name: str
    peak_tflops: float  # dense bf16 with fp32 sums: the denominator of MFU
    memory_bytes: int  # nominal
    memory_GBps: float
    link_GBps: float  # to devices of the same host
    network_GBps: float  # to devices of other hosts
    product_share: float  # of peak_tflops, by large matrix products
    attention_forward_share: float  # of peak_tflops, by the half of the scores that a causal mask leaves
    attention_backward_share: float
    bandwidth_share: float  # of memory_GBps
    link_share: float  # of link_GBps, by NCCL
    network_share: float  # of network_GBps, by NCCL
    product_us: float  # filling and draining the device, beside the time of the operations
    kernel_us: float  # the same for a pass over memory
    collective_us: float
    launch_us: float  # processor time per kernel, Python and autograd included
    # The largest of the measured steps that the prediction with these facts was compared with; None: with none.
    compared_ranks: int | None = None
    compared_parameters: int | None = None


_H100 = DeviceFacts(
    name="h100",
    # The vendor's, for SXM modules, links per direction; one 400 Gb/s adapter per device.
    peak_tflops=989.4,
    memory_bytes=80_000_000_000,
    memory_GBps=3350,
    link_GBps=450,
    network_GBps=50,
    # Alone, large products reach 0.80 of the peak: 792 TFLOP/s (github.com/mag-/gpu_benchmark) and 797
    # (github.com/zzc0721/torch-performance-test-data/issues/79). In long runs the clock falls to the power limit: 0.65
    # was set after the comparison with two published runs in docs/ckpt_plan.md.
    product_share=0.65,
    # FlashAttention-2 with a causal mask: 284 and 287 TFLOP/s at head size 128 and 8,192 tokens
    # (github.com/Dao-AILab/flash-attention/pull/1791), 0.35 of the peak at best (pytorch.org/blog/flashattention-3).
    # Newer versions of torch select cuDNN's kernel, 1.7 to 2.3 times as fast
    # (github.com/huggingface/transformers/pull/48163): the prediction is then too slow.
    attention_forward_share=0.26,
    attention_backward_share=0.26,
    bandwidth_share=0.80,  # a copy within the device moves 2,573 GB/s, 0.77: github.com/NVIDIA/nccl/issues/1264
    link_share=0.80,  # large tensors without NVLink SHARP, 370 of 450 GB/s: github.com/NVIDIA/nccl-tests/issues/212
    # Products of n = 1024, 2048 and 4096 reach 177, 677 and 789 TFLOP/s (torch-performance-test-data/issues/79, too):
    # 9, 4 and 2 us more than their FLOPs at the rate of n = 8192.
    product_us=4,
    # Estimates without a source; a measurement replaces them.
    network_share=0.80,
    kernel_us=2,
    collective_us=20,
    launch_us=8,
    # The larger of the two published runs: MPT-7B on 8 devices.
    compared_ranks=8,
    compared_parameters=6_658_859_008,
)
_NOT_COMPARED = {"compared_ranks": None, "compared_parameters": None}  # of facts that differ from those compared
_DEVICES = {
    facts.name: facts
    for facts in (
        _H100,
        replace(_H100, name="h200", memory_bytes=141_000_000_000, memory_GBps=4800, **_NOT_COMPARED),
        replace(
            _H100,
            name="a100",
            peak_tflops=312.0,
            memory_GBps=2039,
            link_GBps=300,
            network_GBps=25,  # one 200 Gb/s adapter per device
            product_share=0.75,  # alone 268 TFLOP/s, 0.86
            attention_forward_share=0.55,  # arXiv:2307.08691, figure 5
            attention_backward_share=0.50,
            link_share=0.70,  # 208 of 300 GB/s: github.com/NVIDIA/nccl-tests/issues/178
            **_NOT_COMPARED,
        ),
    )
}
_LIKE = "like"
_SHARES = {field.name for field in fields(DeviceFacts) if field.name.endswith("_share")}
_ALL = [field.name for field in fields(DeviceFacts) if field.name != "name"]


def device_names() -> list[str]:
    """The devices that are known without a file."""
    return list(_DEVICES)


def device_facts(name: str, path: Path | None = None) -> DeviceFacts:
    """The facts of device `name`; of the file `path` where it is given.

    The file is a JSON object {name: {fact: number}}; "like": "h100" takes facts that are not given from that device.
    Raises ConfigError that names flag or file, the value and the fix; OSError if the file cannot be read.
    """
    if path is None:
        if name not in _DEVICES:
            raise ConfigError(
                f"--step-time {name}: no such device; there are: {', '.join(_DEVICES)}; give the facts of another one "
                "in --device-facts FILE"
            )
        return _DEVICES[name]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ConfigError(f"--device-facts {path}: no JSON: {exc}") from exc
    given = content.get(name) if isinstance(content, dict) else None
    if not isinstance(given, dict):
        raise ConfigError(f"--device-facts {path}: must be an object with the facts of {name}, as an object")
    return _from_file(name, dict(given), f"--device-facts {path}: {name}")


def _from_file(name: str, given: dict[str, Any], where: str) -> DeviceFacts:
    like = given.pop(_LIKE, None)
    if like is not None and like not in _DEVICES:
        raise ConfigError(f"{where}: {_LIKE} {like!r}: no such device; there are: {', '.join(_DEVICES)}")
    unknown = [key for key in given if key not in _ALL]
    if unknown:
        raise ConfigError(f"{where}: {unknown[0]!r} is no fact of a device; there are: {', '.join(_ALL)}")
    missing = [key for key in _ALL if key not in given and key not in _NOT_COMPARED]
    if missing and like is None:
        raise ConfigError(f'{where}: {missing[0]} is missing; give it, or "{_LIKE}": a device that has it')
    compared = [key for key in _NOT_COMPARED if key in given]
    if len(compared) == 1:  # of the other nothing would be known
        (lacking,) = _NOT_COMPARED.keys() - compared
        raise ConfigError(
            f"{where}: {compared[0]} is given without {lacking}; give both of the measured step, or neither"
        )
    _check_numbers(given, where)
    return replace(_DEVICES[like or "h100"], name=name, **_NOT_COMPARED | given)


def _check_numbers(given: Mapping[str, Any], where: str) -> None:
    for key, value in given.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        most = 1 if key in _SHARES else math.inf
        may_be_zero = key.endswith("_us")
        if not is_number or not (0 < value <= most or (may_be_zero and value == 0)):
            expected = "in (0, 1]" if key in _SHARES else "at least 0" if may_be_zero else "above 0"
            raise ConfigError(f"{where}: {key} {value!r}: must be a number {expected}")
