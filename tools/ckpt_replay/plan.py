"""The request for a replay, and the task of each of its processes. Imports nothing heavy: the command line needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpointing.engines.entries import ENGINES
from megatron.config import CheckpointConfig, uris
from megatron.config.uris import Location, is_uri

SAVE, LOAD_COLD, LOAD_WARM, STORAGE = "save", "load_cold", "load_warm", "storage"
POLL_S = 0.01  # between looks for a file of another process
LOAD_BESIDE = "load_beside"  # loads of an earlier checkpoint, again and again while a save runs (--readers)

# The operations to measure: with LOAD each engine saves once, not measured, and every repeat loads that checkpoint.
# With SAVES_THEN_LOADS an engine does the saves of all repeats, each is kept, and then their loads.
SAVE_AND_LOAD, LOAD, SAVES_THEN_LOADS = "save_and_load", "load", "saves_then_loads"
OPERATIONS = (SAVE_AND_LOAD, SAVE, LOAD, SAVES_THEN_LOADS)

# In place of an engine: only the bytes of the state, in a file per rank, per host, or for all ranks (raw_engine.py).
RAW_RANK, RAW_HOST, RAW_ALL = "raw-rank", "raw-host", "raw-all"
RAW = {
    RAW_RANK: "the state's bytes alone, one file for each rank",
    RAW_HOST: "the state's bytes alone, one file for each host",
    RAW_ALL: "the state's bytes alone, one file in all",
}

# Engine lazy, whose ranks of a host share as many files as --checkpoint-files-per-node says, by default one.
LAZY_SHARED = "lazy-shared"

# Engine lazy with --checkpoint-compression zstd. Where it is asked for, all engines save floats like a trained model's.
LAZY_ZSTD = "lazy-zstd"

# Libraries in place of an engine: the S3 connector for PyTorch under DCP (connector.py), for object storage alone, and
# for directories alone Meta's torch_checkpointing (torch_checkpointing.py), and DCP with all ranks together
# (collective.py). Each with the package that it needs besides torch, and how to get it.
CONNECTOR, TORCH_CHECKPOINTING = "s3torchconnector", "torch_checkpointing"
DCP_COLLECTIVE, DCP_SAFETENSORS = "dcp-collective", "dcp-safetensors"
LIBRARIES: dict[str, tuple[str, str] | None] = {
    CONNECTOR: (CONNECTOR, "pip install 's3torchconnector[dcp]' botocore"),
    TORCH_CHECKPOINTING: (TORCH_CHECKPOINTING, "pip install torch-checkpointing"),
    DCP_COLLECTIVE: None,
    DCP_SAFETENSORS: ("safetensors", "pip install safetensors"),
}
_WITH_DCP = {*LIBRARIES, *(name for name, entry in ENGINES.items() if entry.package == "dcp")}

# Engine memory without storage: saves in this host's slots, and loads from there; or copies of the saves in a process
# that takes the place of another host, and loads from those (host_memory.py).
MEMORY, MEMORY_PEER = "memory", "memory-peer"
IN_MEMORY = {
    MEMORY: "saves in host memory alone, loads from there",
    MEMORY_PEER: "the same with a copy in another process, loads from that over the loopback",
}

# Measurements of the storage itself: kind -> (threads, block in MiB), in all combinations. The kernel splits buffered
# transfers itself, so their block size matters little.
THREADS = (1, 2, 4, 8)
STORAGE_KINDS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "write_direct": (THREADS, (2, 8, 32)),
    "read_direct": (THREADS, (2, 8, 32)),
    # With the other work of an engine: fill a buffer before it is written; verify what was read and copy it to its
    # place, in untouched memory or in memory already in use. (Threads and blocks as in engine lazy.)
    "write_direct_filled": ((2, 4), (8,)),
    "read_direct_fresh": ((8,), (2,)),
    "read_direct_placed": ((8,), (2,)),
    "write_buffered_fsync": (THREADS, (8,)),
    "read_buffered_cold": (THREADS, (8,)),
}


class ReplayError(ValueError):
    """The replay cannot be done as asked; the message says what to change."""


@dataclass(frozen=True)
class Share:
    """What the replayed ranks hold: their shards of a model, or many small tensors."""

    model: str | None  # preset name; None with `small_tensors`
    layout: tuple[int, int, int]  # (tp, pp, dp)
    ranks: tuple[int, ...]  # global ranks of that layout, of each process; one that several processes hold, repeatedly
    limit_bytes: int | None = None
    small_tensors: int | None = None  # this many tensors of `small_tensor_bytes` instead of a model's
    small_tensor_bytes: int = 16 << 10
    vocab_size: int | None = None  # None: the preset's
    fully_sharded: bool = False  # each of `dp` ranks holds an equal part of everything, as under torch's FSDP

    @property
    def copies(self) -> int:
        """How many processes hold what a rank holds."""
        return self.ranks.count(self.ranks[0])

    def copy_of(self, process: int) -> int:
        """Which of its rank's processes it is, from 0; an engine saves the first one's state."""
        return self.ranks[:process].count(self.ranks[process])


@dataclass(frozen=True)
class Steps:
    """The training that is simulated around a save of an asynchronous engine."""

    total_s: float = 0.0  # 0: the state changes right after begin_save
    step_s: float = 1.0
    work: str = "matmul"  # or "idle"

    @property
    def count(self) -> int:
        return max(1, round(self.total_s / self.step_s)) if self.total_s else 0


@dataclass(frozen=True)
class Striping:
    """How a file is striped over the targets of a parallel file system, and the command that sets it."""

    text: str  # as the user wrote it
    count: int
    piece_bytes: int | None  # None: the file system's own
    command: str | None  # None: the file system's own


@dataclass(frozen=True)
class Request:
    """What the user asks for."""

    share: Share
    engines: tuple[str, ...]
    directory: str
    repeat: int
    cold: bool
    warmup_saves: int
    steps: Steps
    options: dict[str, Any]  # of megatron.config.CheckpointConfig, by field name
    measure_storage: bool
    storage_bytes: int
    keep: bool
    trace_dir: str | None
    operations: str = SAVE_AND_LOAD
    striping: Striping | None = None
    readers: int = 0  # how many load an earlier checkpoint while a save is measured
    throughput_target_gbps: float | None = None  # of the connector's client, Gbit/s; None: the library's own

    @property
    def in_object_storage(self) -> bool:
        return is_uri(self.directory)

    @property
    def checkpoints(self) -> int:
        """How many checkpoints of an engine exist at once."""
        return self.repeat if self.operations == SAVES_THEN_LOADS else 1

    @property
    def uses_dcp(self) -> bool:
        """Whether one of the engines imports torch.distributed.checkpoint."""
        return not _WITH_DCP.isdisjoint(self.engines)


@dataclass(frozen=True)
class Task:
    """A task that all replayed ranks carry out at once, each in a process started for it."""

    kind: str  # SAVE, LOAD_COLD, LOAD_WARM, LOAD_BESIDE or STORAGE
    index: int  # unique among the tasks of a replay
    repeat: int  # from 0
    engine: str | None
    directory: str  # of this engine's checkpoints, or of the files that measure the storage
    first_step: int  # of the saves of this task
    launch_id: str  # the same on all ranks, different for every task
    notes: Path  # directory of this host for files that the processes of a rank exchange
    request: Request
    measured: bool = True  # False: no trace of it is written
    readers: tuple[int, ...] = ()  # of a save: the tasks of kind LOAD_BESIDE that run meanwhile
    beside: int | None = None  # of a LOAD_BESIDE: the task of that save

    @property
    def location(self) -> Location:
        """`directory` as a Location."""
        return location_of(self.directory)


@dataclass(frozen=True)
class Preparation:
    """The input of prepare.py, which runs before the first task, for the ranks of these processes."""

    request: Request
    notes: Path
    processes: tuple[int, ...]


def location_of(directory: str) -> Location:
    """The directory, or the prefix of a bucket. Raises ConfigError naming --dir for an invalid URI."""
    return uris.location_of("--dir", directory)


def checkpoint_flags(directory: str, options: Mapping[str, Any]) -> CheckpointConfig:
    """The flags of a training that saves to `directory`. Raises ConfigError for flags that it would refuse."""
    if options.get("checkpoint_files_per_node") is not None:
        return CheckpointConfig(save=directory, save_interval=1, checkpoint_engine="lazy", **options)
    if not is_uri(directory):
        return CheckpointConfig(**options)
    return CheckpointConfig(save=directory, save_interval=1, **options)


def state_file(notes: Path, process: int) -> Path:
    """File of the pickled planned state of a process's rank, with tensors on the meta device."""
    return notes / f"state_{process:05d}.pt"


def fingerprint_file(notes: Path, process: int) -> Path:
    """File of the checksums of what a process saved last."""
    return notes / f"fingerprints_{process:05d}.json"


def ready_file(notes: Path, task: int, process: int) -> Path:
    """Is there once this process of a reader has loaded for the first time, and waits for the save."""
    return notes / f"ready_{task:05d}_{process:05d}"


def loading_file(notes: Path, task: int, process: int) -> Path:
    """Is there once this process of a reader loads beside the save, or has ended."""
    return notes / f"loading_{task:05d}_{process:05d}"


def begun_file(notes: Path, task: int) -> Path:
    """Is there once readers are to load: the save that is measured is next, on the first process of its task."""
    return notes / f"begun_{task:05d}"


def ended_file(notes: Path, task: int) -> Path:
    """Is there once that save has ended, or this host's processes of the task have."""
    return notes / f"ended_{task:05d}"


def result_file(notes: Path, task: int) -> Path:
    """File of what all ranks measured in a task, written by the process of the first rank."""
    return notes / f"result_{task:05d}.json"
