"""Column-, row- and vocabulary-parallel layers.

Layers are created without values; `reset_parameters(seed, prefix)` draws them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from megatron.parallel.mappings import linear_of_copy, reduce_from_tensor_parallel_region, summed_linear
from megatron.parallel.parameter_init import init_normal_
from megatron.parallel.placement import Placement
from megatron.parallel.products import linear
from megatron.parallel.sequence import linear_of_gathered_sequence, reduce_scatter_sequence, replicated
from megatron.parallel.topology import TensorParallelGroup


def column_parallel_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: TensorParallelGroup
) -> torch.Tensor:
    """x W^T + b where each rank has some rows of W and b; see ColumnParallelLinear."""
    if tp.splits_sequence:
        return linear_of_gathered_sequence(x, weight, bias, tp)
    return linear_of_copy(x, weight, bias, tp)


def row_parallel_linear(x: torch.Tensor, weight: torch.Tensor, tp: TensorParallelGroup) -> torch.Tensor:
    """The sum of x W^T over all ranks where each has some columns of W; see RowParallelLinear."""
    if tp.splits_sequence:
        return reduce_scatter_sequence(linear(x, weight), tp)
    return summed_linear(x, weight, tp)


def _sum_over_ranks(partial: torch.Tensor, tp: TensorParallelGroup) -> torch.Tensor:
    """The sum of `partial` [b, s, n] on every rank; with --sequence-parallel its part of the sequence."""
    if tp.splits_sequence:
        return reduce_scatter_sequence(partial, tp)
    return reduce_from_tensor_parallel_region(partial, tp)


class DrawnLayer(nn.Module):
    """A layer whose `weight` is drawn from N(0, init_std^2), and whose `bias`, if it has one, starts at zero."""

    def __init__(self, init_std: float) -> None:
        super().__init__()
        self.init_std = init_std

    def reset_parameters(self, seed: int, prefix: str) -> None:
        init_normal_(self.get_parameter("weight"), std=self.init_std, seed=seed, name=f"{prefix}.weight")
        if getattr(self, "bias", None) is not None:
            nn.init.zeros_(self.get_parameter("bias"))


class ColumnParallelLinear(DrawnLayer):
    """y = x W^T + b with W split along its output rows.

    `output_sizes` are the full row counts of the matrices fused into W ([sum/TP, input_size] here);
    `vocabulary`: there is one row per token of the padded vocabulary.
    Input [b, s, input_size], replicated, or with --sequence-parallel a part of the sequence, [b, s / TP, input_size];
    output [b, s, sum(output_sizes) / TP], split.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        *,
        bias: bool,
        init_std: float,
        place: Placement,
        vocabulary: bool = False,
    ) -> None:
        super().__init__(init_std)
        self.tp = place.tp
        rows = sum(output_sizes)
        self.weight = place.parameter(rows, input_size, dim=0, blocks=output_sizes, vocabulary=vocabulary)
        self.bias = place.parameter(rows, dim=0, blocks=output_sizes, vocabulary=vocabulary) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return column_parallel_linear(x, self.weight, self.bias, self.tp)


class RowParallelLinear(DrawnLayer):
    """y = x W^T + b with W split along its input columns; b is replicated and added after the sum.

    Input [b, s, input_size / TP], split; output [b, s, output_size], replicated, or with --sequence-parallel a part of
    the sequence, [b, s / TP, output_size].
    """

    def __init__(self, input_size: int, output_size: int, *, bias: bool, init_std: float, place: Placement) -> None:
        super().__init__(init_std)
        self.tp = place.tp
        self.weight = place.parameter(output_size, input_size, dim=1)
        self.bias = place.parameter(output_size) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = row_parallel_linear(x, self.weight, self.tp)
        return y if self.bias is None else y + replicated(self.bias, self.tp)


class ReplicatedLinear(DrawnLayer):
    """y = x W^T + b with W and b on every rank; not for parts of a sequence."""

    def __init__(self, input_size: int, output_size: int, *, bias: bool, init_std: float, place: Placement) -> None:
        super().__init__(init_std)
        self.weight = place.parameter(output_size, input_size)
        self.bias = place.parameter(output_size) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class VocabParallelEmbedding(DrawnLayer):
    """Word embedding [padded_vocab / TP, hidden] with the vocabulary split over TP.

    Input ids [b, s]; output [b, s, hidden], replicated, or with --sequence-parallel a part of the sequence,
    [b, s / TP, hidden]. `norm`: applied to the output.
    """

    def __init__(
        self,
        padded_vocab_size: int,
        hidden_size: int,
        *,
        init_std: float,
        place: Placement,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__(init_std)
        self.tp = place.tp
        self.weight = place.parameter(padded_vocab_size, hidden_size, dim=0, vocabulary=True)
        self.first_id = place.tp.rank * self.weight.shape[0]
        self.norm = norm

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self._embed(ids)
        return embedded if self.norm is None else self.norm(embedded)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.first_id
        foreign = (local < 0) | (local >= self.weight.shape[0])
        out = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return _sum_over_ranks(out.masked_fill(foreign.unsqueeze(-1), 0.0), self.tp)
