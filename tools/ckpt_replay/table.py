"""The figures of a replay as a text table."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..common.tables import Column, fitted_table, wrapped
from .answer import answer, sentence, what
from .plan import IN_MEMORY, LOAD, SAVE, SAVES_THEN_LOADS

_TIMES = (
    ("blocked s", "blocked_s"),
    ("durable s", "durable_s"),
    ("cold load s", "load_cold_s"),
    ("warm load s", "load_warm_s"),
)
_OPTIONAL = ("memory MiB (kept)", "warm load s")  # columns that are dropped on a narrow terminal
_Engine = tuple[str, dict[str, Any]]  # name, figures


def render(figures: dict[str, Any], *, show_all: bool = False) -> str:
    """The verdict, a line per engine, notes on the figures, and the answer in the last lines.

    `show_all`: also throughputs, ratios, every measurement of the storage, and the loads that are not counted.
    """
    columns = [Column[_Engine]("engine", lambda engine: engine[0])]
    columns += [Column(title, partial(_time, name)) for title, name in _TIMES]
    columns.append(Column("memory MiB (kept)", lambda engine: _memory(engine[1])))
    engines = list(figures["engines"].items())
    if figures.get("in_object_storage"):
        columns = [column for column in columns if column.title != "warm load s"]
    lines = [*_wrapped([sentence(figures)]), "", *_wrapped(head(figures)), ""]
    lines += fitted_table(columns, engines, optional=_OPTIONAL)
    if figures.get("in_object_storage") or figures["readers"]:
        lines += ["", *_operations(engines)]
    if show_all:
        lines += ["", *_throughputs(figures), *_ratios(figures)]
    lines += ["", *_storage(figures["storage"], show_all)]
    notes = [*_notes(figures), *(_details(figures) if show_all else []), *_explanation(figures)]
    lines += [*_wrapped(notes), *([] if show_all else _wrapped([_HIDDEN]))]
    return "\n".join([*lines, "", *answer(figures)])


_HIDDEN = "--all adds throughputs, ratios, every measurement of the storage, first saves and second loads."


def _wrapped(paragraphs: list[str]) -> list[str]:
    return [line for text in paragraphs for line in wrapped(text, rest="  ")]


def head(figures: dict[str, Any]) -> list[str]:
    """What was replayed."""
    ranks, size = list(dict.fromkeys(figures["ranks"])), figures["bytes_per_rank"]
    copies = f" in {len(figures['ranks']) // len(ranks)} copies" * (len(ranks) < len(figures["ranks"]))
    kept = figures["operations"] == SAVES_THEN_LOADS
    order = "of each engine all saves, then the loads" if kept else "variants interleaved"
    lines = [
        f"{what(figures)}, rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}{copies}: {size / 2**30:.2f} GiB "
        f"({size / 1e9:.2f} GB) a rank, {figures['repeat']} repeats, {order}; medians [least to most], "
        "slowest rank"
    ]
    if figures["limited"]:
        full = figures["limited"]["full_bytes_per_rank"]
        lines.append(
            f"LIMITED by --limit-bytes to {size / full:.1%} of the {full / 1e9:.2f} GB that such a rank really holds"
        )
    if figures["readers"]:
        lines.append(f"while a save is measured, {figures['readers']} readers load an earlier checkpoint (--readers)")
    if figures["operations"] in (SAVE, LOAD):
        lines.append(f"only {figures['operations']}s are measured (--operations {figures['operations']})")
    if figures["striping"] is not None:
        lines.append(f"files are striped over the targets of the file system: --striping {figures['striping']}")
    return lines


_OPERATION_COLUMNS = (
    ("throughput MiB/s", "throughput_MiBps", ".0f"),
    ("duration s", "duration_s", ".3f"),
    ("coordination s", "coordination_s", ".3f"),
    ("processing s", "processing_s", ".2f"),
    ("requests", "requests", ".0f"),
    ("requests/s", "requests_per_s", ".0f"),
    ("success", "success_ratio", ".2%"),
)


def _operations(engines: list[_Engine]) -> list[str]:
    """Saves and loads as the benchmark of the S3 connector for PyTorch prints them, and more."""
    rows = [(f"{name} {kind}", of) for name, found in engines for kind, of in found["operations"].items()]
    columns = [Column[_Engine]("engine and operation", lambda row: row[0])]
    columns += [Column(title, partial(_cell, name, form)) for title, name, form in _OPERATION_COLUMNS]
    return [*fitted_table(columns, rows, optional=("processing s", "requests", "coordination s")), *_clients(engines)]


def _clients(engines: list[_Engine]) -> list[str]:
    """What the client of a library ran with, in the terms of S3ClientConfig."""
    return _wrapped(
        [
            f"{name}: {client['threads']} threads, parts of {client['part_bytes'] / 2**20:g} MiB, throughput target "
            f"{client['throughput_target_gbps']:g} Gbit/s"
            for name, found in engines
            if (client := found["client"])
        ]
    )


def _cell(name: str, form: str, row: _Engine) -> str:
    value = row[1][name]
    value = value["median"] if isinstance(value, dict) else value
    return "-" if value is None else format(value, form)


def _time(name: str, engine: _Engine) -> str:
    return _seconds(engine[1][name])


def _seconds(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    return f"{found['median']:.3f} [{found['min']:.3f} to {found['max']:.3f}]"


def _memory(found: dict[str, Any]) -> str:
    peak, kept, children = (found[name] for name in ("peak_rss_bytes", "kept_rss_bytes", "children_peak_bytes"))
    if peak is None:
        return "-"
    text = f"{peak['median'] / 2**20:.0f} ({kept['median'] / 2**20:.0f})"
    return text + (f" + {children['median'] / 2**20:.0f} in children" if children["median"] else "")


_GBPS = (("durable", "durable_GBps"), ("cold load", "load_cold_GBps"), ("warm load", "load_warm_GBps"))


def _throughputs(figures: dict[str, Any]) -> list[str]:
    columns = [Column[_Engine]("GB/s", lambda engine: engine[0])]
    columns += [Column(title, partial(_rate, name)) for title, name in _GBPS]
    columns.append(Column("steps, while flushing", lambda engine: _slower(engine[1]["step_interference"])))
    return fitted_table(columns, list(figures["engines"].items()), optional=("steps, while flushing",))


def _rate(name: str, engine: _Engine) -> str:
    return f"{value:.2f}" if (value := engine[1][name]) else "-"


def _slower(interference: dict[str, Any] | None) -> str:
    return f"{interference['median']:+.1%}" if interference else "-"


def _ratios(figures: dict[str, Any]) -> list[str]:
    """Speed relative to torch (blocked: how many times shorter), and as a share of the storage's own throughput."""
    lines: list[str] = []
    engines = list(figures["engines"].items())
    torch = figures["engines"].get("torch")
    if torch is not None and len(engines) > 1:
        columns = [Column[_Engine]("times torch's speed", lambda engine: engine[0])]
        columns += [Column(title[:-2], partial(_against, torch, name)) for title, name in _TIMES]
        lines += ["", *fitted_table(columns, engines)]
    storage = figures["storage"]
    limits = (storage["write_direct_gbps"], storage["read_direct_gbps"])
    if any(limits):
        columns = [Column[_Engine]("of the best raw direct write or read", lambda engine: engine[0])]
        columns += [
            Column(title, partial(_part, name, limit)) for (title, name), limit in zip(_GBPS, limits, strict=False)
        ]
        lines += ["", *fitted_table(columns, engines)]
    return lines


