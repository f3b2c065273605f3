"""What it means for a resume that a flag has another value than in the run that saved the checkpoint.

Checkpoints hold the settings of that run, as `args` in their mp_rank files, upstream's too. DECISIONS has every setting
of megatron.config, and a test fails for one that is not here; docs/resuming.md tells users
of the flags, those with the same consequences together.

The content of the files that a run trains on is kept, too, since a path says nothing of it: a corpus that is made again
under its old path is another one, and a moved one is the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from megatron.checkpointing.engines.errors import CheckpointMismatchError
from megatron.config import CheckpointConfig, Config, DataConfig, ModelConfig
from megatron.config.arguments import GROUPS, namespace_from_config
from megatron.config.data import parse_blend, parse_split
from megatron.config.errors import ConfigError
from megatron.config.flags import FlagSpec, flag_name, spec_of
from megatron.fileio.content_identity import content_identity
from megatron.processes.in_process_restart import at_return

logger = logging.getLogger(__name__)


_DATASETS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_OTHER_FILES = (
    "train_doc_idx_path", "train_sample_idx_path", "train_shuffle_idx_path", "tokenizer_model", "vocab_file",
    "merge_file",
)  # fmt: skip
_AT_ONCE = 16  # files: a blend has hundreds, of each of which a remote file system takes milliseconds a block


class Kind(enum.Enum):
    """What becomes of another value; the value is how docs/resuming.md calls it."""

    REFUSED = "refused"
    SCHEDULE = "refused unless a flag decides"
    APPLIED = "applied, logged"
    MODEL = "applied, logged; also with --finetune"
    DATA = "applied, logged with the effect on the data"
    NO_EFFECT = "no effect, logged"
    FREE = "allowed"


class Decision(NamedTuple):
    """`meaning` ends the line that tells of the change, or says why there is none. {sample}: the first to come."""

    kind: Kind
    meaning: str


_ORDER = "training continues at sample {sample} of the new order: some samples may be trained on twice, others never"

# Of a checkpoint that does not know the content of its files.
_UNLESS_MOVED = "unless these are the same files at another path, "
_UNLESS_SAME_TOKENIZER = "unless this is the same tokenizer at another path, "

# What another value means -> the settings that it holds for.
_MEANINGS: dict[Kind, dict[str, str]] = {
    Kind.REFUSED: {
        "the tensors of the checkpoint would not fit":
            "num_layers hidden_size ffn_hidden_size num_attention_heads num_key_value_heads kv_channels normalization "
            "swiglu position_embedding_type use_rotary_position_embeddings add_position_embedding embed_layernorm "
            "untie_embeddings_and_output_weights add_bias_linear num_experts expert_interval mlp_type",
        "the tensors of the checkpoint would not fit; allowed with position embeddings that have no table":
            "max_position_embeddings",
        "if the padded vocabulary has another size; else allowed": "make_vocab_size_divisible_by",
        "the files have other names and dtypes": "params_dtype",
        "one optimizer cannot use the state of another; allowed with --no-load-optim": "optimizer",
    },
    Kind.SCHEDULE: {
        "--override-opt_param-scheduler takes the new schedule, --use-checkpoint-opt_param-scheduler the old one; "
        "--no-load-lr-state starts the new one from its beginning":
            "lr min_lr lr_decay_style lr_decay_iters lr_decay_samples lr_decay_tokens lr_warmup_iters "
            "lr_warmup_samples lr_warmup_tokens lr_warmup_fraction weight_decay start_weight_decay end_weight_decay "
            "weight_decay_incr_style",
    },
    Kind.APPLIED: {
        "the new probability applies from here": "attention_dropout hidden_dropout",
        "gradients are summed in the new dtype from here": "accumulate_allreduce_grads_in_fp32",
        "the new value applies from here; a dynamic scale starts from its first value": "loss_scale",
        "the new value applies from here; the loss scale continues where it was":
            "min_loss_scale loss_scale_window hysteresis",
        "the new limit applies from here": "clip_grad",
        "the new value applies from here; experts take more or fewer tokens, or others":
            "moe_train_capacity_factor moe_eval_capacity_factor moe_min_capacity moe_token_dropping "
            "moe_top2_2nd_expert_sampling",
        "the new factor applies from here": "moe_loss_coeff",
        "the new value applies from here; the moments are restored unchanged":
            "adam_beta1 adam_beta2 adam_eps sgd_momentum",
        "losses before and after are means over different tokens and cannot be compared": "eod_mask_loss",
    },
    Kind.MODEL: {
        "the new value applies, and the model no longer computes the function that the weights were trained for":
            "rotary_percent rope_theta layernorm_epsilon bias_gelu_fusion topk",
        f"{_UNLESS_SAME_TOKENIZER}tokens and weights no longer match: the weights know the old tokenizer's ids":
            "tokenizer_model vocab_file merge_file",
        "tokens and weights no longer match: the weights know the old tokenizer's ids": "tokenizer_type vocab_size",
    },
    Kind.DATA: {
        f"samples are cut anew at this length, so {_ORDER}": "seq_length",
        "training continues at sample {sample}, none is repeated or skipped; an iteration has more or fewer samples, "
        "so --train-iters is another number of samples": "global_batch_size",
        "training continues at sample {sample}, none is repeated or skipped, with the batch of the new ramp":
            "rampup_batch_size",
        f"samples are shuffled anew, so {_ORDER}": "seed",
        f"{_UNLESS_MOVED}{_ORDER}":
            "data_path train_data_path train_doc_idx_path train_sample_idx_path train_shuffle_idx_path",
        f"{_UNLESS_MOVED}evaluation losses before and after come from different data "
        "and cannot be compared":
            "valid_data_path test_data_path",
        f"other documents are in the training set, so {_ORDER}, and samples of the training set may appear in "
        "validation or test": "split",
    },
    Kind.NO_EFFECT: {
        "no effect: all weights come from the checkpoint": "init_method_std",
        "no effect except on another layout or with --no-load-rng: else random states are restored":
            "data_parallel_random_init",
        "no effect: the loss scale continues where it was": "initial_loss_scale",
    },
    Kind.FREE: {
        "the checkpoint is loaded onto any layout that its engine allows (otherwise refused); the samples and their "
        "order stay":
            "tensor_model_parallel_size pipeline_model_parallel_size no_pipeline_parallel world_size "
            "data_parallel_size moe_expert_parallel_size",
        "it changes what is kept for the backward pass, and where; gradients are the same":
            "checkpoint_activations checkpoint_num_layers recompute_activations recompute_granularity "
            "recompute_method recompute_num_layers deepspeed_activation_checkpointing partition_activations "
            "contigious_checkpointing checkpoint_in_cpu synchronize_each_layer profile_backward",
        "it concerns this process and machine only":
            "distributed_backend distributed_timeout_minutes warmup_communicators warmup_kernels local_rank rank "
            "exit_signal_handler exit_signal allow_injected_faults",
        "it changes the order of sums, and so their rounding": "deterministic",
        "the function stays; rounding differs": "torch_compile cpu_optimizer",
        "the function stays; dropout masks and rounding differ": "sequence_parallel ds_sequence_parallel_size",
        "0, 1 and 2 run as stage 1; what stage 1 or 3 has saved the other does not load (refused)":
            "zero_stage zero_stage_asked",
        "it is a path; the settings in the file are compared as flags": "deepspeed_config",
        "an iteration has the same samples; dropout masks and rounding differ": "micro_batch_size",
        "the data order stays; without --lr-decay-samples the schedule is another, too, and so refused unless a flag "
        "decides":
            "train_samples",
        "the data order stays; without --lr-decay-iters the schedule is another, too, and so refused unless a flag "
        "decides; an end before the iteration of the checkpoint is refused":
            "train_iters",
        "it changes when this launch evaluates or ends; the data order stays":
            "eval_interval eval_iters exit_interval exit_duration_in_mins train_tokens",
        "it changes what is logged, measured or traced":
            "log_interval log_level tensorboard_dir tensorboard_log_interval tensorboard_queue_size "
            "log_timers_to_tensorboard log_batch_size_to_tensorboard log_learning_rate_to_tensorboard "
            "log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard log_memory_to_tensorboard "
            "log_world_size_to_tensorboard log_params_norm log_num_zeros_in_grad "
            "log_optimizer_states_to_tensorboard restart_trace restart_trace_dir trace_probes "
            "trace_probes_interval trace_nvtx otlp profile profile_steps profile_ranks",
        "the samples and their order stay": "data_impl data_cache_path num_workers",
        "it changes how and when this launch saves":
            "save save_interval keep_last no_save_optim no_save_rng export_hf_interval export_hf_dir export_hf_wait "
            "checkpoint_engine checkpoint_durability checkpoint_files_per_node checkpoint_compression "
            "persist_interval replicas failure_domain replica_compression replication_traffic comm_profile_steps "
            "span_threshold span_alpha max_blocks_in_span snapshot_buffer_size "
            "peer_timeout host_cache_size io_threads io_block_size direct_io checksum verify_restored_state take_over "
            "storage_cache storage_deadline allow_other_checkpoints library_options",
        "it says what this launch loads, and how":
            "override_opt_param_scheduler use_checkpoint_opt_param_scheduler load load_tag no_load_optim no_load_rng "
            "no_load_lr_state finetune exit_on_missing_checkpoint allow_start_over start_over on_repeated_error "
            "load_timeout ckpt_fully_parallel_load prefetch_on_start prefetch_limit verify_checkpoint "
            "universal_checkpoint reset_iteration",
    },
}  # fmt: skip

DECISIONS: dict[str, Decision] = {
    name: Decision(kind, meaning)
    for kind, meanings in _MEANINGS.items()
    for meaning, settings in meanings.items()
    for name in settings.split()
}
"""Setting of megatron.config -> what becomes of another value of it."""

# Refused settings that preflight/compatibility.py compares by what they lead to: two values may fit, or two settings
# say what position_embedding_type says.
_COMPARED_BY_EFFECT = (
    "max_position_embeddings", "make_vocab_size_divisible_by", "params_dtype", "use_rotary_position_embeddings",
    "add_position_embedding",
)  # fmt: skip
_REFUSED = [name for name, decision in DECISIONS.items() if decision.kind is Kind.REFUSED]
_OF_MODEL = {field.name for field in dataclasses.fields(ModelConfig)}
REFUSED_OF_MODEL = tuple(name for name in _REFUSED if name in _OF_MODEL and name not in _COMPARED_BY_EFFECT)
REFUSED_OF_TRAINING = tuple(name for name in _REFUSED if name not in (*REFUSED_OF_MODEL, *_COMPARED_BY_EFFECT))
# Of those, what allows another value; --finetune allows it for all of them.
_ALLOWED_BY = {"optimizer": "no_load_optim"}

_REPORTED = (Kind.APPLIED, Kind.MODEL, Kind.DATA, Kind.NO_EFFECT)
# Settings that mean nothing in some runs.
_MATTERS_IF: dict[str, Callable[[argparse.Namespace], bool]] = {
    **dict.fromkeys(("rotary_percent", "rope_theta"), lambda args: args.use_rotary_position_embeddings),
    "bias_gelu_fusion": lambda args: args.add_bias_linear and not args.swiglu,
    "loss_scale": lambda args: args.fp16,
    **dict.fromkeys(
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        lambda args: args.fp16 and args.loss_scale is None,
    ),
    "accumulate_allreduce_grads_in_fp32": lambda args: args.fp16,
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_eps"), lambda args: args.optimizer == "adam"),
    "sgd_momentum": lambda args: args.optimizer == "sgd",
    "split": lambda args: bool(args.data_path),
    **dict.fromkeys(
        (
            "topk",
            "moe_train_capacity_factor",
            "moe_eval_capacity_factor",
            "moe_min_capacity",
            "moe_token_dropping",
            "moe_top2_2nd_expert_sampling",
            "moe_loss_coeff",
        ),
        lambda args: max(args.num_experts) > 1,
    ),
    "vocab_size": lambda args: args.tokenizer_type == "NullTokenizer",
}
_OF_OPTIMIZER_STATE = ("initial_loss_scale",)  # restored with it, and the flag's own without


def changes(saved: argparse.Namespace, mine: argparse.Namespace) -> list[str]:
    """One line for every setting that the resume must tell of: flag, old -> new, what it means.

    `saved`: `args` of the checkpoint; what they lack, as an older program or upstream may, is not compared. `mine`:
    the settings of this run under the same names.
    """
    lines = []
    specs = {field.name: spec_of(field) for cls in GROUPS.values() for field in dataclasses.fields(cls)}
    # Both begin another training with the weights: what comes next is no matter of the checkpoint's data order.
    reported = (Kind.MODEL,) if mine.finetune else _REPORTED
    if mine.reset_iteration:
        reported = tuple(kind for kind in reported if kind is not Kind.DATA)
    for name, spec in specs.items():
        decision = DECISIONS[name]
        if decision.kind not in reported or not hasattr(saved, name):
            continue
        if not (_matters(name, saved) and _matters(name, mine)) or (name in _OF_OPTIMIZER_STATE and mine.no_load_optim):
            continue
        difference = _difference(name, spec, saved, mine)
        if difference is not None:
            meaning = decision.meaning.format(sample=saved.consumed_train_samples)
            if _contents(name, saved, mine):  # then the files are others for certain
                meaning = meaning.replace(_UNLESS_MOVED, "").replace(_UNLESS_SAME_TOKENIZER, "")
            lines.append(f"{difference}: {meaning}")
    return lines


def check_refused(saved: argparse.Namespace, mine: argparse.Namespace, place: object) -> None:
    """Raises CheckpointMismatchError if a setting is another than that which saved the state at `place`.

    Compares settings of REFUSED_OF_TRAINING, but those that `saved` lacks.
    """
    for name in REFUSED_OF_TRAINING:
        ours = getattr(mine, name)
        theirs = getattr(saved, name, ours)
        if theirs == ours or mine.finetune or (name in _ALLOWED_BY and getattr(mine, _ALLOWED_BY[name])):
            continue
        flag = flag_name(name)
        raise CheckpointMismatchError(
            f"{flag} {_shown(ours)}: {place} was saved with {flag} {_shown(theirs)}; give that "
            f"({DECISIONS[name].meaning})"
        )


def check_training(common: Mapping[str, Any], config: Config, place: object) -> None:
    """Raises CheckpointMismatchError if the run that saved `place` had another optimizer, or its schedule is missing.

    So it does if no run saved it, and its progress is to be restored. `common`: the mp_rank state.
    """
    options = config.checkpoint
    if "global_steps" not in common and not (options.finetune or options.reset_iteration):
        raise CheckpointMismatchError(
            f"{place}: holds a model that hf-convert has imported, and no progress of a training: give --finetune to "
            "begin a training from it"
        )
    check_refused(common["args"], namespace_from_config(config), place)
    check_schedule_is_there(common, options)


def warn_of_changes(saved: argparse.Namespace, config: Config) -> None:
    """On rank 0: log each flag with another value than in the run that `saved` the checkpoint."""
    if config.parallel.rank == 0:
        mine = namespace_from_config(config)
        mine.input_contents = input_contents(config.data)
        for line in changes(saved, mine):
            logger.warning("changed on resume: %s", line)


def check_schedule_is_there(common: Mapping[str, Any], options: CheckpointConfig) -> None:
    """Raises CheckpointMismatchError if the mp_rank state `common` has no schedule, and one is to be restored."""
    if common.get("lr_scheduler") is None and not (options.no_load_lr_state or options.finetune):
        raise CheckpointMismatchError(
            "the checkpoint holds no state of the learning-rate schedule, which would begin anew: give "
            "--no-load-lr-state if it should, or load another checkpoint"
        )


def _matters(name: str, args: argparse.Namespace) -> bool:
    try:
        return name not in _MATTERS_IF or bool(_MATTERS_IF[name](args))
    except AttributeError:  # of an older program, which had no such setting
        return True


def _contents(name: str, saved: argparse.Namespace, mine: argparse.Namespace) -> tuple[list[str], list[str]] | None:
    """The identities of the files that the setting names, then and now.

    None unless both are known. Those of a checkpoint may be of any type, and as many as it likes.
    """
    known = [getattr(args, "input_contents", None) for args in (saved, mine)]
    then, now = (each.get(name) if isinstance(each, dict) else None for each in known)
    if not (isinstance(then, list) and isinstance(now, list)):
        return None
    return (then, now) if [len(then), len(now)] == [_files_named(name, args) for args in (saved, mine)] else None


def _files_named(name: str, args: argparse.Namespace) -> int:
    """How many files the setting names; of a blend, pairs of a weight and a path count once."""
    value = getattr(args, name)
    if not name.endswith("data_path"):
        return 1 if value else 0
    try:
        return len(parse_blend(flag_name(name), tuple(value or ()))) if value else 0
    except (ConfigError, TypeError):
        return -1


def _comparable(name: str, value: Any, contents: list[str] | None) -> Any:
    """`value` so that two spellings of the same are equal; with `contents`, those of its files stand for the paths."""
    if value is None or value == [] or value == ():
        return None
    try:
        if name == "split":
            return parse_split(str(value))
        if name.endswith("data_path"):
            blend = parse_blend(flag_name(name), tuple(value))
            paths = [path for _, path in blend] if contents is None else contents
            return [(weight, path) for (weight, _), path in zip(blend, paths, strict=True)]
    except ConfigError:  # what an older program or upstream took
        return value
    if contents is not None:
        return contents
    return tuple(value) if isinstance(value, list) else value


def _difference(name: str, spec: FlagSpec | None, saved: argparse.Namespace, mine: argparse.Namespace) -> str | None:
    """How the setting differs; None if it is the same. Of files their content counts, where it is known."""
    old, new = getattr(saved, name), getattr(mine, name)
    then, now = _contents(name, saved, mine) or (None, None)
    if _comparable(name, old, then) == _comparable(name, new, now):
        return None
    flag = spec.names[0] if spec else flag_name(name)
    if spec is not None and spec.const is not None:
        return f"{flag} " + ("is given, and was not" if new == spec.const else "is not given, and was")
    if _shown(old) == _shown(new):
        return f"{flag} {_shown(new)} has another content than before"
    return f"{flag} {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "(none)"
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


@functools.cache
def input_contents(data: DataConfig) -> dict[str, list[str]]:
    """Setting -> the identity of each file that it names, in order, as the first call of a start has found them.

    Of a dataset, that of its index and tokens. A setting with a file that cannot be read is left out: the checks of a
    start refuse it, and a plan may be made without the files.
    """
    at_return(input_contents.cache_clear)  # the next start opens the files that are there by then
    named = list(_files_by_setting(data))
    files = [(name, file) for name, paths in named for path in paths for file in _files_of(name, path)]
    found: dict[str, list[str]] = {name: [] for name, _ in named}
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="input-files") as pool:
        for (name, _), identity in zip(files, pool.map(_identity, files), strict=True):
            if identity is None:
                found.pop(name, None)
            elif name in found:
                found[name].append(identity)
    return {name: _by_path(name, identities) for name, identities in found.items()}


def _files_by_setting(data: DataConfig) -> Iterator[tuple[str, list[str]]]:
    for name in _DATASETS:
        if getattr(data, name):
            yield name, [prefix for _, prefix in data.blend(name)]
    for name in _OTHER_FILES:
        path = getattr(data, name)
        if path is not None and not os.path.isdir(path):
            yield name, [path]


def _files_of(name: str, path: str) -> list[str]:
    return [path + ".idx", path + ".bin"] if name in _DATASETS else [path]


def _identity(file: tuple[str, str]) -> str | None:
    try:
        found = os.stat(file[1])
        return _content_of(file[1], found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    except OSError:
        return None


@functools.cache
def _content_of(path: str, *_state: int) -> str:
    """Read again in a later start of this process only if another file is there, or it was written to."""
    return content_identity(path)


def _by_path(name: str, identities: list[str]) -> list[str]:
    """One for each path: that of a dataset has those of its two files."""
    each = 2 if name in _DATASETS else 1
    return ["".join(identities[start : start + each]) for start in range(0, len(identities), each)]
