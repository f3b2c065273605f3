"""Detects an error that ends one start after another at the same step, before torch is imported.

A rank that ends by an error of its own in training leaves a record in SAVE/.generations, named after the generation of
its start; every later start reads these records. If three starts of one run in a row ended with the same error at the
same step, another restart does not help: the checkpoint that they resumed from, or the data of that step, is suspected.
A run is identified by the flags of its first start (first_start.py), so this works before its first checkpoint.

A crash, such as SIGSEGV, leaves a record of its own (crashes.py). No fault handler writes into object storage: with a
--save there the record is on the node's own disk, and the next start on that node puts it beside the others. After the
prefix was emptied, a new run begins there: it ignores the record, which is removed when it is old. SIGKILL and the
loss of another rank or node leave no record; nor does the abort with which NCCL's watchdog answers such a loss. A start
that passes the step removes the records.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpointing.engines.errors import CheckpointError
from megatron.checkpointing.preflight.crashes import CrashFile, crash_in
from megatron.checkpointing.preflight.first_start import FirstStart, began, kept_by, newest_manifest, resumes
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.search import Candidate, Search
from megatron.config import CheckpointConfig
from megatron.config.errors import REPEATED
from megatron.config.uris import is_uri
from megatron.fileio.objects.errors import ObjectStoreError
from restart_trace.strict_json import parse_json, read_json

logger = logging.getLogger(__name__)

STARTS = 3  # in a row with the same error: then it is suspected
_RECORD, _CRASH, _BACK = "error_", "crash_", "back_"  # each with the generation of the start
_MAX_BYTES = 1 << 14
_MAX_TEXT = 300
# Addresses, ranks and sizes with their units: they differ between starts.
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?: (?:bytes|[KMGT]i?B)\b)?")
# torch raises an error of a data worker once more in the rank, under a message that holds the worker's traceback.
_OF_WORKER = re.compile(r"in DataLoader worker process \d+\.\s*Original Traceback \(most recent call last\):")
_FRAME = re.compile(r'^ *File "(.+)", line \d+, in (.+)$')
# On a node's own disk, of a run that saves to object storage.
_CRASHES_OF_A_RUN = re.compile(r"crashes_[0-9a-f]{16}")
_OLD_S = 30 * 24 * 3600.0  # after which no start of that run is expected on the node any more


class RepeatedErrorError(CheckpointError):
    """The same error has ended several starts in a row at the same step: another one would end so, too."""

    exit_code = REPEATED


@dataclass(frozen=True)
class StepError:
    """An error that ended a start in training.

    `generation`: of its hold on --save; `run`: FirstStart.all_flags of its run; `step`: the iteration that was
    under way; `loaded`: that of the checkpoint which the start went on from, 0 without one; `place`: that checkpoint,
    as a message names it; `error`: type, place and message without numbers, by which errors are compared; `message`: as
    it was.
    """

    generation: int
    run: str
    step: int
    loaded: int
    place: str
    error: str
    message: str
    rank: int

    def same(self, other: StepError) -> bool:
        return (self.run, self.step, self.error) == (other.run, other.step, other.error)


class _Back(NamedTuple):
    """A start that went back to `tag` when `sequence` was that of the newest checkpoint in --save."""

    generation: int
    tag: str
    sequence: int


class _Directory:
    """Where the records of a --save in a file system are. All methods raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def crashes_of(self, run_id: str) -> _Directory:
        """Where the ranks of this node write their crashes. `run_id`: of --save, as its ownership has it."""
        return self

    def list(self) -> list[str]:
        return os.listdir(self.path)

    def read(self, name: str) -> Any:
        """Raises ValueError if it is no JSON."""
        return read_json(self.path / name, _MAX_BYTES)

    def crash(self, name: str) -> dict[str, Any] | None:
        """As `crash_in`."""
        return crash_in(str(self.path / name))

    def create(self, name: str, content: str) -> None:
        """One that is there already stays."""
        with contextlib.suppress(FileExistsError), open(self.path / name, "x") as file:
            file.write(content)

    def remove(self, name: str) -> None:
        os.unlink(self.path / name)


