"""The interface of a checkpoint engine, and the guards that every engine shares.

An engine turns the state of *this* rank into files in a directory and back. It does not know tags, other ranks or the
commit, which megatron.checkpointing handles. It records each phase in the Operation that it is given, under the names
of restart_trace.schema.

A save has three stages. `begin_save` returns as soon as training may continue to compute; `release_state` must return
before any tensor of the state changes; `wait` returns when the files are written. A synchronous engine does all work in
the first.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

from megatron.checkpointing.engines.errors import CheckpointDamagedError, reading
from megatron.peers.pacing import Pacing
from restart_trace.recorder import Operation
from restart_trace.regular import NotRegularFileError, check_regular

if TYPE_CHECKING:
    import torch

    from megatron.fileio.checksums import CheckedBytes
    from megatron.fileio.device_copies import CopyStream
    from megatron.fileio.open_files import RangedFiles
    from megatron.peers.client import Peer
    from megatron.peers.wire import Key

T = TypeVar("T")
MIB = 1 << 20


@dataclass(frozen=True)
class EngineOptions:
    """The options of engines, from the command line. None: the engine's own default."""

    fsync: bool = True  # --checkpoint-durability fsync
    verify_checksums: bool = True  # --checkpoint-verify checksum
    verify_saved: bool = True  # not --checkpoint-verify none: read back files whose library may lose data silently
    checksum: bool = True  # --checksum crc32: computed while saving, if the format itself has none
    host_cache_bytes: int | None = None  # --host-cache-size
    io_threads: int | None = None  # --io-threads
    io_block_bytes: int = 8 * MIB  # --io-block-size
    saves_to_store: bool = False  # --save is object storage
    direct_io: str = "auto"  # --direct-io: auto, on or off
    rank: int = 0  # of the process that the engine runs in
    local_rank: int = 0  # among the ranks of this host
    local_world_size: int = 1  # number of ranks that share this host's memory
    files_per_node: int | None = None  # --checkpoint-files-per-node; None: a file per rank
    device_timeout_s: float = 600.0  # --distributed-timeout-minutes: how long a save waits for the device
    compress_files: bool = False  # --checkpoint-compression zstd
    peer_timeout_s: float = 10.0  # --peer-timeout
    compress_copies: bool = False  # --replica-compression zstd
    copy_steps: int | None = None  # --replication-traffic interleave: --save-interval, over which copies are spread
    copy_pacing: Pacing = Pacing()  # --comm-profile-steps and the flags after it
    library: tuple[tuple[str, Any], ...] = ()  # options of the engine's library, from a --deepspeed_config stanza


@dataclass(frozen=True)
class FileState:
    """The state of one file of DeepSpeed's layout: a nest of dicts, lists, tensors and values.

    `placements` says which part of which parameter a tensor is: path in the nest (its keys, as a tuple) -> JSON object.
    Empty unless the engine wants placements. `on_storage`: False for state that another rank writes to storage, and
    that this rank only keeps in memory.
    """

    name: str
    state: Any
    placements: Mapping[tuple[Any, ...], Mapping[str, Any]] = field(default_factory=dict)
    on_storage: bool = True


class HeaderExtent(NamedTuple):
    """Bytes [start, stop) of the header of a file, and their CRC-32 as eight hexadecimal digits."""

    start: int
    stop: int
    crc32: str


@dataclass(frozen=True)
class FilePart:
    """What one rank has written of a file that several ranks share.

    `header`: where the file's header tells of this part; `data`: bytes [start, stop) of its tensors and of the padding
    behind them. `states` as in SavedFile.
    """

    rank: int
    header: tuple[HeaderExtent, ...]
    data: tuple[int, int]
    states: tuple[str, ...]

    @property
    def header_bytes(self) -> int:
        return sum(extent.stop - extent.start for extent in self.header)

    @property
    def num_bytes(self) -> int:
        return self.header_bytes + self.data[1] - self.data[0]


