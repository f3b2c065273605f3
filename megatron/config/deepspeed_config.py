"""The DeepSpeed configuration of a run: the flags, merged with the --deepspeed_config file.

Keys are those of DeepSpeed's configuration JSON (https://www.deepspeed.ai/docs/config-json/);
megatron.config.deepspeed_keys says what becomes of each.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from megatron.config import Config, ConfigError
from megatron.config.deepspeed_file import engine_stanzas, get, load_deepspeed_file
from megatron.config.deepspeed_keys import BF16, KEYS, ZERO_1, ZERO_3, Names, Passes
from megatron.config.flags import flag_name

_STEPS_PER_PRINT = 2**31 - 1  # DeepSpeed's own step lines would double the training log
_MIB, _PAGE = 1 << 20, 4096
_WRITERS = {"fast": "on", "python": "off"}  # checkpoint.writer.type -> --direct-io


def _same(value: Any) -> Any:
    return value


def _if_true(value: bool) -> bool | None:
    return value or None


class _Link(NamedTuple):
    """A key that says what the flag of field `dest` says.

    `of_file` makes the flag's value of the file's (None: it says nothing); `in_file` does the reverse.
    """

    dest: str
    of_file: Callable[[Any], Any] = _same
    in_file: Callable[[Any], Any] = _same


_LINKS = {
    "train_batch_size": _Link("global_batch_size"),
    "train_micro_batch_size_per_gpu": _Link("micro_batch_size"),
    "gradient_clipping": _Link("clip_grad"),
    "zero_optimization.stage": _Link("zero_stage"),
}
_OFFLOAD = "zero_optimization.offload_optimizer.device"
_FP16_LINKS = {
    "fp16.loss_scale": _Link("loss_scale", lambda scale: float(scale) or None, lambda scale: scale or 0),  # 0: dynamic
    "fp16.initial_scale_power": _Link(
        "initial_loss_scale", lambda power: 2.0**power, lambda scale: int(math.log2(scale))
    ),
    "fp16.loss_scale_window": _Link("loss_scale_window", in_file=int),
    "fp16.hysteresis": _Link("hysteresis"),
    "fp16.min_loss_scale": _Link("min_loss_scale", in_file=int),
}
# Of flags that only switch something on.
_SWITCHES = {
    "activation_checkpointing.partition_activations": _Link("partition_activations", _if_true),
    "activation_checkpointing.contiguous_memory_optimization": _Link("contigious_checkpointing", _if_true),
    "activation_checkpointing.cpu_checkpointing": _Link("checkpoint_in_cpu", _if_true),
    "activation_checkpointing.synchronize_checkpoint_boundary": _Link("synchronize_each_layer", _if_true),
    "activation_checkpointing.profile": _Link("profile_backward", _if_true),
}
_ENGINE_LINKS = {
    "datastates_ckpt.host_cache_size": _Link("host_cache_size"),
    "aio.intra_op_parallelism": _Link("io_threads"),
    "aio.block_size": _Link("io_block_size", lambda size: size / _MIB, lambda size: int(size * _MIB)),
}
_WRITER_LINK = {"checkpoint.writer.type": _Link("direct_io", _WRITERS.__getitem__)}
_OFFLOAD_LINK = {
    _OFFLOAD: _Link("cpu_optimizer", lambda device: _if_true(device == "cpu"), lambda given: "cpu" if given else "none")
}
_ALL_LINKS = _LINKS | _OFFLOAD_LINK | _FP16_LINKS | _SWITCHES | _ENGINE_LINKS | _WRITER_LINK
# What a stanza says to its engine's library and no flag does.
_LIBRARY_OPTIONS = {
    "datastates_ckpt.engine_type": "engine_type",
    "datastates_ckpt.profile_engine": "profile_engine",
    "checkpoint.writer.io_buffer_size": "io_buffer_size",
}


class _Leaf(NamedTuple):
    """One key that flags decide: its dotted name, its value, and the flags as an error message shows them.

    `only_if_present` leaves are written into an existing section only; they say that something is off.
    """

    key: str
    value: Any
    flags: str
    only_if_present: bool = False


def file_precision(raw: dict[str, Any], path: str) -> str | None:
    """ "bf16" or "fp16" where the file enables one of them.

    Raises: ConfigError naming the file when it enables both.
    """
    on = [precision for precision in ("bf16", "fp16") if get(raw, f"{precision}.enabled") is True]
    if len(on) == 2:
        raise ConfigError(f"--deepspeed_config {path}: bf16 and fp16 are both enabled; enable one of them")
    return on[0] if on else None


def flag_values(raw: dict[str, Any], params_dtype: str) -> dict[str, Any]:
    """What a file, as load_deepspeed_file gives it, says for flags that were not given: destination -> value.

    "auto" values are left out, and so are those of an fp16 section that `params_dtype` does not use.
    """
    values: dict[str, Any] = {}
    for key, link in _ALL_LINKS.items():
        given = _given(raw, key)
        value = None if given is None else link.of_file(given)
        if value is not None and (params_dtype == "fp16" or key not in _FP16_LINKS):
            values[link.dest] = value
    if get(raw, "data_types.grad_accum_dtype") == "fp32":
        values["accumulate_allreduce_grads_in_fp32"] = True
    for engine in engine_stanzas(raw).values():  # one at most
        values["checkpoint_engine"] = engine
    options = {name: _given(raw, key) for key, name in _LIBRARY_OPTIONS.items()}
    options = {name: value for name, value in options.items() if value is not None}
    return values | ({"library_options": tuple(options.items())} if options else {})


def name_source(error: ConfigError, dests: Collection[str], path: str) -> ConfigError:
    """The error about a flag, with the key of the file where that gave the flag its value; `dests` are such flags."""
    for key, link in _ALL_LINKS.items():
        if link.dest in dests and str(error).startswith(flag_name(link.dest)):
            return ConfigError(f"{error} ({key} in --deepspeed_config {path} says it)")
    return error


def check_engine_stanza(config: Config) -> None:
    """Raises: ConfigError naming file, key and both values where a stanza says another engine, or something else of the
    engine, than the command line."""
    path, checkpoint = config.parallel.deepspeed_config, config.checkpoint
    if path is None:
        return
    raw = load_deepspeed_file(path)
    for key, engine in engine_stanzas(raw).items():
        if engine != checkpoint.checkpoint_engine:
            raise ConfigError(
                f"--deepspeed_config {path}: {key} names engine {engine}, but --checkpoint-engine is "
                f"{checkpoint.checkpoint_engine}; give --checkpoint-engine {engine} or drop one of the two"
            )
    if raw.get("aio") and not checkpoint.checkpoint_engine.startswith("fastpersist"):
        raise ConfigError(
            f"--deepspeed_config {path}: {', '.join(f'aio.{name}' for name in raw['aio'])}: aio is for DeepSpeed's "
            "checkpoint writer, and --checkpoint-engine is "
            f"{checkpoint.checkpoint_engine}; use --checkpoint-engine fastpersist, or drop the section"
        )
    for leaf in _linked(_ENGINE_LINKS, checkpoint):
        _check_agrees(raw, leaf, path)
    unit, buffer = 2 * _PAGE * (checkpoint.io_threads or 1), _given(raw, "checkpoint.writer.io_buffer_size")
    if buffer is not None and buffer % unit:
        raise ConfigError(
            f"--deepspeed_config {path}: checkpoint.writer.io_buffer_size is {buffer}; with --io-threads "
            f"{checkpoint.io_threads} it must be a multiple of {unit}"
        )
    shared, replicas = _given(raw, "checkpoint.writer.data_parallel"), config.parallel.weight_copies
    if shared is not None and replicas > 1:
        raise ConfigError(
            f"--deepspeed_config {path}: checkpoint.writer.data_parallel is {shared!r}, by which DeepSpeed's "
            f"{replicas} data-parallel ranks would share each file; here each has one writer: drop the key, or train "
            "with DP 1"
        )
    writer = _given(raw, "checkpoint.writer.type")
    if writer is not None and _WRITERS[writer] != checkpoint.direct_io:
        raise ConfigError(
            f"--deepspeed_config {path}: checkpoint.writer.type is {writer!r}, that is --direct-io "
            f"{_WRITERS[writer]}, but --direct-io is {checkpoint.direct_io}; make them agree or drop one of them"
        )


def immediate_grad_update(config: Config) -> bool:
    """Whether DeepSpeed adds each bf16 gradient to its fp32 buffer when it is there, and frees it at once.

    So it is by default; false in the --deepspeed_config file keeps all of them until the end of the backward pass. The
    sums have the same bits. False for fp16 and fp32, whose gradients have no second buffer.
    """
    path = config.parallel.deepspeed_config
    given = get(load_deepspeed_file(path), "bf16.immediate_grad_update") if path is not None else None
    return config.model.bf16 and given is not False


def build_deepspeed_config(config: Config) -> dict[str, Any]:
    """The dict for `deepspeed.initialize(config=...)`.

    Starts from the --deepspeed_config file, if any; what flags decide is filled in where the file is
    silent or says "auto". What is this program's own business (checkpoint engines, activation checkpointing) and what
    changes nothing is left out.

    Raises: ConfigError naming file, key and both values where file and flags disagree.
    """
    path = config.parallel.deepspeed_config
    merged = copy.deepcopy(load_deepspeed_file(path)) if path is not None else {}
    _check_precisions(merged, config)
    for leaf in _leaves(config):
        asked = leaf
        if leaf.key == "zero_optimization.stage":
            asked = leaf._replace(value=config.parallel.zero_stage_asked)  # before 0 and 2 became 1
        _check_agrees(merged, asked, path)
        if get(merged, leaf.key) is not None or not leaf.only_if_present:
            _set(merged, leaf.key, leaf.value)
    _check_optimizer(merged, config)
    if config.training.torch_compile and get(merged, "flops_profiler.enabled"):
        raise ConfigError(
            f"--deepspeed_config {path}: flops_profiler.enabled is True, and DeepSpeed's profiler counts operations of "
            "uncompiled layers only: drop it, or --torch-compile"
        )
    # DeepSpeed takes the ranks of a sequence for data-parallel ranks with samples of their own.
    _set(merged, "train_batch_size", config.training.global_batch_size * config.parallel.ds_sequence_parallel_size)
    if config.model.bf16 and config.parallel.zero_stage == 1:
        _set(merged, "bf16.immediate_grad_update", immediate_grad_update(config))
    for key, value in (
        ("steps_per_print", _STEPS_PER_PRINT),
        ("wall_clock_breakdown", False),
        ("checkpoint.tag_validation", "Fail"),  # ranks that save under different names must not go on
    ):
        if get(merged, key) is None:
            _set(merged, key, value)
    # DeepSpeed would start an engine of its own for a stanza, or fail where its package is missing.
    for key in ("aio", *(key for key, rule in KEYS.items() if isinstance(rule, Names))):
        section, _, name = key.rpartition(".")
        (get(merged, section) if section else merged).pop(name, None)
    if config.optimizer.cpu_optimizer:
        merged["zero_force_ds_cpu_optimizer"] = False
    else:
        merged.pop("zero_force_ds_cpu_optimizer", None)
        merged["zero_optimization"].pop("offload_optimizer", None)
    if config.optimizer.optimizer != "adam":  # DeepSpeed's list of optimizers tested with ZeRO has no SGD
        merged.setdefault("zero_allow_untested_optimizer", True)
    return merged


def _check_agrees(tree: dict[str, Any], leaf: _Leaf, path: str | None) -> None:
    found = get(tree, leaf.key)
    if found not in (None, "auto") and found != leaf.value:
        raise ConfigError(
            f"--deepspeed_config {path}: {leaf.key} is {found!r}, but {leaf.flags} makes it "
            f"{leaf.value!r}; make them agree or drop one of them"
        )


def _check_precisions(tree: dict[str, Any], config: Config) -> None:
    """Raises: ConfigError for settings of a precision that the run does not have, in a section without `enabled`.

    Where that is false or "auto" the file itself says that they may have no effect.
    """
    run, path = config.model.params_dtype, config.parallel.deepspeed_config
    for precision in ("bf16", "fp16"):
        section = tree.get(precision, {})
        if precision != run and section and "enabled" not in section:
            names = ", ".join(f"{precision}.{name}" for name in section)
            raise ConfigError(
                f'--deepspeed_config {path}: {names}: no effect in {run}; give --{precision}, or "enabled": "auto" in '
                "that section, which is then for runs of that precision, or drop it"
            )


def _check_optimizer(merged: dict[str, Any], config: Config) -> None:
    """Raises: ConfigError for keys that the run's optimizer does not read, or must not."""
    path, dtype, stage = config.parallel.deepspeed_config, config.model.params_dtype, config.parallel.zero_stage
    mine = ZERO_3 if stage == 3 else BF16 if config.model.bf16 else ZERO_1
    instead = {ZERO_1: "train in fp16 or fp32 at stage 1", ZERO_3: "train at stage 3", BF16: "train at stage 1"}
    for key, rule in KEYS.items():
        found = get(merged, key)
        if not isinstance(rule, Passes) or not rule.takers or mine in rule.takers or found in (None, rule.default):
            continue
        if key.startswith("bf16.") and not config.model.bf16:  # of a section that is off
            continue
        raise ConfigError(
            f"--deepspeed_config {path}: {key} is {found!r}; {mine}, which trains {dtype} at ZeRO stage {stage}, does "
            f"not take it: drop it, or {instead[rule.takers[0]]}"
        )
    if config.optimizer.cpu_optimizer and get(merged, "zero_force_ds_cpu_optimizer"):
        raise ConfigError(
            f"--deepspeed_config {path}: zero_force_ds_cpu_optimizer is True, but the Adam of --cpu-optimizer is "
            "torch's, which needs no compiler; drop the key"
        )
    if config.optimizer.optimizer != "adam" and get(merged, "zero_allow_untested_optimizer") is False:
        raise ConfigError(
            f"--deepspeed_config {path}: zero_allow_untested_optimizer is False, but --optimizer "
            f"{config.optimizer.optimizer} is not on DeepSpeed's list; drop the key or use --optimizer adam"
        )


