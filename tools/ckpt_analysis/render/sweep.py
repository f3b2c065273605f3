"""The tables of a sweep, for a terminal and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from typing import Any, NamedTuple

from ...common.cli import parse_rank_ranges
from ...common.escaping import visible
from ...common.formatting import NOT_RECORDED, number, percent, plural, rate, size
from ...common.sweep_files import NO_FAULT
from ...common.tables import Column, Style, fitted_table, numbers, times, wrapped
from ...common.verdict import TOO_FEW, load_before
from ..compare.results import DIFFERS
from ..compare.verdict import in_brief
from ..sweeps.groups import NO_ENGINE, Group, failures, grouped, storage_ceiling
from ..sweeps.read import CellResult, Sweep
from ..sweeps.samples import Measured

BLOCKED, DURABLE, RESTART, FIRST_STEP = "blocked_s", "durable_s", "restart_s", "time_to_first_step_s"
COLD_LOAD, WARM_LOAD, LOAD = "load_cold_s", "load_warm_s", "load_s"
SHARE, STEP = "blocked_share", "iteration_s"
SPED_UP = (BLOCKED, DURABLE, COLD_LOAD, WARM_LOAD, LOAD, RESTART, FIRST_STEP)


class Line(NamedTuple):
    """One engine of one group."""

    group: Group
    engine: str

    def median(self, metric: str) -> float | None:
        return self.group.median(self.engine, metric)

    @property
    def ranks(self) -> int | None:
        return self._fact("ranks")

    @property
    def hosts(self) -> int | None:
        return self._fact("hosts")

    def _fact(self, name: str) -> Any:
        return self.group.variants[self.engine][0].facts.get(name)

    def rate(self, over: str) -> float | None:
        """GB/s: bytes of a save over the time that `over` names, both medians."""
        num_bytes, seconds = self.median("save_bytes"), self.median(over)
        return num_bytes / seconds / 1e9 if num_bytes and seconds else None

    def each(self, over: str, count: int | None) -> float | None:
        """`rate` for each of so many ranks or hosts."""
        found = self.rate(over)
        return found / count if found is not None and count else None


class SpedUp(NamedTuple):
    """A time of an engine beside that of the first one."""

    line: Line
    baseline: str
    metric: str
    times: float
    interval: str
    verdict: str


@dataclass(frozen=True)
class View:
    """A sweep with everything that is shown of it."""

    sweep: Sweep
    measured: list[Measured]

    @cached_property
    def groups(self) -> list[Group]:
        return grouped(self.measured)

    @cached_property
    def ceiling(self) -> dict[str, list[float]]:
        return storage_ceiling(self.measured)

    @property
    def lines(self) -> list[Line]:
        return [Line(group, engine) for group in self.groups for engine in group.variants]

    def having(self, *metrics: str) -> list[Line]:
        """Lines with a value of one of these."""
        return [line for line in self.lines if any(line.median(metric) is not None for metric in metrics)]

    @property
    def failures(self) -> list[CellResult]:
        return failures(self.sweep)

    @property
    def not_ended(self) -> int:
        """How many of `failures` have no result yet."""
        return sum(one.result is None for one in self.failures)

    @property
    def labels(self) -> list[str]:
        """What a reader of any figure must know: of the traces, each once."""
        reports = [one.report for one in self.measured if one.report is not None]
        return list(dict.fromkeys(label for report in reports for label in report.facts.labels))

    def verdicts(self) -> list[str]:
        """A sentence per group of several engines that save; the load of the machine if one has too few repeats."""
        compared = [(group.title, group.of_savers) for group in self.groups]
        said = [f"{title}: {in_brief(comparison)}" for title, comparison in compared if comparison is not None]
        loads = [cell.result["load_average_1_min_before"] for cell in self.sweep.cells if cell.result is not None]
        processors = self.sweep.sessions[0]["machine"]["processors"] if self.sweep.sessions else None
        load = load_before(loads, processors) if any(TOO_FEW in sentence for sentence in said) else ""
        return [*said, *([load] if load else [])]

    def sped_up(self) -> list[SpedUp]:
        """Each engine against the first that saves."""
        found = []
        for line in self.lines:
            names = [variant.name for variant in line.group.comparison.variants]
            if line.engine in (names[0], NO_ENGINE):
                continue
            for row in (row for metric in SPED_UP if (row := line.group.comparison.row(metric))):
                cell = row.cells[names.index(line.engine)]
                gain = row.speed_up(cell)
                if gain is not None:
                    interval = "" if gain.low is None or gain.high is None else f"{gain.low:.2f} to {gain.high:.2f}"
                    found.append(SpedUp(line, names[0], row.name, gain.times, interval, cell.verdict or ""))
        return found


def _planned(view: View, line: Line, name: str) -> int | None:
    plan = view.sweep.plan_of(_cell(line))
    return None if plan is None else int(plan[name])


def _file_bytes(view: View, line: Line, which: int) -> int | None:
    """Size of the smallest, a middle or the largest file; None without a plan, or with one of an earlier version."""
    plan = view.sweep.plan_of(_cell(line))
    found = None if plan is None else plan.get("file_bytes")
    return None if found is None else int(found[which])


def _cell(line: Line) -> Any:
    return line.group.variants[line.engine][0].cell.cell


def expected_files(view: View, line: Line) -> int | None:
    """Files that the plan says this cell's save has: those of the replayed ranks; in a drill, the hashes, too.

    None without a plan.
    """
    cell, plan = _cell(line), view.sweep.plan_of(_cell(line))
    if plan is None:
        return None
    of_ranks: Sequence[int] = plan["files_per_rank"]
    if cell.mode == "replay":
        ranges = parse_rank_ranges(str(cell.settings["ranks"]))
        return sum(of_ranks[rank] for first, last in ranges for rank in range(first, last + 1))
    # A drill verifies what is restored by a file of hashes that each rank saves.
    return sum(of_ranks) + (len(of_ranks) if cell.fault != NO_FAULT else 0)


def _agreement(view: View, line: Line) -> str:
    written, expected = line.median("save_files"), expected_files(view, line)
    if written is None or expected is None:
        return NOT_RECORDED
    return "as planned" if written == expected else f"{expected} planned"


_WHERE: tuple[Column[Line], ...] = (
    Column("configuration", lambda line: line.group.title),
    Column("engine", lambda line: line.engine),
)


def files_columns(view: View) -> tuple[Column[Line], ...]:
    return (
        *_WHERE,
        numbers("ranks planned", lambda line: _cell(line).ranks),
        numbers("files planned", lambda line: _planned(view, line, "num_files")),
        numbers("bytes planned", lambda line: _planned(view, line, "total_bytes"), size),
        numbers("smallest file", lambda line: _file_bytes(view, line, 0), size),
        numbers("median file", lambda line: _file_bytes(view, line, 1), size),
        numbers("largest file", lambda line: _file_bytes(view, line, -1), size),
        numbers("files written", lambda line: line.median("save_files"), partial(number, spec=".0f")),
        numbers("bytes written", lambda line: line.median("save_bytes"), size),
        Column("files", lambda line: _agreement(view, line)),
    )  # fmt: skip


def _median_column(title: str, metric: str) -> Column[Line]:
    return times(title, lambda line: line.median(metric))


def _range(metric: str) -> Column[Line]:
    def text(line: Line) -> str:
        cell = line.group.value(line.engine, metric)
        return (
            NOT_RECORDED if cell is None else f"{min(cell.values):.4f} to {max(cell.values):.4f} ({len(cell.values)})"
        )

    return Column("least to most (n)", text)


SAVES: tuple[Column[Line], ...] = (
    *_WHERE,
    *(_median_column("blocked s", BLOCKED), _range(BLOCKED)),
    *(_median_column("durable s", DURABLE), _range(DURABLE)),
)
RESTARTS: tuple[Column[Line], ...] = (
    *_WHERE, _median_column("load cold s", COLD_LOAD), _median_column("load warm s", WARM_LOAD),
    _median_column("load s", LOAD), _median_column("time to first step s", FIRST_STEP),
    _median_column("restart s", RESTART), _median_column("lost work s", "lost_work_s"),
)  # fmt: skip
SPEED_UPS: tuple[Column[SpedUp], ...] = (
    Column("configuration", lambda one: one.line.group.title),
    Column("engine", lambda one: one.line.engine),
    Column("first engine", lambda one: one.baseline),
    Column("metric", lambda one: one.metric),
    numbers("speed-up", lambda one: one.times, lambda value: f"{value:.2f}"),
    Column("95 % interval", lambda one: one.interval),
    Column("verdict", lambda one: one.verdict, None, lambda one: _mark(one)),
)


def _mark(one: SpedUp) -> str:
    return "" if one.verdict != DIFFERS else "good" if one.times > 1 else "bad"


THROUGHPUT: tuple[Column[Line], ...] = (
    *_WHERE,
    numbers("ranks", lambda line: line.ranks),
    numbers("hosts", lambda line: line.hosts),
    numbers("durable GB/s", lambda line: line.rate(DURABLE), rate),
    numbers("per host GB/s", lambda line: line.each(DURABLE, line.hosts), rate),
    numbers("per rank GB/s", lambda line: line.each(DURABLE, line.ranks), rate),
    numbers("blocked GB/s", lambda line: line.rate(BLOCKED), rate),
)
FREQUENCY: tuple[Column[Line], ...] = (
    *_WHERE,
    numbers("save interval", lambda line: line.group.cell.save_interval),
    numbers("blocked share", lambda line: line.median(SHARE), percent),
    _median_column("blocked s", BLOCKED),
)  # fmt: skip
ITERATIONS: tuple[Column[Line], ...] = (*_WHERE, _median_column("iteration s", STEP), _range(STEP))
FAILED: tuple[Column[CellResult], ...] = (
    Column("cell", lambda one: one.cell.name),
    Column("error", lambda one: "has not ended" if one.result is None else str(one.result["reason"])),
)


class Ceiling(NamedTuple):
    name: str
    values: list[float]


CEILING: tuple[Column[Ceiling], ...] = (
    Column("storage", lambda one: one.name),
    numbers("median GB/s", lambda one: median(one.values), rate),
    numbers("least", lambda one: min(one.values), rate),
    numbers("most", lambda one: max(one.values), rate),
    numbers("n", lambda one: len(one.values)),
)  # fmt: skip


_MOST_FAILURES = 10


def to_table(view: View, style: Style) -> str:
    """The answer for a terminal: verdicts, the times of each engine, and what failed."""
    done = sum(one.ok for one in view.sweep.cells)
    lines = [f"{visible(view.sweep.name)}: {done} of {plural(len(view.sweep.cells), 'cell')} measured", ""]
    for sentence in [*view.labels, *view.verdicts()]:
        lines += wrapped(visible(sentence), rest="  ")
    for title, columns, items in (
        ("Files and sizes", files_columns(view), [line for line in view.lines if _planned(view, line, "num_files")]),
        ("Saves", SAVES, view.having(BLOCKED, DURABLE)),
        ("Loads and restarts", RESTARTS, view.having(COLD_LOAD, WARM_LOAD, LOAD, RESTART)),
    ):
        if items:
            lines += ["", style.heading(title), *fitted_table(columns, items, style, left=2)]
    failed = [one for one in view.failures if one.result is not None]
    lines += [f"FAILED: {one.cell.name}: {visible(FAILED[1].text(one))}" for one in failed[:_MOST_FAILURES]]
    lines += [f"FAILED: {len(failed) - _MOST_FAILURES} more, which -o lists"] if len(failed) > _MOST_FAILURES else []
    lines += [f"{plural(view.not_ended, 'cell')} without a result yet"] if view.not_ended else []
    return "\n".join(lines) + "\n"
