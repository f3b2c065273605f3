"""Engine `lazy` as a checkpoint engine of DeepSpeed, which `megatron.adapters.deepspeed` has it make.

`save_checkpoint` returns once the files have begun to be written. What is left of a save is a thread's: when all files
of all ranks are written, rank 0 writes `lazy_manifest.json` beside them, gives them their names, and replaces `latest`,
in this order and each step synchronised, so that `latest` always names a complete checkpoint. Files are first called
NAME.SUFFIX.lazy; if a save replaces one of the same tag, the manifest says which of the two is meant.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import io
import json
import logging
import multiprocessing.util
import os
import pickle
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from megatron.adapters import lazy_files
from megatron.adapters.snapshot import SNAPSHOTS, LiveSave, Snapshot, Trained
from megatron.adapters.store_agreement import StoreAgreement
from megatron.checkpointing.engines.base import EngineOptions, SavedFile
from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointSaveError, reading
from megatron.checkpointing.engines.lazy.writer import LazySave
from megatron.fileio.files import sync_directory, with_name
from megatron.fileio.new_directory import new_directory
from restart_trace.device_threads import device_thread

logger = logging.getLogger(__name__)

MANIFEST = "lazy_manifest.json"
_VERSION = 1
_SUFFIX = ".lazy"  # of files that are not committed yet
_WRITTEN = re.compile(rf".+\.[0-9a-f]{{12}}{re.escape(_SUFFIX)}")  # the names that they have
_PICKLE = "pickle"  # name of the tensor with the state's pickle, in which tensors are numbers
_ZIP = b"PK\x03\x04"  # how a file of torch.save begins
_NOT_CREATED = CheckpointCommitInfo("(without a tag yet)", "", False)
_AFTER_A_CRASH_S = 10.0  # for which an ending process waits for its last save, if training has failed


@dataclass(frozen=True)
class LazySettings:
    """The stanza `"checkpoint": {"engine": {"type": "lazy", ...}}` of DeepSpeed's JSON.

    `snapshot`, `fsync`, `io_threads`: as of megatron.adapters.dcp.LazyWriter. `verify`: compare what is loaded with its
    checksums. `timeout_minutes`: how long a save waits for the other ranks.
    """

    snapshot: str = "lazy"
    fsync: bool = True
    verify: bool = True
    io_threads: int | None = None
    timeout_minutes: float = 30.0

    @classmethod
    def of(cls, stanza: Mapping[str, Any]) -> LazySettings:
        """Raises ValueError naming the key that is unknown, or has no such value."""
        for key, value in stanza.items():
            allowed = _ALLOWED.get(key)
            if allowed is None or not allowed[0](value):
                raise ValueError(
                    f'DeepSpeed\'s JSON, "checkpoint": {{"engine": {{"{key}": {json.dumps(value)}}}}}: the keys beside '
                    '"type" are ' + ", ".join(f'"{name}" ({what})' for name, (_, what) in _ALLOWED.items())
                )
        return cls(**stanza)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "snapshot": (lambda value: value in SNAPSHOTS, " or ".join(SNAPSHOTS)),
    "fsync": (lambda value: isinstance(value, bool), "true or false"),
    "verify": (lambda value: isinstance(value, bool), "true or false"),
    "io_threads": (lambda value: isinstance(value, int) and _is_number(value), "a number above 0"),
    "timeout_minutes": (_is_number, "a number above 0"),
}


@dataclass(frozen=True)
class _File:
    """A file that is being written: its final name, and the path that it has until then."""

    name: str
    path: Path
    live: LiveSave[LazySave]
    save: LazySave

    def wait(self) -> SavedFile:
        """Raises OSError, or CheckpointSaveError if the state was changed while it was written."""
        (saved,) = self.save.wait()
        self.live.check()
        return saved


@dataclass
class _Save:
    """One `save_checkpoint`. `thread` waits for its files and commits; there is none before it returns or raises."""

    info: CheckpointCommitInfo
    number: int
    files: list[_File] = field(default_factory=list)
    thread: threading.Thread | None = None
    error: str | None = None

    @property
    def directory(self) -> Path:
        return Path(self.info.save_dir) / self.info.tag


class LazyCheckpointEngine(CheckpointEngine):
    """To be made by all ranks, after `init_process_group`."""

    _all: list[LazyCheckpointEngine] = []

    def __init__(self, config_params: Any = None, settings: LazySettings | None = None) -> None:
        super().__init__(config_params)
        wait_for_saves()  # of another engine, whose checkpoint this one may go on from
        self.name = "lazy"
        self._settings = settings or LazySettings()
        self._options: EngineOptions = lazy_files.options(
            fsync=self._settings.fsync, verify=self._settings.verify, io_threads=self._settings.io_threads
        )
        self._agreement = StoreAgreement(60 * self._settings.timeout_minutes)
        self._open: _Save | None = None  # of which DeepSpeed has not saved all files yet
        self._pending: _Save | None = None
        self._saves = 0
        self.trained: Trained | None = None
        LazyCheckpointEngine._all.append(self)

    @contextlib.contextmanager
    def save_of(self, engine: Any) -> Iterator[None]:
        """What is saved within is one checkpoint of this DeepSpeedEngine; an exception makes it fail on all ranks.

        An engine changes the parameters of its module once its optimizer steps; frozen ones only somebody else changes.
        Waits for the save before it. Raises CheckpointSaveError, as all ranks do then, if that one failed.
        """
        self.wait()
        optimizer = getattr(engine, "basic_optimizer", None)
        if isinstance(optimizer, torch.optim.Optimizer):
            trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
            self.trained = Trained(optimizer, trained)
        self._open = None
        failure: str | None = None
        try:
            yield
        except BaseException as exc:
            failure = f"{type(exc).__name__}: {exc}"
            raise
        finally:
            self.trained = None  # so that no model is kept whose training is over
            save = self._open or _Save(_NOT_CREATED, self._saves)
            self._open = None
            self._saves += 1
            save.thread = device_thread(self._complete, args=(save, failure), name="lazy-commit")
            save.thread.start()
            self._pending = save

    # What DeepSpeed calls, in this order

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a save; waits for the one before it. Raises CheckpointSaveError if that one failed."""
        self.wait()
        self._open = _Save(info, self._saves)

    def save(self, state_dict: Any, path: str) -> None:
        """Begin to write one file. Raises SkeletonError or PicklingError for a state that cannot be saved."""
        target = Path(path)
        if self._open is None or target.parent != self._open.directory:
            _save_with_torch(state_dict, target, self._settings.fsync)  # save_16bit_model, for programs of others
            return
        snapshot = Snapshot(self._settings.snapshot, self.trained)
        tensors = _split(state_dict, snapshot)
        written = target.with_name(f"{target.name}.{uuid.uuid4().hex[:12]}{_SUFFIX}")
        live: LiveSave[LazySave] = LiveSave(snapshot)
        writing = live.begin(lambda: lazy_files.begin(written, tensors, self._options))
        self._open.files.append(_File(target.name, written, live, writing))

    def is_decoupled(self) -> bool:
        """Whether this engine commits and writes `latest` itself, instead of save_checkpoint."""
        return True

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Called by save_16bit_model alone, which saves no checkpoint."""
        self._open = None
        return True

    def cleanup(self) -> None:
        """Raises CheckpointSaveError if the last save failed."""
        self.wait()

    def preserves_storage_sharing(self) -> bool:
        return False  # it writes tensors, not their storages: DeepSpeed need not copy them

    def load(self, path: str, map_location: Any = None) -> Any:
        """Raises CheckpointDamagedError naming the file that is missing or altered."""
        self.wait()
        return load_file(Path(path), map_location, self._options)

    # The end of a save

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the last save is committed. Raises CheckpointSaveError if it failed.

        Raises TimeoutError if it has not ended after `timeout_s`: it goes on, and may be waited for again.
        """
        save = self._pending
        if save is None or save.thread is None:
            return
        save.thread.join(timeout_s)
        if save.thread.is_alive():
            raise TimeoutError(
                f"checkpoint {save.info.tag} is not complete yet: its save goes on; wait again, or longer"
            )
        self._pending = None
        if save.error is not None:
            raise CheckpointSaveError(f"checkpoint {save.info.tag} was not saved: {save.error}")

    def _complete(self, save: _Save, failure: str | None) -> None:
        """Thread: wait for this rank's files, agree, commit. `failure`: why this rank has not saved all of them."""
        mine: dict[str, SavedFile] | str = {}
        try:
            if failure is None:
                mine = {file.name: file.wait() for file in save.files}
        except BaseException as exc:
            failure = f"{type(exc).__name__}: {exc}"
        if failure is not None:
            mine = f"rank {self._agreement.rank}: {failure}"
        remove = False
        try:
            answer = self._agreement.agree(save.number, mine, lambda given: self._commit_all(save, given))
            save.error, remove = answer
        except Exception as exc:
            save.error = f"{type(exc).__name__}: {exc}"
        if save.error is not None:
            logger.error("checkpoint %s was not saved: %s", save.info.tag, save.error)
        if remove:
            for file in save.files:
                with contextlib.suppress(Exception):
                    file.save.wait()
                with contextlib.suppress(OSError):
                    file.path.unlink()

    def _commit_all(self, save: _Save, given: list[dict[str, SavedFile] | str]) -> tuple[str | None, bool]:
        """On rank 0: commit what all ranks have written. Returns (the error, or None; whether to remove the files)."""
        files: dict[str, SavedFile] = {}
        for mine in given:
            if isinstance(mine, str):
                return mine, True
            files |= mine
        try:
            _commit(save.directory, files, len(given), self._settings.fsync)
            if save.info.save_latest:
                latest = Path(save.info.save_dir) / "latest"
                lazy_files.replace_file(latest, save.info.tag.encode(), self._settings.fsync)
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}", not _may_name(save.directory, files)
        return None, False


