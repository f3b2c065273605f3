"""Exports of checkpoints as Hugging Face models while the training goes on: --export-hf-interval, on rank 0.

Each is made by a process of its own (megatron.hf.export_process), one at a time, which ends with this one. Of the
checkpoints that are committed meanwhile the newest comes next; then those that earlier starts have not made, oldest
first. --keep-last leaves all of these alone, and the checkpoint of the last export that failed for a reason that may
pass, which is tried again. Whatever goes wrong with an export is a warning and a notice in the trace.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron.checkpointing.store.naming import tag_of
from megatron.checkpointing.store.search import Search
from megatron.config import CheckpointConfig
from megatron.fileio.new_directory import remove_unfinished
from megatron.hf.export_process import REFUSED
from megatron.hf.source import is_export_of, owner_of
from megatron.processes.helper_process import helper_command
from megatron.processes.parent_process import stop_signals_blocked
from restart_trace.recorder import Recorder

logger = logging.getLogger(__name__)

NOTICE = "hf_export"
"""The name of the notices of the trace."""
_WAIT_S = 300.0  # the default of --export-hf-wait: as long as torchrun's agents wait for each other after their ranks
_POLL_S = 0.05
_END_S = 10.0  # for a process that was killed
_TRIES = 3  # of an export in one start


@dataclass
class _Export:
    """`said`: what the process has printed so far."""

    step: int
    process: subprocess.Popen[bytes]
    begun_s: float
    said: bytearray = field(default_factory=bytearray)

    def read(self) -> None:
        """Take what the process has printed, so that it never waits for this. Does not wait."""
        assert self.process.stdout is not None
        try:
            while chunk := os.read(self.process.stdout.fileno(), 1 << 16):
                self.said += chunk
        except OSError:  # nothing more for now
            return

    def close(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()


def owed_exports(save: Path, directory: Path, interval: int, step: int) -> list[int]:
    """The checkpoints in `save` up to `step` that earlier starts should have exported and have not; OSError."""
    listed = Search(save, None).listed()
    there = {one.step: one.directory for one in listed if one.has_manifest and one.tag == one.directory.name}
    due = (each for each in sorted(there) if 0 < each <= step and each % interval == 0)
    tagged = (each for each in due if there[each].name == tag_of(each))
    return [each for each in tagged if not is_export_of(export_path(directory, each), there[each])]


def export_path(directory: Path, step: int) -> Path:
    """What the export of the checkpoint of `step` is called."""
    return directory / f"iteration_{step}"


class HFExports:
    """Those of a run. Call it from the main thread alone, with which the processes end.

    `in_use`: the checkpoints that --keep-last leaves alone. `run_id`: of the run that saves to --save; `generation`: of
    its launch.
    """

    def __init__(
        self, options: CheckpointConfig, run_id: str, generation: int, in_use: set[Path], recorder: Recorder
    ) -> None:
        assert options.save is not None and options.export_hf_interval is not None
        assert options.export_directory is not None
        self._interval = options.export_hf_interval
        self._save = Path(options.save)
        self._directory = Path(options.export_directory)
        self._wait_s = _WAIT_S if options.export_hf_wait is None else options.export_hf_wait
        self._keep_last = options.keep_last
        self._run_id = run_id
        self._generation = generation
        self._in_use = in_use
        self._recorder = recorder
        self._running: _Export | None = None
        self._owed: list[int] = []
        self._waiting: int | None = None
        self._failed: int | None = None
        self._tries = dict[int, int]()

    def resumed(self, step: int) -> None:
        """The run goes on after `step`: export the checkpoints up to there that earlier starts have not come to."""
        try:
            self._owed = owed_exports(self._save, self._directory, self._interval, step)
        except OSError as error:
            logger.warning("--save %s: whether exports are missing could not be found out: %s", self._save, error)
            return
        for each in self._owed:
            self._in_use.add(self._checkpoint(each))
        self.poll()

    def saving(self, step: int) -> None:
        """The checkpoint of `step` will be committed: from then on it must stay, if it is to be exported."""
        if step % self._interval == 0:
            self._in_use.add(self._checkpoint(step))

    def failed(self, step: int) -> None:
        """The checkpoint of `step` was not committed."""
        self._in_use.discard(self._checkpoint(step))

    def committed(self, step: int) -> None:
        """Export the checkpoint of `step` if it is to be; next, if another one is being exported."""
        if step % self._interval:
            return
        if self._waiting is not None:
            self._not_exported(self._waiting, "an export took longer than --export-hf-interval; raise that")
        self._waiting = step
        self.poll()

    def poll(self) -> None:
        """Report the export that has ended, and begin the next one. Waits for nothing."""
        if self._running is not None:
            code = self._running.process.poll()
            self._running.read()
            if code is None:
                return
            self._ended(self._running, code)
            self._running = None
        if self._waiting is not None:
            step, self._waiting = self._waiting, None
            self._begin(step)
        elif self._owed:
            self._begin(self._owed.pop(0))

    def finish(self, stops: Callable[[], bool]) -> None:
        """At the end of training: wait until all is exported, --export-hf-wait at most, or until `stops` says to end.

        Then nothing is exported any more. What is not, the next start makes; --keep-last leaves it to that.
        """
        deadline = time.monotonic() + self._wait_s
        told = False
        while self._pending and time.monotonic() < deadline and not stops():
            if self._running is not None and not told:
                what = f"waiting for the export of iteration {self._running.step}"
                logger.info("%s, %g s at most (--export-hf-wait)", what, self._wait_s)
                told = True
            time.sleep(_POLL_S)
            self.poll()
        left = self._pending
        if self._running is not None:
            self._end(self._running)
        self._running, self._owed, self._waiting = None, [], None
        why = "the training was ended first" if stops() else f"--export-hf-wait {self._wait_s:g} s were over"
        for step in left:
            self._not_exported(step, why, owed=True)

    @property
    def _pending(self) -> list[int]:
        running = [] if self._running is None else [self._running.step]
        return [*running, *self._owed, *([] if self._waiting is None else [self._waiting])]

    def _checkpoint(self, step: int) -> Path:
        return self._save / tag_of(step)

    def _out(self, step: int) -> Path:
        return export_path(self._directory, step)

    def _begin(self, step: int) -> None:
        paths = (str(self._save.absolute()), tag_of(step), str(self._out(step).absolute()))
        command = helper_command("megatron.hf.export_process", os.getpid(), *paths, self._run_id, self._generation)
        # It computes nothing on a device, and takes no memory there.
        environment = os.environ | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        try:
            with stop_signals_blocked():  # until the process ignores them
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )  # fmt: skip
        except OSError as error:
            self._try_again(step, str(error))
            return
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        logger.info("exporting the checkpoint of iteration %d to %s", step, self._out(step))
        self._running = _Export(step, process, time.monotonic())

    def _ended(self, export: _Export, code: int) -> None:
        export.read()
        export.close()
        *others, said = export.said.decode(errors="replace").strip().splitlines() or [""]
        took_s = time.monotonic() - export.begun_s
        if others:
            logger.debug("the export of iteration %d also said: %s", export.step, "\n".join(others))
        if code != 0:
            why = f"exit status {code} after {took_s:.1f} s: {said}"
            (self._not_exported if code == REFUSED else self._try_again)(export.step, why)
            return
        if self._failed is not None:
            self._owed.append(self._failed)
            self._failed = None
        self._in_use.discard(self._checkpoint(export.step))
        logger.info("exported iteration %d in %.1f s: %s", export.step, took_s, said)
        self._recorder.event("save", NOTICE, f"exported in {took_s:.3f} s: {said}", export.step)

    def _end(self, export: _Export) -> None:
        """End it, and remove what it has written so far."""
        export.process.kill()
        try:
            export.process.wait(_END_S)
        except subprocess.TimeoutExpired:  # storage that hangs: the process ends when that answers
            logger.warning("%s: the unfinished export stays there: its process does not end", self._directory)
            return
        export.close()
        try:
            remove_unfinished(self._directory, owner_of(self._run_id, self._save, self._directory), self._generation)
        except OSError as error:
            logger.warning("%s: the unfinished export stays there: %s", self._directory, error)

    def _try_again(self, step: int, why: str) -> None:
        """It failed for a reason that may pass, and is tried again after one that succeeds, or by the next start.

        Only the last one waits for that: where every export fails, --save must not fill up.
        """
        self._tries[step] = self._tries.get(step, 0) + 1
        if self._tries[step] >= _TRIES:
            self._not_exported(step, f"{why}; it was tried {_TRIES} times")
            return
        if self._failed is not None and self._failed != step:
            self._not_exported(self._failed, f"that of iteration {step} failed, too")
        self._failed = step
        self._not_exported(step, f"{why}; it is tried again after the next export, or by the next start", owed=True)

    def _not_exported(self, step: int, why: str, *, owed: bool = False) -> None:
        """`owed`: it is tried again, perhaps by the next start, so that the checkpoint stays."""
        if not owed:
            self._in_use.discard(self._checkpoint(step))
            if self._keep_last is not None:
                why += f"; a later save removes its checkpoint (--keep-last {self._keep_last})"
        words = ("hf-convert", "export", "--load", self._save, "--load-tag", tag_of(step), "--out", self._free(step))
        by_hand = shlex.join(map(str, words))
        logger.warning("iteration %d was not exported: %s; to export it: %s", step, why, by_hand)
        self._recorder.event("save", NOTICE, f"not exported: {why}", step)

    def _free(self, step: int) -> Path:
        """A name for an export by hand, which overwrites nothing."""
        out, number = self._out(step), 2
        while os.path.lexists(out):
            out, number = self._out(step).with_name(f"iteration_{step}_{number}"), number + 1
        return out
