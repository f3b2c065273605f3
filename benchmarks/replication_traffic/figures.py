"""From traces and counters to figures."""

from __future__ import annotations

import bisect
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.samples import ratio_of_medians
from benchmarks.replication_traffic.plan import INTERLEAVE, NONE, VARIANTS, Plan
from tools.common.tables import markdown_table

_TARGET = 1.05
_IDLE_SHARE = 0.05  # of the link's rate: below, a stretch of 10 ms counts as idle


@dataclass
class Variant:
    """What was measured of one, of each step that counts; s. Lists of `steps` by round."""

    steps: list[list[float]] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)  # of the first host's link, while the step went on
    sent: list[int] = field(default_factory=list)  # bytes by the first host, while the step went on
    blocked: list[float] = field(default_factory=list)  # of rank 0's training thread, by the save before
    copied: list[float] = field(default_factory=list)  # from the sealed slot to the verified copy, of rank 0

    @property
    def step_s(self) -> float:
        return statistics.median(seconds for one in self.steps for seconds in one)


@dataclass
class Figures:
    """`at_once`: share of the copies' bytes that `interleave` sent beside training."""

    variants: dict[str, Variant]
    copy_bytes: int  # of one rank
    at_once: float
    link_bytes_per_s: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def figures_of(directory: Path, plan: Plan, link_bytes_per_s: float) -> Figures:
    """What the first rank's trace and its host's counter say."""
    (trace,) = (directory / "trace").glob("rank_00000_cycle_*.jsonl")
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    sent = [json.loads(line) for line in (directory / "sent_0.jsonl").read_text().splitlines()]
    return analyse(records, sent, plan, link_bytes_per_s)


def analyse(
    records: Sequence[Mapping[str, Any]], sent: Sequence[Sequence[int]], plan: Plan, link_bytes_per_s: float
) -> Figures:
    """`records` of a trace; `sent`: (monotonic ns, bytes so far), in order.

    The save at the end of an iteration costs the next one: from its beginning to the beginning of the one that follows.
    """
    began = {record["step"]: record["start_ns"] for record in records if record.get("type") == "iteration"}
    found = {name: Variant([[] for _ in range(plan.rounds)]) for name in VARIANTS}
    idle_bytes = [
        (start[0], end[0] - start[0])
        for start, end in zip(sent, sent[1:], strict=False)
        if (end[1] - start[1]) * 1e9 < _IDLE_SHARE * link_bytes_per_s * (end[0] - start[0])
    ]
    times_ns, sampled_ns = [at for at, _ in idle_bytes], [at for at, _ in sent]
    for step in began:
        if not plan.counts(step) or step + 2 not in began:
            continue
        start, end = began[step + 1], began[step + 2]
        variant = found[plan.variant(step)]
        variant.steps[plan.round(step)].append((end - start) / 1e9)
        within = idle_bytes[bisect.bisect_left(times_ns, start) : bisect.bisect_left(times_ns, end)]
        variant.idle.append(sum(length for _, length in within) / 1e9)
        first, last = (sent[bisect.bisect_left(sampled_ns, at, hi=len(sent) - 1)][1] for at in (start, end))
        variant.sent.append(last - first)
    saves = {record["op"]: record for record in records if record.get("operation") == "save" and "start_ns" in record}
    for record in records:
        save = saves.get(record.get("op", -1))
        if save is None or "phase" not in record or not plan.counts(save["step"]):
            continue
        variant, took = found[plan.variant(save["step"])], (record["end_ns"] - record["start_ns"]) / 1e9
        if record["phase"] == "replicate":
            variant.copied.append(took)
        elif record["phase"] in ("wait_previous", "barrier") and record.get("blocking") is not False:
            variant.blocked.append(took)
    copies = {r["op"]: r["bytes"] for r in records if r.get("phase") == "replicate" and "bytes" in r}
    late = [
        int(record["detail"].partition("; ")[2].split()[0])
        for record in records
        if record.get("type") == "event" and str(record.get("detail", "")).startswith(INTERLEAVE)
        and plan.counts(record["step"])
    ]  # fmt: skip
    each = max(copies.values(), default=0)
    return Figures(found, each, sum(late) / (each * len(late)) if late and each else 0.0, link_bytes_per_s)


def render(found: Figures, before: Mapping[str, Any]) -> str:
    """Tables."""
    base = found.variants[NONE]
    rows = []
    for name, one in found.variants.items():
        seconds = [value for block in one.steps for value in block]
        ratio = ratio_of_medians(
            [statistics.median(b) for b in one.steps], [[statistics.median(b) for b in base.steps]]
        )
        spread = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
        rows.append(
            (
                name,
                f"{statistics.median(seconds):.3f}",
                f"{spread[0]:.3f} to {spread[2]:.3f}",
                f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
                f"{statistics.median(one.idle):.3f}",
                f"{statistics.median(one.sent) / 1e6:.1f}",
                _median(one.copied),
                _median(one.blocked),
                str(len(seconds)),
            )
        )
    titles = (
        "copies",
        "step, s",
        "middle half",
        "of none",
        "link idle, s",
        "sent, MB",
        "copy took, s",
        "blocked, s",
        "steps",
    )
    target = found.variants[INTERLEAVE].step_s / base.step_s
    return "\n".join(
        [
            f"load average before: {before['load_average_1_min']}; {before['processors']} processors; link "
            f"{found.link_bytes_per_s * 8 / 1e9:g} Gbit/s; a copy of a rank has {found.copy_bytes / 1e6:.1f} MB",
            "",
            *markdown_table(titles, rows),
            "",
            f"interleave takes {target:.3f} of the step without checkpoints (target: at most {_TARGET}: "
            f"{'met' if target <= _TARGET else 'MISSED'}); {found.at_once:.0%} of its bytes went at once",
        ]
    )


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f}" if values else "-"
