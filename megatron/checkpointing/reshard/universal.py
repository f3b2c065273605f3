"""--universal-checkpoint: loads the output of DeepSpeed's ds_to_universal onto any layout.

Each file of a universal checkpoint holds a full parameter, as the master weight or a moment. As with any checkpoint of
another layout, each rank reads only its share (direct.py). The files hold no weights: also without the optimizer
(--no-load-optim, --finetune) the masters are read, and the weights are made from them.

Fused matrices: if a file has the key `sub_param_shape` or `param_n_sub_params`, DeepSpeed has joined the parts of the
TP ranks matrix by matrix, [Q; K; V]. With `cat_dim` alone the parts of the TP ranks follow each other, [Q; K; V] of
rank 0 first, as for upstream's fused QKV; each row is then read from its place in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.engines.base import PlacedTensor, SavedCheckpoint
from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointMismatchError, reading
from megatron.checkpointing.engines.torch_files import tensor_records
from megatron.checkpointing.preflight.universal_directory import (
    OPTIMIZER_STATE,
    PARAMETERS,
    STATES,
    STEP,
    parameter_names,
)
from megatron.checkpointing.reshard.direct import DirectLoad, Survey
from megatron.checkpointing.reshard.torch_shards import interleaved_ranges, placed_tensor
from megatron.checkpointing.state.shard_metadata import shard_placement, weight_placement
from megatron.checkpointing.store.parts import share_of
from megatron.checkpointing.store.upstream import FIRST_FILE
from megatron.parallel.parameter_slice import ParameterSlice, slice_of

_MASTER = "master"


class UniversalLoad(DirectLoad):
    """Each rank reads its own share of the full parameters."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._from_masters = True

    @property
    def _surveys_parameters(self) -> bool:
        return True

    def _values(self) -> list[Any]:
        """On rank 0: the mp_rank state, and what the optimizer keeps of all parameters alike."""
        if self._ctx.control.rank != 0:
            return []
        with reading(self._directory):
            common = self._load_values(FIRST_FILE)
            kept = self._load_values(OPTIMIZER_STATE)
            steps = self._steps_of(parameter_names(self._directory)[0])
            base = {"state": {0: {} if steps is None else {"step": steps}}, "param_groups": kept.pop("param_groups")}
            return [common, {"optimizer_state_dict": kept | {"base_optimizer_state": base}}]

    def _survey(self) -> Survey:
        """The tensors of some parameters, with placements of the tensor alone; each is looked into by one rank."""
        found = Survey()
        with self._op.span("discover"), reading(self._directory):
            everything = parameter_names(self._directory)
            first = self._steps_of(everything[0])
            for name in share_of(everything, self._ctx.control.rank, self._ctx.control.world_size):
                if self._with_optimizer and (steps := self._steps_of(name)) != first:
                    raise CheckpointDamagedError(
                        f"{self._directory / PARAMETERS / name / STEP}: {steps} steps of the optimizer, and {first} in "
                        f"that of {everything[0]}: two conversions lie in one directory; convert again"
                    )
                kinds = STATES if self._with_optimizer else [_MASTER]
                found.tensors += [self._tensor(name, kind) for kind in kinds]
            found.needed = self._names_held()
        return found

    def _tensor(self, name: str, kind: str) -> PlacedTensor:
        file = f"{PARAMETERS}/{name}/{STATES[kind]}"
        path = self._directory / file
        state = self._load_values(file)
        tensor = state.get("param") if isinstance(state, dict) else None
        if not isinstance(tensor, torch.Tensor) or not tensor.dim():
            raise CheckpointDamagedError(f"{path}: holds no parameter, so ds_to_universal has not written it")
        by_rank = "cat_dim" in state and state.get("param_n_sub_params", 1) == 1 and "sub_param_shape" not in state
        placement = {"name": name, "shape": list(tensor.shape), "rank_by_rank": by_rank}
        records = tensor_records(path) if self._reader.options.verify_checksums else {}
        return placed_tensor(path, name, tensor, {"kind": kind, "fragments": [placement]}, records)

    def _placed_tensors(self, surveyed: list[Any]) -> list[PlacedTensor]:
        parts = {name: slice_of(param, name) for name, param in self._engine.module.named_parameters()}
        found = []
        for tensor in surveyed:
            (saved,) = tensor.placement["fragments"]
            name, kind = saved["name"], tensor.placement["kind"]
            fragment = self._fragment(tensor.path, parts[name], saved)
            found.append(replace(tensor, placement=shard_placement(kind, [fragment], fragment["numel"])))
        there = {(tensor.placement["kind"], tensor.name) for tensor in found}
        for name in sorted(self._names_held()):
            if (_MASTER, name) not in there:
                raise CheckpointMismatchError(
                    f"{self._directory / PARAMETERS / name}: missing, and the model here has this parameter: give the "
                    "flags of the run that was converted, or another --load"
                )
        return found

    def _fragment(self, path: Path, part: ParameterSlice, saved: dict[str, Any]) -> dict[str, Any]:
        """Where in the full parameter the elements of the tensor in `path` lie; `part`: of the live parameter."""
        shape = tuple(saved["shape"])
        whole = replace(part, tp_rank=0, tp_size=1)
        if part.vocabulary:  # DeepSpeed cuts off the rows of no token; with patterns of another program it may not
            rows = {self._ctx.vocab_size, self._manifest.model["padded_vocab_size"]} & {shape[0]}
            whole = replace(whole, shape=(*rows, *part.shape[1:]), blocks=tuple(rows)) if rows else whole
        if shape != whole.shape:
            raise CheckpointMismatchError(
                f"{path}: its shape is {shape}, and this model's is {whole.shape}: another model was converted, or the "
                "patterns of the conversion joined the tensor-parallel parts wrongly; give the model flags of the run "
                "that was converted, or load the checkpoint before its conversion, without --universal-checkpoint"
            )
        fragment = weight_placement(saved["name"], whole, self._ctx.vocab_size)
        if saved["rank_by_rank"]:
            fragment["ranges"] = self._ranges_by_rank(saved["name"], whole)
        return fragment | {"local_shape": list(shape), "start": 0, "numel": torch.Size(shape).numel(), "offset": 0}

    def _ranges_by_rank(self, name: str, whole: ParameterSlice) -> list[list[int]] | None:
        """Rows of the full parameter in the order of the TP ranks that were put together."""
        if whole.dim is None or len(whole.blocks) == 1:
            return None if whole.ranges is None else [list(pair) for pair in whole.ranges]
        if self._foreign is not None and self._foreign.heads_interleaved and ".query_key_value." in name:
            return interleaved_ranges(whole, self._manifest.model["num_key_value_heads"])
        tp = self._manifest.layout["tp"]
        parts = [replace(whole, tp_rank=rank, tp_size=tp) for rank in range(tp)]
        return [list(pair) for part in parts for pair in part.ranges or []]

    def _file_sizes(self, placed: Sequence[PlacedTensor]) -> dict[Path, tuple[str, int]]:
        paths = [tensor.path for tensor in placed]
        return {path: (path.relative_to(self._directory).as_posix(), path.stat().st_size) for path in paths}

    def _steps_of(self, name: str) -> Any:
        """Steps that the optimizer has done, as a number or a tensor without dimensions; None if it keeps none."""
        file = f"{PARAMETERS}/{name}/{STEP}"
        return self._load_values(file) if (self._directory / file).is_file() else None

    def _load_values(self, file: str) -> Any:
        return self._reader.load_values(file, SavedCheckpoint(self._directory), self._op)
