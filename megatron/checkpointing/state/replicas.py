"""Weights, which all DP replicas need: each replica reads some of the layers, and all exchange what they have read.

The division depends on the model alone, so that every replica computes the same one. All arguments called `engine` are
DeepSpeed PipelineEngines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpointing.state.shard_metadata import layer_modules
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.naming import RankPlace
from megatron.checkpointing.store.parts import spread
from megatron.fileio.checksums import crc32

_UNDER_WAY = 4  # broadcasts at once: gloo keeps a copy in host memory of each tensor of a device meanwhile


def readers_of(layers: Iterable[torch.nn.Module], replicas: int) -> list[int]:
    """The DP rank that reads each of the `layers` of a stage."""
    return spread([sum(tensor.numel() for tensor in _tensors(layer)) for layer in layers], replicas)


def layers_read_by(layers: Sequence[tuple[int, torch.nn.Module]], place: RankPlace, *, divided: bool) -> list[str]:
    """Names of the files with the layers that the rank at `place` reads, of the (number, module) of its stage.

    `divided`: as with --ckpt-fully-parallel-load, by which replicas read a part each; else all.
    """
    readers = readers_of((layer for _, layer in layers), place.layout.dp)
    return [
        names.layer_file(number, place.at.tp)
        for (number, _), reader in zip(layers, readers, strict=True)
        if reader == place.at.dp or not divided
    ]


def broadcast_within_replicas(engine: Any, place: RankPlace, tensors: Iterable[tuple[torch.Tensor, int]]) -> None:
    """Fill each of `tensors` on all DP replicas with what it is on the DP rank beside it; collective over these.

    They are filled when it returns, on a device, too.
    """
    group = engine.mpu.get_data_parallel_group()
    under_way: deque[Any] = deque()
    device = torch.device("cpu")
    with torch.no_grad():
        for tensor, reader in tensors:
            if len(under_way) == _UNDER_WAY:
                under_way.popleft().wait()
            source = place.layout.rank(place.at.tp, place.at.pp, reader)
            under_way.append(dist.broadcast(tensor, source, group, async_op=True))
            device = tensor.device
        for broadcast in under_way:
            broadcast.wait()
        if device.type != "cpu":  # NCCL's wait() only orders streams
            torch.accelerator.synchronize(device)


def exchange_layers(engine: Any, place: RankPlace) -> None:
    """Have the layers that each replica has read on all of them; collective over these."""
    layers = [layer for _, layer in layer_modules(engine)]
    readers = readers_of(layers, place.layout.dp)
    pairs = zip(layers, readers, strict=True)
    broadcast_within_replicas(
        engine, place, ((tensor, reader) for layer, reader in pairs for tensor in _tensors(layer))
    )


def layer_checksums(engine: Any, place: RankPlace) -> dict[str, tuple[int, int]]:
    """By name of its file, the CRC-32 of each layer's live weights, and the global rank that has read them."""
    layers = layer_modules(engine)
    readers = readers_of((layer for _, layer in layers), place.layout.dp)
    return {
        names.layer_file(number, place.at.tp): (_checksum(layer), place.layout.rank(place.at.tp, place.at.pp, reader))
        for (number, layer), reader in zip(layers, readers, strict=True)
    }


def differing(by_rank: Sequence[dict[str, tuple[int, int]]]) -> list[str]:
    """What ranks have received otherwise than it was read, by their `layer_checksums`."""
    return [
        f"{name} on rank {rank}, from rank {reader}"
        for rank, mine in enumerate(by_rank)
        for name, (checksum, reader) in mine.items()
        if checksum != by_rank[reader][name][0]
    ]


def _tensors(layer: torch.nn.Module) -> list[torch.Tensor]:
    """The live tensors of its file."""
    return [value for value in layer.state_dict().values() if isinstance(value, torch.Tensor)]


def _checksum(layer: torch.nn.Module) -> int:
    crc = 0
    for tensor in _tensors(layer):
        crc = crc32(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy(), crc)
    return crc