@dataclass(frozen=True)
class SavedFile:
    """One file on disk. `name` is its path within the checkpoint directory, with "/" between directories.

    `checksum` is "algorithm:hex", with an algorithm that the engine chooses ("none" with --checksum none);
    `num_bytes` is its size. `states` are the names of the FileStates that it holds completely or in part; empty: only
    the state of the same name. `parts`: of a file that several ranks share, in order of rank; the checksums are theirs.
    """

    name: str
    num_bytes: int
    checksum: str
    states: tuple[str, ...] = ()
    parts: tuple[FilePart, ...] = ()

    def __reduce__(self) -> tuple[type[SavedFile], tuple[Any, ...]]:
        """A compact pickle, since ranks send each other thousands of these: a third of the bytes and of the time."""
        values = (self.name, self.num_bytes, self.checksum, self.states)
        return SavedFile, (*values, self.parts) if self.parts else values

    @property
    def leads(self) -> bool:
        """Whether the first of the ranks that share the file has written this part: the file counts as that rank's."""
        return not self.parts or self.parts[0].header[0].start == 0

    def split(self) -> list[SavedFile]:
        """The file once for each of its parts, as if it had no other; a file without parts as it is."""
        return [self.with_parts([part]) for part in self.parts] or [self]

    def with_parts(self, parts: Iterable[FilePart]) -> SavedFile:
        """The same file with these parts, in order of rank, in place of its own."""
        ordered = tuple(sorted(parts, key=lambda part: part.rank))
        return replace(self, states=tuple(state for part in ordered for state in part.states), parts=ordered)

    def holds(self, state_name: str) -> bool:
        return state_name in self.states if self.states else state_name == self.name


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint to load from. `files`: those of its manifest, by name; empty for a checkpoint without a manifest.

    `ranged` opens its files by path if they are not on this node, for engines whose `reads_ranges_of` accepts them.
    """

    directory: Path
    files: Mapping[str, SavedFile] = field(default_factory=dict)
    ranged: RangedFiles | None = None

    def path(self, name: str) -> Path:
        """Path of the file called `name`."""
        return self.directory / name

    def holding(self, state_name: str) -> list[SavedFile]:
        """The files that hold the state `state_name` or a part of it."""
        return [file for file in self.files.values() if file.holds(state_name)]

    def parts_holding(self, state_name: str) -> list[SavedFile]:
        """As `holding`, of shared files only the part that holds it."""
        return [part for file in self.holding(state_name) for part in file.split() if part.holds(state_name)]


# Of one checkpoint: see `first_undamaged`.
Copies = Generator[SavedCheckpoint, None, None]


def first_undamaged(copies: Copies, load: Callable[[SavedCheckpoint], T]) -> T:
    """What `load` returns for the first of the `copies` of a checkpoint that it finds undamaged.

    The CheckpointDamagedError that a copy leads to is thrown into the generator, which gives the next copy, or raises.
    Raises CheckpointDamagedError if there is none, and what else `load` raises.
    """
    with contextlib.closing(copies):
        files = next(copies)
        while True:
            try:
                return load(files)
            except CheckpointDamagedError as damaged:
                files = copies.throw(damaged)


@dataclass(frozen=True)
class MemorySave:
    """A complete save in memory of this host that outlives the ranks; `record`: see `begin_memory_save`."""

    record: Mapping[str, Any]
    checkpoint: SavedCheckpoint


class FileCopies(Protocol):
    """Access of one rank to the files of a save in memory, of which one or several hosts hold copies.

    The copies of a file have the same numbers on all ranks; a rank uses one copy at a time.
    """

    def bring(self, name: str, parts: Sequence[tuple[int, int]]) -> Path:
        """Fetch byte ranges [start, stop) of a file. Returns the path of a local file that has them.

        They are not verified; other bytes of the file may be holes. Raises CheckpointDamagedError if no holder sends
        them.
        """
        ...

    def pass_over(self, name: str, why: str) -> None:
        """Use the next copy, since this rank found its copy damaged. Raises CheckpointDamagedError if there is none."""
        ...

    def used(self) -> dict[str, int]:
        """Number of the copy that this rank uses, for each file of which it fetched a part."""
        ...

    def another(self, name: str, used: Collection[int], why: str) -> int | None:
        """On one rank: the copy of a damaged file that all ranks should use next; None if all were tried.

        `used`: the copies that parts of the file came from.
        """
        ...

    def use(self, name: str, number: int) -> None:
        """Use this copy from now on."""
        ...


@dataclass(frozen=True)
class MemoryFiles(SavedCheckpoint):
    """A save in the memory of several hosts, for a load onto another layout."""

    copies: FileCopies = field(kw_only=True)
    header_bytes: Mapping[str, int] = field(kw_only=True)

    def path(self, name: str) -> Path:
        """Path of a local file with at least its header. Raises CheckpointDamagedError if no holder sends it."""
        return self.copies.bring(name, [(0, self.header_bytes[name])])

    def holding(self, state_name: str) -> list[SavedFile]:
        """The file of the lowest rank, since every replica keeps the weights."""
        return super().holding(state_name)[:1]


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of a checkpoint with its placement (megatron.checkpointing.state.shard_metadata).

    Its elements are in the file at `path`, in order, from byte `start` on. `checked`: the checksummed byte range that
    contains it; None if it was saved without a checksum or is not to be verified.
    """

    path: Path
    name: str
    dtype: torch.dtype
    start: int
    placement: Mapping[str, Any]
    checked: CheckedBytes | None = None


