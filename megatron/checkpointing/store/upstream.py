"""Describes a checkpoint without a manifest, of upstream Megatron-DeepSpeed or another script; no torch.

The file mp_rank_00 holds the arguments of the run, and what DeepSpeed keeps beside the tensors. It says whether this
program can read the checkpoint, and which files must be there.
"""

from __future__ import annotations

import functools
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointMismatchError
from megatron.checkpointing.store import naming as names
from megatron.parallel.topology import Layout

FIRST_FILE = names.model_states_file(Layout(1, 1, 1), Layout(1, 1, 1).coordinates(0))
_NEEDED_ARGS = (
    "num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size", "bf16", "fp16",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "consumed_train_samples", "consumed_valid_samples",
    "train_iters", "eval_interval", "eval_iters", "global_batch_size",
)  # fmt: skip
_NEEDED_STATE = ("dp_world_size", "iteration", "global_steps", "global_samples", "skipped_steps")
_SIZES = (
    "num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "dp_world_size",
)  # fmt: skip
# Upstream's options that change the function or the parameters, and what this program has in their place.
_WITHOUT = {
    "apply_layernorm_1p": False, "squared_relu": False, "apply_residual_connection_post_layernorm": False,
    "openai_gelu": False, "embedding_weights_in_fp32": False,
}  # fmt: skip
# An argument that came with the commit (676a482c, December 2024) by which the rows of upstream's fused QKV became the
# blocks [Q; K; V]. Before, they lay head by head: of each key/value head its query heads, the key, the value.
_SINCE_BLOCKS = "ds_sequence_parallel_fpdt"
# Arguments of BigScience's Megatron-DeepSpeed, which trained BLOOM: its pipeline has further layers around the blocks.
_OF_BIGSCIENCE = ("position_embedding_type", "embed_layernorm")
# What an upstream has that does not know the option yet.
_BEFORE = {
    "normalization": "layernorm", "swiglu": False, "use_rotary_position_embeddings": False, "add_bias_linear": True,
    "add_position_embedding": True, "untie_embeddings_and_output_weights": False,
}  # fmt: skip
_LARGEST_PICKLE = 64 << 20  # bytes: the one of mp_rank_00 holds no tensor's elements


@dataclass(frozen=True)
class ForeignCheckpoint:
    """`model` has the arguments of the run that are plain values, by name, and "params_dtype".

    `vocab_size`: the tokenizer's; None where an older upstream did not note it. `heads_interleaved`: the rows of fused
    QKV lie head by head. `spare_positions`: the last stage has masters of a position embedding that it does not use.
    `experts`: of the MLP of each block, 1 without a gate. `in_modules`: mp_rank_* holds the weights of a whole stage,
    and each expert has a file of its own: there are none of pipeline layers (reshard/upstream_modules.py).
    """

    model: dict[str, Any]
    layout: Layout
    step: int
    vocab_size: int | None
    heads_interleaved: bool
    spare_positions: bool
    experts: tuple[int, ...] = ()
    in_modules: bool = False

    @property
    def needs_rearranging(self) -> bool:
        """Whether its files are not what a rank of this program holds on the same layout."""
        return self.heads_interleaved or self.spare_positions or self.in_modules

    @property
    def has_experts(self) -> bool:
        return any(experts > 1 for experts in self.experts)

    @property
    def layers(self) -> list[int]:
        """Numbers of the pipeline layers that have files of their own."""
        last = self.model["num_layers"] + 2  # the final norm
        return [*range(1, last + 1), *([last + 1] if self.model["untie_embeddings_and_output_weights"] else [])]

    def model_files(self) -> list[str]:
        """The files that must be there beside those of the optimizer and of experts."""
        first = Layout(self.layout.tp, self.layout.pp, 1)  # the first replica writes them
        models = [names.model_states_file(first, first.coordinates(rank)) for rank in range(first.world_size)]
        if self.in_modules:
            return models
        return [*models, *(names.layer_file(number, tp) for number in self.layers for tp in range(first.tp))]

    def optimizer_files(self) -> list[str]:
        """The ZeRO-1 shards of all ranks."""
        places = map(self.layout.coordinates, range(self.layout.world_size))
        return [names.optimizer_file(self.layout, at, self.model["params_dtype"]) for at in places]


