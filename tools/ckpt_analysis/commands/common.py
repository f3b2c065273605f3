"""Common code of the commands: flags, reading a log directory, writing the output."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...common import cli
from ...common.cli import CHECK_FAILED, OK
from ...common.formatting import plural
from .. import open_trace
from ..common.errors import CouldNotRunError
from ..common.progress import Progress

if TYPE_CHECKING:
    from ..compare.variants import Variant
    from ..render.content import Content, Figure
    from ..render.document import Document
    from ..report import Analysis, Report
    from ..trace_analysis import TraceAnalysis

FILE_NAME = "ckpt_report.html"


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of every command: --quiet, --run-id and --cache-dir. The command line adds them itself."""
    shared = parser.add_argument_group("shared by all commands")
    shared.add_argument("--quiet", action="store_true", help="no progress bar and no remarks on stderr")
    help_ = "run to analyse if a directory holds several (default: the last); with import: run whose spans are read"
    shared.add_argument("--run-id", help=help_)
    shared.add_argument(
        "--cache-dir", metavar="DIR", type=Path, help="keep the Parquet cache here (default: beside the logs)"
    )
    shared.add_argument("--no-cache", action="store_true", help="neither use nor keep a Parquet cache")


def add_logdir(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add the log directory that most commands take, as `arguments.logdir`. `more`: text on other kinds of input."""
    help_ = f"directory of trace files, or of the checkpoints{more}"
    parser.add_argument("logdir", metavar="LOGDIR", type=Path, help=help_)


def add_strict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strict", action="store_true", help="exit 1 if the data have problems, notes aside")


def add_target(parser: argparse.ArgumentParser) -> None:
    help_ = (
        "number that the run is to stay within, such as restart_s=60 or goodput=0.9: exit 1 if its worst value does "
        "not, or is not recorded; repeatable (docs/ckpt_analysis.md lists the names)"
    )
    parser.add_argument("--target", metavar="NAME=VALUE", action="append", default=[], help=help_)


def add_output(parser: argparse.ArgumentParser) -> None:
    help_ = (
        f"write the HTML report: to PATH/{FILE_NAME}, or to PATH if it ends in .html. One file that needs no "
        "network. Without it nothing is written"
    )
    parser.add_argument("-o", "--output", metavar="PATH", type=Path, help=help_)


def add_figures(parser: argparse.ArgumentParser) -> None:
    help_ = "write each figure of the HTML report to DIR as SVG and PDF, for papers; needs matplotlib (extra `figures`)"
    parser.add_argument("--figures", metavar="DIR", type=Path, help=help_)


def check_figures(arguments: argparse.Namespace) -> None:
    """Raises CouldNotRunError if --figures is given and cannot be met, before anything is read."""
    from ..render.paper.files import require_matplotlib

    if arguments.figures is not None:
        require_matplotlib(arguments.figures)


def write_figures(contents: Iterable[tuple[Figure, Content]], arguments: argparse.Namespace) -> None:
    """Write the plots of the figures to the directory of --figures. Raises CouldNotRunError if that fails."""
    from ..render.paper import files

    plots = files.plots_of((figure.name, content.all_plots) for figure, content in contents)
    files.write_figures(plots, arguments.figures)
    progress_of(arguments).remark(f"{arguments.figures}: {plural(len(plots), 'figure')} as SVG and as PDF")


def add_format(parser: argparse.ArgumentParser, *formats: str) -> None:
    """Add --format with the values `formats`; by default those that most commands have."""
    choices = formats or ("table", "json", "csv", "markdown")
    parser.add_argument("--format", choices=choices, default="table", help="output (default: table)")


def write_formatted(arguments: argparse.Namespace, **renderers: Callable[[], str]) -> None:
    """Write the output in the format given by --format."""
    write_stdout(renderers[arguments.format]())


def write_document(arguments: argparse.Namespace, document: Document) -> None:
    """Write a result in the format given by --format."""
    from ...common.tables import Style

    write_formatted(
        arguments,
        table=lambda: document.table(Style(sys.stdout)),
        json=document.json,
        csv=document.csv,
        markdown=document.markdown,
    )


def remark_on_problems(arguments: argparse.Namespace, report: Report) -> None:
    """Tell on stderr what a CSV has no column for: errors and warnings that its numbers are to be read with."""
    from ...common.escaping import visible
    from ..common.problems import told

    if arguments.format == "csv" and not arguments.quiet:
        for problem in told(report.problems):
            print(f"ckpt-analysis: {visible(problem)}", file=sys.stderr)


def open_run(directory: Path, arguments: argparse.Namespace, *, per_rank: bool = False) -> TraceAnalysis:
    """`open_trace` with the shared flags. Raises LogDirectoryError if nothing can be analysed.

    Raises CouldNotRunError for the JSON of a replay, naming the commands that take it.
    """
    if is_json(directory):
        raise CouldNotRunError(
            f"{directory}: is no directory of a trace; of what `ckpt-replay --output` wrote, `ckpt-analysis compare "
            f"{directory}` shows the saves and loads, and `ckpt-analysis project --nodes N {directory}` the goodput"
        )
    return open_trace(
        directory,
        arguments.run_id,
        per_rank=per_rank,
        cache_dir=arguments.cache_dir,
        use_cache=not arguments.no_cache,
        quiet=arguments.quiet,
    )


def progress_of(arguments: argparse.Namespace) -> Progress:
    """The progress bar and remarks of this command."""
    return Progress(quiet=arguments.quiet)


def read_analysis(directory: Path, arguments: argparse.Namespace, *, per_rank: bool = False) -> Analysis:
    """The analysis of a trace or of an imported run. Raises LogDirectoryError if nothing can be analysed."""
    from ..compare.targets import judge, parse_target

    targets = [parse_target(text) for text in getattr(arguments, "target", [])]
    analysis = open_run(directory, arguments, per_rank=per_rank).analysis
    return replace(analysis, report=replace(analysis.report, targets=judge(analysis.report, targets)))


def read_report(directory: Path, arguments: argparse.Namespace, *, per_rank: bool = False) -> Report:
    """Only the report. Raises LogDirectoryError if nothing can be analysed."""
    return read_analysis(directory, arguments, per_rank=per_rank).report


def read_saves(path: Path, arguments: argparse.Namespace) -> Report:
    """The report of a directory, or of the JSON of a replay. Raises LogDirectoryError if it cannot be analysed."""
    if not is_json(path):
        return read_report(path, arguments)
    from ..compare.replays import read_replay

    refuse_flags_of_traces(arguments)
    return read_replay(path)


def is_json(path: Path) -> bool:
    """Whether the path is a JSON file, such as `ckpt-replay --output` writes, rather than a directory."""
    return path.suffix == ".json" and path.is_file()


def read_variants(texts: list[str], arguments: argparse.Namespace) -> list[Variant]:
    """The runs of a comparison from `[NAME=]LOGDIR`s or the JSON of replays, each engine of a run by itself.

    Raises LogDirectoryError if one cannot be analysed.
    """
    from ..compare.variants import Variant, by_engine

    return by_engine(
        [Variant(name, [read_saves(path, arguments) for path in paths]) for name, paths in named(texts).items()]
    )


def named(texts: list[str]) -> dict[str, list[Path]]:
    """Name -> its directories, in the given order. Without NAME= the directory is the name; it may contain a "="."""
    named: dict[str, list[Path]] = {}
    for text in texts:
        name, equals, directory = text.partition("=")
        if equals and name and directory and not os.path.exists(text):
            named.setdefault(name, []).append(Path(directory))
        else:
            named.setdefault(text, []).append(Path(text))
    return named


def refuse_flags_of_traces(arguments: argparse.Namespace, read: str = "a sweep or a replay's JSON") -> None:
    """Refuse flags of single traces in commands that read sweeps or replays, which have one run each and no cache.

    `read`: what the command reads instead. Raises CouldNotRunError.
    """
    given = [("--run-id", arguments.run_id), ("--cache-dir", arguments.cache_dir), ("--no-cache", arguments.no_cache)]
    for flag, value in given:
        if value:
            raise CouldNotRunError(f"{flag}: applies to single traces, not to {read}; leave it out")


def holds_sweep(path: Path) -> bool:
    """Whether the path is the directory of a sweep or may be a bundle of one, rather than a trace."""
    from ..sweeps.bundle import is_bundle
    from ..sweeps.read import is_sweep

    return is_sweep(path) or is_bundle(path)


def _reason(exc: OSError) -> str:
    """The system's text of the error, without the number and the temporary name that polars appends."""
    number = re.search(r"\(os error (\d+)\)", str(exc))
    return os.strerror(int(number[1])) if number else str(exc)


def exit_status(arguments: argparse.Namespace, *reports: Report) -> int:
    """CHECK_FAILED if a report misses a target or, with --strict, has problems; otherwise OK."""
    missed = any(not target.met for report in reports for target in report.targets)
    return CHECK_FAILED if missed or (arguments.strict and any(report.has_problems for report in reports)) else OK


def write_stdout(text: str) -> None:
    """Write to standard output. Raises CouldNotRunError if that fails."""
    try:
        cli.write_stdout(text)
    except OSError as exc:
        raise CouldNotRunError(f"standard output: {exc.strerror}") from exc


@contextmanager
def output_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the directory of `path`, which is renamed to `path` at the end.

    Raises CouldNotRunError if that fails; an existing file then stays unchanged.
    """
    is_special = path.exists() and not path.is_file()  # a pipe, /dev/stdout
    draft = path if is_special else path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if not is_special:
            draft.unlink(missing_ok=True)  # a link there would be written through
        yield draft
        if not is_special:
            draft.replace(path)
    except OSError as exc:
        reason = exc.strerror or _reason(exc)
        raise CouldNotRunError(f"{path}: cannot be written: {reason}; give another path with -o") from exc
    finally:
        if not is_special:
            draft.unlink(missing_ok=True)


def write_page(page: str, arguments: argparse.Namespace) -> None:
    """Write an HTML page to the path of -o. Raises CouldNotRunError if that fails."""
    path: Path = arguments.output
    if path.suffix.lower() not in (".html", ".htm"):
        path = path / FILE_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise CouldNotRunError(
            f"-o {arguments.output}: {path.parent} cannot be created: {exc.strerror}; give another path with -o"
        ) from exc
    with output_file(path) as draft:
        draft.write_text(page, encoding="utf-8")
    progress_of(arguments).remark(f"the HTML report is {path}")
