"""Products of bf16 and fp16 on a slow CPU are those of fp32, rounded once, and keep no more for the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.model.transformer import ParallelTransformerLayerPipe
from megatron.parallel import products
from megatron.parallel.placement import Placement
from megatron.parallel.products import linear, matmul
from megatron.parallel.topology import TensorParallelGroup
from tests.unit.tools.ckpt_plan.test_activations import config_of

HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[True], ids=["slow"])
def slow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """As on a processor that is slow with half precision, or not, whatever this one is."""
    monkeypatch.setattr(products, "is_slow_on_cpu", lambda dtype: request.param and dtype in HALF)
    return request.param


def operands(dtype: torch.dtype, bias: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 5, 16), (24, 16)] + ([(24,)] if bias else [])
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("slow")
def test_a_linear_layer_is_that_of_fp32_rounded_once(dtype: torch.dtype, bias: bool) -> None:
    given = operands(dtype, bias)
    widened = [operand.detach().float().requires_grad_() for operand in given]
    y, expected = linear(*given), F.linear(*widened)
    assert torch.equal(y, expected.to(dtype))
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    y.backward(gradient)
    expected.backward(gradient.float())
    for mine, reference in zip(given[:2], widened[:2], strict=True):
        assert mine.grad is not None and reference.grad is not None
        assert mine.grad.dtype == dtype and torch.equal(mine.grad, reference.grad.to(dtype))
    if bias:
        assert given[2].grad is not None and widened[2].grad is not None
        torch.testing.assert_close(given[2].grad, widened[2].grad.to(dtype))  # summed by torch, in the type itself


def test_what_onednn_has_kernels_for_decides() -> None:
    assert products.is_slow_on_cpu(torch.bfloat16) != torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert products.is_slow_on_cpu(torch.float16) != torch.ops.mkldnn._is_mkldnn_fp16_supported()
    assert not products.is_slow_on_cpu(torch.float32)


@pytest.mark.parametrize("slow", [False], indirect=True)
@pytest.mark.usefixtures("slow")
def test_a_fast_processor_multiplies_half_precision_as_it_is() -> None:
    given = operands(torch.bfloat16, bias=True)
    with ProductTypes() as of_both:
        linear(*given).sum().backward()
        matmul(given[1].detach(), given[0].detach()[0].t())
    assert of_both.seen == {torch.bfloat16}


@pytest.mark.usefixtures("slow")
def test_other_types_are_multiplied_as_they_are() -> None:
    for dtype in (torch.float32, torch.float64):
        x, weight, bias = operands(dtype, bias=True)
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
        assert torch.equal(matmul(weight, x[0].t()), weight @ x[0].t())


@pytest.mark.usefixtures("slow")
def test_the_operands_alone_are_kept_for_the_backward_pass() -> None:
    given = operands(torch.bfloat16, bias=True)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear(*given)
    assert {tensor.data_ptr() for tensor in kept} == {operand.data_ptr() for operand in given[:2]}


class ProductTypes(TorchDispatchMode):
    """Notes the types of all matrix products but those within attention, which is one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.seen |= {argument.dtype for argument in args if isinstance(argument, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("style", ["--swiglu --normalization rmsnorm --disable-bias-linear", ""])
def test_a_layer_of_the_model_multiplies_in_fp32(style: str) -> None:
    config = config_of(f"--bf16 --hidden-dropout 0 {style}").model
    layer = ParallelTransformerLayerPipe(config, Placement(TensorParallelGroup(), torch.bfloat16, torch.device("cpu")))
    x = torch.randn(2, config.seq_length, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with ProductTypes() as of_layer:
        layer(x).sum().backward()
    assert of_layer.seen == {torch.float32}
