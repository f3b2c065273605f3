"""The operations of a block with backward passes of their own, against the same composed of torch's operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

from megatron.model.norms import RMSNorm
from megatron.model.rotary import rotary_cos_sin, split_and_rotate
from megatron.model.swiglu import swiglu
from megatron.parallel.placement import Placement
from megatron.parallel.topology import TensorParallelGroup

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def drawn(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(
    function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Results of the function and the gradients of its inputs, for gradients of the results drawn from fixed seeds."""
    given = [each.detach().clone().requires_grad_() for each in inputs]
    results = function(*given)
    results = results if isinstance(results, tuple) else (results,)
    of_results = [drawn(9 + i, *result.shape, dtype=result.dtype) for i, result in enumerate(results)]
    return [*(result.detach() for result in results), *torch.autograd.grad(results, given, of_results)]


def stored_bytes(function: Callable[..., object], inputs: Sequence[torch.Tensor]) -> int:
    """Bytes kept for the backward pass."""
    given = [each.detach().requires_grad_() for each in inputs]
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*given)
    return sum(kept.values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_that_of_float32_rounded_once_and_keeps_its_input(dtype: torch.dtype) -> None:
    layer = RMSNorm(32, 1e-5, Placement(TensorParallelGroup(), dtype, CPU))
    x, weight = drawn(1, 2, 7, 32, dtype=dtype), drawn(2, 32, dtype=dtype)

    def mine(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    def wide(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.double(), (32,), weight.double(), 1e-5).to(dtype)

    for found, expected in zip(gradients(mine, [x, weight]), gradients(wide, [x, weight]), strict=True):
        torch.testing.assert_close(found, expected)
    of_statistic = 4 * x[..., 0].numel()
    assert stored_bytes(mine, [x, weight]) == (x.numel() + weight.numel()) * dtype.itemsize + of_statistic


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [16, 6])
def test_rotated_heads_are_those_of_the_formula_and_nothing_but_tables_is_kept(
    dtype: torch.dtype, rotary_dim: int
) -> None:
    cos, sin = rotary_cos_sin(9, rotary_dim, 10000.0, dtype, CPU)
    heads = drawn(3, 2, 9, 4 + 2 + 2, 16, dtype=dtype)

    def mine(heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return split_and_rotate(heads, (4, 2), cos, sin)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        turned, passed = x[..., :rotary_dim], x[..., rotary_dim:]
        pairs = torch.complex(*turned.double().chunk(2, dim=-1)) * torch.complex(cos.double(), sin.double())
        return torch.cat((pairs.real.to(dtype), pairs.imag.to(dtype), passed), dim=-1)

    def formula(heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = heads.split([4, 2, 2], dim=2)
        return rotated(query), rotated(key), value

    # In bf16 one of the two products is rounded before the sum.
    tolerance = 4e-2 if dtype == torch.bfloat16 else 1e-5
    for found, expected in zip(gradients(mine, [heads]), gradients(formula, [heads]), strict=True):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0.0)
    assert stored_bytes(mine, [heads]) == (cos.numel() + sin.numel()) * dtype.itemsize


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_has_the_bits_of_torchs_operations_and_keeps_its_input(dtype: torch.dtype) -> None:
    def composed(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up

    both = drawn(4, 2, 5, 24, dtype=dtype)
    for found, expected in zip(gradients(swiglu, [both]), gradients(composed, [both]), strict=True):
        assert torch.equal(found, expected)
    assert stored_bytes(swiglu, [both]) == both.numel() * dtype.itemsize
