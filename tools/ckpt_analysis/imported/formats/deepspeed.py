"""Lines of DeepSpeed's launcher, logger and checkpoint engines, and of its environment report."""

from __future__ import annotations

from ..draft import NUMBER, Draft, reads
from ..saves import SaveDraft, step_of

PROGRAMS: tuple[str, ...] = ("DeepSpeed",)
LOGS = ""


@reads(r"WORLD INFO DICT: (\{[^{}]*\})")
def _world_info(run: Draft, text: str) -> None:
    run.layout.world_info(text, run.line_number)


@reads(r"process \d+ spawned with command")
def _spawn(run: Draft) -> None:
    run.spawned = run.spawned or run.moment


@reads(r"\[Rank 0\] step=\d+, skipped=")
def _step_line(run: Draft) -> None:
    run.first_step = run.first_step or run.moment


@reads(r"\[(\w+)\] Checkpoint (\S+) is about to be saved")
def _about_to_save(run: Draft, engine: str, tag: str) -> None:
    run.engine = run.engine or engine
    newest = run.saves[-1] if run.saves else None
    if newest is None or newest.completed or newest.is_asked:  # no line of Megatron's has begun this one
        newest = SaveDraft(step=step_of(tag), begun=True)
        run.saves.append(newest)
    newest.tag, newest.is_asked, newest.asked = tag, True, run.moment


@reads(r"\[\w+\] Checkpoint (\S+) is ready now!")
def _ready(run: Draft, tag: str) -> None:
    """DeepSpeed's engine says so on each rank. Newer versions print nothing there."""
    run.ends_are_known = True
    save = run.save_of(tag)
    save.is_ready, save.ready = True, run.moment or save.ready


@reads(r"\[\w+\] (?:Loading|Begin Load|Loaded|End Load) checkpoint from (\S+)$")
def _loaded_file(run: Draft, path: str) -> None:
    """DeepSpeed's engine reads a file, before the first step: a job may load others later."""
    if not run.iterations and run.first_step is None:
        run.files_loaded.seen(path.rstrip("."), run.moment)


@reads(rf"steps: (\d+) loss: \S+ iter time \(s\): {NUMBER}")
def _deepspeed_iteration(run: Draft, step: str, seconds: str) -> None:
    run.add_iteration(step, step_s=float(seconds))


@reads(r"(torch|deepspeed) (?:version|info) \.{2,} ([^\s,]+)", r"()git_hash=(\w+)")
def _version(run: Draft, package: str, version: str) -> None:
    run.versions.setdefault(package or "megatron-deepspeed", version)
