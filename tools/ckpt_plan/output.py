"""A plan as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron.checkpointing.engines.registry import engines_of_object_storage
from megatron.config.uris import is_uri
from megatron.fileio.objects.parts import LISTED, download_requests, range_requests, upload_requests

from ..common.formatting import size
from ..common.tables import text_table, wrapped
from .compression import Verdict
from .compression import render as render_verdict
from .compression import to_dict as verdict_to_dict
from .device_memory import DEVICE_SIZES
from .engines import engine_plan
from .kinds import KINDS
from .listing import Comparison
from .plan import UPSTREAM, Plan, PlannedFile, RankPlan
from .run_needs import RunNeeds, to_dict
from .run_needs import render as render_needs

_MANY_RANKS, _MANY_ON_A_SCREEN = 16, 4


def to_json(plan: Plan, needs: RunNeeds | None = None, compressed: Verdict | None = None) -> str:
    """One JSON object; docs/ckpt_plan.md defines its fields."""
    content = {
        "engine": plan.engine,
        "layout": plan.layout.as_dict(),
        "params_dtype": plan.config.model.params_dtype,
        "vocab_size": plan.vocab_sizes[0],
        "padded_vocab_size": plan.vocab_sizes[1],
        "iteration": plan.progress.iteration,
        "files": [_file(file) for file in plan.files],
        "num_files": len(plan.files),
        "total_bytes": plan.total_bytes,
        "bytes_by_kind": plan.by_kind,
        "per_rank": [_rank(rank) for rank in plan.ranks],
        "commit_files": [_file(file) for file in plan.commit_files],
        "object_storage_requests": requests(plan),
        "compression": verdict_to_dict(compressed),
        "notes": notes(plan),
    }
    if needs is not None:
        content["run"] = to_dict(needs)
    return json.dumps(content) + "\n"


def requests(plan: Plan) -> dict[str, int] | None:
    """Requests of a save to object storage and of a load from it; None for an engine that cannot use object storage.

    `save_put`: PutObject, UploadPart, and the requests that begin and complete an upload; `save_list`: the listing with
    which rank 0 compares; `load_get`: GetObject, if each file is needed by one node. docs/object_storage.md describes
    the other requests.
    """
    if plan.engine not in engines_of_object_storage():
        return None
    sizes = [file.num_bytes for file in plan.files]
    read = range_requests if plan.engine == "lazy" else download_requests
    return {
        "save_put": sum(map(upload_requests, sizes)) + 2,  # manifest.json and latest
        "save_list": -(-len(sizes) // LISTED),
        "load_get": sum(map(read, sizes)) + 2,
    }


def _file(file: PlannedFile) -> dict[str, Any]:
    return {"name": file.name, "bytes": file.num_bytes, "rank": file.rank}


def _rank(rank: RankPlan) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        **rank.at._asdict(),
        "num_files": len(rank.files),
        "bytes": rank.num_bytes,
        "bytes_by_kind": rank.by_kind,
        "device_bytes_estimate": rank.device_bytes,
        "device_bytes_by_use": rank.device,
        "host_bytes_estimate": rank.host_bytes,
    }


def notes(plan: Plan) -> list[str]:
    """What the numbers mean and what they leave out."""
    found = []
    if plan.engine == UPSTREAM:
        found.append(
            "files of layers and experts are exact, shards to 200 bytes; mp_rank_* leaves out upstream's further "
            "settings in args, about 7 kB"
        )
        engine = "torch"
    else:
        engine = plan.engine
    found.append(
        "device memory is an estimate of the least needed: weights, gradients, master weights, moments and "
        "activations, without communication buckets and workspaces; it was not compared with a GPU"
    )
    found.append(f"host memory is an estimate of what saving needs beside the state: {engine_plan(engine).host_note}")
    if plan.config.checkpoint.keep_last is None:
        found.append("every checkpoint is kept unless --keep-last N is given: the disk needs this for each")
    return found


def render(
    plan: Plan, needs: RunNeeds | None, with_files: bool, *, show_all: bool = False, compressed: Verdict | None = None
) -> str:
    """Text for a terminal: totals, ranks, with `with_files` every file, what the run needs, on one screen.

    `show_all`: with a run's needs, also what they push off the screen: configuration, files of a commit, requests.
    """
    brief = needs is not None and not show_all and not with_files
    model = plan.config.model
    lines = [
        f"{plan.layout}, engine {plan.engine}, {model.params_dtype}, vocabulary {plan.vocab_sizes[0]} padded to "
        f"{plan.vocab_sizes[1]}, iteration {plan.progress.iteration}",
        f"{len(plan.files)} files, {plan.total_bytes} bytes ({size(plan.total_bytes, 2)})",
        *(f"  {kind.replace('_', ' '):16} {plan.by_kind[kind]:>20}  {size(plan.by_kind[kind], 2)}" for kind in KINDS),
        "",
        *_rank_lines(plan.ranks, _MANY_ON_A_SCREEN if brief else _MANY_RANKS),
        *_device_lines(plan.ranks),
        "",
    ]
    if with_files:
        lines += _file_lines(plan.files)
    if plan.commit_files and not brief:
        lines += ["written by rank 0 when it commits the first checkpoint of a run, not counted above:"]
        lines += _file_lines(plan.commit_files, heading=False)
    if (count := requests(plan)) is not None and not (brief and not is_uri(plan.config.checkpoint.save or "")):
        lines.append(
            f"to object storage: {count['save_put']} PUT and POST for a save, {count['save_list']} LIST; from there "
            f"{count['load_get']} GET for a load, where one node needs each file"
        )
    if compressed is not None:
        lines += render_verdict(compressed)
    lines += [line for note in notes(plan) for line in wrapped(f"note: {note}", rest="  ")]
    return "\n".join(lines) + "\n" + ("" if needs is None else render_needs(needs, show_all=show_all))


def _rank_lines(ranks: Sequence[RankPlan], many: int) -> list[str]:
    """One line per rank; of more than `many` ranks, one line per distinct amount."""
    groups: dict[tuple[Any, ...], list[RankPlan]] = {}
    for rank in ranks:
        key = (rank.rank,) if len(ranks) <= many else (rank.at.pp, rank.at.dp == 0, len(rank.files))
        groups.setdefault(key, []).append(rank)
    header = ("rank", "tp", "pp", "dp", "files", "bytes", "device memory", "host memory")
    rows: list[tuple[str, ...]] = []
    for group in groups.values():
        most = max(group, key=lambda rank: rank.num_bytes)
        rows.append(
            (
                _span([rank.rank for rank in group]),
                *(_span([getattr(rank.at, axis) for rank in group]) for axis in ("tp", "pp", "dp")),
                str(len(most.files)),
                str(most.num_bytes),
                size(most.device_bytes, 2),
                size(most.host_bytes, 2),
            )
        )
    text = text_table(header, rows, indent="", left=0)
    if len(groups) < len(ranks):
        text.append("(ranks of a stage together, with the largest of their amounts; --format json has each)")
    return text


def _device_lines(ranks: Sequence[RankPlan]) -> list[str]:
    """What the fullest device holds, and the device sizes that it fits."""
    most = max(ranks, key=lambda rank: rank.device_bytes)
    parts = ", ".join(f"{name.replace('_', ' ')} {size(value, 2)}" for name, value in most.device.items())
    fits = [f"{'fits' if most.device_bytes <= each else 'does not fit'} {size(each, 0)}" for each in DEVICE_SIZES]
    text = f"the fullest device, rank {most.rank}: {size(most.device_bytes, 2)} = {parts}; {', '.join(fits)}"
    return wrapped(text, rest="  ")


def _span(values: list[int]) -> str:
    distinct = sorted(set(values))
    return str(distinct[0]) if len(distinct) == 1 else f"{distinct[0]}-{distinct[-1]}"


def _file_lines(files: Sequence[PlannedFile], heading: bool = True) -> list[str]:
    rows = [f"{file.num_bytes:>16}  {file.rank:>5}  {file.name}" for file in files]
    return [f"{'bytes':>16}  {'rank':>5}  file", *rows] if heading else rows


def render_comparison(found: Comparison, listed: int, path: str) -> str:
    """The result of a comparison with a listing."""
    lines = [f"{path}: {found.agreeing} of {listed} listed files agree with the plan in name and size as listed"]
    lines += [f"  {name}: planned, not listed" for name in found.missing]
    lines += [f"  {name}: listed, not planned" for name in found.unplanned]
    lines += [f"  {name}: {mine} planned, {theirs} listed" for name, (mine, theirs) in found.sizes.items()]
    return "\n".join(lines) + "\n"
