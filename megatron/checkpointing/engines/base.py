"""The interface of a checkpoint engine, and the guards that every engine shares.

An engine turns the state of *this* rank into files in a directory and back. It knows nothing of tags, other
ranks or the commit: megatron.checkpointing does that around it. It reports each phase to the Operation it is
given, under the names of restart_trace.schema.

A save has three moments. `begin_save` returns as soon as training may go on computing; `release_state` must
have returned before any tensor of the state changes; `wait` returns when the files are written. A synchronous
engine does it all in the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from megatron.checkpointing.engines.errors import CheckpointDamagedError, reading
from restart_trace.recorder import Operation
from restart_trace.regular import NotRegularFileError, check_regular

if TYPE_CHECKING:
    import torch

    from megatron.fileio.checksums import CheckedBytes
    from megatron.fileio.device_copies import CopyStream
    from megatron.fileio.open_files import RangedFiles
    from megatron.peers.client import Peer
    from megatron.peers.wire import Key

MIB = 1 << 20


@dataclass(frozen=True)
class EngineOptions:
    """What the command line says about how engines work. None: the engine's own default."""

    fsync: bool = True  # --checkpoint-durability fsync
    verify_checksums: bool = True  # --checkpoint-verify checksum
    verify_saved: bool = True  # not --checkpoint-verify none: an engine reads back what a library reports no loss of
    checksum: bool = True  # --checksum crc32: computed while saving, where the format has none of its own
    host_cache_bytes: int | None = None  # --host-cache-size
    io_threads: int | None = None  # --io-threads
    io_block_bytes: int = 8 * MIB  # --io-block-size
    saves_to_store: bool = False  # --save is object storage
    direct_io: str = "auto"  # --direct-io: auto, on or off
    rank: int = 0  # of the process that the engine runs in
    local_rank: int = 0  # among those of this host
    local_world_size: int = 1  # ranks that share this host's memory
    device_timeout_s: float = 600.0  # --distributed-timeout-minutes: how long a save waits for the device
    peer_timeout_s: float = 10.0  # --peer-timeout
    copy_steps: int | None = None  # --replication-traffic interleave: --save-interval, over which copies are spread
    library: tuple[tuple[str, Any], ...] = ()  # what a --deepspeed_config stanza says to the engine's library


@dataclass(frozen=True)
class FileState:
    """The state kept under one file name of DeepSpeed's layout: a nest of dicts, lists, tensors and values.

    `placements` tells of tensors which part of which parameter they are: path in the nest (its keys, as a tuple)
    -> JSON object. It is empty where nobody asked for it. `on_storage`: False for what another rank writes there, and
    this one keeps in memory all the same.
    """

    name: str
    state: Any
    placements: Mapping[tuple[Any, ...], Mapping[str, Any]] = field(default_factory=dict)
    on_storage: bool = True


