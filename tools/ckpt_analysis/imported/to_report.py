"""Turns an imported run into a Report; what the log does not say is None."""

from __future__ import annotations

from pathlib import Path

from ...common.formatting import plural, size
from ..common.problems import Problem
from ..metrics.iterations import StepTime, TrainingTime
from ..metrics.phases import throughput_GBps
from ..metrics.results import OperationStats, PhaseStats, Spread, StartStats
from ..model.imported_run import ImportedLoad, ImportedRun, ImportedSave, Listing, Range
from ..model.run_info import CycleInfo
from ..report import Report
from .cycles import report_of_cycles

_DATA_TIMER = "train/valid/test-data-iterators-setup"
_SHAPE = {
    "num_layers": "layers",
    "hidden_size": "hidden size",
    "num_attention_heads": "attention heads",
    "seq_length": "sequence length",
    "micro_batch_size": "micro batch",
    "global_batch_size": "global batch",
}
_OUTCOMES = {True: "ok", False: "unfinished", None: "unknown"}
_BYTES_PER_PARAMETER = 14  # what upstream multiplies by where it prints "Checkpoint Save GB"


def to_report(run: ImportedRun, directory: Path) -> Report:
    """The report of an imported run that lies in `directory`."""
    if run.cycles:
        return report_of_cycles(run, directory)
    return Report(
        directory=directory,
        run_id=run.run_id,
        cycles=[_cycle(run)],
        saves=[_save(save, run) for save in run.saves],
        loads=[_load(load, run) for load in run.loads],
        starts=_starts(run),
        problems=_notes(run),
        steps=_steps(run),
        training=_training(run),
        model=_model(run),
        imported=run,
    )


def _cycle(run: ImportedRun) -> CycleInfo:
    world_size = run.launched.world_size
    return CycleInfo(
        cycle=0,
        expected=world_size,
        present=world_size,  # upstream's timers are reduced over all ranks
        missing=[],
        layout=run.launched.layout,
        hosts=run.launched.hosts,
        engine_asked=None,
        engine_used=run.engine,
        durability=None,
        versions=run.versions,
        coordinates={},
    )


def _model(run: ImportedRun) -> str | None:
    """The model in a line, as model_info.describe_model gives it for a trace."""
    parameters = f"{run.parameters / 1e9:.3g} G parameters" if run.parameters else None
    shape = ", ".join(f"{words} {run.arguments[name]}" for name, words in _SHAPE.items() if name in run.arguments)
    return "; ".join(part for part in (parameters, shape) if part) or None


def _spread(took: Range | None) -> Spread | None:
    return None if took is None else Spread(took.max_s, min_s=took.min_s)


def _save(save: ImportedSave, run: ImportedRun) -> OperationStats:
    blocked_s = save.call.max_s + (save.wait.max_s if save.wait else 0.0) if save.call else None
    outcome = _OUTCOMES[save.completed]
    return OperationStats(
        operation="save",
        tag=save.tag or (None if save.step is None else f"global_step{save.step}"),
        step=save.step,
        cycle=0,
        engine=run.engine,
        outcome=outcome,
        ranks=run.launched.world_size,
        finished_ranks=run.launched.world_size if outcome == "ok" else None,
        wall=_spread(save.call),
        bytes=save.bytes,
        num_files=save.num_files,
        blocked_s=blocked_s,
        drain_s=save.drain.max_s if save.drain else None,
        blocked_GBps=throughput_GBps(save.bytes, blocked_s),
    )


def _load(load: ImportedLoad, run: ImportedRun) -> OperationStats:
    tag = f"global_step{load.step}" if load.step is not None else None
    return OperationStats(
        operation="load",
        tag=tag,
        step=load.step,
        cycle=0,
        engine=run.engine if tag else None,
        outcome="ok",
        ranks=run.launched.world_size,
        finished_ranks=run.launched.world_size,
        wall=_spread(load.call),
    )


def _starts(run: ImportedRun) -> list[StartStats]:
    if run.to_first_step_s is None:
        return []
    resumed = next((load.step for load in run.loads if load.found), None)
    ranks = run.launched.world_size
    data_build = _spread(run.setup.get(_DATA_TIMER))
    phases = [PhaseStats("data_build", data_build, ranks, None, None, None, "all")] if data_build else []
    known = {"is_restart": resumed is not None, "resumed_step": resumed, "phases": phases}
    return [StartStats(cycle=0, ranks=ranks, finished_ranks=ranks, wall=Spread(run.to_first_step_s), **known)]


def _steps(run: ImportedRun) -> list[StepTime]:
    """Training steps. A mean over a log interval counts only if no save lies in the interval."""
    saved = {save.step for save in run.saves if save.step is not None}
    steps: list[StepTime] = []
    before = 0
    for iteration in run.iterations:
        seconds = iteration.step_s
        # A save within the interval follows one of its steps: `before` up to the one before its last.
        if seconds is None and not any(before <= step < iteration.step for step in saved):
            seconds = iteration.interval_s
        if seconds is not None:
            steps.append(StepTime(0, iteration.step, seconds))
        before = iteration.step
    return steps