def wait_for_saves(timeout_s: float | None = None) -> None:
    """Return when the saves of all engines of this process are committed. Raises CheckpointSaveError if one failed.

    Raises TimeoutError if one has not ended after `timeout_s`: it goes on, and may be waited for again.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for engine in LazyCheckpointEngine._all:
        engine.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))


def end_saves() -> None:
    """Wait for the last saves, at the end of the program, after all else that it does then.

    A script may end right after `save_checkpoint`. If it has failed, other ranks may be gone. If only the save has
    failed, nothing but this process's status can tell whoever has started the script: it ends here with 1.
    """
    failed, saved = getattr(sys, "last_value", None) is not None, True
    for engine in LazyCheckpointEngine._all:
        try:
            engine.wait(_AFTER_A_CRASH_S if failed else None)
        except TimeoutError as exc:
            logger.error("%s", exc)
        except CheckpointSaveError:  # logged
            saved = False
    if not saved and not failed:
        # As multiprocessing does where it calls os._exit: ends processes of the script, and its trace.
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        logging.shutdown()
        _flush_files()
        os._exit(1)


def _flush_files() -> None:
    """Write what is still in the buffers of the program's open files, as the interpreter does when it ends."""
    files = [found for found in gc.get_objects() if issubclass(type(found), io.IOBase)]
    for file in (*files, sys.stdout, sys.stderr):  # a text file flushes the binary one below it, too
        with contextlib.suppress(Exception):  # closed, or not open for writing, or the disk is full
            file.flush()
    ctypes.CDLL(None).fflush(None)  # those of C


