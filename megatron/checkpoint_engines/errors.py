"""What can go wrong with a checkpoint, by name."""

from __future__ import annotations


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


class CheckpointMismatchError(CheckpointError):
    """The checkpoint is of another model shape or layout."""


class CheckpointNotFoundError(CheckpointError):
    """There is no (complete) checkpoint where one must be."""


class UnknownEngineError(ValueError):
    """--checkpoint-engine names an engine that is not there or not installed."""


class EngineUnavailableError(ValueError):
    """The engine is known, but this machine lacks a package or a device that it needs."""
