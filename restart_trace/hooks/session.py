"""The trace of this process, opened once it is known to be a rank, and the operations in progress.

A process is a rank if it has RANK in its environment when it imports torch, or joins a process group later. A rank
marks its environment, so that the processes it starts, which inherit RANK, are not traced as ranks.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from restart_trace import cycles
from restart_trace.clock import now_ns
from restart_trace.hooks.background import Background
from restart_trace.hooks.running import Running
from restart_trace.hooks.timeline import Timeline
from restart_trace.hooks.variables import RANK_PID_VARIABLE
from restart_trace.mounts import storage_fields
from restart_trace.process import RankIdentity, rank_fields
from restart_trace.raised import Raised
from restart_trace.recorder import Recorder, given
from restart_trace.schema import COUNT, RANK_FILE_PATTERN
from restart_trace.sink import JsonlSink
from restart_trace.startup import Startup

_SHORT_IMPORT_NS = 100_000  # shorter imports are not recorded
# Programs that run in a process which is not a rank, even if its environment has RANK.
_LAUNCHERS = {
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed", "deepspeed.launcher.runner",
    "deepspeed.launcher.launch", "accelerate", "accelerate.commands.launch",
}  # fmt: skip
_FLAGS_WITH_VALUE = {"-X", "-W", "--check-hash-based-pycs"}  # of the interpreter
logger = logging.getLogger(__name__)


class Session:
    """State that the hooks share. The thread that installed them is the one that trains; others save or load beside it.

    A save or load of another thread is in the background: its spans are not blocking.
    """

    def __init__(
        self,
        trace_dir: Path,
        installed_ns: int,
        imports: Sequence[tuple[int, int, int]] = (),
        thread: int | None = None,
    ) -> None:
        """`imports`: those that the program has made since `installed_ns`, as arguments of `imported`.

        `thread`: the one that trains; by default the one that calls this.
        """
        self.trace_dir = trace_dir
        self.recorder: Recorder | None = None  # once this process is known to be a rank
        self.startup: Startup | None = None
        self._starting: Timeline | None = None  # timeline of the start-up
        self._of_thread = _thread_state()  # `running`: the save or load in progress
        self.background = Background()
        self._idle: tuple[Running, int] | None = None  # one that may go on, and since when it waits (ns)
        self._step: int | None = None  # newest step of the run
        self._installed_ns = installed_ns
        self._imports = [*imports]  # before there was a recorder
        self._recorded: dict[str, Mapping[str, Any]] = {}  # type -> fields of the last such record
        self._thread = threading.get_ident() if thread is None else thread
        self._is_compiling = False
        self._backward_passes = 0  # which the training thread is in
        self._exit_status: object = None
        self._notices: set[str] = set()  # that were given
        self._has_ended = False
        self._rank = 0  # of the recorder
        self._refused = False  # the trace of this rank could not be opened
        os.register_at_fork(after_in_child=self._forked)

    def open_if_rank(self) -> None:
        """Open the trace if the environment says that this process is a rank."""
        if program_of(sys.orig_argv) in _LAUNCHERS:  # a scheduler may set RANK to the number of the node
            return
        rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        if rank.isdigit() and world_size.isdigit():
            self.open(int(rank), int(world_size))

    def open(self, rank: int, world_size: int) -> None:
        """Open the trace of this rank, unless it is open already or a rank started this process.

        If the trace directory cannot be written, that is logged once and the rank is not traced.
        """
        opened = self.recorder is not None or self._refused
        if opened or os.environ.setdefault(RANK_PID_VARIABLE, _pid()) != _pid():
            return
        try:
            self._open(rank, world_size)
        except OSError as exc:
            self._refused = True
            place = "" if exc.filename in (None, str(self.trace_dir)) else f"{exc.filename}: "
            reason = f"{place}{exc.strerror or exc}"
            logger.error("restart_trace: this rank is not traced: --trace-dir %s: %s", self.trace_dir, reason)

    def _open(self, rank: int, world_size: int) -> None:
        """Raises OSError if the trace directory cannot be written."""
        # Until DeepSpeed's grid or an mpu is known, all ranks count as data-parallel.
        identity = RankIdentity(rank, world_size, 0, (0, 0, rank), (1, 1, world_size))
        # A rank that a process group numbered, as under srun, may have neither variable in its environment.
        launch = cycles.launch_key({**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size)})
        run_id, cycle = cycles.claim_cycle(self.trace_dir, launch, rank)
        sink = JsonlSink(self.trace_dir / RANK_FILE_PATTERN.format(rank=rank, cycle=cycle))
        process = rank_fields(identity, os.environ, run_id=run_id, cycle=cycle, instrument="hooks")
        self.recorder, self._rank = Recorder(sink, process), rank
        installed_ns = self._installed_ns
        self.startup = Startup(self.recorder, self.trace_dir, rank, cycle, installed_ns, opened_ns=installed_ns)
        assert self.startup.operation is not None
        self._starting = Timeline(self.startup.operation)
        for start_ns, own_ns, end_ns in self._imports:
            self._add_import(self._starting, start_ns, own_ns, end_ns)
        atexit.register(self.recorder.close)
        atexit.register(self._ended)  # runs before the one above
        # For processes of multiprocessing, which end without atexit, and wait for their threads after this.
        Finalize(self, self._ended, exitpriority=0)

    def imported(self, start_ns: int, own_ns: int, end_ns: int) -> None:
        """Record an import by the program, including the imports that it caused; the hooks took `own_ns` of it.

        Imports within a load belong to that.
        """
        if end_ns - start_ns < _SHORT_IMPORT_NS:
            return
        if self.recorder is None:
            self._imports.append((start_ns, own_ns, end_ns))
            return
        starting = self._start_up()
        if starting is not None and self.running() is None:
            self._add_import(starting, start_ns, own_ns, end_ns)
            assert self.startup is not None
            self.startup.spent(start_ns, end_ns)

    def _add_import(self, starting: Timeline, start_ns: int, own_ns: int, end_ns: int) -> None:
        """Add the spans of an import. What the hooks took is no part of the program's imports."""
        if own_ns >= _SHORT_IMPORT_NS:
            starting.interrupted("process_start", start_ns, start_ns + own_ns)
            start_ns += own_ns
        starting.interrupted("imports", start_ns, end_ns)

    def record_coordinates(self, place: Mapping[str, Any] | None) -> None:
        """Record the coordinates of this rank, if they are known, as a coordinates record. The last record counts."""
        if place is not None:
            self._record("coordinates", place)

    def record_runtime(self, found: Mapping[str, Any]) -> None:
        """Add fields to the runtime record, and write it again. The last record counts."""
        self._record("runtime", {**self._recorded.get("runtime", {}), **found})

    def record_directory(self, kind: str, directory: str, engine_used: str | None) -> None:
        """Record the directory of checkpoints for `kind` ("save" or "load") when it is first used, and the engine.

        Directories with the same parent count as one, since some trainers use a new directory for each checkpoint.
        """
        runtime = self._recorded.get("runtime", {})
        recorded = runtime.get(f"{kind}_dir")
        names_engine = engine_used is not None and "engine_used" not in runtime
        if recorded is None or names_engine or os.path.dirname(recorded) != os.path.dirname(directory):
            self.record_runtime(given({"engine_used": engine_used}) | storage_fields(kind, directory))

    def _record(self, record_type: str, fields: Mapping[str, Any]) -> None:
        if self.recorder is not None and self._recorded.get(record_type) != fields:
            self._recorded[record_type] = fields
            self.recorder.write(record_type, **fields)

    def startup_phase(self, name: str, detail: str | None = None) -> AbstractContextManager[Any]:
        """The body is this phase of the start-up, except for phases within it. No effect once the start-up is over."""
        starting = self._start_up()
        return nullcontext() if starting is None else starting.phase(name, detail)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """The body compiles: the phase `compile` of the start-up, its first step included.

        What compiles within a save or load belongs to that.
        """
        starting, startup = self._start_up(), self.startup
        if starting is None or startup is None or self._is_compiling or self.running() is not None:
            yield
            return
        self._is_compiling, since_ns = True, 0
        try:
            with starting.phase("compile"):
                since_ns = starting.since_ns
                yield
        finally:
            self._is_compiling = False
            startup.spent(since_ns, starting.since_ns)

    def backward(self) -> AbstractContextManager[None] | None:
        """The body is a backward pass, which other threads may work on while this one waits.

        None: the start-up is over, so that it does not matter.
        """
        return None if self.startup is None or self.startup.operation is None else self._backward()

    @contextmanager
    def _backward(self) -> Iterator[None]:
        mine = self._is_mine()
        self._backward_passes += mine
        try:
            yield
        finally:
            self._backward_passes -= mine

    def compiled_backward(self, start_ns: int, end_ns: int) -> None:
        """As `compiling`, of what was compiled just now in a backward pass that this thread runs or training waits for.

        What another thread compiles while training goes on is not recorded: training does not wait for it.
        """
        startup = self.startup
        if startup is None or startup.operation is None or self._is_compiling or self.running() is not None:
            return
        if not self._is_mine() and not self._backward_passes:
            return
        assert self._starting is not None
        self._starting.interrupted("compile", start_ns, end_ns)
        startup.spent(start_ns, end_ns)

    def computes(self) -> bool:
        """Whether this is the training thread, outside of any save or load. One that may go on ends now."""
        if not self.is_training_thread() or self.running() is not None:
            return False
        if self._idle is not None:
            self.end_idle()
        return True

    def running(self) -> Running | None:
        """The save or load in progress on this thread."""
        return getattr(self._of_thread, "running", None)

    def phase(self, phase: str, detail: str | None = None) -> AbstractContextManager[Any]:
        """The body is this phase of the save or load in progress on this thread, if there is one."""
        running = self.running()
        return nullcontext() if running is None else running.phase(phase, detail)

    def begin(
        self, kind: str, *, inferred: bool = False, weights_only: bool = False, ranks: int | None = None
    ) -> Running | None:
        """Begin a save or load on this thread; None if nothing is traced, or it is a part of one in progress.

        `inferred`, `weights_only`, `ranks`: as in Recorder.begin.
        """
        if self.recorder is None or self.running() is not None:
            return None
        if self._is_mine():
            self.end_idle()
        step = self._step if kind == "save" else None
        operation = self.recorder.begin(kind, step=step, inferred=inferred, weights_only=weights_only, ranks=ranks)
        running = Running(operation, kind, blocking=self._is_mine(), inferred=inferred)
        self._of_thread.running = running
        if not running.blocking:
            self.background.began(operation)
        return running

    def resume(self, running: Running) -> bool:
        """Continue a save that a thread left open, on this thread; False if another operation is in progress."""
        if self.running() is not None:
            return False
        self._of_thread.running = running
        running.blocking = self._is_mine()
        if not running.blocking:
            self.background.began(running.operation)
        running.skip()
        return True

    @contextmanager
    def file_call(self, kind: str, function: str, path: str | None) -> Iterator[Running | None]:
        """The body is a call of `function` that saves or loads the file at `path` (None: no file, but memory).

        Outside of any save or load it is one itself, which is inferred. Calls that follow before training computes
        again belong to it, unless they concern the same file; on a thread beside training each is one.
        """
        running = self.running()
        if running is not None or path is None or self.recorder is None or hasattr(self._of_thread, "untraced"):
            yield running
            return
        idle = self._idle[0] if self._idle and self._is_mine() else None
        if idle is not None and idle.kind == kind and os.path.abspath(path) not in idle.files:
            running = idle
        with self._open_ended(running, kind, function, path, inferred=True) as running:
            yield running

    @contextmanager
    def load_part(self, directory: str | None, function: str) -> Iterator[None]:
        """The body is a part of the load of the checkpoint at `directory`, by the trainer `function`.

        None: it is a part of the trainer's load that may go on, if there is one. What the trainer does between two
        parts is its `library_call`, too. The load ends as those of file_call do.
        """
        idle, since_ns = self._idle or (None, 0)
        if directory is not None or (idle is not None and (idle.kind != "load" or idle.inferred)):
            idle = None  # the program's own, such as a torch.load of data
        known = idle is not None or directory is not None
        if self.running() is not None or self.recorder is None or not self._is_mine() or not known:
            yield
            return
        if idle is not None:
            idle.add("library_call", None, since_ns, now_ns())
        with (
            self._open_ended(idle, "load", function, directory or "", inferred=False) as running,
            running.phase("library_call"),
        ):
            yield

    @contextmanager
    def _open_ended(
        self, idle: Running | None, kind: str, function: str, path: str, *, inferred: bool
    ) -> Iterator[Running]:
        """The body continues `idle`, or begins a save or load of `path` by `function`, which may go on after it."""
        if idle is not None and self.resume(idle):
            self._idle = None
            running = idle
        else:
            named = inferred and "engine_used" in self._recorded.get("runtime", {})  # a library that saves checkpoints
            engine = function if kind == "save" and not named else None  # what a job saves with is its engine
            self.record_directory(kind, os.path.dirname(os.path.abspath(path)), engine)
            begun = self.begin(kind, inferred=inferred)
            assert begun is not None
            running = begun
            tag = os.path.basename(path)
            if inferred:  # the files of all ranks are one save
                tag = re.sub(rf"(?i)(rank[_=-]?)0*{self._rank}(?!\d)", r"\1*", tag)
            running.operation.label(tag=tag, engine=function)
        running.unfinished = self._is_mine()
        with self.until_end(running):
            yield running
        if running.unfinished:
            self._idle = running, running.operation.until_ns()

    def notice(self, kind: str, phase: str, text: str) -> None:
        """Record once that something of a save or load is not observed; not of what belongs to another traced call."""
        if self.recorder is not None and phase not in self._notices and not hasattr(self._of_thread, "untraced"):
            self._notices.add(phase)
            self.recorder.event(kind, phase, text)

    @contextmanager
    def not_traced(self) -> Iterator[None]:
        """What this thread does in the body is a part of another thread's traced call."""
        self._of_thread.untraced = True
        try:
            yield
        finally:
            del self._of_thread.untraced

    def end_idle(self) -> None:
        """End the save or load of the training thread that may go on, if any: what follows is no part of it."""
        if self._idle is not None:
            (running, since_ns), self._idle = self._idle, None
            running.operation.end(at_ns=since_ns)

    def exits(self, status: object) -> None:
        """The program asks for the end of this process with an exit status, as sys.exit takes it."""
        self._exit_status = status

    def _ended(self) -> None:
        """This process ends by itself."""
        if self.recorder is None or self._has_ended:
            return
        self._has_ended = True
        self.end_idle()
        # An exception that nobody has caught. A process of multiprocessing ends while it is raised, others after that.
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        status = error.code if isinstance(error, SystemExit) else self._exit_status
        if error is not None and not isinstance(error, SystemExit):
            reason: str | None = f"{type(error).__name__}: {error}"
        else:
            reason = None if status in (None, 0) else f"exit status {status}"
        self.recorder.process_ended(reason)

    @contextmanager
    def resumed(self, running: Running) -> Iterator[None]:
        """The body is the rest of a save that a thread left open, which then ends.

        If another operation is in progress on this thread, that one goes on afterwards; it is the one that blocks. If
        the save itself is still in progress here, the body is a part of it.
        """
        outer = self.running()
        if outer is running:
            running.unfinished = False
            yield
            return
        self._of_thread.running = None
        self.resume(running)
        running.blocking = running.blocking and outer is None
        running.unfinished = False
        try:
            with self.until_end(running):
                yield
        finally:
            self._of_thread.running = outer

    @contextmanager
    def until_end(self, running: Running) -> Iterator[None]:
        """The body is the rest of the save or load, which then ends unless the body sets `running.unfinished`."""
        raised = Raised()
        try:
            with raised:
                yield
        finally:
            self._of_thread.running = None
            if raised.error or not running.unfinished:
                self.background.ends(running.operation)
                running.operation.end(raised.error)

    def iteration(self, step: int, source: str, first_ns: int, start_ns: int, end_ns: int) -> None:
        """Record iteration `step`, numbered by `source`, from start_ns to end_ns; training began at first_ns."""
        if self.recorder is not None and self.startup is not None:
            if self._recorded.get("runtime", {}).get("step_source") != source:
                self.record_runtime({"step_source": source})
            self._step = None if source == COUNT else step
            self.recorder.iteration(step, start_ns, end_ns)
            self.startup.iteration_done(step, first_ns, end_ns, numbered=source != COUNT)

    def data_skip(self, start_ns: int, end_ns: int, batches: int) -> None:
        """Record that the data loader was iterated over `batches` batches before the first step."""
        starting = self._start_up()
        if starting is not None:
            starting.operation.add("data_skip", None, start_ns, end_ns, batches=batches)

    def is_starting(self) -> bool:
        """Whether this thread trains, and has made no step yet."""
        return self._start_up() is not None

    def is_training_thread(self) -> bool:
        """Whether this is the thread that trains, in a process that is traced."""
        return self.recorder is not None and threading.get_ident() == self._thread

    def _start_up(self) -> Timeline | None:
        in_progress = self.startup is not None and self.startup.operation is not None and self._is_mine()
        return self._starting if in_progress else None

    def _is_mine(self) -> bool:
        return threading.get_ident() == self._thread

    def _forked(self) -> None:
        """In a forked child: it becomes a rank itself if a launcher forked it; otherwise nothing is recorded."""
        if self.recorder is not None or "RANK" in os.environ:
            os.environ.setdefault(RANK_PID_VARIABLE, "0")
        self.recorder = self.startup = self._starting = self._idle = self._step = None
        self._of_thread, self.background = _thread_state(), Background()
        self._imports, self._recorded = [], {}
        self._exit_status, self._has_ended, self._notices = None, False, set()
        self._installed_ns, self._thread = now_ns(), threading.get_ident()


def _thread_state() -> threading.local:
    """The state of each thread. Of this one it has the attribute `running`: to look for a missing one costs more."""
    state = threading.local()
    state.running = None
    return state


def program_of(command: Sequence[str]) -> str:
    """The program that an interpreter with this command line runs: a module, or a script without its directory."""
    words = iter(command[1:])
    for word in words:
        if word in _FLAGS_WITH_VALUE:
            next(words, None)
        elif word == "-m":
            return next(words, "")
        elif not word.startswith("-"):
            return os.path.basename(word)
    return ""


def _pid() -> str:
    return str(os.getpid())