class SaveTarget(Protocol):
    """Target of one file of a save, written in blocks, in any order and from any thread."""

    def write(self, buffer: memoryview, length: int, position: int) -> None:
        """Write the first `length` bytes of `buffer`, which is aligned, at `position`."""
        ...

    def cut_off(self, size: int) -> None:
        """Set the file's final size, once everything is written."""
        ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class SaveTargets(Protocol):
    """Targets of the files of a save that are not written to a disk of this node."""

    def open(self, name: str, num_bytes: int, data_start: int, block_bytes: int) -> SaveTarget:
        """Target of a file of at most `num_bytes`, of which none is left out.

        Bytes before `data_start` are written last, the rest in blocks from there.
        """
        ...


class PendingSave(ABC):
    """A save that its engine continues in the background, from the return of `begin_save` on.

    Until `release_state` returns training computes, forward and backward passes, and does not change the state. No
    later change may be in the checkpoint. After the last save `release_state` may never be called; `wait` must return
    nevertheless.
    """

    @abstractmethod
    def release_state(self) -> None:
        """Return when the live state may change. Called on the training thread before the optimizer steps.

        The engine records its waits as blocking spans. Must not raise: errors are raised by `wait`. Further calls have
        no effect.
        """

    def shared_part(self) -> Any:
        """What `CheckpointEngine.place_parts` must know of this save; waits until it is known. None: it has failed.

        Called once, if `CheckpointEngine.shares_files`; the answer comes by `take_place` or `give_up`.
        """
        return None

    def take_place(self, place: Any) -> None:
        """Where this save's part of a shared file lies, as `place_parts` says. Nothing is written before."""
        return None

    def give_up(self, why: str) -> None:
        """This save cannot become a checkpoint: `wait` is to raise CheckpointSaveError soon, with this reason.

        Called from any thread, also after the end of `wait`, and without waiting for more than a moment. It has no
        effect on an engine that cannot end its work early; one that shares files must obey before it has a place.
        """
        return None

    def set_waiting(self, waits: bool) -> None:
        """Called when training begins to wait for the end of the save (True), and when it stops waiting (False)."""
        return None

    @abstractmethod
    def wait(self) -> list[SavedFile]:
        """Wait for the files and return them, all that the directory holds.

        Called once, on another thread if the engine is asynchronous. Sets `bytes`, `num_files` and `durable` of the
        operation. Raises OSError if the storage refused, or another exception that says why the save failed; after
        either, nothing writes into the directory any more.
        """


class FinishedSave(PendingSave):
    """The result of a synchronous engine, which has done all work."""

    def __init__(self, saved: list[SavedFile]) -> None:
        self._saved = saved

    def release_state(self) -> None:
        return None

    def wait(self) -> list[SavedFile]:
        return self._saved


