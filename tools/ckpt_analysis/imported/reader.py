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

from ..common.errors import CouldNotRunError
from ..model.imported_run import (
    ImportedIteration,
    ImportedLoad,
    ImportedRun,
    Printed,
    Range,
)
from .drafts import SaveDraft
from .fastpersist import FileStatistics, parse_statistics
from .layout import LayoutDraft
from .listing import ListingDraft

_NUMBER = r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
# What launchers of several nodes put before every line: "node7: " (pdsh, srun), "[1,0]<stdout>:" (mpirun).
_PREFIX = r"^(?:\[\d+,\d+\]<std\w+>:|\S+: )?"
_MOMENT = re.compile(rf"{_PREFIX}\[(\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}})\]")
_STEP_OF_TAG = re.compile(r"global_step(\d+)$")
_LOSS = re.compile(rf"lm loss: {_NUMBER}")
# Arguments that tell the model and what was asked for; names are upstream's.
_KEPT_ARGUMENTS = (
    *(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "seq_length",
    ),
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
                handle(self, match)
        if statistics := parse_statistics(line):
            found += 1
            self._statistics(statistics)
        self.known_lines += bool(found)
        if self.saves and not self.saves[-1].completed:
            self.saves[-1].seen_at(self._moment)

    def finish(self, source: str, run_id: str, world_size: int | None) -> ImportedRun:
        """The run. Raises CouldNotRunError if the layout contradicts itself or the number of ranks is unknown."""
        launched = self.layout.finish(world_size)
        dated = [(save.step, save.first, save.last) for save in self.saves]
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
            loads=self.loads,
            iterations=[self.iterations[step] for step in sorted(self.iterations)],
            setup=self.setup,
            timers=self.timers,
            to_first_step_s=to_first_step_s,
            listing=self.listing.finish([(s, first, last) for s, first, last in dated if first and last]),
        )

    def _save_of(self, tag: str) -> SaveDraft:
        """The newest save of this tag; a new one where the log has no line for its begin."""
        for save in reversed(self.saves):
            if save.tag in (None, tag) and tag == (save.tag or f"global_step{save.step}"):
                return save
        step = _STEP_OF_TAG.search(tag)
        self.saves.append(SaveDraft(step=int(step[1]) if step else 0, tag=tag))
        return self.saves[-1]

    def _statistics(self, statistics: FileStatistics) -> None:
        parts = statistics.path.split("/")
        tag = parts[-2] if len(parts) > 1 else ""
        if _STEP_OF_TAG.search(tag):
            self._save_of(tag).written[statistics.path] = statistics

    # One method per pattern of _HANDLERS.

    def _launch_line(self) -> None:
        """A line that each launch prints once, in a known dialect. Raises CouldNotRunError at the second one."""
        self._ends_are_known = True
        if self._launched_at is not None:
            raise CouldNotRunError(
                f"the log holds several launches, at lines {self._launched_at} and {self._number}: cut it between "
                "them and import each part"
            )
        self._launched_at = self._number

    def _world(self, match: re.Match[str]) -> None:
        self._launch_line()
        for name, value in zip(("world_size", "dp", "sp", "tp", "pp"), match.groups(), strict=True):
            if value is not None:
                self.layout.state(name, int(value), self._number)

    def _megatron_lm_world(self, match: re.Match[str]) -> None:
        """Megatron-LM's sizes. Its versions differ in what stands between them, and in the commas."""
        self._launch_line()
        sizes = {"world_size": int(match[1]), "dp": int(match[2])}
        of_encoder = re.findall(r"encoder-\w+-model-parallel size: (\d+)", match[3])
        if any(int(size) for size in of_encoder):  # its ranks are no product of the sizes
            self.layout.state("world_size", sizes["world_size"], self._number)
            return
        for name, words in (("tp", "tensor"), ("pp", "pipeline")):
            found = re.search(rf"(?<!encoder-){words}-model-parallel size: (\d+)", match[3])
            if found:
                sizes[name] = int(found[1])
        if {"tp", "pp"} <= sizes.keys():
            ranks = sizes["dp"] * sizes["tp"] * sizes["pp"]
            if ranks and sizes["world_size"] % ranks == 0:
                sizes["sp"] = (
                    sizes["world_size"] // ranks
                )  # context-parallel ranks, and what else cuts a layer
        for name, value in sizes.items():
            self.layout.state(name, value, self._number)

    def _world_info(self, match: re.Match[str]) -> None:
        self.layout.world_info(match[1], self._number)

    def _argument(self, match: re.Match[str]) -> None:
        name, value = match[1], match[2].strip()
        if name in _LAYOUT_ARGUMENTS and value.isdigit():
            self.layout.state(_LAYOUT_ARGUMENTS[name], int(value), self._number)
        elif name in _KEPT_ARGUMENTS:
            self.arguments.setdefault(name, value)

    def _spawn(self, match: re.Match[str]) -> None:
        self._spawned = self._spawned or self._moment

    def _step_line(self, match: re.Match[str]) -> None:
        self._first_step = self._first_step or self._moment

    def _timer(self, match: re.Match[str]) -> None:
        name, low, high = match[1], match[2], match[3]
        took = Range(max_s=float(high) / 1e3, min_s=float(low) / 1e3)
        self._timed(name, took)

    def _max_timer(self, match: re.Match[str]) -> None:
        self._timed(match[1], Range(max_s=float(match[2]) / 1e3, min_s=None))

    def _timed(self, name: str, took: Range) -> None:
        if name in ("save-checkpoint", "save-checkpoint-non-persistent"):
            if self.saves:
                self.saves[-1].call = took
        elif name == "load-checkpoint":
            self.loads.append(ImportedLoad(self._loaded, self._loaded is not None, took))
        elif name in _SETUP_TIMERS:
            self.setup.setdefault(name, took)

    def _begin_save(self, match: re.Match[str]) -> None:
        self.saves.append(SaveDraft(step=int(match[1]), begun=True))

    def _newest_save(self, step: str) -> SaveDraft | None:
        """The newest save of a step. It need not be the last: an asynchronous save may end after the next has begun."""
        return next((save for save in reversed(self.saves) if save.step == int(step)), None)

    def _end_save(self, match: re.Match[str]) -> None:
        self._ends_are_known = True
        if save := self._newest_save(match[1]):
            save.completed = True

    def _scheduled_save(self, match: re.Match[str]) -> None:
        if save := self._newest_save(match[1]):
            save.scheduled = True

    def _about_to_save(self, match: re.Match[str]) -> None:
        self.engine = self.engine or match[1]
        if self.saves and not self.saves[-1].completed:
            self.saves[-1].tag = match[2]

    def _file_call(self, match: re.Match[str]) -> None:
        self.engine = self.engine or match[1]
        if self.saves:
            self.saves[-1].calls_s[match[2]] = float(match[3])

    def _waited(self, match: re.Match[str]) -> None:
        if self.saves:
            waits = self.saves[-1].drains_s if self._trained else self.saves[-1].waits_s
            waits.append(float(match[1]))

    def _training_done(self, match: re.Match[str]) -> None:
        self._trained = True

    def _printed(self, match: re.Match[str]) -> None:
        if self.saves:
            self.saves[-1].printed = Printed(float(match[1]), float(match[2]), float(match[3]))

    def _loaded_line(self, match: re.Match[str]) -> None:
        self._loaded = int(match[1])

    def _iteration(self, step: int, **known: float | None) -> None:
        """What a line says of a step beside what earlier lines said."""
        before = self.iterations.get(step, ImportedIteration(step, None, None, None))
        self.iterations[step] = replace(before, **known)

    def _deepspeed_iteration(self, match: re.Match[str]) -> None:
        self._iteration(int(match[1]), step_s=float(match[2]))

    def _megatron_iteration(self, match: re.Match[str]) -> None:
        found = _LOSS.search(match.string, match.end())
        loss = float(found[1]) if found else math.nan
        interval_s = float(match[2]) / 1e3
        self._iteration(int(match[1]), interval_s=interval_s, loss=loss if math.isfinite(loss) else None)

    def _named_timer(self, match: re.Match[str]) -> None:
        self.timers.setdefault(match[1], []).append(float(match[2]))

    def _parameters(self, match: re.Match[str]) -> None:
        self.parameters.add(int(match[1]))

    def _version(self, match: re.Match[str]) -> None:
        self.versions.setdefault(match[1].split()[0], match[2])

    def _git_hash(self, match: re.Match[str]) -> None:
        self.versions.setdefault("megatron-deepspeed", match[1])


