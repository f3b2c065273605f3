"""The command line of a sweep. Exit status: 0 every cell measured, 1 some failed, 2 could not run."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.uris import URI_FORM, Location, ObjectUri, location_of

from ..common.cli import CHECK_FAILED, COULD_NOT_RUN, OK, make_parser, write_stdout

if TYPE_CHECKING:
    from ..common.sweep_files import Cell
    from .sweep_file import Sweep

_SWITCHES = ("reduced", "retry_failed", "no_report")  # that a job has as the submission
_DESCRIPTION = "Measure models x layouts x engines x repeats x cold and warm x faults, as a YAML file asks for."
_EPILOG = """\
examples:
  %(prog)s examples_deepspeed/restart_bench/sweeps/tiny.yaml
      replays, trainings and restarts on CPUs, in minutes; the report is in runs/sweep_tiny/report
  %(prog)s --dry-run examples_deepspeed/restart_bench/sweeps/study.yaml
      its cells in their order, the files and bytes of each checkpoint, and what all of them take
  %(prog)s --dry-run --models 3b,7b --engines torch,lazy examples_deepspeed/restart_bench/sweeps/study.yaml
      a part of it; without --dry-run that part is measured, and the rest when you ask for it
  %(prog)s --reduced examples_deepspeed/restart_bench/sweeps/study.yaml
      two small cells of each kind, to see that all of it runs here
  %(prog)s --out runs/first --dir /scratch study.yaml
      checkpoints on the storage that is to be measured. The same command resumes what was interrupted
  GPUS_PER_NODE=8 %(prog)s --submit --out runs/first --dir /scratch study.yaml -- --account physics
      jobs of Slurm: one for all cells that need the same nodes, one job after the other; add --dry-run to see them

exit status: 0 every cell asked for is measured, or all jobs submitted, 1 some failed, 2 could not run.
docs/restart_sweep.md has the keys of the file.
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("restart-sweep", _DESCRIPTION, _EPILOG)
    parser.add_argument("sweep", type=Path, metavar="SWEEP.yaml", help="what is to be measured")
    help_ = "directory of the results: new, or that of the same sweep, which is resumed (default: runs/sweep_NAME)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=help_)
    help_ = f"where checkpoints are written, {URI_FORM} too: on the storage that is measured (default: below --out)"
    parser.add_argument("--dir", metavar="DIR", help=help_)
    help_ = "settings of the launches, lines NAME = VALUE, such as LAUNCHER; the environment overrides it"
    parser.add_argument("--config", metavar="FILE", help=help_)
    help_ = "list cells and sizes, and what all of them take; run and write nothing"
    parser.add_argument("--dry-run", action="store_true", help=help_)
    for name in ("models", "engines"):
        help_ = f"only the cells of these {name} of the file; the same command without it measures the others"
        parser.add_argument(f"--{name}", type=_names, metavar="NAME[,NAME...]", help=help_)
    help_ = "a few small cells of each kind, one repeat, trainings scaled down: whether it runs here; measures nothing"
    parser.add_argument("--reduced", action="store_true", help=help_)
    help_ = "hand the cells to sbatch: a job for all that need the same nodes; options of sbatch come after --"
    parser.add_argument("--submit", action="store_true", help=help_)
    help_ = (
        "only the cells that need so many nodes with so many GPUs each; --dry-run lists them. A job of --submit has it"
    )
    parser.add_argument("--allocation", metavar="NODESxGPUS", help=help_)
    parser.add_argument("--retry-failed", action="store_true", help="measure again the cells that failed")
    parser.add_argument(
        "--no-report", action="store_true", help="measure alone; `ckpt-analysis sweep` makes the report"
    )
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:end])
    arguments.of_sbatch = words[end + 1 :]
    if arguments.of_sbatch and not arguments.submit:
        parser.error(f"-- {arguments.of_sbatch[0]}: options of sbatch go with --submit")
    for option in arguments.of_sbatch:
        if option.startswith("--dep") or option.startswith("-d"):
            parser.error(
                f"-- {option}: the jobs of a sweep wait for each other by --dependency=singleton; leave it out"
            )
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    from megatron.config import ConfigError

    from ..common.stopping import StoppedBySignal, stop_on_signals
    from .directory import SweepError
    from .sweep_file import SweepFileError, read_sweep

    stop_on_signals()
    try:
        from .cells import cells_of

        _use_settings(arguments.config)
        sweep = read_sweep(arguments.sweep)
        of_file = cells_of(sweep)
        if arguments.reduced:
            from .reduced import reduced

            sweep = reduced(sweep)
        cells = cells_of(sweep)
        chosen = _chosen(cells, of_file, arguments)
        if arguments.allocation is not None:
            from .allocations import named

            chosen = named(arguments.allocation, chosen).cells
        _check_environment(chosen)
        if arguments.submit:
            return _submit(arguments, sweep, chosen)
        if arguments.dry_run:
            from .dry_run import listing

            write_stdout(listing(sweep, chosen))
            return OK
        return _run(arguments, sweep, cells, chosen)
    except StoppedBySignal as exc:
        print(f"restart-sweep: stopped by {exc}; the same command resumes", file=sys.stderr)
    except (SweepError, SweepFileError, ConfigError) as exc:
        print(f"restart-sweep: {exc}", file=sys.stderr)
    except OSError as exc:
        said = f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc)
        print(f"restart-sweep: {said}; fix that, and run the same command again to resume", file=sys.stderr)
    return COULD_NOT_RUN


