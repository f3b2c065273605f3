"""`report`: shows where saves, loads and restarts spent their time: a summary in the terminal and an HTML file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.errors import CouldNotRunError
from . import compare
from .common import (
    add_figures,
    add_format,
    add_output,
    add_strict,
    add_target,
    check_figures,
    exit_status,
    read_analysis,
    read_variants,
    write_figures,
    write_formatted,
    write_page,
)

if TYPE_CHECKING:
    from ..report import Report

HELP = "show where saves, loads and restarts of a traced run spent their time"
EXAMPLES = """\
  %(prog)s $trace                             where the restart went, four numbers, and what would help
  %(prog)s SAVE_DIR                           a directory of --save: its restart_trace/ is analysed
  %(prog)s $trace -o report                   and report/ckpt_report.html: figures, tables, findings
  %(prog)s $trace --figures paper             the same figures as SVG and PDF files
  %(prog)s runs/torch runs/lazy -o cmp.html   two runs side by side, in the terminal and as a page
  %(prog)s --all $trace                       everything, phase by phase and rank by rank
  %(prog)s --format json $trace > out.json    the same numbers for programs
  %(prog)s --target restart_s=60 --target blocked_s=2 $trace      exit 1 if a restart or a save took longer
  %(prog)s --strict $trace                    exit 1 if anything is missing, torn, failed or unfinished
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    help_ = (
        "directory of trace files, or of the checkpoints; several are compared with the first, as `compare` does. Runs "
        "of the same NAME are repeats"
    )
    parser.add_argument("logdirs", metavar="[NAME=]LOGDIR", nargs="+", help=help_)
    add_output(parser)
    add_figures(parser)
    help_ = "save that the HTML report shows in detail (default: the newest that all ranks finished)"
    parser.add_argument("--checkpoint", metavar="TAG", help=help_)
    add_format(parser, "table", "json")
    parser.add_argument(
        "--all", action="store_true", help="after the first screen, show everything: each start, load, save and finding"
    )
    parser.add_argument("--per-rank", action="store_true", help="numbers rank by rank also for more than 16 ranks")
    add_strict(parser)
    add_target(parser)


def run(arguments: argparse.Namespace) -> int:
    """Analyse the directories, print the report and write the page. Returns the exit status."""
    several = len(arguments.logdirs) > 1
    _check(arguments, several)
    check_figures(arguments)
    reports = _compared(arguments) if several else _of_one(arguments)
    return exit_status(arguments, *reports)


def _of_one(arguments: argparse.Namespace) -> list[Report]:
    """The report of one run."""
    from ...common.tables import Style
    from ..project.gains import gains
    from ..render.json_output import to_json
    from ..render.terminal import render

    analysis = read_analysis(Path(arguments.logdirs[0]), arguments, per_rank=arguments.per_rank)
    write_formatted(
        arguments,
        table=lambda: render(analysis.report, Style(sys.stdout), show_all=arguments.all, gains=gains(analysis)),
        json=lambda: to_json(analysis.report),
    )
    if arguments.output is not None:
        from ..render.html.page import run_page

        write_page(run_page(analysis, arguments.checkpoint), arguments)
    if arguments.figures is not None:
        from ..render.html.page import run_contents

        write_figures(run_contents(analysis, arguments.checkpoint), arguments)
    return [analysis.report]


def _compared(arguments: argparse.Namespace) -> list[Report]:
    """The comparison of several runs, as `compare` prints it, and the page with its figure."""
    from ..compare.comparison import compare_variants

    variants = read_variants(arguments.logdirs, arguments)
    compare.show(arguments, compare_variants(variants), variants)
    return [report for variant in variants for report in variant.reports]


def _check(arguments: argparse.Namespace, several: bool) -> None:
    """Refuse flags that do not apply. Raises CouldNotRunError."""
    for flag, given in (("--checkpoint", arguments.checkpoint), ("--run-id", arguments.run_id)):
        if several and given is not None:
            raise CouldNotRunError(f"{flag} {given}: applies to one run; give one LOGDIR with it")
    if several and arguments.target:
        raise CouldNotRunError(f"--target {arguments.target[0]}: applies to one run; run it for each LOGDIR")
    if arguments.checkpoint is not None and arguments.output is None and arguments.figures is None:
        raise CouldNotRunError(
            f"--checkpoint {arguments.checkpoint}: chooses what the HTML report and the figures show; add -o PATH or "
            "--figures DIR, or remove it"
        )
    if several and arguments.format == "json":
        raise CouldNotRunError(
            "--format json: describes one run; run it for each LOGDIR, or use `ckpt-analysis compare` for several"
        )
