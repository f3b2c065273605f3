"""What can go wrong with a checkpoint, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.config import ConfigError
from megatron.fileio.files import DamagedFileError
from megatron.fileio.objects.errors import ObjectStoreError


class CheckpointError(RuntimeError):
    """Base of all checkpoint errors."""


class CheckpointSaveError(CheckpointError):
    """A save failed on at least one rank; the previous checkpoint is untouched."""


class SaveDirectoryInUseError(CheckpointError):
    """Another launch saves to --save and is alive."""


class SaveDirectorySupersededError(CheckpointError):
    """A later launch owns --save: this one may not save there any more, and ends."""


class CheckpointDamagedError(CheckpointError):
    """A file is missing, truncated or altered; the message names it."""


class NoChecksumsError(CheckpointDamagedError):
    """A file was saved without checksums of its parts: what is read of it in ranges cannot be verified."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint is of another model shape or layout."""


class CheckpointNotFoundError(CheckpointError):
    """There is no (complete) checkpoint where one must be."""


class UnknownEngineError(ValueError):
    """--checkpoint-engine names an engine that is not there or not installed."""


class EngineUnavailableError(ValueError):
    """The engine is known, but this machine lacks a package or a device that it needs."""


# torch's, which is not imported for them, and the one of megatron.startup.injected_faults.
_OF_THE_PROCESS = ("OutOfMemoryError", "AcceleratorError", "InjectedFault")


@contextmanager
def damaged_files() -> Iterator[None]:
    """Within it, what megatron.fileio finds wrong with a file is raised as CheckpointDamagedError."""
    try:
        yield
    except DamagedFileError as exc:
        raise CheckpointDamagedError(str(exc)) from exc


@contextmanager
def reading(path: Path, kind: str = "") -> Iterator[None]:
    """Within it, a file of a checkpoint is read: whatever that raises is damage to `path`, which is to be a `kind`.

    What a damaged file makes of a parser is beyond listing. These keep their meaning: CheckpointError, OSError and
    ObjectStoreError, which name a file themselves; a flag or a package that is wrong; and what is the process's
    (`is_of_the_process`).
    Raises CheckpointDamagedError in place of any other Exception.
    """
    try:
        with damaged_files():
            yield
    except (
        CheckpointError,
        OSError,
        ObjectStoreError,
        MemoryError,
        ConfigError,
        UnknownEngineError,
        EngineUnavailableError,
    ):
        raise
    except Exception as exc:
        if is_of_the_process(exc):
            raise
        what = f" as {kind}" if kind else ""
        raise CheckpointDamagedError(f"{path}: cannot be read{what} ({type(exc).__name__}: {exc})") from exc


def is_of_the_process(exc: BaseException) -> bool:
    """Whether an error while a file is read says nothing of the file: want of memory, a failed device, a drill's fault.

    torch has no MemoryError: on a device it raises a class of its own, on the host a plain RuntimeError.
    """
    return isinstance(exc, RuntimeError) and (
        type(exc).__name__ in _OF_THE_PROCESS or "DefaultCPUAllocator: " in str(exc)
    )