def _use_settings(file: str | None) -> None:
    """Take the settings of --config FILE into the environment. Raises SweepError."""
    from ..restart_bench.errors import SettingsError
    from ..restart_bench.settings import SET_UP, names
    from ..restart_bench.settings_file import use
    from .directory import SweepError

    try:
        use(file, names(of=(SET_UP,)))
    except SettingsError as exc:
        raise SweepError(str(exc)) from None


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _chosen(cells: list[Cell], of_file: list[Cell], arguments: argparse.Namespace) -> list[Cell]:
    """The cells of --models and --engines, and those of the storage itself; `of_file`: all, without --reduced.

    Raises SweepError for a name that the file does not have, or of which no cell is left.
    """
    from restart_trace.command_line import hint

    from ..common.sweep_files import STORAGE
    from .directory import SweepError

    asked = [
        (option, attribute, getattr(arguments, option))
        for option, attribute in (("models", "model"), ("engines", "engine"))
        if getattr(arguments, option) is not None
    ]
    chosen = [
        cell
        for cell in cells
        if cell.mode == STORAGE or all(getattr(cell, attribute) in names for _, attribute, names in asked)
    ]
    for option, attribute, names in asked:
        known = list(dict.fromkeys(getattr(cell, attribute) for cell in of_file if cell.mode != STORAGE))
        left = {getattr(cell, attribute) for cell in chosen if cell.mode != STORAGE}
        for name in names or [""]:
            if name not in known:
                there = ", ".join(known)
                raise SweepError(
                    f"--{option} {name}: no cell of {arguments.sweep} has it{hint(name, known)}; there are {there}"
                )
            if name not in left:
                raise SweepError(
                    f"--{option} {name}: {arguments.sweep} has it, but no cell of it is left with the other options; "
                    "leave it out, or change those"
                )
    return chosen


