"""The context of one replayed rank's process: its coordinates, the control plane, its trace, its state."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megatron.checkpointing.engines.base import CheckpointEngine
from megatron.checkpointing.engines.options import engine_options
from megatron.checkpointing.engines.registry import create_engine
from megatron.checkpointing.store import naming as names
from megatron.config import CheckpointConfig
from megatron.config.uris import Location
from megatron.fileio.device_copies import CopyStream
from megatron.fileio.host_memory import available_memory
from megatron.parallel.control_plane import ControlPlane, control_planes
from megatron.parallel.topology import Layout
from restart_trace.devices import available_accelerator
from restart_trace.process import RankIdentity, open_rank_trace
from restart_trace.recorder import Recorder, untraced_operation

from .host_memory import holder
from .library import Library
from .plan import (
    CONNECTOR,
    DCP_COLLECTIVE,
    DCP_SAFETENSORS,
    IN_MEMORY,
    LAZY_SHARED,
    LAZY_ZSTD,
    LOAD,
    MEMORY,
    MEMORY_PEER,
    RAW,
    SAVE,
    TORCH_CHECKPOINTING,
    Request,
    Task,
    checkpoint_flags,
    state_file,
)
from .raw_engine import RawEngine
from .shares import Planned

_TIMEOUT = datetime.timedelta(hours=2)


@dataclass
class RankContext:
    """The process `process` of `world_size`, which plays global rank `rank` of the model's layout."""

    task: Task
    process: int
    world_size: int
    rank: int
    device: torch.device
    control: ControlPlane  # of the main thread
    commit_control: ControlPlane  # of the thread that commits
    recorder: Recorder
    attempt: str

    @property
    def request(self) -> Request:
        return self.task.request

    @property
    def engine_name(self) -> str:
        if self.task.engine is None:
            raise ValueError(f"task {self.task.kind} has no engine")
        return self.task.engine

    @property
    def location(self) -> Location:
        """The directory or prefix of this task's checkpoints."""
        return self.task.location

    @property
    def flags(self) -> CheckpointConfig:
        """The flags of a training that saves there."""
        return checkpoint_flags(self.task.directory, self.request.options)

    @property
    def in_memory(self) -> bool:
        """Whether this task's engine saves only to host memory."""
        return self.engine_name in IN_MEMORY

    @property
    def layout(self) -> dict[str, int]:
        """Sizes of "tp", "pp" and "dp"."""
        return Layout(*self.request.share.layout).as_dict()

    @property
    def coordinates(self) -> dict[str, int]:
        """The coordinates of this rank, with the keys of `layout`."""
        return Layout(*self.request.share.layout).coordinates(self.rank)._asdict()

    @property
    def last_step(self) -> int:
        """The step of the checkpoint that the saves before this task have left."""
        repeats = 0 if self.request.operations == LOAD else self.task.repeat
        return (repeats + 1) * (self.request.warmup_saves + 1)

    def wait_for_all(self) -> None:
        self.control.agree(None)

    def _wait_in_background(self) -> None:
        """As `wait_for_all`, for the thread that commits."""
        self.commit_control.agree(None)

    def _gathered(self, value: int) -> list[int]:
        """The value of each process, in order; collective."""
        return self.control.broadcast(self.control.gather(value))

    def planned(self) -> Planned:
        """This rank's state with meta tensors, as prepare.py planned it."""
        return torch.load(state_file(self.task.notes, self.process), weights_only=False)

    def create_engine(self) -> CheckpointEngine | Library[Any]:
        """The engine of this task, as the trainer creates it, or the library that takes its place."""
        options = engine_options(self.flags, self.process, _TIMEOUT.total_seconds() / 60)
        engine: CheckpointEngine | Library[Any]
        if self.engine_name == CONNECTOR:
            from .connector import Connector

            engine = Connector(options, self.rank, self.recorder, self.request.throughput_target_gbps)
        elif self.engine_name == TORCH_CHECKPOINTING:
            from .torch_checkpointing import TorchCheckpointing

            saves = self.task.kind == SAVE
            engine = TorchCheckpointing(options, self.recorder, self._wait_in_background, saves=saves)
        elif self.engine_name in (DCP_COLLECTIVE, DCP_SAFETENSORS):
            from .collective import CollectiveDcp, SafetensorsDcp

            kind = SafetensorsDcp if self.engine_name == DCP_SAFETENSORS else CollectiveDcp
            engine = kind(options, self.rank, self.recorder, self._wait_in_background)
        elif self.engine_name in RAW:
            engine = RawEngine(options, self.engine_name, self._gathered)
        else:
            shared, compresses = (self.engine_name == name for name in (LAZY_SHARED, LAZY_ZSTD))
            files_per_node = (self.flags.checkpoint_files_per_node or 1) if shared else None
            name = MEMORY if self.in_memory else "lazy" if shared or compresses else self.engine_name
            engine = create_engine(name, replace(options, files_per_node=files_per_node, compress_files=compresses))
            if self.engine_name == MEMORY_PEER:
                engine.share_with([holder()])
        self.recorder.write(
            "runtime",
            engine_used=type(engine).__name__,
            engine_asked=self.engine_name,
            accelerator=self.device.type,
            backend="gloo",
            save_dir=self.task.directory,
        )
        return engine

    def pin_memory(self, engine: CheckpointEngine | Library[Any], save_bytes: int) -> None:
        """Pin the memory that `engine` copies through from and to a device, as the trainer does beside its start.

        So no measured save or load pins it. `save_bytes`: of this rank's saves, 0 for loads alone. Collective. Raises
        ConfigError as CheckpointEngine.wait_for_memory.
        """
        if self.device.type == "cpu" or not isinstance(engine, CheckpointEngine):
            return
        free = available_memory()
        self.wait_for_all()  # no rank of this host has pinned anything yet
        engine.prepare_memory(save_bytes, free, CopyStream(self.device), untraced_operation())
        engine.wait_for_memory()


