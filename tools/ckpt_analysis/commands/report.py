"""`report`: where saves, loads and restarts spent their time, for people: a summary and an HTML file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tools.ckpt_analysis.commands.common import (
    add_strict,
    output_file,
    progress_of,
    read_analysis,
    write_stdout,
)
from tools.ckpt_analysis.commands.exit_codes import FINDINGS, OK
from tools.ckpt_analysis.errors import CouldNotRunError

if TYPE_CHECKING:
    from tools.ckpt_analysis.report import Analysis

FILE_NAME = "ckpt_report.html"
HELP = "show where saves, loads and restarts of a traced run spent their time"
EXAMPLES = """\
  %(prog)s runs/tiny/restart_trace            where the last save and restart went, rank by rank
  %(prog)s runs/tiny                          the same: restart_trace/ below a save directory is found
  %(prog)s runs/tiny -o report                and report/ckpt_report.html: figures, tables, findings
  %(prog)s runs/torch runs/lazy -o cmp.html   two runs side by side, in the terminal and as a page
  %(prog)s --all runs/tiny                    every save and launch in full
  %(prog)s --format json runs/tiny > out.json the same numbers for programs
  %(prog)s --strict runs/tiny                 exit 1 if anything is missing, torn, failed or unfinished
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    parser.add_argument(
        "logdirs",
        metavar="LOGDIR",
        type=Path,
        nargs="+",
        help="directory of trace files, or of the checkpoints; several are compared with the first",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="PATH",
        type=Path,
        help="write the HTML report: to PATH/ckpt_report.html, or to PATH if it ends in .html. One file "
        "that needs no network. Without it nothing is written",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="TAG",
        help="save that the HTML report shows in detail (default: the newest that all ranks finished)",
    )
    parser.add_argument(
        "--format", choices=("table", "json"), default="table", help="what is printed (default: table)"
    )
    parser.add_argument("--all", action="store_true", help="show every save and every launch in full")
    parser.add_argument(
        "--per-rank", action="store_true", help="numbers rank by rank also for more than 16 ranks"
    )
    add_strict(parser)


def run(arguments: argparse.Namespace) -> int:
    """Analyse the directories, print the report and write the page; returns the exit status."""
    several = len(arguments.logdirs) > 1
    _check(arguments, several)
    analyses = [
        read_analysis(directory, arguments, per_rank=arguments.per_rank) for directory in arguments.logdirs
    ]
    write_stdout(_comparison(analyses) if several else _summary(analyses[0], arguments))
    if arguments.output is not None:
        _write_page(analyses, arguments)
    findings = any(analysis.report.has_findings for analysis in analyses)
    return FINDINGS if arguments.strict and findings else OK


def _check(arguments: argparse.Namespace, several: bool) -> None:
    """Refuse flags that mean nothing here. Raises CouldNotRunError."""
    for flag, given in (("--checkpoint", arguments.checkpoint), ("--run-id", arguments.run_id)):
        if several and given is not None:
            raise CouldNotRunError(f"{flag} {given}: is of one run; give one LOGDIR with it")
    if arguments.checkpoint is not None and arguments.output is None:
        raise CouldNotRunError(
            f"--checkpoint {arguments.checkpoint}: chooses what the HTML report shows; add -o PATH or drop it"
        )
    if several and arguments.format == "json":
        raise CouldNotRunError(
            "--format json: is of one run; run it for each LOGDIR, or take `ckpt-analysis compare` for "
            "several"
        )


def _summary(analysis: Analysis, arguments: argparse.Namespace) -> str:
    from tools.ckpt_analysis.json_output import to_json
    from tools.ckpt_analysis.tables import Style
    from tools.ckpt_analysis.terminal import render

    if arguments.format == "json":
        return to_json(analysis.report)
    return render(analysis.report, Style(sys.stdout), show_all=arguments.all)


def _comparison(analyses: list[Analysis]) -> str:
    from tools.ckpt_analysis.run_comparison import compare_runs, comparison_lines
    from tools.ckpt_analysis.tables import Style, align

    header, rows = comparison_lines(compare_runs(analyses))
    style = Style(sys.stdout)
    title = style.heading(f"{len(analyses)} runs: medians, with the speed-up over {header[1]}")
    return "\n".join([title, *align(header, rows, style)]) + "\n"


def _write_page(analyses: list[Analysis], arguments: argparse.Namespace) -> None:
    from tools.ckpt_analysis.html.page import comparison_page, run_page

    path: Path = arguments.output
    if path.suffix.lower() not in (".html", ".htm"):
        path = path / FILE_NAME
    page = comparison_page(analyses) if len(analyses) > 1 else run_page(analyses[0], arguments.checkpoint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise CouldNotRunError(
            f"-o {arguments.output}: {path.parent} cannot be made: {exc.strerror}; give another place with -o"
        ) from exc
    with output_file(path) as draft:
        draft.write_text(page, encoding="utf-8")
    progress_of(arguments).remark(f"the HTML report is {path}")
