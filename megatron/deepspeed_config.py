"""The DeepSpeed configuration of a run: the flags, merged with the --deepspeed_config file.

Keys are those of DeepSpeed's configuration JSON (https://www.deepspeed.ai/docs/config-json/).
"""

from __future__ import annotations

import copy
import json
import math
from typing import Any, NamedTuple

from megatron.config import Config, ConfigError

_STEPS_PER_PRINT = 2**31 - 1  # DeepSpeed's own step lines would double the training log
_USE_ENGINE = "use --checkpoint-engine NAME"
_REFUSED_SECTIONS = {
    "checkpoint.writer": _USE_ENGINE,
    "datastates": _USE_ENGINE,
    "nebula": _USE_ENGINE,
    "checkpoint.load_universal": "another layout needs no conversion; --redistribute universal makes one",
    "optimizer": "use --optimizer, --lr, --weight-decay and --adam-beta1/2",
    "scheduler": "use --lr-decay-style and the other --lr flags",
    "curriculum_learning": "the batch has a constant shape here",
    "data_efficiency": "the batch has a constant shape here",
    "compression_training": "the model is trained as it is",
    "elasticity": "use --global-batch-size and --micro-batch-size",
    "amp": "use --bf16 or --fp16",
}
_NUMBERS = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_clipping": "clip_grad",
    "zero_optimization.stage": "zero_stage",
}
_DATASTATES = "datastates_ckpt"  # DeepSpeed's section for DataStates-LLM
_DATASTATES_CACHE = f"{_DATASTATES}.host_cache_size"  # GiB
_FRACTIONS = ("gradient_clipping", "fp16.loss_scale", _DATASTATES_CACHE)
_FP16_NUMBERS = {
    "fp16.loss_scale_window": "loss_scale_window",
    "fp16.hysteresis": "hysteresis",
    "fp16.min_loss_scale": "min_loss_scale",
}


class _Leaf(NamedTuple):
    """One key that flags decide: its dotted name, its value, and the flags as an error message shows them.

    `only_if_present` leaves are written into an existing section only; they say that something is off.
    """

    key: str
    value: Any
    flags: str
    only_if_present: bool = False


