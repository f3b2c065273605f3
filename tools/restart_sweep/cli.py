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

from megatron.config.uris import ObjectUri, location_of

from ..common.cli import CHECK_FAILED, COULD_NOT_RUN, OK, make_parser, write_stdout

if TYPE_CHECKING:
    from ..common.sweep_files import Cell
    from .sweep_file import Sweep

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

exit status: 0 every cell measured, 1 some failed (the others were measured), 2 could not run. docs/restart_sweep.md has
the keys of the file.
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("restart-sweep", _DESCRIPTION, _EPILOG)
    parser.add_argument("sweep", type=Path, metavar="SWEEP.yaml", help="what is to be measured")
    help_ = "directory of the results: new, or that of the same sweep, which is resumed (default: runs/sweep_NAME)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=help_)
    help_ = (
        "where checkpoints are written, s3://BUCKET/PREFIX too: on the storage that is measured (default: below --out)"
    )
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
    parser.add_argument("--retry-failed", action="store_true", help="measure again the cells that failed")
    parser.add_argument(
        "--no-report", action="store_true", help="measure alone; `ckpt-analysis sweep` makes the report"
    )
    return parser.parse_args(argv)


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
        _check_environment(chosen)
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


def _run(arguments: argparse.Namespace, sweep: Sweep, cells: list[Cell], chosen: list[Cell]) -> int:
    from .directory import opened
    from .progress import to_stderr
    from .sweep import run_cells

    out = (arguments.out or Path("runs") / f"sweep_{sweep.name}").absolute()
    storage = None if arguments.dir is None else location_of("--dir", arguments.dir)
    if isinstance(storage, Path):
        storage = storage.absolute()
        _check_storage(storage)
    elif storage is not None:
        _check_bucket(storage, sweep, chosen)
    _check_hosts(chosen)
    with opened(out, sweep, cells, storage) as directory:
        if arguments.retry_failed:
            to_stderr(f"{directory.move_failures_aside(chosen)} failed cells are measured again")
        failed = run_cells(directory, cells, chosen, sweep.time_limit_s, to_stderr)
        if not arguments.no_report:
            _report(out)
    if failed:
        to_stderr(f"{failed} of {len(cells)} cells failed; their results say why. --retry-failed measures them again")
    return CHECK_FAILED if failed else OK


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