def _commit(directory: Path, files: Mapping[str, SavedFile], ranks: int, fsync: bool) -> None:
    """Make the files in `directory`, of so many ranks, its checkpoint. Raises OSError; then the one before is still
    there.
    """
    for file in files.values():
        found = (directory / file.name).stat().st_size
        if found != file.num_bytes:
            raise OSError(f"{directory / file.name}: {found} bytes, but {file.num_bytes} were written")
    described = {
        name: {"written_as": file.name, "bytes": file.num_bytes, "checksum": file.checksum}
        for name, file in sorted(files.items())
    }
    content = json.dumps({"version": _VERSION, "ranks": ranks, "files": described}, indent=1)
    if fsync:
        sync_directory(directory)
        sync_directory(directory.parent)
    lazy_files.replace_file(directory / MANIFEST, content.encode(), fsync)
    for name, file in files.items():
        os.replace(directory / file.name, directory / name)
    for left in directory.iterdir():
        if _WRITTEN.fullmatch(left.name):  # of a save that was killed
            left.unlink()
    if fsync:
        sync_directory(directory)


def _may_name(directory: Path, files: Mapping[str, SavedFile]) -> bool:
    """Whether the manifest names these files: a commit can fail after that, and then a load needs them."""
    try:
        return {file.name for file in _manifest(directory).values()} == {file.name for file in files.values()}
    except Exception:
        return True


