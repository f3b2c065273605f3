"""Statistics of the whole model: parameter norm, zeros in the gradient, optimizer states; auxiliary loss of experts.

Each parameter counts once, whatever the layout: TP rank 0 counts a parameter that is replicated over TP, the first
stage counts a tied one, and the result is the mean over the DP replicas, each of which holds all weights. Master
weights, moments and reduced gradients are partitioned over DP by ZeRO-1, so their parts add up; the padding at the end
of a partition is not counted. Each figure costs one small all-reduce over all ranks, and is computed only if a flag
asks for it, or the model has experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpointing.state import zero3
from megatron.checkpointing.state.shard_metadata import flat_partitions, fragments
from megatron.config import TrainingConfig
from megatron.parallel.parameter_slice import slice_of
from megatron.parallel.topology import Coordinates, Layout

_STATES = {"variance": "exp_avg_sq", "momentum": "exp_avg"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics after an iteration; None or empty if no flag asks for them."""

    params_norm: float | None = None
    moe_loss: float | None = None  # mean since the last time that it was due; None: of a dense model
    zeros_in_grad: int | None = None  # also None after an iteration whose step was skipped
    optimizer_states: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by upstream's names


class TrainingStatistics:
    """Statistics for --log-params-norm, --log-num-zeros-in-grad and --log-optimizer-states-to-tensorboard.

    `engine`: DeepSpeed's PipelineEngine, or with --zero-stage 3, which takes only the last of these flags, its engine
    of that.
    """

    def __init__(self, engine: Any, training: TrainingConfig, layout: Layout, at: Coordinates) -> None:
        self._engine = engine
        self._training = training
        self._layout = layout
        self._at = at
        self._zeros: int | None = None
        self._group_of = {id(flat): index for index, flat in enumerate(self._flat_masters())}
        if training.log_num_zeros_in_grad:
            engine.basic_optimizer.register_step_pre_hook(self._count_zeros)

    def measure(self, iteration: int) -> Statistics:
        """The statistics after `iteration`; collective if they are due, which all ranks decide identically."""
        training = self._training
        on_board = training.tensorboard_dir is not None and iteration % training.tensorboard_log_interval == 0
        due = on_board or iteration % training.log_interval == 0
        zeros, self._zeros = self._zeros, None
        return Statistics(
            moe_loss=self._moe_loss() if due else None,
            params_norm=self._params_norm() if due and training.log_params_norm else None,
            zeros_in_grad=self._sum_of_zeros(zeros) if due and training.log_num_zeros_in_grad else None,
            optimizer_states=self._optimizer_states()
            if on_board and training.log_optimizer_states_to_tensorboard
            else {},
        )

    def _counts_here(self) -> dict[str, torch.Tensor]:
        """The parameters, or parts of them, that this rank counts."""
        return {
            name: param
            for name, param in self._engine.module.named_parameters()
            if (slice_of(param, name).dim is not None or self._at.tp == 0)
            and not getattr(param, "ds_pipe_replicated", False)
        }

    def _flat_masters(self) -> list[torch.Tensor]:
        """This rank's partitions of master weights, for which the inner optimizer has a state each."""
        if self._layout.zero == 3:
            return list(self._engine.optimizer.fp32_partitioned_groups_flat)
        return [group["params"][0] for group in self._engine.basic_optimizer.param_groups]

    def _moe_loss(self) -> float | None:
        auxiliary = self._engine.module.auxiliary_loss
        if auxiliary is None:
            return None
        # The sum over stages; all TP ranks have the same, and replicas count equally.
        return self._reduce([auxiliary.take()])[0] / (self._layout.tp * self._layout.dp)

    def _params_norm(self) -> float:
        total = 0.0
        for param in self._counts_here().values():
            mark = getattr(param, "divided_expert", None)  # one of so many replicas holds such an expert
            square = float(torch.linalg.vector_norm(param.detach(), dtype=torch.float32)) ** 2
            total += square * (1 if mark is None else mark.ranks)
        return (self._reduce([total])[0] / self._layout.dp) ** 0.5

    def _count_zeros(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Hook before the optimizer steps, when the gradient of this rank's partition is reduced and unscaled."""
        found = self._zeros or 0
        for group in optimizer.param_groups:  # ZeRO steps one group at a time
            flat = group["params"][0]
            for part in self._parts(self._group_of[id(flat)], flat.grad):
                found += part.numel() - int(torch.count_nonzero(part))
        self._zeros = found

    def _sum_of_zeros(self, mine: int | None) -> int | None:
        return None if mine is None else round(self._reduce([float(mine)])[0])

    def _parts(self, group: int, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """The elements that this rank counts of `flat`, which has the shape of its partition of parameter group
        `group`.
        """
        if self._layout.zero == 3:
            yield from zero3.without_padding(self._engine, group, flat)
            return
        counted = self._counts_here()
        partition = flat_partitions(self._engine, self._at.dp)[group]
        for fragment in fragments(partition, vocab_size=0):
            if fragment["name"] in counted:
                yield flat[fragment["offset"] : fragment["offset"] + fragment["numel"]]

    def _optimizer_states(self) -> dict[str, float]:
        """L2 and L1 norms and largest elements of variance, its root, momentum and master weights."""
        optimizer = self._engine.basic_optimizer
        squares, sums, largest = ({name: 0.0 for name in _NAMES} for _ in range(3))
        for index, flat in enumerate(self._flat_masters()):
            states = optimizer.state.get(flat, {})
            if any(key not in states for key in _STATES.values()):
                return {}  # no step has been taken yet, by any rank
            tensors = {name: states[key] for name, key in _STATES.items()} | {"weight": flat.detach()}
            for name, tensor in tensors.items():
                for part in self._parts(index, tensor):
                    kinds = {name: part.float()}
                    if name == "variance":
                        kinds["variance_sqrt"] = kinds[name].sqrt()
                    for kind, values in kinds.items():
                        squares[kind] += float(torch.linalg.vector_norm(values)) ** 2
                        sums[kind] += float(torch.linalg.vector_norm(values, 1))
                        largest[kind] = max(largest[kind], float(values.abs().max()))
        added = self._reduce([*squares.values(), *sums.values()])
        most = self._reduce([*largest.values()], dist.ReduceOp.MAX)
        count = len(_NAMES)
        found = {f"optimizer/{name}_l2": added[i] ** 0.5 for i, name in enumerate(_NAMES)}
        found |= {f"optimizer/{name}_l1": added[count + i] for i, name in enumerate(_NAMES)}
        return found | {f"optimizer/{name}_abs_max": most[i] for i, name in enumerate(_NAMES)}

    def _reduce(self, values: list[float], op: Any = dist.ReduceOp.SUM) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self._engine.device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()


_NAMES = ("variance", "variance_sqrt", "momentum", "weight")
