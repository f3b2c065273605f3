"""Who may save into a directory: one launch at a time, by a fencing generation.

Every launch that saves claims the next generation when it starts, by creating a file of that number in
SAVE/.generations (O_EXCL: two launches never get the same number). The highest number owns the directory. The owner
checks before every change that it still is, under a lock where the file system has one; a launch that finds a higher
number is superseded: it changes nothing more. See "Ownership of the save directory" in docs/decisions.md.

The file says who the owner is, and its modification time is the owner's heartbeat, so that a launch can be refused
beside another one that is provably alive. Standard library only: a directory is claimed before anything is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpointing.engines.errors import SaveDirectoryInUseError, SaveDirectorySupersededError
from megatron.checkpointing.store import naming as names
from megatron.config.uris import Location
from megatron.fileio.no_links import make_directory
from megatron.processes.patience import looks
from restart_trace import clock
from restart_trace.regular import open_regular, read_regular
from restart_trace.strict_json import read_json

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
# How long a new launch looks whether an owner that seems to be alive still is: a killed one may be on its way out.
PATIENCE_S = 1.0
# An owner whose heart has not beaten for so long is not waited for at all.
_STALE_S = 5.0
_LOCK_PATIENCE_S = 1.0
# How long an owner's file may be without its content, or listed though it is gone.
_SETTLE_S = 0.2
_POLL_S = 0.02
# Begins the names of files that are there for a moment, to ask the file system for its time.
_PROBE = ".probe_"
_RUN_ID = "run_id"
RUN_ID_BYTES = 64  # more than one has
MAX_OWNER_BYTES = 1 << 16  # of a file of .generations; ours have less than 1 kB
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_PF_EXITING = 0x4  # linux/sched.h: the flag of a process that is being torn down
_RELEASED = 0  # the heartbeat, in seconds since 1970, of an owner that has ended by itself


@dataclass(frozen=True)
class Owner:
    """A launch that has claimed a directory, by its process of rank 0."""

    generation: int
    launch_id: str
    launch_key: str = ""  # equal on all ranks of a launch: restart_trace.cycles.job_key
    host: str = ""
    pid: int = 0
    boot_id: str = ""
    pid_namespace: str = ""
    process_start_ticks: int | None = None  # since boot; tells a process from a later one with the same pid
    claimed: str = ""  # UTC, ISO 8601

    def __str__(self) -> str:
        return (
            f"launch {self.launch_id} (generation {self.generation}, host {self.host or 'unknown'}, pid {self.pid}, "
            f"since {self.claimed or 'unknown'})"
        )


class Ownership:
    """This launch's hold on a directory; of rank 0 alone. All methods may be called from any thread.

    `run_id`: of all launches that own this directory, one after another. `follows_itself`: the owner before was this
    launch, too, at an earlier start of its ranks.
    """

    def __init__(self, save_dir: Path, owner: Owner, run_id: str, *, follows_itself: bool = False) -> None:
        self.save_dir = save_dir
        self.run_id = run_id
        self.owner = owner
        self.follows_itself = follows_itself
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="owner-heartbeat", daemon=True)
        self._heart.start()

    @property
    def generation(self) -> int:
        return self.owner.generation

    def check(self) -> None:
        """Raises SaveDirectorySupersededError, naming the successor, if a later launch owns the directory."""
        mine = _file(self.save_dir, self.generation)
        make_directory(mine.parent)
        if not _is_there(mine):
            # A successor has removed it. Network file systems list a directory anew once it has changed.
            _now_on(self.save_dir)
        newest = newest_owner(self.save_dir)
        if newest is None or newest.generation < self.generation:
            logger.warning("--save %s: %s was emptied; going on as its owner", self.save_dir, mine.parent.name)
            _write(self.save_dir, self.owner)
            _write_run_id(self.save_dir, self.run_id)
        elif newest.generation > self.generation:
            raise superseded(self.save_dir, newest, self.owner)

    @contextlib.contextmanager
    def exclusively(self) -> Iterator[None]:
        """A context in which the directory may be changed: no launch claims it meanwhile, where files can be locked.

        Where they cannot, what is done in it must stay harmless if another launch claims the directory in its midst.
        Raises SaveDirectorySupersededError as `check`.
        """
        self.check()
        with _locked(self.save_dir):
            self.check()
            yield

    def release(self) -> None:
        """Tell later launches that this one has ended: they need not look whether it is alive."""
        self._ended.set()
        self._heart.join()
        with contextlib.suppress(OSError):
            os.utime(_file(self.save_dir, self.generation), (_RELEASED, _RELEASED), follow_symlinks=False)

    def _beat(self) -> None:
        path = _file(self.save_dir, self.generation)
        while not self._ended.wait(HEARTBEAT_S):
            # A successor removes the file; storage may be away for a while.
            with contextlib.suppress(OSError):
                os.utime(path, follow_symlinks=False)


def claim(save_dir: Path, launch_key: str = "", *, take_over: bool = False, restarted: bool = False) -> Ownership:
    """Become the owner of `save_dir`, which is there; for rank 0. Waits PATIENCE_S at most, and as a rule not at all.

    `restarted`: the launcher has started the ranks of this launch again. Then an owner with the same `launch_key` is
    the start before, whose ranks the launcher has ended or whose node is lost: its heartbeat is not waited for.
    Raises SaveDirectoryInUseError if the present owner is provably alive, unless `take_over`; OSError if the directory
    cannot be written.
    """
    make_directory(save_dir / names.GENERATIONS)
    while True:
        present = newest_owner(save_dir)
        own = restarted and present is not None and present.launch_key == launch_key != ""
        if present is not None and not take_over and not own and _is_alive(save_dir, present):
            _refuse_beside(save_dir, present)
            continue
        with _locked(save_dir):
            mine = _create(save_dir, launch_key, expected=present)
            run_id = _run_id(save_dir) if mine is not None else ""
        if mine is not None:
            _remove_leftovers(save_dir, mine.generation)
            if present is not None:
                logger.debug("--save %s: generation %d follows %s", save_dir, mine.generation, present)
            return Ownership(save_dir, mine, run_id, follows_itself=own)


def check_not_in_use(save_dir: Path, launch_key: str, *, first_of_host: bool) -> None:
    """For the other ranks: raises SaveDirectoryInUseError where rank 0's claim will be refused.

    So that they end, too, instead of waiting for rank 0. Without `first_of_host` only an owner on this host is looked
    for: thousands of ranks need not watch one heartbeat.
    """
    while (present := newest_owner(save_dir)) is not None and present.launch_key != launch_key:
        if not first_of_host and present.host != socket.gethostname():
            return
        if not _is_alive(save_dir, present):
            return
        _refuse_beside(save_dir, present)


def _refuse_beside(save_dir: Path, present: Owner) -> None:
    """Raises SaveDirectoryInUseError, unless another launch owns the directory by now, or the file was half written."""
    if newest_owner(save_dir) == present:
        raise in_use(save_dir, present)


def in_use(save: Location, owner: Owner) -> SaveDirectoryInUseError:
    """The error of a launch that finds a living owner of its --save."""
    return SaveDirectoryInUseError(
        f"--save {save}: {owner} saves there and is alive; end it first, give another --save, or give --take-over: it "
        "then stops saving and ends"
    )


def superseded(save: Location, newest: Owner | int, owner: Owner) -> SaveDirectorySupersededError:
    """The error of `owner` when it finds that `newest`, a launch or its generation, owns --save."""
    return SaveDirectorySupersededError(
        f"--save {save}: {newest} has superseded this one, {owner}; this launch has stopped saving and ends"
    )


def newest_owner(save_dir: Path) -> Owner | None:
    """The owner of `save_dir`; None if it has never had one. An unreadable file still counts by its number.

    Looked at again for _SETTLE_S if it is unreadable: the file may just be being written.
    """
    newest = 0
    for _ in looks(_SETTLE_S, _POLL_S):
        numbers = _generations(save_dir)
        if not numbers:
            return None
        newest = max(numbers)
        try:
            return owner_of(newest, read_json(_file(save_dir, newest), MAX_OWNER_BYTES))
        except FileNotFoundError:  # a later launch has removed it, and the listing is old
            with contextlib.suppress(OSError):
                _now_on(save_dir)
        except (OSError, ValueError, TypeError):
            continue
    return Owner(newest, launch_id="unknown")


def owner_of(generation: int, content: Any) -> Owner:
    """The owner that the `content` of a generation's file tells of.

    Raises ValueError or TypeError for what no launch has written.
    """
    if not isinstance(content, dict) or content.get("generation") != generation:
        raise ValueError("no owner of this generation")
    owner = Owner(**content)
    shown = (owner.launch_id, owner.host, owner.claimed)
    texts = (*shown, owner.launch_key, owner.boot_id, owner.pid_namespace)
    if not all(isinstance(text, str) for text in texts) or type(owner.pid) is not int:
        raise ValueError("fields of the wrong type")
    if not all(text.isprintable() for text in shown):
        raise ValueError("the owner has unprintable characters")
    return owner


def _generations(save_dir: Path) -> list[int]:
    try:
        found = os.listdir(save_dir / names.GENERATIONS)
    except FileNotFoundError:
        return []
    return generations_among(found)


def generations_among(entries: Iterable[str]) -> list[int]:
    """The generations among the names of what .generations holds."""
    return [int(name) for name in entries if name.isascii() and name.isdigit() and name == f"{int(name):08d}"]


def _file(save_dir: Path, generation: int) -> Path:
    return save_dir / names.GENERATIONS / f"{generation:08d}"


def new_owner(generation: int, launch_key: str) -> Owner:
    """This process as the owner of that generation."""
    return Owner(
        generation=generation,
        launch_id=uuid.uuid4().hex[:12],
        launch_key=launch_key,
        host=socket.gethostname(),
        pid=os.getpid(),
        boot_id=clock.boot_id(),
        pid_namespace=_pid_namespace(),
        process_start_ticks=clock.process_start_ticks(),
        claimed=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _create(save_dir: Path, launch_key: str, expected: Owner | None) -> Owner | None:
    """Claim the generation after that of `expected`; None if another launch was first."""
    generation = 1 if expected is None else expected.generation + 1
    mine = new_owner(generation, launch_key)
    try:
        _write(save_dir, mine)
    except FileExistsError:
        return None
    # The number may have been free only because later owners had removed the older files.
    return mine if max(_generations(save_dir)) == generation else None


def _write(save_dir: Path, owner: Owner) -> None:
    """Raises FileExistsError if the generation is another launch's; OSError, with no file left, if there is no room."""
    path = _file(save_dir, owner.generation)
    file = path.open("x")
    try:
        with file:
            json.dump(dataclasses.asdict(owner), file)
    except OSError:
        path.unlink(missing_ok=True)  # it would supersede the present owner
        raise


