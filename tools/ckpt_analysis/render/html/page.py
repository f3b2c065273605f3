"""Makes the page: collects the plain values that the template takes, and renders it."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ....common.formatting import digits_for, plural, seconds, unbroken
from ....common.tables import Column
from ...common.errors import CouldNotRunError
from ...common.glossary import DEFINITIONS
from ...common.problems import ERROR, NOTE, WARNING, Problem
from ...compare.grid import grid_of
from ...compare.results import Comparison
from ...compare.variants import Variant
from ...compare.verdict import verdicts_of
from ...findings import RULES, Finding
from ...metrics.results import TargetResult
from ...project.gains import gains
from ...project.what_if import Answer
from ...report import Analysis, Report
from ..answer import answer
from ..content import Content, Figure, Plot, Table, table
from ..headline import headline
from ..questions import questions
from ..storage import storage_text
from ..sweep import View
from ..targets import COLUMNS as TARGETS
from ..what_if import gain_text
from . import budget, comparison, sweep
from .figures import FIGURES
from .run_data import choose

_TEMPLATES = Path(__file__).parent / "templates"
_NAMES = (("run", "name"), ("engine", "engine"))
_MOST_STORAGE = 4  # shown; ranks may each have a directory of their own
_MOST_PROBLEMS = 200  # shown; a torn directory of ten thousand files has one each


@dataclass(frozen=True)
class Opening:
    """What a page of many runs begins with: what it is about, its verdicts, and facts by name.

    `one_answer`: the first of the verdicts is that of the page; otherwise each is one of many.
    """

    about: str
    verdicts: list[str]
    facts: list[tuple[str, str]]
    one_answer: bool
    numbers: Table | None = None


def run_page(analysis: Analysis, checkpoint: str | None = None) -> str:
    """The HTML report of one run. `checkpoint`: tag of the save that is shown in detail.

    Raises CouldNotRunError if there is no such save, or plotly is not installed.
    """
    title = f"Checkpoint and restart report: run {analysis.report.run_id}"
    first = _first_page(analysis.report, "", gains(analysis))
    return _render(title, [first], run_contents(analysis, checkpoint))


def run_contents(analysis: Analysis, checkpoint: str | None = None) -> list[tuple[Figure, Content]]:
    """The figures of one run. Raises CouldNotRunError if there is no such save as `checkpoint`."""
    run = choose(analysis, checkpoint)
    return [(figure, figure.make(run)) for figure in FIGURES]


def comparison_contents(compared: Comparison) -> list[tuple[Figure, Content]]:
    """The figure of several runs."""
    return [(comparison.FIGURE, comparison.FIGURE.make(compared))]


def sweep_contents(view: View) -> list[tuple[Figure, Content]]:
    """The figures of a sweep."""
    return [(figure, figure.make(view)) for figure in sweep.FIGURES]


def comparison_page(compared: Comparison, variants: list[Variant]) -> str:
    """The HTML page that compares several runs: those of `variants`, of which `compared` was made.

    Raises CouldNotRunError if plotly is not installed.
    """
    first_pages = []
    for facts, variant in zip(compared.variants, variants, strict=True):
        for index, report in enumerate(variant.reports, start=1):
            repeat = f", run {index} of {len(variant.reports)}" if len(variant.reports) > 1 else ""
            first_pages.append(_first_page(report, f"{comparison.name_of(facts)}{repeat}"))
    title = f"Comparison of {len(first_pages)} runs"
    is_one = grid_of(compared) is None
    opening = Opening("", verdicts_of(compared), [], one_answer=is_one, numbers=_numbers(first_pages))
    return _render(title, first_pages, comparison_contents(compared), opening=opening)


def sweep_page(view: View) -> str:
    """The HTML page of a sweep: its tables and figures over all cells. Raises CouldNotRunError without plotly."""
    opening = Opening(view.sweep.about, view.verdicts(), sweep.facts(view), one_answer=False)
    return _render(f"Sweep {view.sweep.name}", [], sweep_contents(view), labels=view.labels, opening=opening)


def _first_page(report: Report, name: str, worth: Mapping[int, Answer] = MappingProxyType({})) -> dict[str, Any]:
    """What the reader must know before the first figure. With a `name` it is folded, unless its data are broken.

    `worth`: index of a finding -> what it is worth.
    """
    shown = report.problems[:_MOST_PROBLEMS]
    return {
        "name": name,
        "broken": any(problem.severity == ERROR for problem in report.problems),
        "replayed": report.replayed is not None,
        "facts": _facts(report),
        "labels": report.facts.labels,
        "questions": questions(report, worth),
        "answer": answer(report),
        "engine": ", ".join(report.engine_names) or "not recorded",
        "numbers": headline(report),
        "budget": budget.bar_of(report.budget) if report.budget else None,
        "targets": _targets(report.targets),
        "state": _state(report.problems),
        "problems": shown,
        "more_problems": len(report.problems) - len(shown),
        "findings": report.findings,
        "costs": [_cost(finding, worth.get(index)) for index, finding in enumerate(report.findings)],
    }


def _cost(finding: Finding, gain: Answer | None) -> str:
    """What a finding costs, and what would be left without half of it; nothing if neither is known."""
    cost = f"Costs {seconds(finding.cost_s, digits_for(finding.cost_s))} s" if finding.cost_s > 0 else ""
    return f"{cost}{gain_text(gain)}".removeprefix("; ")


def _targets(targets: list[TargetResult]) -> Table | None:
    """What was asked of the run (--target), and whether it was met; None if nothing was."""
    return table("Targets", TARGETS, targets) if targets else None


def _numbers(first_pages: list[dict[str, Any]]) -> Table:
    """The four numbers of each run, a row per run."""
    columns = [Column[dict[str, Any]](name, lambda page, key=key: page[key]) for name, key in _NAMES]
    for index, number in enumerate(first_pages[0]["numbers"]):
        columns.append(Column(number.title, lambda page, index=index: page["numbers"][index].value))
    return table("The runs in four numbers", columns, first_pages)


def _state(problems: list[Problem]) -> str:
    """How many problems of which severity the data have, in words."""
    counts = {
        severity: sum(problem.severity == severity for problem in problems) for severity in (ERROR, WARNING, NOTE)
    }
    return ", ".join(plural(number, severity) for severity, number in counts.items() if number)


def _facts(report: Report) -> list[tuple[str, str]]:
    facts, newest = report.facts, report.cycles[-1]
    hosts = f"{len(facts.hosts)}: {', '.join(facts.hosts[:8])}{', ...' if len(facts.hosts) > 8 else ''}"
    engines = {f"{used or 'not recorded'} (asked for: {asked or 'not recorded'})" for asked, used in facts.engines}
    incomplete = [
        f"; cycle {info.cycle}: {len(info.missing)} of {info.expected} missing"
        for info in report.cycles
        if info.missing
    ]
    present = f"{facts.ranks} expected, {newest.present} present in cycle {newest.cycle}"
    return [
        ("Run", report.run_id),
        ("Trace", str(report.directory)),
        ("Model", report.model or "not recorded"),
        ("Layout", ", then ".join(facts.layouts)),
        ("Engine", "; ".join(sorted(engines))),
        ("Durability", ", ".join(sorted({value or "not recorded" for value in facts.durability}))),
        *((storage.use.capitalize(), storage_text(storage)) for storage in report.storage[:_MOST_STORAGE]),
        ("Hosts", hosts if facts.hosts else "not recorded"),
        ("Ranks", present + "".join(incomplete[-4:])),
        ("Cycles", f"{len(report.cycles)}, of them {plural(len(report.restarts), 'restart')}"),
        ("Saves", f"{len(report.complete_saves)} of {len(report.saves)} complete"),
        *([("Saves of weights", f"{len(report.weights)}, no checkpoints")] if report.weights else []),
        ("Versions", ", ".join(facts.versions)),
    ]


def _render(
    title: str,
    first_pages: list[dict[str, Any]],
    figures: list[tuple[Figure, Content]],
    *,
    labels: list[str] | None = None,
    opening: Opening | None = None,
) -> str:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["anchor"] = _anchor
    environment.filters["marked"] = _marked
    environment.filters["unit"] = _unit
    plots = {f"plot-{f.name}-{i}": one for f, content in figures for i, one in enumerate(content.all_plots)}
    sections = {rule.name: figure for rule in RULES for figure, _ in figures if figure.name == rule.figure}
    used = {term for figure, _ in figures for term in figure.terms}
    if labels is None:
        labels = _labels(first_pages)
    return environment.get_template("report.html.j2").render(
        title=title,
        labels=labels,
        opening=opening,
        first_pages=first_pages,
        figures=figures,
        sections=sections,
        definitions=[(term, DEFINITIONS[term]) for term in sorted(used, key=str.lower)],
        plots=Markup(_plots_json(plots)),
        style=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup((_TEMPLATES / "report.js").read_text(encoding="utf-8")),
        plotly=Markup(plotly_javascript()),
    )


def _labels(first_pages: list[dict[str, Any]]) -> list[str]:
    """What must be known before a number is read, each once, with the names of the runs that it is true of."""
    names: dict[str, list[str]] = {}
    for page in first_pages:
        for label in page["labels"]:
            names.setdefault(label, []).append(page["name"])
    told = []
    for label, runs in names.items():
        of = "all runs" if len(runs) == len(first_pages) > 1 else ", ".join(filter(None, runs))
        told.append(f"{of}: {label}" if of else label)
    return told


def _plots_json(plots: dict[str, Plot]) -> str:
    """All plots as JSON that may stand in a script element: `<` is written so that no tag can begin in it."""
    content = {name: [vars(variant) for variant in one.variants] for name, one in plots.items()}
    text = json.dumps(content, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _anchor(term: str) -> str:
    """The id of a definition."""
    return "def-" + re.sub(r"[^a-z0-9]+", "-", term.lower()).strip("-")


def _unit(heading: str) -> Any:
    """A heading whose unit stays on the line of the word before it, or in a narrow window has its own."""
    from markupsafe import Markup, escape

    text = re.sub(r" (s|GB/s)$", "<span class=unit>\u00a0\\1</span>", str(escape(heading)))
    return Markup(text.replace("_", "_<wbr>"))


def _marked(text: str) -> Any:
    """Escaped text in which `...` is shown as code, and a number stays on the line of its unit."""
    from markupsafe import Markup, escape

    def code(found: re.Match[str]) -> str:
        return f"<code>{found[1]}</code>".replace("\u00a0", " ")

    return Markup(re.sub(r"`([^`]*)`", code, unbroken(str(escape(text)))))


def plotly_javascript() -> str:
    """plotly.js as the Python package brings it, read without importing that package, which takes long.

    Raises CouldNotRunError if the package is not installed.
    """
    spec = importlib.util.find_spec("plotly")
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / "package_data" / "plotly.min.js"
        if path.exists():
            return path.read_text(encoding="utf-8")
    raise CouldNotRunError("the HTML report needs plotly: `pip install plotly`")
