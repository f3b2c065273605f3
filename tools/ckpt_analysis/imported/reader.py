"""Reads the log of an upstream Megatron-DeepSpeed run, line by line.

The lines that it knows are those of upstream's own prints (Megatron-DeepSpeed 4efb479d), of Megatron-LM's (v2.0 to core
v0.19: megatron/arguments.py and checkpointing.py, later in megatron/training/), of DeepSpeed's logger and launcher, of
FastPersist's statistics, and the extra timers of the llm-restart-perf branches. Ranks print into one
stream, so a line may hold what several wrote: patterns are searched for, not anchored, where that can happen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TypeVar

from ..common.errors import CouldNotRunError
from ..model.imported_run import ImportedIteration, ImportedLoad, ImportedRun, Printed, Range
from .drafts import LoadDraft, SaveDraft, step_of
from .fastpersist import FileStatistics, parse_statistics
from .layout import LayoutDraft
from .listing import ListingDraft

_NUMBER = r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
# What launchers of several nodes put before every line: "node7: " (pdsh, srun), "[1,0]<stdout>:" (mpirun).
_PREFIX = r"^(?:\[\d+,\d+\]<std\w+>:|\S+: )?"
_MOMENT = re.compile(rf"{_PREFIX}\[(\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}})\]")
# Arguments that tell the model and what was asked for; names are upstream's.
_KEPT_ARGUMENTS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_key_value_heads", "seq_length"),
    *("micro_batch_size", "global_batch_size", "params_dtype", "zero_stage"),
    *("train_iters", "save_interval", "log_interval"),
)
_SETUP_TIMERS = ("model-and-optimizer-setup", "train/valid/test-data-iterators-setup")
_LAYOUT_ARGUMENTS = {
    "world_size": "world_size",
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "data_parallel_size": "dp",
}
Handler = TypeVar("Handler", bound=Callable[..., None])
_HANDLERS: list[tuple[re.Pattern[str], Callable[..., None]]] = []  # what `_reads` registered, in that order


def _reads(*patterns: str) -> Callable[[Handler], Handler]:
    """The method takes the groups of these patterns, each time that a line has one of them."""

    def register(method: Handler) -> Handler:
        _HANDLERS.extend((re.compile(pattern), method) for pattern in patterns)
        return method

    return register


@dataclass
class LogReader:
    """`feed` it every line, then `finish`."""

    layout: LayoutDraft = field(default_factory=LayoutDraft)
    listing: ListingDraft = field(default_factory=ListingDraft)
    saves: list[SaveDraft] = field(default_factory=list)
    loads: list[ImportedLoad] = field(default_factory=list)
    iterations: dict[int, ImportedIteration] = field(default_factory=dict)
    setup: dict[str, Range] = field(default_factory=dict)
    timers: dict[str, list[float]] = field(default_factory=dict)
    unused_timers: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    parameters: set[int] = field(default_factory=set)
    engine: str | None = None
    known_lines: int = 0
    _number: int = 0
    _moment: datetime | None = None
    _spawned: datetime | None = None
    _first_step: datetime | None = None
    _loaded: int | None = None
    _files_loaded: LoadDraft = field(default_factory=LoadDraft)
    _launched_at: int | None = None
    _trained: bool = False
    _ends_are_known: bool = False

    def feed(self, line: str) -> None:
        """Take the next line. Raises CouldNotRunError if it contradicts an earlier one."""
        self._number += 1
        line = line.rstrip("\r\n")
        dated = _MOMENT.match(line)
        self._moment = datetime.strptime(dated[1], "%Y-%m-%d %H:%M:%S,%f") if dated else None
        if self.listing.feed(line):
            return
        found = 0
        for pattern, handle in _HANDLERS:
            for match in pattern.finditer(line):
                found += 1
                handle(self, *match.groups())
        if statistics := parse_statistics(line):
            found += 1
            self._statistics(statistics)
        self.known_lines += bool(found)
        if self.saves and not self.saves[-1].completed:
            self.saves[-1].seen_at(self._moment)

    def finish(self, source: str, run_id: str, world_size: int | None) -> ImportedRun:
        """The run. Raises CouldNotRunError if the layout contradicts itself or the number of ranks is unknown."""
        launched = self.layout.finish(world_size)
        dated = [
            (save.step, save.first, save.last)
            for save in self.saves
            if save.step is not None and save.first and save.last
        ]
        to_first_step_s = None
        if self._spawned and self._first_step and self._first_step >= self._spawned:
            to_first_step_s = (self._first_step - self._spawned).total_seconds()
        return ImportedRun(
            source=source,
            run_id=run_id,
            launched=launched,
            engine=self.engine,
            parameters=self.parameters.pop() if len(self.parameters) == 1 else None,
            arguments=self.arguments,
            versions=self.versions,
            saves=[save.finish(launched.world_size, self._ends_are_known) for save in self.saves],
            loads=self.loads or self._files_loaded.finish(),
            iterations=[self.iterations[step] for step in sorted(self.iterations)],
            setup=self.setup,
            timers=self.timers,
            unused_timers=dict(sorted(self.unused_timers.items())),
            to_first_step_s=to_first_step_s,
            listing=self.listing.finish(dated),
        )

    def _save_of(self, tag: str) -> SaveDraft:
        """The newest save of this tag; a new one where the log has no line for its begin."""
        for save in reversed(self.saves):
            if save.tag in (None, tag) and tag == (save.tag or f"global_step{save.step}"):
                return save
        self.saves.append(SaveDraft(step=step_of(tag), tag=tag))
        return self.saves[-1]

    def _statistics(self, statistics: FileStatistics) -> None:
        parts = statistics.path.split("/")
        tag = parts[-2] if len(parts) > 1 else ""
        if step_of(tag) is not None:
            self._save_of(tag).written[statistics.path] = statistics

    def _launch_line(self) -> None:
        """A line that each launch prints once, in a known dialect. Raises CouldNotRunError at the second one."""
        self._ends_are_known = True
        if self._launched_at is not None:
            raise CouldNotRunError(
                f"the log holds several launches, at lines {self._launched_at} and {self._number}: cut it between "
                "them and import each part"
            )
        self._launched_at = self._number

    @_reads(
        r"using world size: (\d+), data-parallel-size: (\d+), (?:sequence-parallel size: (\d+), )?"
        r"tensor-model-parallel size: (\d+), pipeline-model-parallel size: (\d+)"
    )
    def _world(self, *sizes: str | None) -> None:
        self._launch_line()
        for name, value in zip(("world_size", "dp", "sp", "tp", "pp"), sizes, strict=True):
            if value is not None:
                self.layout.state(name, int(value), self._number)

    @_reads(r"using world size: (\d+), data-parallel size: (\d+), (.*)")
    def _megatron_lm_world(self, world_size: str, dp: str, others: str) -> None:
        """Megatron-LM's sizes. Its versions differ in what stands between them, and in the commas."""
        self._launch_line()
        sizes = {"world_size": int(world_size), "dp": int(dp)}
        of_encoder = re.findall(r"encoder-\w+-model-parallel size: (\d+)", others)
        if any(int(size) for size in of_encoder):  # its ranks are no product of the sizes
            self.layout.state("world_size", sizes["world_size"], self._number)
            return
        for name, words in (("tp", "tensor"), ("pp", "pipeline")):
            if found := re.search(rf"(?<!encoder-){words}-model-parallel size: (\d+)", others):
                sizes[name] = int(found[1])
        if {"tp", "pp"} <= sizes.keys():
            ranks = sizes["dp"] * sizes["tp"] * sizes["pp"]
            if ranks and sizes["world_size"] % ranks == 0:  # context-parallel ranks, and what else cuts a layer
                sizes["sp"] = sizes["world_size"] // ranks
        for name, value in sizes.items():
            self.layout.state(name, value, self._number)

    @_reads(r"WORLD INFO DICT: (\{[^{}]*\})")
    def _world_info(self, text: str) -> None:
        self.layout.world_info(text, self._number)

    @_reads(rf"{_PREFIX}  (\w+) \.{{2,}} (.*)$")
    def _argument(self, name: str, value: str) -> None:
        value = value.strip()
        if name in _LAYOUT_ARGUMENTS and value.isdigit():
            self.layout.state(_LAYOUT_ARGUMENTS[name], int(value), self._number)
        elif name in _KEPT_ARGUMENTS:
            self.arguments.setdefault(name, value)

    @_reads(r"process \d+ spawned with command")
    def _spawn(self) -> None:
        self._spawned = self._spawned or self._moment

    @_reads(r"\[Rank 0\] step=\d+, skipped=")
    def _step_line(self) -> None:
        self._first_step = self._first_step or self._moment

    # Not from within a word: a long one would be scanned from each of its letters.
    @_reads(
        rf"(?<![\w/-])([\w/-]+) \.{{2,}}: \({_NUMBER}, {_NUMBER}\)",
        rf"{_PREFIX}    ([\w/-]+) \.{{2,}}: (){_NUMBER}$",  # the slowest rank alone
    )
    def _timer(self, name: str, low: str, high: str) -> None:
        took = Range(max_s=float(high) / 1e3, min_s=float(low) / 1e3 if low else None)
        if name in ("save-checkpoint", "save-checkpoint-non-persistent") and self.saves and not self.saves[-1].call:
            self.saves[-1].call = took
        elif name == "load-checkpoint":
            self.loads.append(ImportedLoad(self._loaded, self._loaded is not None, took))
        elif name in _SETUP_TIMERS:
            self.setup.setdefault(name, took)
        else:
            self.unused_timers[name] = self.unused_timers.get(name, 0) + 1

    # Megatron-LM 2.x, BigScience, and DeepSpeed's wall_clock_breakdown: what one rank measured.
    @_reads(r"time \(ms\) \|(.*)$")
    def _timers_of_a_rank(self, line: str) -> None:
        for name, ms in re.findall(rf"([\w/-]+): {_NUMBER}(?= |$)", line):
            self._timer(name, "", ms)

    @_reads(r"saving checkpoint at iteration\s+(\d+) to ")
    def _begin_save(self, step: str) -> None:
        self.saves.append(SaveDraft(step=int(step), begun=True))

    def _newest_save(self, step: str) -> SaveDraft | None:
        """The newest save of a step. It need not be the last: an asynchronous save may end after the next has begun."""
        return next((save for save in reversed(self.saves) if save.step == int(step)), None)

    @_reads(r"successfully saved (?:local )?checkpoint (?:at|from) iteration\s+(\d+)")
    def _end_save(self, step: str) -> None:
        self._ends_are_known = True
        if save := self._newest_save(step):
            save.completed = True

    @_reads(r"scheduled an async checkpoint save at iteration\s+(\d+) to ")
    def _scheduled_save(self, step: str) -> None:
        if save := self._newest_save(step):
            save.scheduled = True

    @_reads(r"\[(\w+)\] Checkpoint (\S+) is about to be saved")
    def _about_to_save(self, engine: str, tag: str) -> None:
        self.engine = self.engine or engine
        newest = self.saves[-1] if self.saves else None
        if newest is None or newest.completed or newest.is_asked:  # no line of Megatron's has begun this one
            newest = SaveDraft(step=step_of(tag), begun=True)
            self.saves.append(newest)
        newest.tag, newest.is_asked, newest.asked = tag, True, self._moment

    @_reads(r"\[\w+\] Checkpoint (\S+) is ready now!")
    def _ready(self, tag: str) -> None:
        """DeepSpeed's engine says so on each rank. Newer versions print nothing there."""
        self._ends_are_known = True
        save = self._save_of(tag)
        save.is_ready, save.ready = True, self._moment or save.ready

    @_reads(r"\[\w+\] (?:Loading|Begin Load|Loaded|End Load) checkpoint from (\S+?)\.*$")
    def _loaded_file(self, path: str) -> None:
        """DeepSpeed's engine reads a file, before the first step: a job may load others later."""
        if not self.iterations and self._first_step is None:
            self._files_loaded.seen(path, self._moment)

    @_reads(rf"\[(\w+)\] CkptTime (\S+) {_NUMBER}")
    def _file_call(self, engine: str, file: str, seconds: str) -> None:
        self.engine = self.engine or engine
        if self.saves:
            self.saves[-1].calls_s[file] = float(seconds)

    @_reads(r"\[after training is done\]")
    def _training_done(self) -> None:
        self._trained = True

    @_reads(
        rf"Waited for all snapshots to complete in {_NUMBER}s", rf"Wait time in checkpointing engine {_NUMBER} for \d"
    )
    def _waited(self, seconds: str) -> None:
        if self.saves:
            waits = self.saves[-1].drains_s if self._trained else self.saves[-1].waits_s
            waits.append(float(seconds))

    @_reads(rf"Checkpoint Save GB: {_NUMBER}, GB/Sec: {_NUMBER}, Latency\(second\): {_NUMBER}")
    def _printed(self, gigabytes: str, GBps: str, latency_s: str) -> None:
        if self.saves:
            self.saves[-1].printed = Printed(float(gigabytes), float(GBps), float(latency_s))

    @_reads(r"successfully loaded checkpoint from .* at iteration (\d+)")
    def _loaded_line(self, step: str) -> None:
        self._loaded = int(step)

    def _iteration(self, step: str, **known: float | None) -> None:
        """What a line says of a step beside what earlier lines said."""
        before = self.iterations.get(int(step), ImportedIteration(int(step), None, None, None))
        self.iterations[int(step)] = replace(before, **known)

    @_reads(rf"steps: (\d+) loss: \S+ iter time \(s\): {_NUMBER}")
    def _deepspeed_iteration(self, step: str, seconds: str) -> None:
        self._iteration(step, step_s=float(seconds))

    @_reads(
        rf"iteration\s+(\d+)/\s*\d+ \|.*?elapsed time per iteration \(ms\): {_NUMBER}"
        rf"(?=(?:.*?lm loss: {_NUMBER})?)"
    )
    def _megatron_iteration(self, step: str, ms: str, loss: str | None) -> None:
        known = float(loss or "nan")
        self._iteration(step, interval_s=float(ms) / 1e3, loss=known if math.isfinite(known) else None)

    @_reads(rf"<TIMER:([\w-]+)[,:]{_NUMBER}>")
    def _named_timer(self, name: str, seconds: str) -> None:
        self.timers.setdefault(name, []).append(float(seconds))

    @_reads(r"TOTAL_PARAMS=(\d+)")
    def _parameters(self, number: str) -> None:
        self.parameters.add(int(number))

    @_reads(r"(torch|deepspeed) (?:version|info) \.{2,} ([^\s,]+)", r"()git_hash=(\w+)")
    def _version(self, package: str, version: str) -> None:
        self.versions.setdefault(package or "megatron-deepspeed", version)