def _run_id(save_dir: Path) -> str:
    """The id of the run that saves into the directory: 32 hexadecimal digits, made at its first claim.

    It is part of the directory: one that is moved as a whole keeps it, and a checkpoint that is copied into another
    directory does not match. Raises OSError if it cannot be read or written.
    """
    path = save_dir / names.GENERATIONS / _RUN_ID
    found = run_id_of(save_dir)
    if found:
        return found
    if os.path.lexists(path):
        logger.warning(
            "%s: holds no id: the run gets a new one, and does not remove the checkpoints it has saved", path
        )
    return _write_run_id(save_dir, uuid.uuid4().hex)


def run_id_of(save_dir: Path) -> str:
    """The id of the run that saves into the directory; "" if it has none. Raises OSError if it cannot be read."""
    try:
        text = read_regular(save_dir / names.GENERATIONS / _RUN_ID, RUN_ID_BYTES).decode("ascii", "replace").strip()
    except (FileNotFoundError, ValueError):  # ValueError: too long
        return ""
    return text if is_run_id(text) else ""


def is_run_id(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{32}", text) is not None


def _write_run_id(save_dir: Path, run_id: str) -> str:
    path = save_dir / names.GENERATIONS / _RUN_ID
    draft = path.with_name(f"{_PROBE}{uuid.uuid4().hex}")  # which the next claim removes if this one is killed
    with draft.open("x") as file:
        file.write(f"{run_id}\n")
    os.replace(draft, path)
    return run_id


def _remove_leftovers(save_dir: Path, generation: int) -> None:
    """Remove the files of generations that are over, and probes of processes that were killed meanwhile.

    A young probe may be in use on another host, where a network file system would answer ESTALE for it.
    """
    leftovers = [_file(save_dir, number) for number in _generations(save_dir) if number < generation]
    with contextlib.suppress(FileNotFoundError):  # superseded meanwhile
        now = _modified(_file(save_dir, generation))
        probes = (save_dir / names.GENERATIONS).glob(f"{_PROBE}*")
        leftovers += [probe for probe in probes if now - probe.stat().st_mtime > _STALE_S]
    for path in leftovers:
        with contextlib.suppress(OSError):
            path.unlink()


def _is_alive(save_dir: Path, owner: Owner) -> bool:
    """Whether `owner` runs for certain: False where that cannot be found out within PATIENCE_S."""
    try:
        last_beat = _modified(_file(save_dir, owner.generation))
    except FileNotFoundError:
        return False  # superseded meanwhile
    if last_beat == _RELEASED:
        return False
    known = runs_here(owner)
    if known is not None:
        return known
    # On another host, or in another container: by the clock of the file system alone, not those of two hosts.
    return _now_on(save_dir) - last_beat < _STALE_S and _beats(save_dir, owner, last_beat)


def runs_here(owner: Owner) -> bool | None:
    """Whether the process of `owner` runs for certain; None if it is on another host, or in another container."""
    here = (socket.gethostname(), clock.boot_id(), _pid_namespace())
    if all(here) and (owner.host, owner.boot_id, owner.pid_namespace) == here:
        return _outlasts(lambda: _process_runs(owner))
    return None


def _outlasts(alive: Callable[[], bool]) -> bool:
    """Whether `alive()` stays true for PATIENCE_S: a process that was just killed takes a while to be gone."""
    return all(alive() for _ in looks(PATIENCE_S, _POLL_S))


def _process_runs(owner: Owner) -> bool:
    """Whether the process on this host is there, no zombie, not torn down and not killed: /proc/PID/stat, proc(5)."""
    try:
        fields = Path(f"/proc/{owner.pid}/stat").read_text().rpartition(")")[2].split()
        status = Path(f"/proc/{owner.pid}/status").read_text()
    except OSError:
        return False
    state, flags, start_ticks = fields[0], int(fields[6]), int(fields[19])
    if start_ticks != owner.process_start_ticks or state in "ZX" or flags & _PF_EXITING:
        return False
    pending = re.findall(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)$", status, re.MULTILINE)
    return not any(int(mask, 16) & 1 << signal.SIGKILL - 1 for mask in pending)


def _beats(save_dir: Path, owner: Owner, last_beat: float) -> bool:
    """Whether a heartbeat after `last_beat` is seen within PATIENCE_S."""
    file = _file(save_dir, owner.generation)
    with contextlib.suppress(FileNotFoundError):  # superseded meanwhile
        return any(_modified(file) != last_beat for _ in looks(PATIENCE_S, min(HEARTBEAT_S / 2, PATIENCE_S)))
    return False


def _is_there(path: Path) -> bool:
    try:
        _modified(path)
    except FileNotFoundError:
        return False
    return True


def _modified(path: Path) -> float:
    """Modification time, s. The file is opened for it: network file systems then ask the server."""
    fd = open_regular(path)
    try:
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)


def _now_on(save_dir: Path) -> float:
    """The present time on the clock of the file system, s."""
    probe = save_dir / names.GENERATIONS / f"{_PROBE}{uuid.uuid4().hex}"
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):  # a launch that claims the directory removes old probes
            os.unlink(probe)


@contextlib.contextmanager
def _locked(save_dir: Path) -> Iterator[None]:
    """Hold the lock of `save_dir`. Without one where the file system has none, or its holder hangs: see `Ownership`."""
    fd = os.open(save_dir / names.GENERATIONS / "lock", _LOCK_FLAGS, 0o666)
    try:
        for _ in looks(_LOCK_PATIENCE_S, _POLL_S):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                continue
            except OSError:
                break
        yield
    finally:
        # What was done with the lock is done. Nothing was written to its file that a close could fail to store.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing it is not enough where a process was forked meanwhile
        with contextlib.suppress(OSError):
            os.close(fd)


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
