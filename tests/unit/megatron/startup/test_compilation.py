"""--torch-compile: what the compiler gets of a block, and how it is set. Trainings: tests/dist/test_compilation.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron.config import ConfigError
from megatron.model.transformer import ParallelTransformerLayerPipe
from megatron.parallel.placement import Placement
from megatron.parallel.topology import TensorParallelGroup
from megatron.startup.compilation import configure_compiler
from tests.unit.megatron.config.test_arguments import small
from tests.unit.tools.ckpt_plan.test_activations import BATCH, CPU, HIDDEN, LLAMA, SEQ, config_of

pytestmark = pytest.mark.slow  # the compiler's import


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The settings of torch's compiler, put back afterwards."""
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    import torch._inductor.config as settings

    saved = settings.save_config()
    yield settings
    settings.load_config(saved)


def layers_of(flags: str) -> list[ParallelTransformerLayerPipe]:
    config = config_of(f"{flags} --hidden-dropout 0").model
    place = Placement(TensorParallelGroup(), torch.bfloat16 if config.bf16 else torch.float32, CPU)
    layers = [ParallelTransformerLayerPipe(config, place) for _ in range(3)]
    for number, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters(1, f"{number}.{name}")  # pyright: ignore[reportCallIssue]
    return layers


def call_layer(layer: ParallelTransformerLayerPipe, hidden: torch.Tensor) -> torch.Tensor:
    return layer(hidden)


def gradients(
    layers: list[ParallelTransformerLayerPipe], call: Callable[..., torch.Tensor] = call_layer
) -> list[torch.Tensor]:
    """Output of the layers, gradients of their input and of their parameters. `call(layer, hidden)` calls a layer."""
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    torch.manual_seed(2)
    x, grad = (torch.randn(BATCH, SEQ, HIDDEN, dtype=parameters[0].dtype) for _ in range(2))
    inputs = [x.requires_grad_(), *parameters]
    for each in inputs:
        each.grad = None
    y = functools.reduce(lambda hidden, layer: call(layer, hidden), layers, x)
    y.backward(grad)
    return [y.detach(), *(each.grad for each in inputs if each.grad is not None)]


def compile_and_capture(layers: list[ParallelTransformerLayerPipe]) -> list[str]:
    """Compile the layers as the trainer does, but for what runs the graphs, which is torch operation by operation.

    Returns a list that gets the kind of each graph as it is captured.
    """
    from torch._dynamo.backends.common import aot_autograd

    captured: list[str] = []

    def keep(kind: str, graph: torch.fx.GraphModule, _: Any) -> Any:
        captured.append(kind)
        return graph.forward

    backend = aot_autograd(**{f"{kind}_compiler": functools.partial(keep, kind) for kind in ("fw", "bw", "inference")})
    for layer in layers:
        layer.compile(backend=backend, fullgraph=True, dynamic=False)
    return captured


@pytest.mark.parametrize(
    "flags",
    [f"--bf16 {LLAMA} --num-key-value-heads 2", f"{LLAMA} --rotary-percent 0.5", "", "--position-embedding-type alibi"],
    ids=["bf16", "fp32", "gpt", "alibi"],
)
def test_all_layers_are_one_graph_for_each_direction_with_the_same_gradients(flags: str) -> None:
    layers = layers_of(flags)
    names, expected = list(layers[0].state_dict()), gradients(layers)
    captured = compile_and_capture(layers)
    found = gradients(layers)
    assert captured == ["fw", "bw"]
    assert list(layers[0].state_dict()) == names
    assert len(found) == len(expected)
    # bf16: RMSNorm and rotary embeddings are rounded at other places.
    tolerance = 0.03 if "bf16" in flags else 1e-5
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


def test_recomputed_layers_have_the_same_gradients_and_one_graph_more() -> None:
    from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint

    layers = layers_of(LLAMA)
    gradients(layers)  # computes the rotary tables, which are no part of the graphs
    captured = compile_and_capture(layers)
    expected = gradients(layers)
    found = gradients(layers, checkpoint)  # pyright: ignore[reportArgumentType]
    assert captured == ["fw", "bw", "inference"]
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


TP2 = " --tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    ("flags", "deterministic"),
    [("", False), (TP2, True), (TP2 + " --sequence-parallel", False), (" --deterministic on", True)],
)
def test_kernels_are_chosen_without_measuring_where_bits_matter(inductor: Any, flags: str, deterministic: bool) -> None:
    """TP ranks have the same weights of norms, and without --sequence-parallel nothing makes their gradients equal."""
    configure_compiler(small(flags, 2))
    assert (inductor.deterministic, inductor.compile_threads) == (deterministic, 1)


def test_what_the_environment_says_of_the_compiler_holds(inductor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "3")
    inductor.compile_threads, inductor.deterministic = 3, True  # as torch reads its variables when it is imported
    configure_compiler(small())
    assert (inductor.compile_threads, inductor.deterministic) == (3, True)


def test_a_torch_that_cannot_be_deterministic_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Settings as an older torch has them."""
    import torch._inductor

    monkeypatch.setattr(torch._inductor, "config", type("Older", (), {"compile_threads": 4}))
    with pytest.raises(ConfigError, match="--deterministic on: torch .* use a newer torch, or drop --torch-compile"):
        configure_compiler(small(" --deterministic on"))
    configure_compiler(small(TP2, 2))
    assert "use --sequence-parallel" in caplog.text
    caplog.clear()
    configure_compiler(small())
    assert not caplog.text