def describe(directory: Path, state: Any, *, universal: bool = False) -> ForeignCheckpoint:
    """What `state`, the content of mp_rank_00, says of the checkpoint in `directory`.

    `universal`: ds_to_universal has copied the file there, of a checkpoint of upstream's or of this program's.
    Raises CheckpointMismatchError, saying why and what to do, if this program cannot resume from it, and
    CheckpointDamagedError if it is one of this program's own whose manifest is gone.
    """
    path = directory / FIRST_FILE
    args = state.get("args") if isinstance(state, Mapping) else None
    if args is None:
        raise CheckpointMismatchError(
            f"{path}: no `args` in it, so it is not a Megatron-DeepSpeed checkpoint: what DeepSpeed saves for another "
            "script does not say which model and which layout it is of; resume it with that script, or give another "
            "--load"
        )
    own = hasattr(args, "indexed_samples")  # upstream has no such argument
    if own and not universal:
        raise CheckpointDamagedError(f"{directory / names.MANIFEST}: missing, so {directory.name} may be incomplete")
    known = getattr(args, "__dict__", {})
    lacking = [name for name in _NEEDED_ARGS if name not in known]
    lacking_state = [name for name in _NEEDED_STATE if name not in state]
    if lacking or lacking_state:
        what = [f"args.{name}" for name in lacking] + lacking_state
        raise CheckpointMismatchError(
            f"{path}: it lacks {', '.join(what)}, which Megatron-DeepSpeed writes for a GPT; give another --load"
        )
    for name, size in {**known, **state}.items():
        if name in _SIZES and not (type(size) is int and size > 0):
            raise CheckpointDamagedError(f"{path}: {name} is {size!r}, and must be a number from 1 on")
    experts = _experts_in(known)
    if not own:
        _refuse_bigscience(path, known)
        _check_experts(path, state, known, experts, universal)
    _refuse_what_is_not_here(path, state, known, universal)
    model = _BEFORE | {"num_key_value_heads": known["num_attention_heads"]}
    model |= {name: value for name, value in known.items() if isinstance(value, (int, float, str)) or value is None}
    model["params_dtype"] = "bf16" if known["bf16"] else "fp16" if known["fp16"] else "fp32"
    model["num_experts"] = " ".join(map(str, experts))
    layout = Layout(
        known["tensor_model_parallel_size"],
        known["pipeline_model_parallel_size"],
        state["dp_world_size"],
        1 if own or experts == [1] else known.get("moe_expert_parallel_size", 1),
    )
    info = state.get("universal_checkpoint_info") or {}
    return ForeignCheckpoint(
        model,
        layout,
        state["iteration"],
        info.get("original_vocab_size"),
        heads_interleaved=not own and _SINCE_BLOCKS not in known,
        spare_positions=not own
        and layout.pp > 1
        and model["add_position_embedding"]
        and not model["untie_embeddings_and_output_weights"],
        experts=() if own else _experts_per_layer(known, experts),
        in_modules=state.get("module") is not None,
    )


def check_vocabulary(directory: Path, found: ForeignCheckpoint, vocab_size: int) -> None:
    """Raises CheckpointMismatchError if the checkpoint's tokenizer has another number of tokens than `vocab_size`."""
    if found.vocab_size not in (None, vocab_size):
        raise CheckpointMismatchError(
            f"{directory}: its tokenizer has {found.vocab_size} tokens, and this one {vocab_size}; give the "
            "tokenizer, or the --vocab-size, of the run that saved it"
        )


def _refuse_bigscience(path: Path, args: Mapping[str, Any]) -> None:
    found = [name for name in _OF_BIGSCIENCE if name in args]
    if found:
        raise CheckpointMismatchError(
            f"{path}: has args.{found[0]}, so BigScience's Megatron-DeepSpeed saved it, which numbers the pipeline's "
            "layers otherwise and cannot be read here; import its model with hf-convert, or give another --load"
        )


def _experts_in(args: Mapping[str, Any]) -> list[Any]:
    """One number, or one for each layer with experts if they differ."""
    given = args.get("num_experts") or [1]
    experts = list(given) if isinstance(given, (list, tuple)) else [given]
    return experts[:1] if all(count == experts[0] for count in experts) else experts


def _experts_per_layer(args: Mapping[str, Any], experts: list[int]) -> tuple[int, ...]:
    found = [1] * args["num_layers"]
    if experts == [1]:  # then the interval, which nobody reads, may be anything
        return tuple(found)
    interval = args.get("expert_interval", 2)
    with_experts = args["num_layers"] // interval
    found[interval - 1 :: interval] = experts * with_experts if len(experts) == 1 else experts
    return tuple(found)