def _submit(arguments: argparse.Namespace, sweep: Sweep, cells: list[Cell]) -> int:
    """Hand the cells that are left, and that no job has, to Slurm, or print the commands that do. Raises SweepError."""
    from ..common.formatting import plural
    from ..restart_bench.environment import for_shell_line
    from .allocations import allocations_of, check_submitted, submission, submit
    from .directory import SweepDirectory, check
    from .progress import to_stderr
    from .submissions import UnknownJobsError, jobs_of, note

    check_submitted(cells)
    out = _out(arguments, sweep)
    # A dry run writes nothing, not even to see whether it can.
    check(out, sweep, _storage(arguments) if arguments.dry_run else _checked_storage(arguments, sweep, cells))
    log, job = f"{out}.slurm-%j.out", f"sweep_{sweep.name}"
    directory = SweepDirectory(out, "")
    failed = directory.failed(cells)
    left = [cell for cell in cells if directory.result(cell) is None or (arguments.retry_failed and cell in failed)]
    if failed and not arguments.retry_failed:
        to_stderr(f"{len(failed)} of {len(cells)} cells failed; --retry-failed submits them again")
    try:
        jobs = jobs_of(out, failed) if left else {}
    except UnknownJobsError as exc:
        if not arguments.dry_run:
            raise
        to_stderr(f"{exc}; these are the jobs without those")
        jobs = {}
    if of_jobs := [jobs[cell.name] for cell in left if cell.name in jobs]:
        which = ", ".join(sorted(set(of_jobs)))
        to_stderr(f"{len(of_jobs)} of {len(cells)} cells have jobs that wait or run, and get no others: {which}")
        left = [cell for cell in left if cell.name not in jobs]
        if not left:
            return OK
    words, of = _words_of_job(arguments, out), allocations_of(left)
    if failed and not arguments.retry_failed and not of:
        return CHECK_FAILED
    if not of:
        to_stderr(f"every cell has its result in {out}: there is nothing to submit")
        return OK
    commands = [submission(each, words, log, job, sweep.time_limit_s, arguments.of_sbatch) for each in of]
    if arguments.dry_run:
        write_stdout("\n".join(map(for_shell_line, commands)) + "\n")
        return OK
    out.parent.mkdir(parents=True, exist_ok=True)
    for handed_over, each in zip(submit(commands), of, strict=True):
        note(out, handed_over, each.cells, retries=arguments.retry_failed)
        number = handed_over.partition(";")[0]
        what = f"{plural(len(each.cells), 'cell')} on {each.name} (nodes x GPUs)"
        to_stderr(f"job {number}: {what}; its output: {log.replace('%j', number)}")
    return OK


def _words_of_job(arguments: argparse.Namespace, out: Path) -> list[str]:
    """The arguments of this command for its jobs, but for the allocation of each."""
    words = [str(arguments.sweep.absolute()), "--out", str(out)]
    if arguments.dir is not None:
        words += ["--dir", str(_storage(arguments))]
    for name in ("models", "engines"):
        if (given := getattr(arguments, name)) is not None:
            words += [f"--{name}", ",".join(given)]
    return words + [f"--{name.replace('_', '-')}" for name in _SWITCHES if getattr(arguments, name)]


def _out(arguments: argparse.Namespace, sweep: Sweep) -> Path:
    return (arguments.out or Path("runs") / f"sweep_{sweep.name}").absolute()


def _run(arguments: argparse.Namespace, sweep: Sweep, cells: list[Cell], chosen: list[Cell]) -> int:
    from .directory import opened
    from .progress import to_stderr
    from .sweep import run_cells

    out = _out(arguments, sweep)
    storage = _checked_storage(arguments, sweep, chosen)
    _check_hosts(chosen)
    with opened(out, sweep, cells, storage) as directory:
        if arguments.retry_failed:
            to_stderr(f"{directory.move_failures_aside(chosen)} failed cells are measured again")
        run_cells(directory, cells, chosen, sweep.time_limit_s, to_stderr, arguments.allocation)
        failed, of_all = len(directory.failed(chosen)), len(directory.failed(cells))
        if not arguments.no_report:
            _report(out)
    if failed:
        to_stderr(f"{failed} of {len(chosen)} cells failed; their results say why. --retry-failed measures them again")
    if of_all > failed:
        to_stderr(f"of the cells that were not asked for here, {of_all - failed} failed before")
    return CHECK_FAILED if failed else OK


