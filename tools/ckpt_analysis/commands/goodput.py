"""`goodput`: shows the goodput of a run, by the definitions of several organisations side by side."""

from __future__ import annotations

import argparse

from ...common.cli import OK
from .common import add_format, add_logdir, read_analysis, remark_on_problems, write_document

HELP = "show the goodput of a run by ours, Meta's, NVIDIA's and Google's definitions, and Google's types of badput"
EXAMPLES = """\
  %(prog)s $trace                        a row per definition, with its formula and source
  %(prog)s --format json $trace          for programs: null with the reason where the trace does not tell
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    add_logdir(parser)
    add_format(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table. Returns the exit status."""
    from ..metrics.goodput.definitions import goodputs
    from ..render.goodput import document

    analysis = read_analysis(arguments.logdir, arguments)
    report = analysis.report
    found = goodputs(analysis.frames, analysis.tables, report.budget, report.saves)
    write_document(arguments, document(report, found))
    remark_on_problems(arguments, report)
    return OK