def _training(run: ImportedRun) -> list[TrainingTime]:
    """The sum of all log intervals, saves between steps included; empty if one has no time or an unknown start."""
    resumed = [load.step for load in run.loads if load.found]
    before = resumed[-1] if resumed else 0
    if before is None or not run.iterations:
        return []
    seconds = 0.0
    for iteration in run.iterations:
        if iteration.interval_s is None or iteration.step <= before:
            return []
        seconds += iteration.interval_s * (iteration.step - before)
        before = iteration.step
    return [TrainingTime(0, before, seconds)]


def _notes(run: ImportedRun) -> list[Problem]:
    notes = [
        f"this run is read from {run.source}, a log without instrumentation. Not recorded: "
        f"{', '.join(_not_recorded(run))}"
    ]
    if any(save.wait for save in run.saves):
        notes.append(
            "blocked_s of a save is its save-checkpoint timer and the longest wait for its files that was printed "
            "after it. Which ranks these were is not recorded, so it is an upper bound, too high by at most the "
            "timer's max less its min. The waits lie within the next training step, whose time has them too"
        )
    unknown = sum(save.completed is None for save in run.saves)
    if unknown:
        notes.append(
            f"whether {unknown} of {len(run.saves)} saves completed is not known: no line of the log is one that "
            "Megatron-DeepSpeed or Megatron-LM prints at the launch or after a save"
        )
    if any(save.scheduled for save in run.saves):
        notes.append(
            "saves were asynchronous: their times are those of the call that blocked training, not until their files "
            "were there"
        )
    if any(one.dated for one in (*run.saves, *run.loads)):
        notes.append(
            "times without a timer are from DeepSpeed's line that a checkpoint is about to be saved, or a file to be "
            "read, to its last line that it is ready, by the dates in the log"
        )
    if run.unused_timers:
        names = ", ".join(f"{name} ({number})" for name, number in run.unused_timers.items())
        notes.append(f"timers and spans that are not of a save, a load or the set-up, and how many of each: {names}")
    if any(save.printed for save in run.saves):
        notes.append(_printed(run))
    if run.to_first_step_s is not None:
        notes.append(
            "time_to_first_step_s is from the launcher's line for its first process to rank 0's line for its first "
            "step, by the times in the log"
        )
    if run.listing is not None:
        notes.append(_listed(run, run.listing))
    return [Problem("imported", note, {"source": run.source}) for note in notes]


def _not_recorded(run: ImportedRun) -> list[str]:
    missing = {
        "phases": True,
        "numbers rank by rank (timers give the fastest and the slowest of all ranks)": True,
        "when a checkpoint was committed or durable": True,
        "failures and restarts of the job": True,
        "bytes counted while writing": any(save.bytes is None for save in run.saves),
        "files of a save": any(save.num_files is None for save in run.saves),
        "how long some saves took": any(save.call is None for save in run.saves),
        "the engine": run.engine is None,
        "a listing of the checkpoint": run.listing is None,
    }
    return [what for what, is_missing in missing.items() if is_missing]


def _printed(run: ImportedRun) -> str:
    printed = next(save.printed for save in run.saves if save.printed)
    text = f"the sizes that the trainer printed with its saves ({printed.gigabytes} GB) are not counted bytes"
    if run.parameters and abs(_BYTES_PER_PARAMETER * run.parameters / 1e9 - printed.gigabytes) < 0.01:
        text += f": they are {_BYTES_PER_PARAMETER} bytes for each of {run.parameters} parameters"
    return text + ". They are in no metric but printed_GBps and printed_total_GBps of `compare`"


def _listed(run: ImportedRun, listing: Listing) -> str:
    parts = [plural(listing.files, "file")] if listing.files else []
    if listing.directories:
        parts.append(f"{listing.directories} files that are directories, so without their sizes")
    text = f"the listing in the log shows {' and '.join(parts) or 'disk usage'}"
    listed = listing.files + listing.directories
    given = {save.num_files for save in run.saves if save.num_files not in (None, listed)}
    if given:
        text += f" where the engine was given {' or '.join(sorted(map(str, given)))} paths"
    if listing.low_bytes is not None and listing.high_bytes is not None:
        text += f", {size(listing.low_bytes)}"
        if listing.low_bytes != listing.high_bytes:
            text += f" to {size(listing.high_bytes)} as its sizes are rounded"
    if listing.disk_usage_low is not None and listing.disk_usage_high is not None:
        text += f", {size(listing.disk_usage_low)} to {size(listing.disk_usage_high)} of disk used"
    whose = f"the save of step {listing.step}, by the files' times" if listing.step is not None else None
    return f"{text}; {whose or 'which save wrote them is not recorded'}"
