"""Lines of Megatron-DeepSpeed (4efb479d) and of Megatron-LM, v2.0 to core v0.19.

Both print them from megatron/arguments.py, checkpointing.py and training.py (Megatron-LM: later in megatron/training/).
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from ...model.imported_run import ImportedLoad, Printed, Range
from ..draft import NUMBER, PREFIX, Draft, reads
from ..saves import SaveDraft

PROGRAMS: tuple[str, ...] = ("Megatron-DeepSpeed", "Megatron-LM")
LOGS = (
    "the output of a Megatron-DeepSpeed or Megatron-LM training (iterations, `saving checkpoint` lines, `CkptTime`, "
    "timers such as `save-checkpoint` and <TIMER:name,seconds>, `ls -l` and `du` of a checkpoint)"
)
# Arguments that tell the model and what was asked for; names are upstream's.
_KEPT_ARGUMENTS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_key_value_heads", "seq_length"),
    *("micro_batch_size", "global_batch_size", "params_dtype", "zero_stage"),
    *("train_iters", "save_interval", "log_interval"),
)
_SETUP_TIMERS = ("model-and-optimizer-setup", "train/valid/test-data-iterators-setup")
_LAYOUT_ARGUMENTS = {
    "world_size": "world_size",
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "data_parallel_size": "dp",
}


@reads(
    r"using world size: (\d+), data-parallel-size: (\d+), (?:sequence-parallel size: (\d+), )?"
    r"tensor-model-parallel size: (\d+), pipeline-model-parallel size: (\d+)"
)
def _world(run: Draft, *sizes: str | None) -> None:
    run.begin_launch()
    for name, value in zip(("world_size", "dp", "sp", "tp", "pp"), sizes, strict=True):
        if value is not None:
            run.layout.state(name, int(value), run.line_number)


@reads(r"using world size: (\d+), data-parallel size: (\d+), (.*)")
def _megatron_lm_world(run: Draft, world_size: str, dp: str, others: str) -> None:
    """Megatron-LM's sizes. Its versions differ in what stands between them, and in the commas."""
    run.begin_launch()
    sizes = {"world_size": int(world_size), "dp": int(dp)}
    of_encoder = re.findall(r"encoder-\w+-model-parallel size: (\d+)", others)
    if any(int(size) for size in of_encoder):  # its ranks are no product of the sizes
        run.layout.state("world_size", sizes["world_size"], run.line_number)
        return
    for name, words in (("tp", "tensor"), ("pp", "pipeline")):
        if found := re.search(rf"(?<!encoder-){words}-model-parallel size: (\d+)", others):
            sizes[name] = int(found[1])
    if {"tp", "pp"} <= sizes.keys():
        ranks = sizes["dp"] * sizes["tp"] * sizes["pp"]
        if ranks and sizes["world_size"] % ranks == 0:  # context-parallel ranks, and what else cuts a layer
            sizes["sp"] = sizes["world_size"] // ranks
    for name, value in sizes.items():
        run.layout.state(name, value, run.line_number)


@reads(rf"{PREFIX}  (\w+) \.{{2,}} (.*)$")
def _argument(run: Draft, name: str, value: str) -> None:
    value = value.strip()
    if name in _LAYOUT_ARGUMENTS and value.isdigit():
        run.layout.state(_LAYOUT_ARGUMENTS[name], int(value), run.line_number)
    elif name in _KEPT_ARGUMENTS:
        run.arguments.setdefault(name, value)


# Not from within a word: a long one would be scanned from each of its letters.
@reads(
    rf"(?<![\w/-])([\w/-]+) \.*: \({NUMBER}, {NUMBER}\)",  # a long name has no dots
    rf"{PREFIX}    ([\w/-]+) \.{{2,}}: (){NUMBER}$",  # the slowest rank alone
)
def _timer(run: Draft, name: str, low: str, high: str) -> None:
    _took(run, name, Range(max_s=float(high) / 1e3, min_s=float(low) / 1e3 if low else None))


def _took(run: Draft, name: str, took: Range) -> None:
    if name in ("save-checkpoint", "save-checkpoint-non-persistent") and run.saves and not run.saves[-1].call:
        run.saves[-1].call = took
    elif name == "load-checkpoint":
        run.loads.append(ImportedLoad(run.loaded_step, run.loaded_step is not None, took))
    elif name in _SETUP_TIMERS and name not in run.setup:
        run.setup[name] = took
    else:
        run.leave_out(name)


# Megatron-LM's --timing-log-option all: the name, then a line for each rank.
@reads(rf"{PREFIX}  ([\w/-]+):$")
def _timer_of_all_ranks(run: Draft, name: str) -> None:
    run.ranks_timer = (name, None)


@reads(rf"{PREFIX}     rank +\d+: {NUMBER}$")
def _timer_of_one_rank(run: Draft, ms: str) -> None:
    if run.ranks_timer is None:
        return
    (name, before), seconds = run.ranks_timer, float(ms) / 1e3
    if before is None:
        took = Range(seconds, seconds)
        _took(run, name, took)
    else:
        took = Range(max(before.max_s, seconds), min(before.min_s or 0.0, seconds))
        if run.saves and run.saves[-1].call is before:
            run.saves[-1].call = took
        elif run.loads and run.loads[-1].call is before:
            run.loads[-1] = replace(run.loads[-1], call=took)
        elif run.setup.get(name) is before:
            run.setup[name] = took
    run.ranks_timer = (name, took)


# Megatron-LM 2.x, BigScience, and DeepSpeed's wall_clock_breakdown: what one rank measured.
@reads(r"time \(ms\) \|(.*)$")
def _timers_of_a_rank(run: Draft, line: str) -> None:
    for name, ms in re.findall(rf"(?<![\w/-])([\w/-]+): {NUMBER}(?= |$)", line):
        _timer(run, name, "", ms)


@reads(r"saving checkpoint at iteration\s+(\d+) to ")
def _begin_save(run: Draft, step: str) -> None:
    run.saves.append(SaveDraft(step=int(step), begun=True))


@reads(r"successfully saved (?:local )?checkpoint (?:at|from) iteration\s+(\d+)")
def _end_save(run: Draft, step: str) -> None:
    run.ends_are_known = True
    if save := run.save_of_step(step):
        save.completed = True


@reads(r"scheduled an async checkpoint save at iteration\s+(\d+) to ")
def _scheduled_save(run: Draft, step: str) -> None:
    if save := run.save_of_step(step):
        save.scheduled = True


@reads(r"successfully loaded checkpoint from .* at iteration (\d+)")
def _loaded_line(run: Draft, step: str) -> None:
    run.loaded_step = int(step)


@reads(
    rf"iteration\s+(\d+)/\s*\d+ \|.*?elapsed time per iteration \(ms\): {NUMBER}"
    rf"(?=(?:.*?lm loss: {NUMBER})?)"
)
def _megatron_iteration(run: Draft, step: str, ms: str, loss: str | None) -> None:
    known = float(loss or "nan")
    run.add_iteration(step, interval_s=float(ms) / 1e3, loss=known if math.isfinite(known) else None)


@reads(r"\[after training is done\]")
def _training_done(run: Draft) -> None:
    run.has_trained = True


@reads(rf"Checkpoint Save GB: {NUMBER}, GB/Sec: {NUMBER}, Latency\(second\): {NUMBER}")
def _printed(run: Draft, gigabytes: str, GBps: str, latency_s: str) -> None:
    if run.saves:
        run.saves[-1].printed = Printed(float(gigabytes), float(GBps), float(latency_s))
    else:
        run.leave_out("Checkpoint Save")