class _Prefix:
    """Where the records of a --save in object storage are. As _Directory; raises ObjectStoreError."""

    def __init__(self, options: CheckpointConfig) -> None:
        from megatron.checkpointing.store.bucket.checkpoints import open_checkpoints

        stored = open_checkpoints("--save", str(options.save), options)
        self._bucket, self._uri, self._root = stored.bucket, stored.uri, stored.root
        self._prefix = stored.uri.key(f"{names.GENERATIONS}/")

    def crashes_of(self, run_id: str) -> _Directory:
        """On this node's own disk. A prefix that was emptied has another `run_id`, and another directory."""
        run = hashlib.sha256(f"{self._bucket.endpoint} {self._uri} {run_id}".encode()).hexdigest()[:16]
        return _Directory(self._root / f"crashes_{run}")

    def list(self) -> list[str]:
        return [info.key.removeprefix(self._prefix) for info in self._bucket.list(self._prefix)]

    def read(self, name: str) -> Any:
        return parse_json(self._bucket.get(self._prefix + name, _MAX_BYTES)[0].decode())

    def crash(self, name: str) -> dict[str, Any] | None:
        """One that was published, as the node's file told it. Raises ValueError if it is no JSON."""
        return self.read(name)

    def publish_crashes(self) -> None:
        """Put the crashes that earlier starts of this run have left on this node beside the other records.

        Of the ranks of several nodes the first counts whose node starts again. If storage does not answer, the checks
        after this one tell so.
        """
        from megatron.checkpointing.store.bucket.generations import run_id_there

        if not _crash_directories(self._root):  # nothing to ask the store for
            return
        run_id = None
        with contextlib.suppress(ObjectStoreError):
            run_id = run_id_there(self._bucket, self._uri)
        if run_id is None:  # no start has been there
            return
        crashes = self.crashes_of(run_id)
        for name in _listed(crashes, _CRASH):
            with contextlib.suppress(*_AWAY, ValueError):
                crash = crashes.crash(name)
                if crash is not None:
                    self.create(name, json.dumps(crash))
                    crashes.remove(name)
                    _remove(self, _listed(self, _CRASH)[:-STARTS])

    def create(self, name: str, content: str) -> None:
        self._bucket.create(self._prefix + name, content.encode())

    def remove(self, name: str) -> None:
        self._bucket.delete([self._prefix + name])


_AWAY = (OSError, ObjectStoreError)  # what storage refuses


def remove_old_crashes(root: Path) -> None:
    """Remove the crashes of all runs in `root`, on this node's own disk, that nothing was written to for 30 days.

    The runs have ended without a good end here, and no start of them has come to this node since.
    """
    for directory in _crash_directories(root):
        with contextlib.suppress(OSError):
            _remove_if_old(_Directory(directory))


