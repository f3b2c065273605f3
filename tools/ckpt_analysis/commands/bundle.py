"""`bundle`: packs a sweep into one archive that others can check and compare with."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from ...common.cli import CHECK_FAILED, OK
from ..common.errors import CouldNotRunError
from .common import output_file, progress_of, refuse_flags_of_traces, write_stdout

HELP = "pack a sweep into one archive: traces, configuration, environment, plans, storage, checksums"
EXAMPLES = """\
  %(prog)s runs/sweep_tiny -o tiny.zip          write the archive; exit 1 if it violates a rule of docs/rules.md
  ckpt-analysis validate tiny.zip               check an archive
  ckpt-analysis compare tiny.zip theirs.zip     compare the configurations that both measured
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    parser.add_argument("sweep", metavar="SWEEP", type=Path, help="--out of a sweep")
    parser.add_argument("-o", "--output", metavar="FILE.zip", type=Path, required=True, help="archive to write")


def run(arguments: argparse.Namespace) -> int:
    """Write the archive and print the rules that the sweep violates. Returns CHECK_FAILED if there are any."""
    from ...common.escaping import visible
    from ..sweeps.bundle import pack
    from ..sweeps.groups import measured_cells, storage_ceiling
    from ..sweeps.read import read_sweep
    from ..sweeps.rules import violations

    refuse_flags_of_traces(arguments)
    if arguments.output.suffix != ".zip":
        raise CouldNotRunError(f"-o {arguments.output}: must be a ZIP archive; call it {arguments.output}.zip")
    sweep = read_sweep(arguments.sweep)
    with progress_of(arguments).bar(len(sweep.cells), "reading cells", "cell") as advance:
        measured = measured_cells(sweep, advance)
    broken = violations(sweep, measured)
    about = {
        "cells": len(sweep.cells),
        "storage_ceiling_GBps": {name: median(values) for name, values in storage_ceiling(measured).items()},
        "rules_not_met": broken,
    }
    with output_file(arguments.output) as draft:
        files = pack(sweep, about, draft)
        size = draft.stat().st_size
    write_stdout("".join(f"rule not met: {visible(one)}\n" for one in broken))
    write_stdout(f"{arguments.output}: {files} files of {len(sweep.cells)} cells, {size} bytes\n")
    return CHECK_FAILED if broken else OK