def _manifest(directory: Path) -> dict[str, SavedFile]:
    """Final name of each file -> the file. Empty if there is no manifest. Raises CheckpointDamagedError."""
    with _read_manifest(directory) as content:
        return {
            name: SavedFile(item["written_as"], item["bytes"], item["checksum"])
            for name, item in content["files"].items()
        }


def ranks_of(directory: Path) -> int | None:
    """How many ranks saved the checkpoint `directory`, SAVE_DIR/TAG; None if that is not known, as of torch.save's.

    Raises CheckpointDamagedError naming the manifest, or OSError.
    """
    with _read_manifest(directory) as content:
        return None if "ranks" not in content else int(content["ranks"])


def lack_of_files(directory: Path) -> str | None:
    """What the checkpoint `directory` lacks of the files and sizes in its manifest; None if nothing, or without one.

    Raises as `ranks_of`.
    """
    for name, saved in _manifest(directory).items():
        # A kill within a commit leaves a file under the name that it was written with.
        found = next((path for path in (directory / saved.name, directory / name) if path.exists()), None)
        if found is None:
            return f"{directory.name}/{name} is missing"
        size = found.stat().st_size
        if size != saved.num_bytes:
            return f"{directory.name}/{found.name} has {size} bytes, but {saved.num_bytes} were written"
    return None


@contextlib.contextmanager
def _read_manifest(directory: Path) -> Iterator[dict[str, Any]]:
    """What the manifest of a checkpoint says; nothing if there is none. What is wrong with it is its damage."""
    path = directory / MANIFEST
    with reading(path, "a manifest"):
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            content = {"version": _VERSION, "files": {}}
        if content["version"] != _VERSION:
            raise CheckpointDamagedError(f"{path}: version {content['version']}; only {_VERSION} is known")
        yield content


def load_file(path: Path, map_location: Any, of: EngineOptions) -> Any:
    """The state in a file of a checkpoint. Raises CheckpointDamagedError naming the file that is missing or altered."""
    saved = _manifest(path.parent).get(path.name)
    if saved is None:
        return _load_with_torch(path, map_location)
    written = path.with_name(saved.name)
    if not written.exists():
        written = path
        if path.exists() and path.stat().st_size != saved.num_bytes and _begin(path) == _ZIP:
            raise CheckpointDamagedError(
                f"{path}: a file of torch.save, in the place of one of engine lazy that {path.parent / MANIFEST} "
                "names; if torch.save has written all files there, remove that manifest"
            )
    tensors = lazy_files.read(written, saved, None, {}, of)
    with reading(path):
        return _joined(tensors, map_location)