@dataclass(frozen=True)
class SavedFile:
    """One file on disk. `name` is its path within the checkpoint directory, with "/" between directories.

    `checksum` is "algorithm:hex", of the engine's own choice ("none" if it was left out by --checksum none);
    `num_bytes` is its size. `states` are the FileState names that it holds, or holds a part of; empty: the one
    state of its own name.
    """

    name: str
    num_bytes: int
    checksum: str
    states: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[type[SavedFile], tuple[str, int, str, tuple[str, ...]]]:
        """Ranks tell each other of thousands of them: a third of the bytes and of the time."""
        return SavedFile, (self.name, self.num_bytes, self.checksum, self.states)

    def holds(self, state_name: str) -> bool:
        return state_name in self.states if self.states else state_name == self.name


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint to load from. `files`: all of its manifest, by name; empty for a checkpoint without one.

    `ranged` opens its files, by their paths, if they are not on this node: for engines that `reads_ranges_of` them.
    """

    directory: Path
    files: Mapping[str, SavedFile] = field(default_factory=dict)
    ranged: RangedFiles | None = None

    def path(self, name: str) -> Path:
        """Of the file called `name`."""
        return self.directory / name

    def holding(self, state_name: str) -> list[SavedFile]:
        """The files that hold the state `state_name`, or a part of it."""
        return [file for file in self.files.values() if file.holds(state_name)]


@dataclass(frozen=True)
class MemorySave:
    """A save that is whole in memory of this host, and outlives the ranks; `record` is what it was begun with."""

    record: Mapping[str, Any]
    checkpoint: SavedCheckpoint


class FileCopies(Protocol):
    """The files of a save in memory, each of which one host or several hold, as one rank uses them.

    The copies of a file have the same numbers on all ranks; a rank uses one at a time.
    """

    def bring(self, name: str, parts: Sequence[tuple[int, int]]) -> Path:
        """Have bytes [start, stop) of the file of a name lie where the path that is returned can be opened.

        They are not verified; other bytes of it may be holes. Raises CheckpointDamagedError if no holder gives them.
        """
        ...

    def pass_over(self, name: str, why: str) -> None:
        """This rank found its copy damaged: it uses the next one. Raises CheckpointDamagedError if there is none."""
        ...

    def used(self) -> dict[str, int]:
        """By file of which something was brought, the number of the copy that this rank uses."""
        ...

    def another(self, name: str, used: Collection[int], why: str) -> int | None:
        """On one rank, for all: the copy that all are to use of a file found damaged; None if each was tried.

        `used`: the copies that it was put together from.
        """
        ...

    def use(self, name: str, number: int) -> None:
        """Use that copy from now on."""
        ...


@dataclass(frozen=True)
class MemoryFiles(SavedCheckpoint):
    """A save in memory whose files lie on several hosts, for a load onto another layout."""

    copies: FileCopies = field(kw_only=True)
    header_bytes: Mapping[str, int] = field(kw_only=True)

    def path(self, name: str) -> Path:
        """Where the file has its header at least. Raises CheckpointDamagedError if no holder gives it."""
        return self.copies.bring(name, [(0, self.header_bytes[name])])

    def holding(self, state_name: str) -> list[SavedFile]:
        """Every replica keeps the weights: the lowest rank's are as good as any."""
        return super().holding(state_name)[:1]


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of a checkpoint with its placement (megatron.checkpointing.shard_metadata).

    Its elements lie in the file at `path`, in order, from byte `start` on. `checked` are the bytes that it is part of
    and that have a checksum; None: it was saved without, or is not to be verified.
    """

    path: Path
    name: str
    dtype: torch.dtype
    start: int
    placement: Mapping[str, Any]
    checked: CheckedBytes | None = None


class SaveTarget(Protocol):
    """What a file of a save is written to, in blocks, in any order and from any thread."""

    def write(self, buffer: memoryview, length: int, position: int) -> None:
        """Write the first `length` bytes of `buffer`, which is aligned, at `position`."""
        ...

    def cut_off(self, size: int) -> None:
        """All is written: the file ends after `size` bytes."""
        ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class SaveTargets(Protocol):
    """Where the files of a save go that are on no disk of this node."""

    def open(self, name: str, num_bytes: int, data_start: int, block_bytes: int) -> SaveTarget:
        """For a file of `num_bytes`: what is before `data_start` is written last, the rest in blocks from there on."""
        ...


class PendingSave(ABC):
    """A save that its engine carries on with in the background."""

    @abstractmethod
    def release_state(self) -> None:
        """Return when the live state may change. Called on the training thread before the optimizer steps.

        What it waits for is recorded by the engine as blocking spans. Must not raise: what went wrong is `wait`'s to
        tell. Calling it again does nothing.
        """

    def tell_waiting(self, waits: bool) -> None:
        """Training begins to wait for the end of the save, or does so no longer."""
        return None

    @abstractmethod
    def wait(self) -> list[SavedFile]:
        """Return what was written, when it is. Called once, on a background thread or the training thread.

        Sets `bytes`, `num_files` and `durable` of the operation. Raises OSError if the storage refused, or another
        exception that says why the save failed; nothing writes into the directory any more after either.
        """


class FinishedSave(PendingSave):
    """The result of a synchronous engine: nothing is left to do."""

    def __init__(self, saved: list[SavedFile]) -> None:
        self._saved = saved

    def release_state(self) -> None:
        return None

    def wait(self) -> list[SavedFile]:
        return self._saved


class CheckpointEngine(ABC):
    """Writes and reads the files of one rank.

    Subclasses set `name` and implement `_save_file` and `_load_file`; engines that treat all files together
    override `save` and `load` instead; asynchronous ones set `asynchronous` and override `begin_save`; those that
    can read straight into live tensors set `loads_in_place` and override `load_into`.
    """

    name: ClassVar[str]
    writes_files: ClassVar[bool] = True
    asynchronous: ClassVar[bool] = False
    wants_placements: ClassVar[bool] = False  # stores FileState.placements beside the tensors
    loads_in_place: ClassVar[bool] = False  # `load_into` fills the tensors that it is given
    redistributable: ClassVar[bool] = False  # has `load_values`, and `placed_tensors` if it stores placements
    streams: ClassVar[bool] = False  # has `begin_streamed_save`
    keeps_in_memory: ClassVar[bool] = False  # has `begin_memory_save` and what follows it below

    def __init__(self, options: EngineOptions) -> None:
        self.options = options

    def check_can_save(self) -> None:
        """Raise EngineUnavailableError, saying what to install or change, if this machine cannot save with it.

        Called once at start-up when --save is given. Loading may work all the same.
        """
        return None

    def prepare_memory(self, save_bytes: int, available: int, stream: CopyStream, op: Operation) -> None:
        """Begin to make ready the host memory that copies from and to a CUDA device go through.

        Called once, while the process starts; `op` is the start-up. `save_bytes`: about what this rank saves, 0 if it
        saves nothing; `available`: bytes of host memory that were free before any rank prepared some. What cannot be
        had is told by `wait_for_memory`.
        """
        return None

    def wait_for_memory(self) -> None:
        """Return when the memory is ready. Raises ConfigError naming flag, value and fix if it cannot be had."""
        return None

    def begin_step(self, began_ns: int) -> None:
        """A step of training begins."""
        return None

    def begin_save(self, files: Sequence[FileState], directory: Path, op: Operation) -> PendingSave:
        """Begin to write `files` into `directory`, which exists and is this save's own.

        At most one save of an engine is pending: the caller waits for it before it begins the next.
        """
        return FinishedSave(self.save(files, directory, op))

    def begin_streamed_save(self, files: Sequence[FileState], targets: SaveTargets, op: Operation) -> PendingSave:
        """As `begin_save`, and the files are on no disk of this node on their way."""
        raise NotImplementedError(f"{type(self).__name__} writes files")

    def begin_memory_save(
        self, files: Sequence[FileState], record: Mapping[str, Any], directory: Path | None, op: Operation
    ) -> PendingSave:
        """As `begin_save`, into memory that outlives this rank; with a `directory` to storage, too.

        `record`, which JSON can hold, is found again by `memory_saves`; its "save" names the save, on all ranks alike.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps nothing in memory")

    @property
    def slot_bytes(self) -> list[int]:
        """Memory that each place for a save of this rank has."""
        return []

    def reserve(self, num_bytes: int) -> None:
        """Give each of these at least that much, unless it holds a save. Raises OSError."""
        return None

    def settle(self) -> None:
        """All ranks have the last save whole: memory that held an older one may be written to."""
        return None

    def memory_saves(self) -> list[MemorySave]:
        """What is whole in memory of this host, of whichever rank."""
        return []

    def share_with(self, peers: Sequence[Peer]) -> None:
        """From now on a save counts once each of these has a copy, too, or it is on storage."""
        return None

    def fetch_copy(self, save: str, key: Key, peer: Peer, op: Operation) -> MemorySave:
        """Copy the save of these coordinates from a peer into memory of this rank.

        Raises CheckpointDamagedError naming the peer if it does not send it, unaltered.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps nothing in memory")

    def keep(self, save: str | None) -> None:
        """Training goes on from the state that `save` names, of those kept: write over others only. None: over all."""
        return None

    def discard_memory_saves(self, save: str | None) -> None:
        """Forget a save of this rank by that name; None: all of them."""
        return None

    def save(self, files: Sequence[FileState], directory: Path, op: Operation) -> list[SavedFile]:
        """Write `files` into `directory`, which exists and is this save's own.

        Returns what was written, in order. Raises OSError if the storage refuses.
        """
        if self.asynchronous:
            pending = self.begin_save(files, directory, op)
            pending.release_state()
            return pending.wait()
        return note_saved([self._save_file(file, directory, op) for file in files], self.options, op)

    def reads_ranges_of(self, files: Iterable[SavedFile]) -> bool:
        """Whether it reads from `files` only the bytes that it needs, and compares each of these with a checksum."""
        return False

    def load(self, names: Sequence[str], checkpoint: SavedCheckpoint, op: Operation) -> dict[str, Any]:
        """Read the states called `names`; tensors on the CPU.

        Raises CheckpointDamagedError naming the file that is missing, short or altered.
        """
        states: dict[str, Any] = {}
        num_bytes = 0
        for name in names:
            path, expected = checkpoint.path(name), checkpoint.files.get(name)
            with reading(path):
                size = check_size(path, expected)
                states[name] = self._load_file(path, expected, op)
            num_bytes += size
        note_loaded(num_bytes, len(states), op)
        return states

    def load_into(self, live: Sequence[FileState], checkpoint: SavedCheckpoint, op: Operation) -> dict[str, Any]:
        """As `load`, of the states that `live` names, whose contiguous tensors are to become what is loaded.

        An engine may read into these tensors, on whatever device they are, and return them as the loaded ones: those
        of the same path in the nest, type and shape. After an exception they may hold anything.
        """
        return self.load([file.name for file in live], checkpoint, op)

    def placed_tensors(self, checkpoint: SavedCheckpoint, op: Operation) -> list[PlacedTensor]:
        """The tensors with a placement of all ranks that saved the checkpoint, in the order of the ranks.

        Raises CheckpointDamagedError naming the file that cannot be used.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot load onto another layout")

    def load_values(self, name: str, checkpoint: SavedCheckpoint, op: Operation) -> Any:
        """As `load` of one state, but tensors may be on the device "meta": all that have dimensions.

        What is returned is verified (--checkpoint-verify). Where no placements are stored,
        `torch_files.position_in_file` tells where a tensor lies that is on "meta".
        """
        raise NotImplementedError(f"{type(self).__name__} cannot load onto another layout")

    def loads_are_over(self) -> None:
        """Give back the memory that is kept for further loads."""
        return None

    def close(self) -> None:
        """Give back threads, processes and memory. No save is pending."""
        return None

    def _save_file(self, file: FileState, directory: Path, op: Operation) -> SavedFile:
        raise NotImplementedError(f"{type(self).__name__} must implement _save_file or override save")

    def _load_file(self, path: Path, expected: SavedFile | None, op: Operation) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must implement _load_file or override load")


