"""`compare`: compares runs, and says whether they differ by more than the noise."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...common.cli import CHECK_FAILED, OK
from ..common.errors import CouldNotRunError
from .common import (
    add_figures,
    add_format,
    add_output,
    check_figures,
    holds_sweep,
    named,
    read_variants,
    refuse_flags_of_traces,
    write_figures,
    write_formatted,
    write_page,
    write_stdout,
)

if TYPE_CHECKING:
    from ..compare.results import Comparison
    from ..compare.variants import Variant

HELP = "compare runs: engines, layouts, model sizes or versions, with what exceeds the noise"
EXAMPLES = """\
  %(prog)s runs/torch runs/lazy                    the second against the first
  %(prog)s runs/torch runs/lazy runs/dcp           each against the first
  %(prog)s replay.json                             the engines of one replay: what --output or --trace-dir wrote
  %(prog)s disk=disk.json shm=shm.json             engines by storage: replays of one model on several
  %(prog)s --fail-if 'restart_s>1.05' old new      exit 1 if restarts got more than 5 %% slower
  %(prog)s --fail-if 'blocked_GBps<0.9' --fail-if 'load_s>1.1' old new
  %(prog)s a=runs/a1 b=runs/b1 a=runs/a2 b=runs/b2   runs repeated under a name: the noise is between runs
  %(prog)s runs/torch runs/lazy -o cmp.html        also write a page with figures
  %(prog)s --format csv runs/torch runs/lazy > both.csv
  %(prog)s runs/sweep_tiny theirs.zip              sweeps or bundles: each configuration that both measured
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    help_ = (
        "two runs or more, or one with several engines, such as a replay; ratios are to the first. Runs of the same "
        "NAME are repeats. A replay's JSON is a run. Or sweeps, one or more"
    )
    parser.add_argument("logdirs", metavar="[NAME=]LOGDIR", nargs="+", help=help_)
    add_output(parser)
    add_figures(parser)
    add_format(parser)
    parser.add_argument("--all", action="store_true", help="show all metrics, including details of phases and timers")
    help_ = "exit 1 if the ratio of a median to that of the first is above (>) or below (<) RATIO; repeatable"
    parser.add_argument("--fail-if", metavar="METRIC>RATIO", action="append", default=[], help=help_)
    help_ = "do not leave out the first save and step of each cycle"
    parser.add_argument("--keep-first", action="store_true", help=help_)


def run(arguments: argparse.Namespace) -> int:
    """Compare the runs. Returns the exit status."""
    from ...common.escaping import visible
    from ..compare.comparison import compare_variants
    from ..compare.conditions import failures, parse_condition

    check_figures(arguments)
    if any(holds_sweep(path) for paths in named(arguments.logdirs).values() for path in paths):
        return _sweeps(arguments)
    conditions = [parse_condition(text) for text in arguments.fail_if]
    variants = read_variants(arguments.logdirs, arguments)
    if len(variants) == 1 and variants[0].reports[0].replayed is not None:
        raise CouldNotRunError(
            f"{variants[0].reports[0].directory}: is a replay of one engine; give a second one to compare it with"
        )
    comparison = compare_variants(variants, keep_first=arguments.keep_first)
    failed = failures(comparison, conditions)
    show(arguments, comparison, variants)
    for sentence in failed:
        print(f"ckpt-analysis: {visible(sentence)}", file=sys.stderr)
    return CHECK_FAILED if failed else OK


def show(arguments: argparse.Namespace, comparison: Comparison, variants: list[Variant]) -> None:
    """Print the comparison, and write the page and the figures that are asked for."""
    from ...common.tables import Style
    from ..render.comparison import to_csv, to_json, to_markdown, to_table

    write_formatted(
        arguments,
        table=lambda: to_table(comparison, Style(sys.stdout), show_all=arguments.all),
        json=lambda: to_json(comparison),
        csv=lambda: to_csv(comparison),
        markdown=lambda: to_markdown(comparison, show_all=arguments.all),
    )
    if arguments.output is not None:
        from ..render.html.page import comparison_page

        write_page(comparison_page(comparison, variants), arguments)
    if arguments.figures is not None:
        from ..render.html.page import comparison_contents

        write_figures(comparison_contents(comparison), arguments)


def _sweeps(arguments: argparse.Namespace) -> int:
    """Compare the measurements of sweeps, configuration by configuration. Returns the exit status."""
    from ...common.escaping import visible
    from ...common.tables import Style
    from ..compare.conditions import failures, parse_condition
    from ..render.comparison import to_json, to_markdown, to_table
    from ..sweeps.several import compared

    refuse_flags_of_traces(arguments)
    only_of_runs = (arguments.output, arguments.figures, arguments.keep_first or None)
    if arguments.format == "csv" or any(one is not None for one in only_of_runs):
        raise CouldNotRunError(
            "-o, --figures, --format csv and --keep-first are for runs; `ckpt-analysis sweep` makes page, figures and "
            "tables of a sweep"
        )
    conditions = [parse_condition(text) for text in arguments.fail_if]
    found, alone = compared(named(arguments.logdirs))
    for condition in conditions:
        if all(comparison.row(condition.metric) is None for comparison in found.values()):
            raise CouldNotRunError(f"--fail-if {condition}: no configuration has a metric {condition.metric}")
    failed = [
        f"{title}: {sentence}"
        for title, comparison in found.items()
        for sentence in failures(comparison, [one for one in conditions if comparison.row(one.metric)])
    ]
    style = Style(sys.stdout)
    write_formatted(
        arguments,
        table=lambda: _each(found, style.heading, lambda one: to_table(one, style, show_all=arguments.all)),
        json=lambda: json.dumps({title: json.loads(to_json(one)) for title, one in found.items()}, indent=2) + "\n",
        markdown=lambda: _each(found, "## {}".format, lambda one: to_markdown(one, show_all=arguments.all)),
    )
    if alone and arguments.format == "table":
        write_stdout("".join(f"measured once, so not compared: {visible(title)}\n" for title in alone))
    for sentence in failed:
        print(f"ckpt-analysis: {visible(sentence)}", file=sys.stderr)
    return CHECK_FAILED if failed else OK


def _each(found: dict[str, Comparison], heading: Callable[[str], str], text: Callable[[Comparison], str]) -> str:
    return "\n".join(f"{heading(title)}\n{text(one)}" for title, one in found.items())