@contextlib.contextmanager
def joined(task: Task) -> Iterator[RankContext]:
    """Join the processes of the other ranks; on exit, wait for them and disconnect."""
    request = task.request
    process, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", process))
    store = _store(task, process, world_size)
    dist.init_process_group("gloo", store=store, rank=process, world_size=world_size, timeout=_TIMEOUT)
    control, commit_control = control_planes(store, process, world_size, 2, _TIMEOUT.total_seconds())
    _tell_deepspeed()
    device, kind = torch.device("cpu"), available_accelerator()
    if kind is not None:
        device = torch.device(kind, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device)
    rank = request.share.ranks[process]
    share = request.share
    layout = Layout(*share.layout)
    tp, pp, dp = layout.coordinates(rank)
    at, sizes = (tp, pp, dp + share.copy_of(process) * layout.dp), (layout.tp, layout.pp, layout.dp * share.copies)
    identity = RankIdentity(process, world_size, local_rank, at, sizes)
    traced = request.trace_dir is not None and task.engine is not None and task.measured
    recorder, _ = open_rank_trace(
        Path(request.trace_dir) if request.trace_dir and traced else None,
        identity,
        dict(os.environ) | {"RESTART_TRACE_LAUNCH_ID": task.launch_id},
        engine_asked=task.engine or "",
        durability=request.options["checkpoint_durability"],
        probes=True,
    )
    ctx = RankContext(
        task=task,
        process=process,
        world_size=world_size,
        rank=rank,
        device=device,
        control=control,
        commit_control=commit_control,
        recorder=recorder,
        attempt=names.attempt_of(task.index),
    )
    yield ctx  # if the body raises, the process ends, and the others notice that their connections break
    recorder.close()
    ctx.wait_for_all()
    control.close()
    commit_control.close()
    dist.destroy_process_group()


def _store(task: Task, process: int, world_size: int) -> Store:
    """The rendezvous store of a task: the launcher's if it has one, else the first rank's."""
    if world_size == 1:
        return HashStore()
    store, _, _ = next(rendezvous("env://", process, world_size, timeout=_TIMEOUT))
    return PrefixStore(f"ckpt_replay/{task.index}", store)


def _tell_deepspeed() -> None:
    """Initialise deepspeed.comm, which DeepSpeed's checkpoint engines use."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