def note_saved(saved: list[SavedFile], options: EngineOptions, op: Operation) -> list[SavedFile]:
    """`saved`, with its figures noted as those of the save `op`."""
    op.bytes = sum(file.num_bytes for file in saved)
    op.num_files = len(saved)
    op.durable = options.fsync
    return saved


def note_loaded(num_bytes: int, num_files: int, op: Operation) -> None:
    """Add to what the load `op` has read."""
    op.bytes = (op.bytes or 0) + num_bytes
    op.num_files = (op.num_files or 0) + num_files


def refuse_duplicates(files: Sequence[FileState]) -> None:
    """Raise ValueError if two states have one name: for engines whose storage would take the second for the first."""
    names = [file.name for file in files]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two states of this rank are called {name}; a checkpoint can hold one")


def check_size(path: Path, expected: SavedFile | None) -> int:
    """Size of the file at `path`, bytes. Raises CheckpointDamagedError if it is missing or not as expected.

    It is missing, too, if something else is there: to open a FIFO would block for ever.
    """
    try:
        status = path.stat()
        check_regular(path, status)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointDamagedError(f"{path}: file is missing") from None
    except NotRegularFileError as exc:
        raise CheckpointDamagedError(str(exc)) from None
    size = status.st_size
    if expected is not None and size != expected.num_bytes:
        raise CheckpointDamagedError(f"{path}: {size} bytes, but {expected.num_bytes} were saved")
    return size