def _against(torch: dict[str, Any], name: str, engine: _Engine) -> str:
    return _ratio(torch[name], engine[1][name])


def _part(name: str, limit: float | None, engine: _Engine) -> str:
    return f"{value / limit:.0%}" if (value := engine[1][name]) and limit else "-"


def _ratio(baseline: dict[str, Any] | None, found: dict[str, Any] | None) -> str:
    if not baseline or not found or not found["median"]:
        return "-"
    return f"{baseline['median'] / found['median']:.2f}"


def _storage(storage: dict[str, Any], show_all: bool) -> list[str]:
    """Per kind the best combination; with `show_all` all of them."""
    if not storage["bytes_per_rank"]:
        return ["the storage itself was not measured"]
    lines = [f"the storage itself, {storage['bytes_per_rank'] / 2**20:.0f} MiB a rank, GB/s with threads x MiB"]
    for kind, found in storage["details"].items():
        if found["best"] is None:
            lines.append(f"  {kind:<22} not possible here")
            continue
        best = found["combinations"][found["best"]]
        spread = best["seconds"]
        total = best["gbps"] * spread["median"]
        lines.append(
            f"  {kind:<22} {best['gbps']:.2f} [{total / spread['max']:.2f} to {total / spread['min']:.2f}] "
            f"with {found['best']}"
        )
        if show_all:
            rest = "  ".join(f"{name} {one['gbps']:.2f}" for name, one in found["combinations"].items())
            lines += wrapped(rest, begin=" " * 4, rest=" " * 4)
    return [*lines, ""]