def convert_to_torch(checkpoint: Path, out: Path) -> list[str]:
    """Write the files of `checkpoint`, a directory SAVE_DIR/TAG, into the new directory `out` as torch.save would.

    Returns their names. `out` appears when it is complete. Raises CheckpointDamagedError, FileExistsError if `out`
    exists, or OSError if the storage refuses.
    """
    names = sorted(_manifest(checkpoint))
    if not names:
        raise CheckpointDamagedError(f"{checkpoint / MANIFEST} is missing: no complete checkpoint of engine lazy")
    if os.path.lexists(out):
        raise FileExistsError(errno.EEXIST, "is there already, and nothing is overwritten; give another", str(out))
    with new_directory(out) as directory:
        for name in names:
            state = load_file(checkpoint / name, "cpu", lazy_files.options())
            try:
                _save_with_torch(state, directory / name, True)
            except RuntimeError as exc:  # of torch, in which the system's error is hidden
                cause = exc.__context__
                if not isinstance(cause, OSError):
                    raise
                raise with_name(cause, out / name) from exc
    return names


# A state as tensors: its own, and one with the pickle of the rest


class _Pickler(pickle.Pickler):
    """Pickles a state without its tensors, which `tensors` then has, and in the pickle are their numbers."""

    def __init__(self, file: io.BytesIO, snapshot: Snapshot) -> None:
        super().__init__(file, protocol=4)
        self.tensors: dict[str, torch.Tensor] = {}
        self._snapshot = snapshot
        self._numbers: dict[Any, tuple[str, torch.Tensor]] = {}

    def persistent_id(self, obj: Any) -> tuple[str, bool, bool] | None:
        if not isinstance(obj, torch.Tensor):
            return None
        same = _memory_of(obj)
        if same not in self._numbers:
            name = str(len(self._numbers))
            self._numbers[same] = name, obj  # kept, so that no other object gets its id or memory
            self.tensors[name] = self._snapshot.take(obj, f"tensor {name} of shape {list(obj.shape)}")
        return self._numbers[same][0], isinstance(obj, torch.nn.Parameter), obj.requires_grad


def _memory_of(tensor: torch.Tensor) -> Any:
    """What two tensors have in common that are the same elements in memory, such as tied weights."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return id(tensor)
    shape = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), *shape


def _split(state: Any, snapshot: Snapshot) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    pickler = _Pickler(file, snapshot)
    pickler.dump(state)
    content = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
    return {**pickler.tensors, _PICKLE: content}


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, tensor: Callable[[str], torch.Tensor]) -> None:
        super().__init__(io.BytesIO(content))
        self._tensor = tensor
        self._made: dict[tuple[str, bool, bool], torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        name, is_parameter, requires_grad = pid
        if pid not in self._made:
            tensor = self._tensor(name)
            self._made[pid] = torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor
        return self._made[pid]


def _joined(tensors: Mapping[str, torch.Tensor], map_location: Any) -> Any:
    device = map_location if isinstance(map_location, (str, torch.device)) else "cpu"
    moved = functools.cache(lambda name: tensors[name].to(device))
    return _Unpickler(tensors[_PICKLE].numpy().tobytes(), moved).load()


# Files that are not this engine's


def _save_with_torch(state: Any, path: Path, fsync: bool) -> None:
    with lazy_files.replacing(path, fsync) as file:
        torch.save(state, file)


def _load_with_torch(path: Path, map_location: Any) -> Any:
    """As DeepSpeed's own engine: of checkpoints that it saved. Raises CheckpointDamagedError for another file."""
    begin = _begin(path)
    if begin != _ZIP and not begin.startswith(b"\x80"):  # pickle, of older torch
        raise CheckpointDamagedError(f"{path}: not a file of torch.save, and {path.parent / MANIFEST} does not name it")
    return torch.load(path, map_location=map_location, weights_only=False)


def _begin(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_ZIP))
