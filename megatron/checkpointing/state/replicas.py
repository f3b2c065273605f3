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

from megatron.checkpointing.state.layer_files import LayerFile, layer_files
from megatron.checkpointing.store.naming import RankPlace
from megatron.checkpointing.store.parts import spread_over_replicas
from megatron.fileio.checksums import crc32

_UNDER_WAY = 4  # broadcasts at once: gloo keeps a copy in host memory of each tensor of a device meanwhile


def readers_of(files: Sequence[LayerFile]) -> list[int]:
    """The DP rank that reads each of the `files` of a rank.

    Those of experts that only some DP ranks hold are divided among these, by themselves.
    """
    sizes = [sum(tensor.numel() for tensor in _tensors(file)) for file in files]
    return spread_over_replicas(sizes, [file.replicas for file in files])


def layers_read_by(files: Sequence[LayerFile], place: RankPlace, *, divided: bool) -> list[str]:
    """Names of those of `files` that the rank at `place`, which holds their weights, reads.

    `divided`: as with --ckpt-fully-parallel-load, by which replicas read a part each; else all.
    """
    return [
        file.name for file, reader in zip(files, readers_of(files), strict=True) if reader == place.at.dp or not divided
    ]


def broadcast_within_replicas(
    engine: Any, place: RankPlace, tensors: Iterable[tuple[torch.Tensor, int, range]]
) -> None:
    """Fill each of `tensors` with what it is on the DP rank beside it, on the DP ranks that follow; collective over
    these.

    They are filled when it returns, on a device, too.
    """
    under_way: deque[Any] = deque()
    device = torch.device("cpu")
    with torch.no_grad():
        for tensor, reader, replicas in tensors:
            if len(under_way) == _UNDER_WAY:
                under_way.popleft().wait()
            source = place.layout.rank(place.at.tp, place.at.pp, reader)
            under_way.append(dist.broadcast(tensor, source, _group_of(engine, replicas), async_op=True))
            device = tensor.device
        for broadcast in under_way:
            broadcast.wait()
        if device.type != "cpu":  # NCCL's wait() only orders streams
            torch.accelerator.synchronize(device)


def exchange_layers(engine: Any, place: RankPlace) -> None:
    """Have the layers that each replica has read on all of them; collective over these."""
    files = layer_files(engine.module, place)
    pairs = zip(files, readers_of(files), strict=True)
    broadcast_within_replicas(
        engine, place, ((tensor, reader, file.replicas) for file, reader in pairs for tensor in _tensors(file))
    )


def _group_of(engine: Any, replicas: range) -> Any:
    """The process group of the DP ranks that hold the same: all, or those with the same experts."""
    if replicas.step == 1:
        return engine.mpu.get_data_parallel_group()
    return engine.module.expert_parallel.groups[replicas.step].replicas


def layer_checksums(engine: Any, place: RankPlace) -> dict[str, tuple[int, int]]:
    """By name of its file, the CRC-32 of each layer's live weights, and the global rank that has read them."""
    files = layer_files(engine.module, place)
    return {
        file.name: (_checksum(file), place.layout.rank(place.at.tp, place.at.pp, reader))
        for file, reader in zip(files, readers_of(files), strict=True)
    }


def differing(by_rank: Sequence[dict[str, tuple[int, int]]]) -> list[str]:
    """What ranks have received otherwise than it was read, by their `layer_checksums`."""
    return [
        f"{name} on rank {rank}, from rank {reader}"
        for rank, mine in enumerate(by_rank)
        for name, (checksum, reader) in mine.items()
        if checksum != by_rank[reader][name][0]
    ]


def _tensors(file: LayerFile) -> list[torch.Tensor]:
    """The live tensors of a file."""
    return [value for value in file.state.values() if isinstance(value, torch.Tensor)]


def _checksum(file: LayerFile) -> int:
    crc = 0
    for tensor in _tensors(file):
        crc = crc32(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy(), crc)
    return crc
