"""`validate`: checks a directory of trace files against docs/log_format.md."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.cli import CHECK_FAILED, OK
from ...common.formatting import plural
from ..common.errors import CouldNotRunError
from .common import add_logdir, holds_sweep, open_run, progress_of, refuse_flags_of_traces, write_stdout

if TYPE_CHECKING:
    from ..common.problems import Problem
    from ..common.progress import Progress
    from ..ingest.discover import Listing
    from ..ingest.validate import Checked

HELP = "check every record of a log directory against the format, and list all that is wrong"
EXAMPLES = """\
  %(prog)s $trace                         one line per problem; exit 1 if there is any
  %(prog)s --quiet $trace && echo fine
  %(prog)s tiny.zip                       a bundle of a sweep: checksums, all its traces, docs/rules.md
  %(prog)s --mlperf mlperf.zip            and the rules of MLPerf Storage for checkpoints
"""
PROCESSES_FROM_BYTES = 32 << 20  # the processes import the standard library only, so they start fast
# Problems that are already reported line by line.
_OF_FILES = {"empty_file", "unreadable_file", "wrong_file_name"}
_BY_LINE = {*_OF_FILES, "no_process_record", "unknown_schema_version", "invalid_record", "torn_line"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    add_logdir(parser, ", or of a sweep, or a bundle of one")
    help_ = "of a sweep: also check MLPerf Storage's rules for checkpoints, as far as docs/rules.md says"
    parser.add_argument("--mlperf", action="store_true", help=help_)


def run(arguments: argparse.Namespace) -> int:
    """Print all problems. Returns CHECK_FAILED if there is one."""
    if holds_sweep(arguments.logdir):
        return _sweep(arguments)
    if arguments.mlperf and not arguments.logdir.exists():
        raise CouldNotRunError(f"--mlperf {arguments.logdir}: does not exist; give the --out of a sweep, or a bundle")
    if arguments.mlperf:
        raise CouldNotRunError(f"--mlperf {arguments.logdir}: is no sweep and no bundle of one; leave the flag out")
    return CHECK_FAILED if _trace(arguments.logdir, arguments) else OK


def _sweep(arguments: argparse.Namespace) -> int:
    """Check all traces of a sweep and the rules for a valid run; a bundle with wrong checksums is not read further."""
    from ...common.escaping import visible
    from ..sweeps.bundle import opened
    from ..sweeps.groups import measured_cells
    from ..sweeps.mlperf import deviations
    from ..sweeps.read import read_sweep
    from ..sweeps.rules import violations

    refuse_flags_of_traces(arguments)
    arguments.no_cache = True  # nothing is written into a sweep
    with opened(arguments.logdir) as directory:
        sweep = read_sweep(directory)
        faults = 0
        for one in sweep.cells:
            if one.ok and one.trace_dir is not None:
                faults += _trace(one.trace_dir, arguments, f"{arguments.logdir}: {one.cell.name}")
        measured = measured_cells(sweep)
        broken = violations(sweep, measured)
        if arguments.mlperf:
            broken += [f"MLPerf Storage {one}" for one in deviations(sweep, measured)]
    write_stdout("".join(f"rule not met: {visible(one)}\n" for one in broken))
    verdict = "valid" if not faults and not broken else f"not valid: {plural(faults + len(broken), 'problem')}"
    write_stdout(f"{arguments.logdir}: {plural(len(sweep.cells), 'cell')}: {verdict} (docs/rules.md)\n")
    return CHECK_FAILED if faults or broken else OK


def _trace(logdir: Path, arguments: argparse.Namespace, name: str | None = None) -> int:
    """Print all problems of a trace, called `name` (default: its directory). Returns their number."""
    from ...common.escaping import visible
    from ..ingest.discover import list_trace

    listing = list_trace(logdir)
    files = records = faults = 0
    for checked in _check(listing, progress_of(arguments)):
        files += 1
        records += checked.records
        faults += len(checked.faults)
        write_stdout("".join(f"{visible(str(fault))}\n" for fault in checked.faults))
    problems = _of_the_whole(logdir, arguments)
    write_stdout("".join(f"{visible(f'{problem.kind}: {problem.message}')}\n" for problem in problems))
    faults += len(problems)
    verdict = "no problems" if not faults else f"{faults} problem{'s' * (faults > 1)}"
    write_stdout(f"{name or listing.directory}: {files} files, {records} records: {verdict}\n")
    return faults


def _check(listing: Listing, progress: Progress) -> Iterator[Checked]:
    from ..common.processes import map_in_processes, processes_for
    from ..ingest.validate import check_file

    sizes = sum(file.size() for file in listing.files)
    with progress.bar(sizes, "checking records", "B") as advance:
        for checked in map_in_processes(check_file, listing.files, processes_for(sizes, PROCESSES_FROM_BYTES), chunk=8):
            advance(checked.num_bytes)
            yield checked


def _of_the_whole(logdir: Path, arguments: argparse.Namespace) -> list[Problem]:
    """Problems between files: missing ranks and cycles, copies, several runs, clocks, contradictions.

    Empty if no file can be analysed; the problems of each file are already reported then.
    """
    from ..common.problems import NOTE
    from ..ingest.discover import LogDirectoryError
    from ..model.run_info import describe_cycles

    try:
        run = open_run(logdir, arguments)
    except LogDirectoryError:
        return []
    _, found = describe_cycles(run.trace, run.frames)
    problems = [*run.trace.problems, *found]
    return [problem for problem in problems if problem.kind not in _BY_LINE and problem.severity != NOTE]