def load_deepspeed_file(path: str) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises: ConfigError naming the file when it is missing, unreadable, no JSON, no object, or holds a section
    that this program does not hand to DeepSpeed.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            raw = json.load(stream)
    except OSError as error:
        raise ConfigError(
            f"--deepspeed_config {path}: {error.strerror}; give a readable JSON file or drop it"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"--deepspeed_config {path}: not JSON ({error}); correct the file or drop it"
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(
            f"--deepspeed_config {path}: holds a JSON {type(raw).__name__}; it must be an object"
        )
    if "bfloat16" in raw:  # DeepSpeed's older name of the section
        raw.setdefault("bf16", raw.pop("bfloat16"))
    if raw.get(_DATASTATES, False) in (None, False):  # off, as DeepSpeed has it
        raw.pop(_DATASTATES, None)
    for section in ("zero_optimization", "bf16", "fp16", "checkpoint", "data_types", _DATASTATES):
        if not isinstance(raw.get(section, {}), dict):
            raise ConfigError(
                f"--deepspeed_config {path}: {section} is {raw[section]!r}; it must be an object"
            )
    for key, instead in _REFUSED_SECTIONS.items():
        if _get(raw, key) not in (None, False):
            raise ConfigError(f"--deepspeed_config {path}: {key} is not supported; drop it and {instead}")
    for key in raw.get(_DATASTATES, {}).keys() - {"host_cache_size"}:
        raise ConfigError(
            f"--deepspeed_config {path}: {_DATASTATES}.{key} is not supported; drop it, host_cache_size is what "
            "--checkpoint-engine datastates takes"
        )
    for key, value in raw.get("zero_optimization", {}).items():
        if value == "auto" and key != "stage":
            raise ConfigError(
                f"--deepspeed_config {path}: zero_optimization.{key} is auto; no flag sets it, give its value"
            )
    return raw


def file_precision(raw: dict[str, Any], path: str) -> str | None:
    """ "bf16" or "fp16" where the file enables one of them.

    Raises: ConfigError naming the file when it enables both.
    """
    on = []
    for precision in ("bf16", "fp16"):
        value = _get(raw, f"{precision}.enabled")
        if value not in (None, "auto", True, False):
            raise ConfigError(
                f"--deepspeed_config {path}: {precision}.enabled is {value!r}; use true or false"
            )
        if value is True:
            on.append(precision)
    if len(on) == 2:
        raise ConfigError(f"--deepspeed_config {path}: bf16 and fp16 are both enabled; enable one of them")
    return on[0] if on else None


def flag_values(raw: dict[str, Any], path: str, params_dtype: str) -> dict[str, Any]:
    """What the file says for flags that were not given: argparse destination -> value.

    "auto" values are left out, and so are those of an fp16 section that `params_dtype` does not use.

    Raises: ConfigError naming file, key and value for a value of the wrong type.
    """
    fp16 = params_dtype == "fp16"
    values: dict[str, Any] = {}
    for key, dest in (_NUMBERS | _FP16_NUMBERS if fp16 else _NUMBERS).items():
        value = _number(raw, key, path)
        if value is not None:
            values[dest] = value
    if _get(raw, "data_types.grad_accum_dtype") == "fp32":
        values["accumulate_allreduce_grads_in_fp32"] = True
    cache = _number(raw, _DATASTATES_CACHE, path)
    if cache is not None:
        values["host_cache_size"] = float(cache)
    if fp16:
        scale = _number(raw, "fp16.loss_scale", path)
        if scale:  # 0 is DeepSpeed's word for a dynamic scale
            values["loss_scale"] = float(scale)
        power = _number(raw, "fp16.initial_scale_power", path)
        if power is not None:
            values["initial_loss_scale"] = 2.0**power
    return values


def build_deepspeed_config(config: Config) -> dict[str, Any]:
    """The dict for `deepspeed.initialize(config=...)`.

    Starts from the --deepspeed_config file, if any; what flags decide is filled in where the file is
    silent or says "auto", and sections that no flag knows pass through.

    Raises: ConfigError naming file, key and both values where file and flags disagree.
    """
    path = config.parallel.deepspeed_config
    merged = copy.deepcopy(load_deepspeed_file(path)) if path is not None else {}
    if _DATASTATES in merged and config.checkpoint.checkpoint_engine != "datastates":
        raise ConfigError(
            f"--deepspeed_config {path}: {_DATASTATES} is set, but --checkpoint-engine is "
            f"{config.checkpoint.checkpoint_engine}; give --checkpoint-engine datastates or drop the section"
        )
    for leaf in _leaves(config):
        found = _get(merged, leaf.key)
        if leaf.key == "zero_optimization.stage" and found == config.parallel.zero_stage_asked:
            found = leaf.value  # --zero-stage says why 0 and 2 are 1
        if found not in (None, "auto") and found != leaf.value:
            raise ConfigError(
                f"--deepspeed_config {path}: {leaf.key} is {found!r}, but {leaf.flags} makes it "
                f"{leaf.value!r}; make them agree or drop one of them"
            )
        if found is not None or not leaf.only_if_present:
            _set(merged, leaf.key, leaf.value)
    for key, value in (
        ("steps_per_print", _STEPS_PER_PRINT),
        ("wall_clock_breakdown", False),
        ("checkpoint.tag_validation", "Fail"),  # ranks that save under different names must not go on
    ):
        if _get(merged, key) in (None, "auto"):
            _set(merged, key, value)
    # DeepSpeed would start a second instance of the library for itself, or fail where the package is missing, although
    # our engine needs it for saving only.
    merged.pop(_DATASTATES, None)
    if config.optimizer.optimizer != "adam":  # DeepSpeed's list of optimizers tested with ZeRO has no SGD
        merged.setdefault("zero_allow_untested_optimizer", True)
    return merged


def _leaves(config: Config) -> list[_Leaf]:
    training, model = config.training, config.model
    precision_flag = f"--{model.params_dtype}" if model.bf16 or model.fp16 else "the fp32 run"
    batches = "--global-batch-size / (--micro-batch-size x data-parallel size)"
    leaves = [
        _Leaf("train_batch_size", training.global_batch_size, "--global-batch-size"),
        _Leaf("train_micro_batch_size_per_gpu", training.micro_batch_size, "--micro-batch-size"),
        _Leaf("gradient_accumulation_steps", training.num_micro_batches, batches),
        _Leaf("zero_optimization.stage", config.parallel.zero_stage, "--zero-stage"),
        _Leaf("gradient_clipping", config.optimizer.clip_grad, "--clip-grad"),
        _Leaf("data_types.grad_accum_dtype", _grad_accum_dtype(config), precision_flag),
        _Leaf(_DATASTATES_CACHE, config.checkpoint.host_cache_size, "--host-cache-size", True),
    ]
    for precision in ("bf16", "fp16"):
        on = model.params_dtype == precision
        shown = f"--{precision}" if on else f"the run's {model.params_dtype}"
        leaves.append(_Leaf(f"{precision}.enabled", on, shown, only_if_present=not on))
    if model.fp16:
        leaves += _loss_scale_leaves(config)
    return leaves


def _loss_scale_leaves(config: Config) -> list[_Leaf]:
    training = config.training
    power = int(math.log2(training.initial_loss_scale))
    return [
        _Leaf("fp16.loss_scale", training.loss_scale or 0, "--loss-scale"),
        _Leaf("fp16.initial_scale_power", power, "--initial-loss-scale"),
        _Leaf("fp16.loss_scale_window", int(training.loss_scale_window), "--loss-scale-window"),
        _Leaf("fp16.hysteresis", training.hysteresis, "--hysteresis"),
        _Leaf("fp16.min_loss_scale", int(training.min_loss_scale), "--min-loss-scale"),
    ]


def _grad_accum_dtype(config: Config) -> str:
    return "fp32" if config.training.accumulate_allreduce_grads_in_fp32 else config.model.params_dtype


def _get(tree: dict[str, Any], key: str) -> Any:
    """The value under a dotted key, or None."""
    section, _, name = key.rpartition(".")
    return (tree.get(section) or {}).get(name) if section else tree.get(name)


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    (tree.setdefault(section, {}) if section else tree)[name] = value


def _number(raw: dict[str, Any], key: str, path: str) -> int | float | None:
    value = _get(raw, key)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"--deepspeed_config {path}: {key} is {value!r}; it must be a number")
    if key in _FRACTIONS:
        return value
    if value != int(value):
        raise ConfigError(f"--deepspeed_config {path}: {key} is {value!r}; it must be a whole number")
    return int(value)
