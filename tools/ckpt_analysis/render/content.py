"""Content of a figure: plots as plain data, tables, sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ...common.tables import Cell, Column, Item, titles


@dataclass(frozen=True)
class Variant:
    """Another arrangement of a plot's data, behind a button with this label."""

    label: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


@dataclass(frozen=True)
class Plot:
    """One plot. The first variant is shown; with several there are buttons to choose.

    `description` is the text alternative, for screen readers.
    """

    title: str
    variants: list[Variant]
    description: str


@dataclass(frozen=True)
class Table:
    """A table that readers can sort. `folded`: shown only when opened."""

    caption: str
    header: list[str]
    rows: list[list[Cell]]
    folded: bool = False

    @cached_property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers, in some row."""
        return [any(row[i].order is not None for row in self.rows) for i in range(len(self.header))]


@dataclass(frozen=True)
class Content:
    """What one figure shows, in this order: notes (sentences with its result), plots, tables, folds.

    `method` are sentences on how the result was found; they are folded.
    """

    plots: list[Plot] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    method: list[str] = field(default_factory=list)
    folds: list[Fold] = field(default_factory=list)

    @property
    def after_first_note(self) -> Content:
        """All but its first note, with which a folded figure is seen."""
        return replace(self, notes=self.notes[1:])

    @property
    def all_plots(self) -> list[Plot]:
        """Its plots, then those of its folds."""
        return self.plots + [one for fold in self.folds for one in fold.content.plots]

    def add(self, part: Content, result: str, *, folded: bool) -> None:
        """Append a part whose `result` is one sentence, and all that is seen of the part where it is `folded`."""
        if folded:
            self.folds.append(Fold(result, part))
            return
        self.notes.append(result)
        self.notes.extend(part.notes)
        self.plots.extend(part.plots)
        self.tables.extend(part.tables)


@dataclass(frozen=True)
class Fold:
    """What is shown only when the reader opens it: of less than a hundredth of the run's wall time.

    `result` is the line that is always seen. `content` has no folds itself.
    """

    result: str
    content: Content


@dataclass(frozen=True)
class Figure:
    """A figure of the report. `make` takes the RunData of a run, or the Comparison of several.

    `caption` defines its metric; `terms` are definitions that it links to. Rules name the figure of their findings.
    `folded`: only its first note is seen until the reader opens it.
    """

    name: str
    section: str
    title: str
    make: Callable[[Any], Content]
    caption: str
    terms: tuple[str, ...]
    folded: bool = False


def folded(content: Content) -> Content:
    """The content behind its first note."""
    result, *notes = content.notes
    return Content(folds=[Fold(result, replace(content, notes=notes))])


def plot(title: str, data: list[dict[str, Any]], layout: dict[str, Any], description: str) -> Plot:
    """A plot with one arrangement."""
    return Plot(title, [Variant("", data, layout)], description)


def table(caption: str, columns: Sequence[Column[Item]], items: Iterable[Item], *, folded: bool = False) -> Table:
    """A table with a row per item."""
    rows = [[column.cell(item) for column in columns] for item in items]
    return Table(caption, titles(columns), rows, folded)


def missing(sentence: str) -> Content:
    """The sentence that says why there is no figure."""
    return Content(notes=[sentence])
