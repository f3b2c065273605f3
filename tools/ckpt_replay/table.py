"""The figures of a replay as a table for people."""

from __future__ import annotations

from typing import Any

_SAVE_COLUMNS = (("blocked", "blocked_s"), ("durable", "durable_s"))
_COLUMNS = (*_SAVE_COLUMNS, ("cold load", "load_cold_s"), ("warm load", "load_warm_s"))
_WIDTH = 27


def render(figures: dict[str, Any]) -> str:
    """The table: one line per engine, ratios below, the storage, then what has to be known of the figures."""
    lines = [*head(figures), "", _row("engine", [*(f"{title}, s" for title, _ in _COLUMNS), "peak memory, MiB (kept)"])]
    for name, found in figures["engines"].items():
        cells = [_seconds(found[key]) for _, key in _COLUMNS]
        cells.append(_memory(found))
        lines.append(_row(name, cells))
    lines += ["", *_throughputs(figures), *_ratios(figures), "", *_storage(figures["storage"])]
    lines += ["", *_notes(figures), *_explanation(figures)]
    if figures.get("targets"):
        lines += ["", *render_targets(figures["targets"])]
    return "\n".join(lines) + "\n"


def render_targets(targets: list[dict[str, str]]) -> list[str]:
    """One line per target."""
    lines = ["targets"]
    for target in targets:
        lines.append(f"  {target['measure']:<46} {target['target']:<54} {target['measured']}   {target['verdict']}")
    return lines


def _row(first: str, cells: list[str]) -> str:
    return f"{first:<24}" + "".join(f"{cell:<{_WIDTH}}" for cell in cells).rstrip()


def head(figures: dict[str, Any]) -> list[str]:
    """What was replayed."""
    layout = " ".join(f"{name.upper()}{size}" for name, size in figures["layout"].items())
    what = f"{figures['model']} {layout}"
    if figures["small_tensors"] is not None:
        what = f"{figures['small_tensors']} small tensors"
    ranks, size = figures["ranks"], figures["bytes_per_rank"]
    lines = [
        f"{what}, rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {size / 2**30:.2f} GiB "
        f"({size / 1e9:.2f} GB) a rank, {figures['repeat']} repeats, variants interleaved; medians [least to most], "
        "slowest rank"
    ]
    if figures["limited"]:
        full = figures["limited"]["full_bytes_per_rank"]
        lines.append(
            f"LIMITED by --limit-bytes to {size / full:.1%} of the {full / 1e9:.2f} GB that such a rank really holds"
        )
    return lines


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


def _throughputs(figures: dict[str, Any]) -> list[str]:
    lines = [_row("GB/s", ["", "durable", "cold load", "warm load", "steps, while flushing"])]
    for name, found in figures["engines"].items():
        cells = [f"{value:.2f}" if (value := found[key]) else "-" for key in _GBPS]
        slower = found["step_interference"]
        cells.append(f"{slower['median']:+.1%}" if slower else "-")
        lines.append(_row("  " + name, ["", *cells]))
    return lines


_GBPS = ("durable_GBps", "load_cold_GBps", "load_warm_GBps")


def _ratios(figures: dict[str, Any]) -> list[str]:
    """Times as fast as torch (blocked: as short), and parts of what the storage itself does."""
    lines: list[str] = []
    torch = figures["engines"].get("torch")
    if torch is not None and len(figures["engines"]) > 1:
        lines.append("times torch's speed")
        for name, found in figures["engines"].items():
            lines.append(_row("  " + name, [_ratio(torch[key], found[key]) for _, key in _COLUMNS]))
    storage = figures["storage"]
    limits = (storage["write_direct_gbps"], storage["read_direct_gbps"])
    if any(limits):
        lines.append("of the best raw direct write or read")
        for name, found in figures["engines"].items():
            parts = [
                f"{value / limit:.0%}" if (value := found[key]) and limit else "-"
                for key, limit in zip(_GBPS, limits, strict=False)
            ]
            lines.append(_row("  " + name, ["", *parts]))
    return lines


def _ratio(baseline: dict[str, Any] | None, found: dict[str, Any] | None) -> str:
    if not baseline or not found or not found["median"]:
        return "-"
    return f"{baseline['median'] / found['median']:.2f}"


def _storage(storage: dict[str, Any]) -> list[str]:
    """Per kind the best combination, and all of them."""
    if not storage["bytes_per_rank"]:
        return ["the storage itself was not measured"]
    lines = [
        f"the storage itself, {storage['bytes_per_rank'] / 2**20:.0f} MiB a rank, GB/s by threads x MiB of a block"
    ]
    for kind, found in storage["details"].items():
        if found["best"] is None:
            lines.append(f"  {kind:<22} not possible here")
            continue
        best = found["combinations"][found["best"]]
        rest = "  ".join(f"{name} {one['gbps']:.2f}" for name, one in found["combinations"].items())
        spread = best["seconds"]
        total = best["gbps"] * spread["median"]
        lines.append(
            f"  {kind:<22} best {best['gbps']:.2f} [{total / spread['max']:.2f} to {total / spread['min']:.2f}] "
            f"with {found['best']}; {rest}"
        )
    return lines


def _notes(figures: dict[str, Any]) -> list[str]:
    """What was left out, what failed, and which loads do not count."""
    lines = [f"left out: {name}: {why}" for name, why in figures["left_out"].items()]
    for name, found in figures["engines"].items():
        if found["failed"]:
            told = found["failed"].splitlines()
            lines.append(f"FAILED: {name}: {' ... '.join(dict.fromkeys((told[0], told[-1])))}")
        for figure, why in found["not_measured"].items():
            lines.append(f"{name}: no {figure}: {why}")
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
    if not figures["cold_asked"]:
        lines.append("cold loads were not asked for: give --cold")
    if figures.get("kept"):
        lines.append(f"the last checkpoint of each engine was kept in {figures['kept']}")
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
        "peak memory: what the process holds more than before the engine was there, the state not included; (kept):",
        "of that, what it still holds after the save: caches, pinned memory, and what the allocator did not give back.",
    ]