_HANDLERS: list[tuple[re.Pattern[str], Callable[[LogReader, re.Match[str]], None]]] = [
    (re.compile(pattern), handle)
    for pattern, handle in (
        (
            r"using world size: (\d+), data-parallel-size: (\d+), (?:sequence-parallel size: (\d+), )?"
            r"tensor-model-parallel size: (\d+), pipeline-model-parallel size: (\d+)",
            LogReader._world,
        ),
        (r"using world size: (\d+), data-parallel size: (\d+), (.*)", LogReader._megatron_lm_world),
        (r"WORLD INFO DICT: (\{[^{}]*\})", LogReader._world_info),
        (rf"{_PREFIX}  (\w+) \.{{2,}} (.*)$", LogReader._argument),
        (r"process \d+ spawned with command", LogReader._spawn),
        (r"\[Rank 0\] step=(\d+), skipped=", LogReader._step_line),
        # Not from within a word: a long one would be scanned from each of its letters.
        (rf"(?<![\w/-])([\w/-]+) \.{{2,}}: \({_NUMBER}, {_NUMBER}\)", LogReader._timer),
        (rf"{_PREFIX}    ([\w/-]+) \.{{2,}}: {_NUMBER}$", LogReader._max_timer),
        (r"saving checkpoint at iteration\s+(\d+) to ", LogReader._begin_save),
        (r"successfully saved (?:local )?checkpoint (?:at|from) iteration\s+(\d+)", LogReader._end_save),
        (r"scheduled an async checkpoint save at iteration\s+(\d+) to ", LogReader._scheduled_save),
        (r"\[(\w+)\] Checkpoint (\S+) is about to be saved", LogReader._about_to_save),
        (rf"\[(\w+)\] CkptTime (\S+) {_NUMBER}", LogReader._file_call),
        (r"\[after training is done\]", LogReader._training_done),
        (rf"Waited for all snapshots to complete in {_NUMBER}s", LogReader._waited),
        (rf"Wait time in checkpointing engine {_NUMBER} for \d", LogReader._waited),
        (
            rf"Checkpoint Save GB: {_NUMBER}, GB/Sec: {_NUMBER}, Latency\(second\): {_NUMBER}",
            LogReader._printed,
        ),
        (r"successfully loaded checkpoint from .* at iteration (\d+)", LogReader._loaded_line),
        (rf"steps: (\d+) loss: \S+ iter time \(s\): {_NUMBER}", LogReader._deepspeed_iteration),
        (
            rf"iteration\s+(\d+)/\s*\d+ \|.*?elapsed time per iteration \(ms\): {_NUMBER}",
            LogReader._megatron_iteration,
        ),
        (rf"<TIMER:([\w-]+)[,:]{_NUMBER}>", LogReader._named_timer),
        (r"TOTAL_PARAMS=(\d+)", LogReader._parameters),
        (r"((?:torch|deepspeed) (?:version|info)) \.{2,} ([^\s,]+)", LogReader._version),
        (r"git_hash=(\w+)", LogReader._git_hash),
    )
]
