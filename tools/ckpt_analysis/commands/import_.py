"""`import`: converts the log of a run without instrumentation, so that the other commands can read it."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from ..imported.formats import LOGS

HELP = "read the log of a run without instrumentation, or OpenTelemetry spans of one with it, for the other commands"
_READS = (
    f"reads {LOGS}. With --from nvrx it reads the files that ft_launcher of NVIDIA Resiliency Extension writes about "
    "its cycles, with --from profiler the Chrome traces of torch.profiler."
)
EXAMPLES = f"""\
  %(prog)s train.log                      writes train-imported/ beside the log
  %(prog)s train.log -o runs/baseline     the same into runs/baseline
  ckpt-analysis report train-imported     show what the log contains; the rest is marked as not recorded
  zcat train.log.gz | %(prog)s - -o runs/baseline
  cat structured_logs/*.jsonl | %(prog)s - -o runs/titan --world-size 64     torchtitan's structured logs of a launch
  %(prog)s spans.jsonl --from otlp -o runs/again       the trace that `export --format otlp` wrote as spans
  %(prog)s spans.jsonl --from otlp --run-id 3f1c       the same, of one of several runs in the file
  %(prog)s nvrx/ --from nvrx --world-size 64           the restarts of a job under ft_launcher, by its cycle_info files
  %(prog)s profiles/ --from profiler -o runs/profiled  steps, saves and loads in traces of torch.profiler
  %(prog)s fast.log --world-size 8        a log of FastPersist's statistics alone, of 8 ranks

{textwrap.fill(_READS, 110, break_on_hyphens=False)}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    help_ = (
        "the log of one launch, with --from otlp the spans, with --from nvrx a directory, with --from profiler a trace "
        "or a directory of them; - or a pipe, of a log or spans, with -o"
    )
    parser.add_argument("log", metavar="UPSTREAM_LOG", type=Path, help=help_)
    help_ = "directory to write (default: beside the log)"
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, help=help_)
    help_ = (
        "what it is: otlp for OTLP/JSON of a restart trace, nvrx for cycle_info files of a job, profiler for Chrome "
        "traces of torch.profiler (default: log)"
    )
    sources = ("log", "otlp", "nvrx", "profiler")
    parser.add_argument("--from", dest="source", choices=sources, default="log", help=help_)
    help_ = "number of ranks, if the log has no line of it; with --from nvrx those of the newest cycle"
    parser.add_argument("--world-size", metavar="N", type=int, help=help_)
    parser.add_argument("--force", action="store_true", help="replace an earlier import in DIR")


def run(arguments: argparse.Namespace) -> int:
    """Import the log. Returns the exit status."""
    from ...common.cli import OK
    from ..common.errors import CouldNotRunError
    from ..imported.file import write_run
    from ..imported.importer import import_log
    from ..imported.profiler import read_profile
    from ..imported.source import is_pipe
    from .common import write_stdout

    if arguments.world_size is not None and arguments.world_size < 1:
        raise CouldNotRunError(f"--world-size {arguments.world_size}: give a number of ranks, 1 or more")
    if arguments.output is None and is_pipe(arguments.log):
        raise CouldNotRunError(f"{arguments.log}: is a pipe, which has no directory: give one with -o")
    if arguments.source == "otlp":
        return _import_spans(arguments)
    if arguments.source == "nvrx":
        return _import_cycles(arguments)
    if arguments.run_id is not None:
        raise CouldNotRunError(
            f"--run-id {arguments.run_id}: a log holds one run; leave it out, or add --from otlp or nvrx"
        )
    read = read_profile if arguments.source == "profiler" else import_log
    imported = read(arguments.log, arguments.world_size)
    directory = arguments.output or arguments.log.with_name(f"{arguments.log.stem}-imported")
    path = write_run(imported, directory, force=arguments.force)
    if not arguments.quiet:
        write_stdout(
            f"{path}: {len(imported.saves)} saves, {len(imported.loads)} loads, {len(imported.iterations)} "
            f"iterations on {imported.launched.world_size} ranks\n"
        )
    return OK


def _import_spans(arguments: argparse.Namespace) -> int:
    """Write the trace that OTLP/JSON is of. Returns the exit status."""
    from ...common.cli import OK
    from ..common.errors import CouldNotRunError
    from ..imported.otlp import read_otlp, write_trace
    from .common import write_stdout

    given = [("--world-size", arguments.world_size is not None), ("--force", arguments.force)]
    for flag, is_given in given:
        if is_given:
            raise CouldNotRunError(f"{flag}: applies to logs, not to --from otlp; leave it out")
    files = read_otlp(arguments.log, arguments.run_id)
    directory = arguments.output or arguments.log.with_name(f"{arguments.log.stem}-imported")
    write_trace(files, directory)
    if not arguments.quiet:
        records = sum(map(len, files.records.values()))
        write_stdout(f"{directory}: {records} records in {len(files.records)} trace files\n")
    return OK


def _import_cycles(arguments: argparse.Namespace) -> int:
    """Import what ft_launcher wrote of a job's cycles. Returns the exit status."""
    from ...common.cli import OK
    from ..common.errors import CouldNotRunError
    from ..imported.file import write_run
    from ..imported.nvrx import read_cycles
    from .common import write_stdout

    given = arguments.log.absolute()
    if arguments.output is None and given.name in ("", ".."):
        raise CouldNotRunError(f"{arguments.log}: no directory can be named after it: give one with -o")
    imported = read_cycles(arguments.log, arguments.world_size, arguments.run_id)
    directory = arguments.output or given.with_name(f"{given.name}-imported")
    path = write_run(imported, directory, force=arguments.force)
    if not arguments.quiet:
        write_stdout(f"{path}: {len(imported.cycles)} cycles on {imported.launched.world_size} ranks\n")
    return OK