def _checked_storage(arguments: argparse.Namespace, sweep: Sweep, chosen: list[Cell]) -> Location | None:
    """--dir, as an absolute path if it is one. Raises SweepError if the cells cannot write there."""
    from ..ckpt_replay.plan import CONNECTOR

    storage = _storage(arguments)
    if isinstance(storage, ObjectUri):
        _check_bucket(storage, sweep, chosen)
        return storage
    if any(cell.engine == CONNECTOR for cell in chosen):
        from .directory import SweepError

        where = "" if storage is None else f" {storage}"
        raise SweepError(f"--dir{where}: {CONNECTOR} writes to object storage only; give --dir {URI_FORM}")
    if storage is not None:
        _check_storage(storage)
    return storage


def _storage(arguments: argparse.Namespace) -> Location | None:
    storage = None if arguments.dir is None else location_of("--dir", arguments.dir)
    return storage.absolute() if isinstance(storage, Path) else storage


def _check_bucket(storage: ObjectUri, sweep: Sweep, cells: list[Cell]) -> None:
    """Raises SweepError if --dir cannot be written to, or if what is asked for makes no sense in object storage."""
    from ..ckpt_replay.locations import problem_of
    from ..common.sweep_files import COLD, STORAGE
    from .directory import SweepError

    for cell in cells:
        wrong = None
        if cell.mode == STORAGE:
            wrong = "storage_bytes: the storage itself is measured with files; give storage_bytes: none"
        elif COLD in cell.cache:
            wrong = "cache: cold drops the page cache of a file system; give cache: warm"
        elif cell.settings.get("limit_bytes") == "fit" or "striping" in cell.settings:
            wrong = "limit_bytes: fit and striping are of file systems; give a size, and drop striping"
        if wrong is not None:
            raise SweepError(f"--dir {storage}: {sweep.name} asks for what object storage does not have: {wrong}")
    problem = problem_of(storage)
    if problem is not None:
        raise SweepError(f"--dir {storage}: {problem}")


def _check_storage(storage: Path) -> None:
    """Raises SweepError if --dir is no directory that can be written to."""
    from .directory import SweepError

    if not storage.is_dir():
        raise SweepError(f"--dir {storage}: is no directory; make it first, or correct the path")
    try:
        with tempfile.TemporaryFile(dir=storage) as file:
            file.write(b"\0")
    except OSError as exc:
        raise SweepError(f"--dir {storage}: cannot be written: {exc.strerror}; give another") from exc


def _check_environment(cells: list[Cell]) -> None:
    """Raises SweepError if the environment has a setting of the presets' scripts that the cells would not take."""
    from .commands import refused_setting
    from .directory import SweepError

    refused = refused_setting(cells)
    if refused is not None:
        raise SweepError(refused)


def _check_hosts(cells: list[Cell]) -> None:
    """Raises SweepError if faults of nodes are given without nodes."""
    from ..restart_drill.faults import ON_NODES
    from .directory import SweepError

    for cell in cells:
        if cell.fault.partition("@")[0] in ON_NODES and not os.environ.get("HOSTFILE"):
            raise SweepError(
                f"HOSTFILE: is not set, but {cell.fault} is a fault of a node; name the hosts and spares in a file"
            )


def _report(out: Path) -> None:
    """Page and tables, by the analysis. Raises SweepError if it could not run."""
    from .commands import PACKAGE, ROOT, environment
    from .directory import SweepError

    page = out / "report" / "ckpt_report.html"
    page.unlink(missing_ok=True)
    words = [sys.executable, "-m", f"{PACKAGE}.ckpt_analysis", "sweep", str(out), "-o", str(page.parent)]
    if subprocess.run(words, env=environment({}), cwd=ROOT).returncode > CHECK_FAILED or not page.is_file():
        raise SweepError(f"the report of {out} could not be made; the analysis says why. All results are there")