def _leaves(config: Config) -> list[_Leaf]:
    training, model, parallel = config.training, config.model, config.parallel
    precision_flag = f"--{model.params_dtype}" if model.bf16 or model.fp16 else "the fp32 run"
    batches = "--global-batch-size / (--micro-batch-size x data-parallel size)"
    grad_dtype = "fp32" if training.accumulate_allreduce_grads_in_fp32 else model.params_dtype
    leaves = [
        *_linked(_LINKS, training, parallel, config.optimizer),
        _Leaf("gradient_accumulation_steps", training.num_micro_batches, batches),
        _Leaf("data_types.grad_accum_dtype", grad_dtype, precision_flag),
        _Leaf("data_types.param_dtype", model.params_dtype, precision_flag, True),
        _Leaf("activation_checkpointing.number_checkpoints", model.num_layers, "--num-layers", True),
        *(leaf._replace(only_if_present=True) for leaf in _linked(_SWITCHES, parallel)),
        *(leaf._replace(only_if_present=leaf.value == "none") for leaf in _linked(_OFFLOAD_LINK, config.optimizer)),
    ]
    # Between stages DeepSpeed would send of each TP rank a share of what it takes for the same on all of them.
    shown = "--sequence-parallel" if parallel.splits_sequence else "a run without --sequence-parallel"
    for key in ("pipeline.pipe_partitioned", "pipeline.grad_partitioned"):
        leaves.append(_Leaf(key, not parallel.splits_sequence, shown, only_if_present=not parallel.splits_sequence))
    for precision in ("bf16", "fp16"):
        on = model.params_dtype == precision
        shown = f"--{precision}" if on else f"the run's {model.params_dtype}"
        leaves.append(_Leaf(f"{precision}.enabled", on, shown, only_if_present=not on))
    return leaves + (_linked(_FP16_LINKS, training) if model.fp16 else [])


def _linked(links: dict[str, _Link], *groups: Any) -> list[_Leaf]:
    """The leaves of these links, with values of the groups of flags that hold them."""
    values: dict[str, Any] = {}
    for group in groups:
        values |= {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
    return [_Leaf(key, link.in_file(values[link.dest]), flag_name(link.dest)) for key, link in links.items()]


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = value


def _given(raw: dict[str, Any], key: str) -> Any:
    """The value under a dotted key; None where it is absent or "auto"."""
    value = get(raw, key)
    return None if value == "auto" else value
