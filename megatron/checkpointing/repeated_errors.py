"""Errors that end start after start at the same step; known from --save alone, before anything heavy is imported.

A rank that an error of its own ends in training leaves a record in SAVE/.generations, named after the generation of its
start, where the next start finds it, whoever made that. Three records of the same error at the same step mean that a
restart does not help: the checkpoint that these starts went on from is suspected, or the data of that step.

What ends a rank from outside (a signal, a lost rank or node) leaves no record, and a start that gets past the step
removes the records. Of a --save in object storage none are kept.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import traceback
import uuid
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from megatron.checkpointing import naming as names
from megatron.checkpointing.commit import Search
from megatron.checkpointing.engines.errors import CheckpointError
from megatron.checkpointing.first_start import resumes
from megatron.config import CheckpointConfig
from megatron.config.errors import REPEATED
from megatron.config.uris import is_uri
from restart_trace.strict_json import read_json

logger = logging.getLogger(__name__)

STARTS = 3  # in a row with the same error: then it is suspected
_NAME = re.compile(r"error_(\d{8})")
_MAX_BYTES = 1 << 14
_MAX_TEXT = 300
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")  # addresses, sizes and ranks: they differ between starts


class RepeatedErrorError(CheckpointError):
    """The same error has ended several starts in a row at the same step: another one would end so, too."""

    exit_code = REPEATED


@dataclass(frozen=True)
class StepError:
    """An error that ended a start in training.

    `step`: the iteration that was under way; `loaded`: that of the checkpoint which the start went on from, 0 without
    one; `error`: type, place and message without numbers, by which errors are compared; `message`: as it was.
    """

    step: int
    loaded: int
    error: str
    message: str
    rank: int

    def same(self, other: StepError) -> bool:
        return (self.step, self.error) == (other.step, other.error)


def _files(directory: Path) -> list[str]:
    """Names of the records in SAVE/.generations, oldest first."""
    try:
        return sorted(name for name in os.listdir(directory) if _NAME.fullmatch(name))
    except OSError:
        return []


def recorded(save: str) -> list[StepError]:
    """The errors that are recorded in --save, oldest first; what no start has written is left out."""
    directory = Path(save) / names.GENERATIONS
    errors = []
    for name in _files(directory):
        with contextlib.suppress(OSError, ValueError, TypeError):
            error = StepError(**read_json(directory / name, _MAX_BYTES))
            if all(type(number) is int for number in (error.step, error.loaded, error.rank)):
                errors.append(error)
    return errors


def checkpoint_before(options: CheckpointConfig) -> str | None:
    """The tag to go back to, as --on-repeated-error back says; None if there is nothing to go back from.

    `options`: of a start that goes on from --save. Raises RepeatedErrorError if the same error has ended STARTS starts
    in a row at the same step and the flag is not `retry`, or if going back has not helped or is not possible.
    """
    save = options.save
    if save is None or is_uri(save) or not resumes(options) or options.load_tag is not None:
        return None
    last = recorded(save)[-STARTS:]
    if len(last) < STARTS or not all(error.same(last[-1]) for error in last):
        return None
    # The first start of the three may have saved the checkpoint that the others went on from.
    error, went_back = last[-1], any(later.loaded < one.loaded for one, later in pairwise(last))
    if options.on_repeated_error == "retry":
        logger.warning("%s; going on all the same, as --on-repeated-error retry says", _told(save, last))
        return None
    older = _committed_before(save, error.loaded) if options.on_repeated_error == "back" and not went_back else None
    if older is not None:
        logger.warning("%s; going back to %s, as --on-repeated-error back says", _told(save, last), older)
        return older
    raise RepeatedErrorError(f"{_told(save, last)}. {_advice(options, error, went_back)}")


def _told(save: str, last: list[StepError]) -> str:
    error = last[-1]
    loaded = sorted({one.loaded for one in last})
    places = " and ".join(f"{save}/{names.tag_of(step)}" if step else "iteration 0" for step in loaded)
    return (
        f"iteration {error.step} has ended {len(last)} starts in a row with the same error (rank {error.rank}: "
        f"{error.message}), going on from {places}"
    )


def _advice(options: CheckpointConfig, error: StepError, went_back: bool) -> str:
    of_data = f"the data of iteration {error.step} or the program"
    if went_back:
        suspected, back = f"As going back has not helped, {of_data} is suspected", ""
    elif options.on_repeated_error == "back":
        suspected, back = f"No older checkpoint is there to go back to: that one, or {of_data}, is suspected", ""
    else:
        suspected = f"That checkpoint, or {of_data}, is suspected" if error.loaded else f"Suspected is {of_data}"
        back = "--on-repeated-error back to go on from the checkpoint before, " if error.loaded else ""
    return f"{suspected}: correct the cause and give --on-repeated-error retry, or give {back}--load-tag or other data"


def _committed_before(save: str, step: int) -> str | None:
    """The newest checkpoint in --save of an earlier iteration than `step`."""
    search = Search(Path(save), None)
    for _ in range(search.number):
        candidate, _ = search.next()
        if candidate is not None and candidate.manifest is not None and candidate.step < step:
            return candidate.tag
    return None


class StepErrors:
    """The errors of one start, on each rank; `generation`: of its hold on --save. `loaded`: as in StepError."""

    def __init__(self, save: str | None, generation: int, loaded: int, rank: int) -> None:
        self._directory = None if save is None or is_uri(save) else Path(save) / names.GENERATIONS
        self._generation, self._loaded, self._rank = generation, loaded, rank
        known = [] if save is None or self._directory is None or rank != 0 else recorded(save)
        self._until = max((error.step for error in known), default=None)  # once it is done, they are over

    def note(self, error: BaseException, step: int) -> None:
        """Record what ends this rank in iteration `step`; of several ranks the first counts."""
        if self._directory is None:
            return
        described = StepError(step, self._loaded, _compared(error), _shown(error), self._rank)
        draft = self._directory / f".error_{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):  # it must not hide the error itself
            draft.write_text(json.dumps(asdict(described)))
            try:
                os.link(draft, self._directory / f"error_{self._generation:08d}")
            finally:
                draft.unlink()
            self._remove(_files(self._directory)[:-STARTS])

    def passed(self, step: int) -> None:
        """Iteration `step` is done: errors at it and before are over. Removes their records, on rank 0."""
        if self._until is None or step < self._until or self._directory is None:
            return
        self._until = None
        self._remove(_files(self._directory))

    def _remove(self, files: list[str]) -> None:
        for name in files:
            with contextlib.suppress(OSError):
                os.unlink(f"{self._directory}/{name}")


def _shown(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:_MAX_TEXT]


def _compared(error: BaseException) -> str:
    """Type and message of the error, numbers left out, and the function that raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    place = f" in {frames[-1].f_globals.get('__name__')}:{frames[-1].f_code.co_name}" if frames else ""
    return _NUMBERS.sub("N", _shown(error)) + place
