"""The variants of a comparison: one run, or several repeats of it, with the facts that describe it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_uppercase

from ..common.errors import CouldNotRunError
from ..model.run_info import layout_text
from ..report import Report
from .metrics import Samples
from .results import VariantFacts

NO_ENGINE = "engine not recorded"
_TRACES = ("restart_trace", "trace")  # what directories of traces are called, of trainings and of drills


@dataclass(frozen=True)
class Variant:
    """Runs that are repeats of each other, one at least.

    `collected`: name -> samples of each run, where they are not just what `metrics.collect` takes of its report.
    """

    name: str
    reports: list[Report]
    collected: list[dict[str, Samples]] | None = None


def by_engine(variants: list[Variant]) -> list[Variant]:
    """The variants, with one for each engine in place of one whose runs used several, in the order of use.

    Two engines are no repeats of each other. A replay, or a job that was resumed with another engine, holds several in
    one run; its cycles have one each. Raises CouldNotRunError for replays of one name that are no repeats.
    """
    found: list[Variant] = []
    for variant in variants:
        _check_repeats(variant)
        engines = list(dict.fromkeys(engine for report in variant.reports for engine in engines_of(report).values()))
        if len(engines) == 1:
            found.append(variant)
            continue
        of = "" if len(variants) == 1 else f"{_short(variant.name, variant.reports[0].directory)} "
        for engine in engines:
            reports = [report for report in variant.reports if engine in engines_of(report).values()]
            found.append(Variant(f"{of}{engine}", [of_engine(report, engine) for report in reports]))
    return found


def _check_repeats(variant: Variant) -> None:
    """Refuse replays of different sizes under one name: their median is a size that none of them had."""
    facts = [_of_run(report) for report in variant.reports if report.replayed is not None]
    for name in ("model", "layout", "ranks", "label"):
        values = dict.fromkeys(str(of_run[name]) for of_run in facts)
        if len(values) > 1:
            raise CouldNotRunError(
                f"{variant.name}: runs of one name are repeats of each other, and these replays differ in {name}: "
                f"{'; '.join(values)}. Give each a NAME of its own"
            )


def engines_of(report: Report) -> dict[int, str]:
    """Cycle -> engine. A cycle that ended before it recorded one has that of the cycle before it, or the first known.

    In a run that records none, such as an imported one, each has NO_ENGINE.
    """
    recorded = [(info.cycle, info.engine_asked or info.engine_used) for info in report.cycles]
    latest = next((engine for _, engine in recorded if engine), NO_ENGINE)
    found: dict[int, str] = {}
    for cycle, engine in recorded:
        latest = found[cycle] = engine or latest
    return found


def of_engine(report: Report, engine: str) -> Report:
    """The cycles of a run that used one engine. What describes the whole run, such as its budget, is left out."""
    kept = {cycle for cycle, each in engines_of(report).items() if each == engine}
    return replace(
        report,
        cycles=[info for info in report.cycles if info.cycle in kept],
        saves=[save for save in report.saves if save.cycle in kept],
        weights=[save for save in report.weights if save.cycle in kept],
        loads=[load for load in report.loads if load.cycle in kept],
        starts=[start for start in report.starts if start.cycle in kept],
        steps=[step for step in report.steps if step.cycle in kept],
        training=[training for training in report.training if training.cycle in kept],
        problems=[problem for problem in report.problems if problem.data.get("engine") in (None, engine)],
        path=None, last_failure=None, budget=None, findings=[],
    )  # fmt: skip


def label_of(index: int) -> str:
    """A, B, ... in the order given."""
    return ascii_uppercase[index] if index < len(ascii_uppercase) else f"#{index + 1}"


def short_name(variant: VariantFacts) -> str:
    """The name of a variant; if it was given as a directory, the last part that is not a generic name."""
    return _short(variant.name, Path(variant.directories[0]))


def _short(name: str, directory: Path) -> str:
    path = Path(name)
    if not directory.is_relative_to(path):  # a NAME, which may hold slashes
        return name
    return (path.parent.name if path.name in _TRACES else path.name) or name


def names_in_sentences(variants: list[VariantFacts]) -> list[str]:
    """A name for each: its short name, with the label before it where two have the same."""
    names = [short_name(variant) for variant in variants]
    times = Counter(names)
    return [
        name if times[name] == 1 else f"{variant.label} ({name})" for name, variant in zip(names, variants, strict=True)
    ]


def facts_of(variant: Variant, label: str) -> VariantFacts:
    """What a variant ran with; where its runs differ, all their values."""
    of_runs = [_of_run(report) for report in variant.reports]
    names = list(dict.fromkeys(name for facts in of_runs for name in facts))
    facts: dict[str, str | None] = {}
    for name in names:
        values = list(dict.fromkeys(value for run in of_runs if (value := run.get(name)) is not None))
        facts[name] = " / ".join(values) if values else None
    return VariantFacts(
        label=label,
        name=variant.name,
        directories=[str(report.directory) for report in variant.reports],
        run_ids=[report.run_id for report in variant.reports],
        sources=[_source(report) for report in variant.reports],
        facts=facts,
    )


def _source(report: Report) -> str:
    if report.replayed is not None:
        return "replay"
    return report.imported.source if report.imported else "trace"


def _storage(report: Report) -> str | None:
    """Where checkpoints are saved, by its mount; of a replay its directory, too. None if that is not recorded."""
    if report.replayed is not None:
        return report.replayed.storage
    mounts = [storage.mount for storage in report.storage if storage.use == "save"]
    found = re.search(r" on (\S+) type (\S+)", mounts[0]) if mounts else None
    return f"{found[1]} ({found[2]})" if found else None


def _of_run(report: Report) -> dict[str, str | None]:
    last = report.cycles[-1]
    asked = last.engine_asked if report.replayed else None  # raw-rank and raw-all are one class
    facts: dict[str, str | None] = {
        "label": last.label,
        "engine": asked or last.engine_used or last.engine_asked,
        "layout": layout_text(last.layout) if last.layout else None,
        "model": report.model,
        "ranks": str(last.expected),
        "hosts": str(len(last.hosts)) if last.hosts else None,
        "durability": last.durability,
        "storage": _storage(report),
        "host": last.hosts[0] if len(last.hosts) == 1 else None,
    }
    if report.replayed is not None:
        facts |= report.replayed.conditions
    return facts | {f"version of {name}": version for name, version in sorted(last.versions.items())}
