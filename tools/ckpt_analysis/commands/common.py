"""What the commands share: flags, reading a log directory with them, and writing the answer."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tools.ckpt_analysis.commands.exit_codes import FINDINGS, OK

if TYPE_CHECKING:
    from tools.ckpt_analysis.load import Trace
    from tools.ckpt_analysis.report import Report


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of every command: --quiet, --run-id and --cache-dir. The command line adds them itself."""
    shared = parser.add_argument_group("shared by all commands")
    shared.add_argument("--quiet", action="store_true", help="no progress bar and no remarks on stderr")
    shared.add_argument(
        "--run-id", help="analyse this run where a directory holds several (default: the last)"
    )
    shared.add_argument(
        "--cache-dir", metavar="DIR", type=Path, help="keep the Parquet cache here (default: beside the logs)"
    )


def add_logdir(parser: argparse.ArgumentParser) -> None:
    """The one log directory that most commands take, as `arguments.logdir`."""
    parser.add_argument(
        "logdir", metavar="LOGDIR", type=Path, help="directory of trace files, or of the checkpoints"
    )


def add_strict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strict", action="store_true", help="exit 1 if there are findings (notes are none)")


def read_trace(directory: Path, arguments: argparse.Namespace) -> Trace:
    """`load_trace` as the shared flags ask for it. Raises LogDirectoryError if nothing can be analysed."""
    from tools.ckpt_analysis.load import load_trace

    return load_trace(directory, arguments.run_id)


def strict_status(report: Report, arguments: argparse.Namespace) -> int:
    """FINDINGS under --strict if the report has any, else OK."""
    return FINDINGS if arguments.strict and report.has_findings else OK


def write_stdout(text: str) -> None:
    """Write the answer; a reader that has seen enough (head, less) is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stderr.close()
