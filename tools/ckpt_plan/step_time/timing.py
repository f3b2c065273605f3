"""Seconds of passes on a device.

A pass takes as long as its operations at the rate that the device reaches, or as its bytes at the bandwidth that it
reaches, whichever is longer (the roofline, doi:10.1145/1498765.1498785), and a fixed time for filling and draining it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .devices import DeviceFacts
from .passes import ALL_TO_ALL, Pass


@dataclass
class Seconds:
    """Time of a device for some passes by kind, and what a processor needs to launch them."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    collectives: float = 0.0  # of tensor-parallel ranks, that no other pass hides
    exchanges: float = 0.0  # of tokens between the ranks that experts are divided over
    launches: float = 0.0
    by_pass: list[float] = field(default_factory=list)  # of the device, a hidden collective's part left out

    @property
    def device(self) -> float:
        return self.products + self.attention + self.memory + self.collectives + self.exchanges


class Exchange(NamedTuple):
    """Between so many ranks, over the slowest link between them."""

    ranks: int = 1
    GBps: float = 1.0


NO_EXCHANGE = Exchange()


def pass_seconds(each: Pass, device: DeviceFacts, ranks: int, exchange: Exchange = NO_EXCHANGE) -> float:
    """Seconds of one pass; `ranks`: size of the tensor-parallel group, all on one host; `exchange`: of tokens."""
    if each.name == ALL_TO_ALL:
        return collective_seconds(each.name, each.payload, *exchange, device)
    if each.kind == "collective":
        return collective_seconds(each.name, each.payload, ranks, device.link_GBps * device.link_share, device)
    of_memory = each.num_bytes / (device.memory_GBps * 1e9 * device.bandwidth_share)
    if each.kind == "memory":
        return of_memory + device.kernel_us * 1e-6
    share = device.product_share
    if each.kind == "attention":
        share = device.attention_backward_share if each.backward else device.attention_forward_share
    return max(each.flops / (device.peak_tflops * 1e12 * share), of_memory) + device.product_us * 1e-6


def collective_seconds(name: str, payload: int, ranks: int, GBps: float, device: DeviceFacts) -> float:
    """Seconds of a collective on a ring, which moves (n - 1) / n of the whole tensor, an all-reduce twice that.

    (Thakur et al., doi:10.1177/1094342005051521.) So much of its tensor each rank sends in an all-to-all.
    """
    if ranks == 1:
        return 0.0
    rounds = 2 if name == "all_reduce" else 1
    return rounds * (ranks - 1) / ranks * payload / (GBps * 1e9) + device.collective_us * 1e-6


def seconds_of(passes: Sequence[Pass], device: DeviceFacts, ranks: int, exchange: Exchange = NO_EXCHANGE) -> Seconds:
    """Seconds of passes that follow each other.

    A collective that nothing waits for is hidden by the passes up to the first that reads its result; each pass can
    hide one at a time. That the collective takes a part of the device from them is left out.
    """
    found = Seconds(launches=len(passes) * device.launch_us * 1e-6)
    alone = [pass_seconds(each, device, ranks, exchange) for each in passes]
    hiding = [0.0 if each.kind == "collective" else seconds for each, seconds in zip(passes, alone, strict=True)]
    for index, (each, seconds) in enumerate(zip(passes, alone, strict=True)):
        if each.kind == "collective":
            for later in range(index + 1, _first_reader(passes, index)) if each.beside else ():
                hidden = min(seconds, hiding[later])
                hiding[later] -= hidden
                seconds -= hidden
            if each.name == ALL_TO_ALL:
                found.exchanges += seconds
            else:
                found.collectives += seconds
        elif each.kind == "product":
            found.products += seconds
        elif each.kind == "attention":
            found.attention += seconds
        else:
            found.memory += seconds
        found.by_pass.append(seconds)
    return found


def _first_reader(passes: Sequence[Pass], index: int) -> int:
    """Index of the first pass after `index` that touches what it writes; the end if there is none."""
    written = {storage for storage, _ in passes[index].writes}
    for later in range(index + 1, len(passes)):
        if any(storage in written for storage, _ in (*passes[later].reads, *passes[later].writes)):
            return later
    return len(passes)