def _crash_directories(root: Path) -> list[Path]:
    """Where ranks of this node have written their crashes: a directory for each run."""
    try:
        there = [entry for entry in os.scandir(root) if _CRASHES_OF_A_RUN.fullmatch(entry.name)]
        return [Path(entry.path) for entry in there if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def publish_crashes(options: CheckpointConfig) -> None:
    """With a --save in object storage: put there what ranks of this node have left of their crashes.

    Rank 0 judges for all hosts. It may do so before another host has published: then its next start knows.
    """
    if is_uri(options.save):
        _Prefix(options).publish_crashes()


def _remove_if_old(crashes: _Directory) -> None:
    """Raises OSError if another process is removing it."""
    there = _listed(crashes, _CRASH)
    if all(time.time() - (crashes.path / name).lstat().st_mtime > _OLD_S for name in ("", *there)):
        _remove(crashes, there)
        crashes.path.rmdir()


def _place_of(options: CheckpointConfig) -> _Directory | _Prefix:
    save = str(options.save)
    return _Prefix(options) if is_uri(save) else _Directory(Path(save) / names.GENERATIONS)


def _listed(place: _Directory | _Prefix, *kinds: str) -> list[str]:
    """Names of the records of these kinds, each oldest first."""
    try:
        there = sorted(place.list())
    except _AWAY:
        return []
    return [name for kind in kinds for name in there if re.fullmatch(rf"{kind}\d{{8}}", name)]


def recorded(options: CheckpointConfig) -> list[StepError]:
    """The errors that are recorded in --save, oldest first; what no start has written is left out.

    A crash precedes the errors of other ranks of its start, but an abort follows them: it may be a library's answer to
    the loss of the rank with the error.
    """
    place = _place_of(options)
    errors: dict[int, StepError] = {}  # by generation
    for name in _listed(place, _RECORD, _CRASH):
        with contextlib.suppress(*_AWAY, ValueError, TypeError, KeyError):
            error = StepError(**(_of_crash(place.crash(name)) if name.startswith(_CRASH) else place.read(name)))
            if not all(type(number) is int for number in (error.generation, error.step, error.loaded, error.rank)):
                continue
            if error.generation not in errors or not error.error.startswith("SIGABRT"):
                errors[error.generation] = error
    return [errors[generation] for generation in sorted(errors)]


def _of_crash(crash: dict[str, Any] | None) -> dict[str, Any]:
    """The fields of StepError. Raises ValueError without a crash."""
    if crash is None:
        raise ValueError("no crash")
    told = f"{crash.pop('signal')}{crash.pop('function')}"
    return crash | {"error": told, "message": _one_line(told)[:_MAX_TEXT]}


def _last_back(options: CheckpointConfig) -> _Back | None:
    """The last start that went back, of those since the records were removed."""
    place = _place_of(options)
    for name in reversed(_listed(place, _BACK)):
        with contextlib.suppress(*_AWAY, ValueError, TypeError):
            back = _Back(**place.read(name))
            if type(back.generation) is int and type(back.sequence) is int and type(back.tag) is str:
                return back
    return None


def checkpoint_before(options: CheckpointConfig, later: bool) -> str | None:
    """The tag to go back to, as --on-repeated-error back says; None if there is nothing to go back from.

    `options`: of the command; `later`: --save holds checkpoints of this run, and flags of its first start are given.
    Raises RepeatedErrorError if the same error has ended STARTS starts of this run in a row at the same step and the
    flag is not `retry`, or if going back has not helped or is not possible. Raises as `newest_manifest`.
    """
    if options.save is None:
        return None
    publish_crashes(options)
    last = recorded(options)[-STARTS:]
    if len(last) < STARTS or not all(error.same(last[-1]) for error in last):
        return None
    if last[-1].run != began(options).all_flags:
        return None
    if options.on_repeated_error == "retry":
        logger.warning("%s; going on all the same, as --on-repeated-error retry says", _told(last))
        return None
    # Only a start that goes on from --save can go on from another checkpoint there.
    resumed = later or (resumes(options) and options.load_tag is None)
    back = _last_back(options)
    failed_since = back is not None and last[-1].generation >= back.generation
    if back is not None and resumed and not failed_since and _committed_since(options, back):
        return None
    older = None
    if options.on_repeated_error == "back" and resumed and not failed_since:
        older = _committed_before(options, last[-1].loaded if back is None else (names.step_of(back.tag) or 0) + 1)
    if older is not None:
        logger.warning("%s; going back to %s, as --on-repeated-error back says", _told(last), older)
        return older
    raise RepeatedErrorError(f"{_told(last)}. {_advice(options, last[-1], resumed, failed_since)}")


def _told(last: list[StepError]) -> str:
    error = last[-1]
    places = " and ".join({one.loaded: one.place for one in sorted(last, key=lambda one: one.loaded)}.values())
    return (
        f"iteration {error.step} has ended {len(last)} starts in a row with the same error (rank {error.rank}: "
        f"{error.message}), going on from {places}"
    )


def _advice(options: CheckpointConfig, error: StepError, resumed: bool, failed_since: bool) -> str:
    """`resumed`: this start goes on from --save; `failed_since`: the error has come again after going back."""
    of_data, back = f"the data of iteration {error.step} or the program", ""
    if failed_since:
        suspected = f"As going back has not helped, {of_data} is suspected"
    elif options.on_repeated_error == "back":
        suspected = f"No older checkpoint of this run is there to go back to: that one, or {of_data}, is suspected"
    else:
        suspected = f"That checkpoint, or {of_data}, is suspected" if error.loaded else f"Suspected is {of_data}"
        if error.loaded and resumed:
            back = ", or give --on-repeated-error back to go on from the checkpoint before, or --load-tag"
    return f"{suspected}: correct the cause and give --on-repeated-error retry{back}"


def _committed_before(options: CheckpointConfig, step: int) -> str | None:
    """The newest checkpoint in --save of an earlier iteration than `step`, of the run that saved there last."""
    run = None
    for candidate in _newest_first(options):
        if candidate.manifest is None:
            continue
        run = run or kept_by(candidate.manifest)
        if candidate.step < step and kept_by(candidate.manifest) == run:
            return candidate.tag
    return None


def _newest_first(options: CheckpointConfig) -> Iterator[Candidate]:
    """The complete checkpoints in --save. Raises ObjectStoreError."""
    save = str(options.save)
    if is_uri(save):
        from megatron.checkpointing.store.bucket.checkpoints import open_checkpoints

        yield from open_checkpoints("--save", save, options).discover(None)[0]
        return
    search = Search(Path(save), None)
    for _ in range(search.number):
        candidate, _ = search.next()
        if candidate is not None:
            yield candidate


def _committed_since(options: CheckpointConfig, back: _Back) -> bool:
    """Whether a checkpoint was committed after a start went back: then the run goes on from that one."""
    newest = newest_manifest(options)
    return newest is not None and newest.sequence > back.sequence


class StepErrors:
    """The errors of one start, on each rank.

    `options`: of this start; `begins`: how its run began; `generation`: of its hold on --save, and `run_id` of --save,
    both as its ownership has them; `loaded`: as in StepError; `back_to`: the checkpoint that --on-repeated-error back
    went back to, which rank 0 records.
    """

    def __init__(
        self, options: CheckpointConfig, begins: FirstStart, generation: int, loaded: int, rank: int, *,
        run_id: str = "", back_to: str | None = None,
    ) -> None:  # fmt: skip
        save = options.save
        self._options = options
        self._run_id = run_id
        self._generation, self._run, self._loaded, self._rank = generation, begins.all_flags, loaded, rank
        of_save = loaded > 0 and resumes(options)
        self._place = f"{save}/{names.tag_of(loaded)}" if of_save else f"iteration {loaded}"
        self._crash: CrashFile | None = None
        known = [] if save is None or rank != 0 else recorded(options)
        self._until = max((error.step for error in known), default=None)  # once it is done, they are over
        if back_to is not None and rank == 0:
            newest = newest_manifest(options)
            back = _Back(generation, back_to, 0 if newest is None else newest.sequence)
            self._write(_BACK, back._asdict())
        if save is not None:
            self._expect_crash()

    def _expect_crash(self) -> None:
        known = asdict(StepError(self._generation, self._run, 0, self._loaded, self._place, "", "", self._rank))
        place = _place_of(self._options)
        crashes = place.crashes_of(self._run_id)
        path = crashes.path / self._name(_CRASH)
        earlier = [name for name in _listed(crashes, _CRASH) if name < path.name]
        try:
            if isinstance(place, _Prefix):
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._crash = CrashFile(str(path), self._rank, known)
            self._crash.begin(self._loaded + 1)
        except OSError as refused:
            logger.warning("%s: cannot be written, so a repeated crash goes unnoticed: %s", path, refused)
        if isinstance(place, _Prefix):  # this node's, which publish_crashes has read
            _remove(crashes, earlier)
        elif self._rank == 0:
            _remove(place, earlier[:-STARTS])

    def _name(self, kind: str) -> str:
        return f"{kind}{self._generation:08d}"

    def note(self, error: BaseException, step: int) -> str:
        """Record what ends this rank in iteration `step`; of several ranks the first counts. Returns its message."""
        message, place = _cause(error)
        if self._options.save is None:
            return message[:_MAX_TEXT]
        described = StepError(
            self._generation, self._run, step, self._loaded, self._place,
            _NUMBERS.sub("N", message)[:_MAX_TEXT] + place, message[:_MAX_TEXT], self._rank,
        )  # fmt: skip
        self._write(_RECORD, asdict(described))
        return described.message

    def _write(self, kind: str, content: dict[str, object]) -> None:
        """A record that is there already stays. What storage refuses must not hide the error that ends this rank."""
        name = self._name(kind)
        try:
            place = _place_of(self._options)
            place.create(name, json.dumps(content))
        except _AWAY as refused:
            where = f"{self._options.save}/{names.GENERATIONS}/{name}"
            logger.warning("%s: not written, so a repeated error goes unnoticed: %s", where, refused)
            return
        _remove(place, _listed(place, kind)[:-STARTS])

    def passed(self, step: int) -> None:
        """Iteration `step` is done: errors at it and before are over. Removes their records, on rank 0.

        A crash is of the next one from here on, also in an evaluation or a save, as an error is.
        """
        if self._crash is not None:
            self._crash.begin(step + 1)
        if self._until is None or step < self._until:
            return
        self._until = None
        place = _place_of(self._options)
        for kind in (_RECORD, _CRASH, _BACK):
            _remove(place, [name for name in _listed(place, kind) if name != self._name(_CRASH)])

    def close(self, *, trained: bool = False) -> None:
        """Training is over, or an error ends it: a crash while this process ends is not its cause.

        `trained`: it is over as it should be, and leaves nothing on the node's own disk. Otherwise the file may have a
        crash of another rank of this node.
        """
        if self._crash is None:
            return
        self._crash.close()
        self._crash = None
        place = _place_of(self._options)
        if trained and isinstance(place, _Prefix):
            crashes = place.crashes_of(self._run_id)
            _remove(crashes, [self._name(_CRASH)])
            with contextlib.suppress(OSError):  # another rank has done so
                crashes.path.rmdir()


def _remove(place: _Directory | _Prefix, files: list[str]) -> None:
    for name in files:
        with contextlib.suppress(*_AWAY):
            place.remove(name)


def _cause(error: BaseException) -> tuple[str, str]:
    """Type and message of what went wrong, in one line, and the function that raised it: " in MODULE:FUNCTION".

    Of an error in a data worker these are the worker's, from the traceback in the message of torch.
    """
    of_worker = _OF_WORKER.search(str(error))
    if of_worker is not None:
        lines = str(error)[of_worker.end() :].splitlines()
        frames = [(number, match) for number, line in enumerate(lines) if (match := _FRAME.match(line))]
        if frames:
            number, frame = frames[-1]
            after = itertools.dropwhile(lambda line: line.startswith(" "), lines[number + 1 :])
            return _one_line(" ".join(after)), f" in {frame[1]}:{frame[2]}"
    called = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    place = f" in {called[-1].f_globals.get('__name__')}:{called[-1].f_code.co_name}" if called else ""
    return _one_line(f"{type(error).__name__}: {error}"), place


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