def _check_experts(
    path: Path, state: Mapping[str, Any], args: Mapping[str, Any], experts: list[Any], universal: bool
) -> None:
    """Raises as `describe` of what this program cannot read of upstream's experts, or is no number of them."""
    if experts == [1]:
        return
    shown = f"{path}: upstream's mixture of experts (--num-experts {' '.join(map(str, experts))})"
    sizes = {name: args.get(name, least) for name, least in (("expert_interval", 2), ("moe_expert_parallel_size", 1))}
    numbers = [*experts, *sizes.values()]
    ranks, replicas = sizes["moe_expert_parallel_size"], state["dp_world_size"]
    if not all(type(number) is int and number > 0 for number in numbers) or replicas % ranks:
        raise CheckpointDamagedError(f"{shown}: {sizes} on {replicas} data-parallel ranks cannot be")
    layers = args["num_layers"] // sizes["expert_interval"]
    if len(experts) not in (1, layers) or any(max(count, ranks) % min(count, ranks) for count in experts):
        raise CheckpointDamagedError(f"{shown}: not for {layers} layers with experts, divided over {ranks} ranks")
    if universal:
        raise CheckpointMismatchError(f"{shown}, which --universal-checkpoint does not load; load what was converted")
    if args["tensor_model_parallel_size"] > 1 and not args.get("enable_expert_tensor_parallelism", False):
        raise CheckpointMismatchError(
            f"{shown} was saved on several TP ranks without --enable-expert-tensor-parallelism, and then DeepSpeed "
            "saves the experts of one of them alone; give another --load"
        )
    config = state.get("ds_config")
    if isinstance(config, Mapping) and config.get("use_data_before_expert_parallelism", False):
        raise CheckpointMismatchError(
            f"{shown} was saved with use_data_before_expert_parallelism, which divides experts over other ranks than "
            "here; give another --load"
        )
    if not isinstance(state.get("num_experts"), list) or state.get("module") is None:
        raise CheckpointMismatchError(
            f"{shown} was saved by an old DeepSpeed, whose files of experts do not tell the layer; load it there "
            "with a later one, and save it"
        )


def _refuse_what_is_not_here(path: Path, state: Mapping[str, Any], args: Mapping[str, Any], universal: bool) -> None:
    if universal and state.get("module") is not None:
        raise CheckpointMismatchError(
            f"{path}: it was converted from a checkpoint with the weights of the whole model, as upstream saves them "
            "with --no-pipeline-parallel, whose names are others; load the checkpoint that was converted"
        )
    other = [f"{name} {args[name]}" for name, here in _WITHOUT.items() if args.get(name, here) != here]
    if other:
        raise CheckpointMismatchError(
            f"{path}: saved with {', '.join(other)}, which this program does not have; give another --load"
        )


def read_header(directory: Path) -> Mapping[str, Any] | None:
    """The content of mp_rank_00 in `directory` as far as it is no class's, without torch; None if it cannot be had.

    What is wrong with the file is the load's to tell. Nothing is imported or run: an object of any class is one of a
    class made here and now, with the attributes that it was pickled with.
    """
    try:
        if not (directory / FIRST_FILE).is_file():  # a pipe would block
            return None
        with zipfile.ZipFile(directory / FIRST_FILE) as archive:
            (record,) = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
            if record.file_size > _LARGEST_PICKLE:
                return None
            with archive.open(record) as file:
                state = _Inert(file).load()
    except Exception:  # a damaged pickle can make the unpickler raise anything
        return None
    return state if isinstance(state, dict) else None


class _Inert(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        return self._classes(f"{module}.{name}")

    @functools.cached_property
    def _classes(self) -> Any:
        """One class for each name, of this file alone: a pickle can set attributes of what it finds."""
        return functools.cache(lambda name: type(name, (_Object,), {}))

    def persistent_load(self, pid: Any, /) -> Any:
        return None  # the storage of a tensor


class _Object(dict[Any, Any]):
    """Takes whatever a pickle gives to an object, items included, and does nothing with it."""

    def __new__(cls, *_: Any, **__: Any) -> _Object:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __call__(self, *_: Any, **__: Any) -> _Object:
        return self

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
