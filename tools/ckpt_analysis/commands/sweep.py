"""`sweep`: shows the report of a sweep, and writes all its measurements as one table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ...common.cli import CHECK_FAILED, OK
from ..common.errors import CouldNotRunError
from .common import (
    FILE_NAME,
    add_figures,
    check_figures,
    output_file,
    progress_of,
    refuse_flags_of_traces,
    write_figures,
    write_page,
    write_stdout,
)

HELP = "show the results of a sweep: engines by model and layout, and all measurements as a table"
EXAMPLES = """\
  %(prog)s runs/sweep_tiny                     verdicts, saves, restarts
  %(prog)s runs/sweep_tiny -o runs/sweep_tiny/report
      and a page with all figures, measurements.csv and measurements.parquet
"""
TABLES = ("measurements.csv", "measurements.parquet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    parser.add_argument("sweep", metavar="SWEEP", type=Path, help="--out of a sweep, or a bundle of one")
    help_ = f"write {FILE_NAME}, {' and '.join(TABLES)} here"
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, help=help_)
    add_figures(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the report and write page and tables. Returns CHECK_FAILED if a cell has no result."""
    from ...common.tables import Style
    from ..render.sweep import View, to_table
    from ..sweeps.bundle import opened
    from ..sweeps.groups import measured_cells
    from ..sweeps.read import read_sweep

    refuse_flags_of_traces(arguments)
    check_figures(arguments)
    if arguments.output is not None and arguments.output.suffix.lower() in (".html", ".htm"):
        raise CouldNotRunError(f"-o {arguments.output}: must be a directory, for the page and two tables")
    with opened(arguments.sweep) as directory:
        sweep = read_sweep(directory)
        with progress_of(arguments).bar(len(sweep.cells), "reading cells", "cell") as advance:
            view = View(sweep, measured_cells(sweep, advance))
        write_stdout(to_table(view, Style(sys.stdout)))
        if arguments.output is not None:
            _write(view, arguments)
        if arguments.figures is not None:
            from ..render.html.page import sweep_contents

            write_figures(sweep_contents(view), arguments)
    return CHECK_FAILED if view.failures else OK


def _write(view: object, arguments: argparse.Namespace) -> None:
    from ..common.table_files import write_table
    from ..render.html.page import sweep_page
    from ..render.sweep import View
    from ..sweeps.rows import measurements

    assert isinstance(view, View)
    write_page(sweep_page(view), arguments)
    table = measurements(view.sweep, view.measured)
    for name in TABLES:
        path = arguments.output / name
        with output_file(path) as draft:
            write_table(table, draft, path.suffix.removeprefix("."))
        progress_of(arguments).remark(f"{path}: {table.height} measurements")
