"""Command line: `python -m benchmarks.published`. Exit status: 0 all within their limits, 1 a figure is not."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from tools.common.cli import CHECK_FAILED, COULD_NOT_RUN, OK, make_parser
from tools.common.marked import replaced
from tools.common.tables import markdown_table

if TYPE_CHECKING:
    from .figure import Figure

NAME = "published"
_CHOSEN = " †"  # beside a number whose unit was chosen
_HEADER = ("figure", "source", "published", "predicted", "deviation", "verdict")
_DESCRIPTION = "Predict published figures from their stated inputs, and compare."
_EPILOG = """\
examples:
  %(prog)s
  %(prog)s --write docs/results/published.md
      replace the table between the markers of this document

exit status: 0 every figure is within the limit set for it, 1 one is not, 2 could not run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    found = all_figures()
    text = "\n".join(render(found))
    try:
        if arguments.write is None:
            print(text)
        else:
            arguments.write.write_text(replaced(arguments.write.read_text(), NAME, text))
    except (OSError, ValueError) as error:
        print(f"--write {arguments.write}: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    return status(found)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = make_parser("python -m benchmarks.published", _DESCRIPTION, _EPILOG)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table into this document")
    return parser.parse_args(argv)


def all_figures() -> list[Figure]:
    """Every figure; the models that predict them are imported here, so that --help need not wait."""
    from . import failures, sizes

    return [*sizes.figures(), *failures.figures()]


def status(figures: Sequence[Figure]) -> int:
    """CHECK_FAILED if one of `figures` is off by more than its limit; stderr says which."""
    from .figure import DIFFERS

    wrong = [figure.what for figure in figures if figure.verdict == DIFFERS]
    if wrong:
        print("off by more than the limit: " + "; ".join(wrong), file=sys.stderr)
    return CHECK_FAILED if wrong else OK


def render(figures: Sequence[Figure]) -> list[str]:
    """Lines of Markdown: the table, then inputs and sources."""
    sources = list(dict.fromkeys(figure.source for figure in figures))
    rows = [_row(number, figure, sources) for number, figure in enumerate(figures, 1)]
    lines = [*markdown_table(("", *_HEADER), rows), "", _summary(figures), ""]
    lines += ["Inputs, and why a figure is off:", ""]
    for inputs, group in groupby(enumerate(figures, 1), key=lambda numbered: numbered[1].inputs):
        alike = list(group)
        numbers = ", ".join(str(number) for number, _ in alike)
        whys = [f" *{f'{number}: ' * (len(alike) > 1)}{figure.why}.*" for number, figure in alike if figure.why]
        lines.append(f"- **{numbers}**: {inputs}.{''.join(whys)}")
    lines += ["", "Sources:", ""]
    for number, source in enumerate(sources, 1):
        read = f" Read in: {source.read}." if source.read else ""
        lines.append(f"- **S{number}** [{source.name}]({source.url}).{read}")
    return lines


def _summary(figures: Sequence[Figure]) -> str:
    counts = Counter(figure.verdict for figure in figures)
    chosen = sum(figure.unit_chosen for figure in figures)
    return (
        f"{len(figures)} figures: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()) + ". "
        f"{_CHOSEN.strip()}: the source writes GB or TB; this unit was chosen when the prediction was known "
        f"({chosen} figures)."
    )


def _row(number: int, figure: Figure, sources: Sequence[object]) -> tuple[str, ...]:
    place = f"S{sources.index(figure.source) + 1}, {figure.where}"
    deviation = "-" if figure.deviation is None else f"{100 * figure.deviation:+.1f} %"
    published = f"{figure.published:.{max(0, figure.digits)}f} {figure.unit}".strip() + _CHOSEN * figure.unit_chosen
    return str(number), figure.what, place, published, _predicted(figure), deviation, figure.verdict


def _predicted(figure: Figure) -> str:
    digits = max(figure.digits, 1) if figure.published < 1000 else 0
    values = figure.predicted if isinstance(figure.predicted, tuple) else (figure.predicted,)
    return " to ".join(f"{value:.{digits}f}" for value in values) + (f" {figure.unit}" if figure.unit else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