class CheckpointEngine(ABC):
    """Writes and reads the files of one rank.

    Subclasses set `name` and implement `_save_file` and `_load_file`. An engine that handles all files at once
    overrides `save` and `load` instead; an asynchronous one sets `asynchronous` and overrides `begin_save`; one that
    can read directly into live tensors sets `loads_in_place` and overrides `load_into`.
    """

    name: ClassVar[str]
    writes_files: ClassVar[bool] = True
    asynchronous: ClassVar[bool] = False
    wants_placements: ClassVar[bool] = False  # stores FileState.placements with the tensors
    loads_in_place: ClassVar[bool] = False  # `load_into` fills the given tensors
    redistributable: ClassVar[bool] = False  # implements `load_values`, and `placed_tensors` if it stores placements
    streams: ClassVar[bool] = False  # implements `begin_streamed_save`
    keeps_in_memory: ClassVar[bool] = False  # implements the methods from `begin_memory_save` to `discard_memory_saves`

    def __init__(self, options: EngineOptions) -> None:
        self.options = options

    @property
    def shares_files(self) -> bool:
        """Whether the ranks write into shared files, so that each save needs `place_parts`; the same on all ranks."""
        return False

    def place_parts(self, parts: Sequence[Any]) -> list[Any]:
        """Where the part of each rank lies in the file that it shares, for `PendingSave.take_place`.

        `parts`: what `shared_part` has returned, by rank. Raises CheckpointSaveError naming the flag if there is none.
        """
        raise NotImplementedError(f"{type(self).__name__} writes no shared files")

    def check_can_save(self) -> None:
        """Raise EngineUnavailableError, saying what to install or change, if the engine cannot save on this machine.

        Called once at start-up if --save is given. Loading may work nevertheless.
        """
        return None

    def prepare_memory(self, save_bytes: int, available: int, stream: CopyStream, op: Operation) -> None:
        """Begin to allocate the host memory for staging copies from and to a CUDA device.

        Called once, during the start-up `op`. `save_bytes`: approximate size of this rank's saves, 0 if it saves
        nothing; `available`: bytes of host memory that were free before any rank allocated some. Errors are raised by
        `memory_is_ready`. A save that begins before the memory is ready waits for what it needs of it.
        """
        return None

    def memory_is_ready(self) -> bool:
        """Whether the memory is ready by now. Raises ConfigError naming flag, value and fix if it is not available."""
        return True

    def wait_for_memory(self) -> None:
        """Wait until the memory is ready. Raises ConfigError as `memory_is_ready`."""
        return None

    def begin_step(self, began_ns: int) -> None:
        """Called when a training step begins."""
        return None

    def begin_save(self, files: Sequence[FileState], directory: Path, op: Operation) -> PendingSave:
        """Begin to write `files` into `directory`, which exists and is used by this save only.

        At most one save of an engine is pending: the caller waits for it before it begins the next.
        """
        return FinishedSave(self.save(files, directory, op))

    def begin_streamed_save(self, files: Sequence[FileState], targets: SaveTargets, op: Operation) -> PendingSave:
        """As `begin_save`, but writes to `targets` instead of a disk of this node."""
        raise NotImplementedError(f"{type(self).__name__} writes files")

    def begin_memory_save(
        self, files: Sequence[FileState], record: Mapping[str, Any], directory: Path | None, op: Operation
    ) -> PendingSave:
        """As `begin_save`, but into memory that outlives this rank and, with a `directory`, also to storage.

        `record` must be JSON; `memory_saves` returns it. Its key "save" is the name of the save, the same on all ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps nothing in memory")

    @property
    def slot_bytes(self) -> list[int]:
        """Sizes of this rank's slots for saves in memory, bytes."""
        return []

    def reserve(self, num_bytes: int) -> None:
        """Grow each slot to at least `num_bytes`, unless it holds a save. Raises OSError."""
        return None

    def settle(self) -> None:
        """Called when the last save is complete on all ranks: the slot of an older one may be overwritten."""
        return None

    def memory_saves(self) -> list[MemorySave]:
        """The complete saves in memory of this host, of all its ranks."""
        return []

    def share_with(self, peers: Sequence[Peer]) -> None:
        """From now on a save is complete only once each of these peers has a copy, or it is on storage."""
        return None

    def fetch_copy(self, save: str, key: Key, peer: Peer, op: Operation) -> MemorySave:
        """Copy the save of these coordinates from a peer into memory of this rank.

        Raises CheckpointDamagedError naming the peer if it does not send an undamaged copy.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps nothing in memory")

    def keep(self, save: str | None) -> None:
        """Protect the slot of `save`, from which training continues, and overwrite others only. None: overwrite any."""
        return None

    def discard_memory_saves(self, save: str | None) -> None:
        """Discard this rank's save with that name; None: all of its saves."""
        return None

    def save(self, files: Sequence[FileState], directory: Path, op: Operation) -> list[SavedFile]:
        """Write `files` into `directory`, which exists and is used by this save only.

        Returns the files written, in order. Raises OSError if the storage refuses.
        """
        if self.asynchronous:
            pending = self.begin_save(files, directory, op)
            if self.shares_files and (part := pending.shared_part()) is not None:
                pending.take_place(self.place_parts([part])[0])
            pending.release_state()
            return pending.wait()
        return note_saved([self._save_file(file, directory, op) for file in files], self.options, op)

    def reads_ranges_of(self, files: Iterable[SavedFile]) -> bool:
        """Whether the engine reads only the bytes of `files` that it needs, and verifies each of them by a checksum."""
        return False

    def load(self, names: Sequence[str], checkpoint: SavedCheckpoint, op: Operation) -> dict[str, Any]:
        """Read the states called `names`, with tensors on the CPU.

        Raises CheckpointDamagedError naming the file that is missing, truncated or altered.
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
        """As `load`, for the states that `live` names, whose contiguous tensors are to get the loaded values.

        An engine may read into these tensors, on any device, and return them as the loaded ones, if path in the nest,
        type and shape are the same. After an exception they may hold anything.
        """
        return self.load([file.name for file in live], checkpoint, op)

    def placed_tensors(self, checkpoint: SavedCheckpoint, op: Operation) -> list[PlacedTensor]:
        """The tensors with a placement, of all ranks that saved the checkpoint, in order of rank.

        Raises CheckpointDamagedError naming the file that cannot be used.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot load onto another layout")

    def load_values(self, name: str, checkpoint: SavedCheckpoint, op: Operation) -> Any:
        """As `load` for one state, but tensors with dimensions may be on the device "meta".

        The returned values are verified (--checkpoint-verify). If no placements are stored,
        `torch_files.position_in_file` returns the position of a tensor that is on "meta".
        """
        raise NotImplementedError(f"{type(self).__name__} cannot load onto another layout")

    def end_loads(self) -> None:
        """Release the memory that is kept for further loads."""
        return None

    def close(self) -> None:
        """Release threads, processes and memory. No save may be pending."""
        return None

    def leave(self) -> bool:
        """As `close`, in a process that starts again. Returns whether the engine can serve that start, too.

        It then keeps what takes long to make and is at rest, and must forget what it has told of the start before.
        """
        self.close()
        return False

    def _save_file(self, file: FileState, directory: Path, op: Operation) -> SavedFile:
        raise NotImplementedError(f"{type(self).__name__} must implement _save_file or override save")

    def _load_file(self, path: Path, expected: SavedFile | None, op: Operation) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must implement _load_file or override load")


def note_saved(saved: list[SavedFile], options: EngineOptions, op: Operation) -> list[SavedFile]:
    """Set the figures of the save `op` from `saved`, and return `saved`."""
    op.bytes = sum(sum(part.num_bytes for part in file.parts) if file.parts else file.num_bytes for file in saved)
    op.num_files = sum(file.leads for file in saved)
    op.durable = options.fsync
    return saved


def note_loaded(num_bytes: int, num_files: int, op: Operation) -> None:
    """Add to the figures of the load `op`."""
    op.bytes = (op.bytes or 0) + num_bytes
    op.num_files = (op.num_files or 0) + num_files


def refuse_duplicates(files: Sequence[FileState]) -> None:
    """Raise ValueError if two states have the same name, for engines whose storage would confuse them."""
    names = [file.name for file in files]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two states of this rank are called {name}; a checkpoint can hold only one")


def check_size(path: Path, expected: SavedFile | None) -> int:
    """Size of the file at `path`, bytes. Raises CheckpointDamagedError if it is missing or has another size.

    Also raised if the path is not a regular file, since opening a FIFO would block for ever.
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