def _notes(figures: dict[str, Any]) -> list[str]:
    """Engines left out or failed, and loads that are not counted."""
    lines = [f"left out: {name}: {why}" for name, why in figures["left_out"].items()]
    for name, found in figures["engines"].items():
        if found["failed"]:
            error = found["failed"].splitlines()
            lines.append(f"FAILED: {name}: {' ... '.join(dict.fromkeys((error[0], error[-1])))}")
        lines += [
            f"{name}: of {of['done'] + of['failed']} {kind}s {of['failed']} failed"
            for kind, of in found["attempts"].items()
            if of["failed"]
        ]
        if found["in_memory_s"]:
            lines.append(
                f"{name}: {IN_MEMORY[name]}; all ranks have agreed on a save {_seconds(found['in_memory_s'])} s "
                "after its start, and nothing is on storage"
            )
        lines += [f"{name}: no {figure}: {why}" for figure, why in found["not_measured"].items()]
    if not figures["cold_asked"]:
        lines.append("cold loads were not measured: --no-cold")
    if figures.get("kept"):
        lines.append(f"the last checkpoint of each engine was kept in {figures['kept']}")
    return lines


def _details(figures: dict[str, Any]) -> list[str]:
    """Per engine: its second load, the first write to what was loaded, and its first save."""
    lines: list[str] = []
    for name, found in figures["engines"].items():
        if found["load_warm_again_s"] and found["load_warm_s"]:
            again = _seconds(found["load_warm_again_s"])
            lines.append(f"{name}: a second warm load in the same process, memory it keeps used again: {again} s")
        for state in ("cold", "warm"):
            if found[f"first_write_{state}_s"]:
                write = _seconds(found[f"first_write_{state}_s"])
                lines.append(f"{name}: first write to every page after a {state} load: {write} s")
        if found["first_blocked_s"]:
            blocked, durable = _seconds(found["first_blocked_s"]), _seconds(found["first_durable_s"])
            lines.append(
                f"{name}: first save of a process, not counted above: blocked {blocked} s, durable {durable} s"
            )
    return lines


def _explanation(figures: dict[str, Any]) -> list[str]:
    steps = figures["steps"]
    trained = (
        f"{steps['total_s']:g} s of training in steps of {steps['step_s']:g} s ({steps['work']}) follow each save"
        if steps["total_s"]
        else "the state is to change right after the save has begun (--steps-between lets training go on meanwhile)"
    )
    durable = "durable: from the start of the save until its commit"
    if figures["options"]["checkpoint_durability"] != "fsync":
        durable += " (NOT SYNCHRONISED to storage: --checkpoint-durability none)"
    return [
        f"blocked: what the training thread waited; {trained}.",
        f"{durable}. Loads: first of a fresh process, verified afterwards.",
        "memory: the most that the process holds beside its state during a save; (kept): what it holds afterwards.",
    ]
