"""The mixture of experts against loops over tokens, and where the gradient of its auxiliary loss goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron.config import ConfigError, ModelConfig
from megatron.model.experts import AuxiliaryLoss, MoE, route
from megatron.model.gpt_model import check_stages
from megatron.model.transformer import ParallelTransformerLayerPipe
from megatron.parallel.placement import Placement
from megatron.parallel.topology import TensorParallelGroup

HIDDEN, EXPERTS, BATCH, SEQ = 16, 4, 2, 8
TOKENS = BATCH * SEQ


def layer_of(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[ParallelTransformerLayerPipe, AuxiliaryLoss]:
    config = ModelConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=2, seq_length=SEQ, hidden_dropout=0, attention_dropout=0,
        num_experts=(EXPERTS,), **settings,
    )  # fmt: skip
    auxiliary = AuxiliaryLoss(config.moe_loss_coeff)
    layer = ParallelTransformerLayerPipe(
        config, Placement(TensorParallelGroup(), dtype, torch.device("cpu")), EXPERTS, auxiliary
    )
    torch.manual_seed(7)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer, auxiliary


def hidden_states(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(BATCH, SEQ, HIDDEN, dtype=dtype, generator=torch.Generator().manual_seed(3))


def by_loops(moe: Any, x: torch.Tensor, k: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and auxiliary loss: the k most probable experts, in order of the tokens, first choices first."""
    tokens = x.reshape(-1, HIDDEN)
    probabilities = functional.softmax(tokens @ moe.deepspeed_moe.gate.wg.weight.T, dim=-1)
    ranking = probabilities.argsort(dim=-1, descending=True)
    taken = [0] * EXPERTS
    chosen: list[list[int]] = [[] for _ in tokens]
    for choice in range(k):
        for token, experts in enumerate(ranking[:, choice].tolist()):
            if taken[experts] < capacity:
                chosen[token].append(experts)
                taken[experts] += 1
    rows = []
    for token, experts in enumerate(chosen):
        row = torch.zeros(HIDDEN)
        whole = sum(probabilities[token, expert] for expert in experts) if k == 2 else 1.0
        for expert in experts:
            of_expert = moe.deepspeed_moe.experts.deepspeed_experts[str(expert)](tokens[None, token : token + 1])[0, 0]
            row = row + probabilities[token, expert] / whole * of_expert
        rows.append(row)
    firsts = torch.tensor([ranking[:, 0].tolist().count(expert) / TOKENS for expert in range(EXPERTS)])
    return torch.stack(rows).view_as(x), EXPERTS * (probabilities.mean(dim=0) * firsts).sum()


@pytest.mark.parametrize(
    ("k", "capacity", "settings"),
    [
        (1, TOKENS, {"moe_token_dropping": False}),
        (1, TOKENS, {"moe_train_capacity_factor": 4.0}),
        (2, TOKENS, {"moe_token_dropping": False}),
        (2, 5, {"moe_train_capacity_factor": 0.6}),
    ],
)
def test_output_and_gradients_are_those_of_loops(k: int, capacity: int, settings: dict[str, Any]) -> None:
    layer, auxiliary = layer_of(topk=k, moe_top2_2nd_expert_sampling=False, moe_loss_coeff=0.5, **settings)
    moe, x = layer.mlp, hidden_states()
    assert isinstance(moe, MoE)
    auxiliary.begin_iteration(loss_scale=8.0, micro_batches=2)
    weights = list(moe.parameters())
    found = moe(x)
    gradients = torch.autograd.grad(found.square().sum(), weights)
    expected, loss = by_loops(moe, x, k, capacity)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected.square().sum() + 0.5 * 8 / 2 * loss, weights)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    assert auxiliary.take() == pytest.approx(0.5 * float(loss.detach()) / 2)
    assert auxiliary.take() == 0


def test_an_expert_with_too_many_tokens_takes_some_at_random() -> None:
    logits = torch.zeros(TOKENS, EXPERTS)
    logits[:, 1] = 1
    drawn = set()
    for seed in range(20):
        torch.manual_seed(seed)
        routes = route(logits, 1, 3, draw_tokens=True)
        taken = routes.slots[0] < EXPERTS * 3
        assert sorted(routes.slots[0][taken].tolist()) == [3, 4, 5]
        assert (routes.weights[0] > 0).tolist() == taken.tolist()
        drawn.add(tuple(taken.nonzero().flatten().tolist()))
    assert len(drawn) > 10
    assert (route(logits, 1, 3).slots[0] < EXPERTS * 3).nonzero().flatten().tolist() == [0, 1, 2]


def test_the_second_expert_is_drawn_by_the_probabilities_of_the_others() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0]).repeat(8000, 1)
    torch.manual_seed(1)
    routes = route(logits, 2, None, draw_second=True)
    seconds = (routes.slots[1] // routes.capacity).bincount(minlength=EXPERTS) / 8000
    expected = functional.softmax(torch.tensor([-torch.inf, 2.0, 1.0, 0.0]), dim=0)
    torch.testing.assert_close(seconds, expected, rtol=0, atol=0.03)
    assert route(logits, 2, None).slots[1].unique().numel() == 8000


def test_the_residual_mlp_has_a_share_of_each_token() -> None:
    layer, _ = layer_of(mlp_type="residual", moe_token_dropping=False)
    moe, x = layer.mlp, hidden_states()
    assert isinstance(moe, MoE) and moe.mlp is not None and moe.coefficient is not None
    weight, bias = moe.coefficient.get_parameter("weight"), moe.coefficient.get_parameter("bias")
    share = functional.softmax(x @ weight.T + bias, dim=-1)
    routed, _ = by_loops(moe, x, 1, TOKENS)
    torch.testing.assert_close(moe(x), share[..., :1] * routed + share[..., 1:] * moe.mlp(x))


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputation_changes_no_bit_and_counts_the_loss_once(how: str, dtype: torch.dtype) -> None:
    found = []
    for recomputes in (False, True):
        selective = {"recompute_granularity": "selective"} if recomputes and how == "selective" else {}
        layer, auxiliary = layer_of(dtype, topk=2, **selective)
        x = hidden_states(dtype).requires_grad_()
        auxiliary.begin_iteration(1.0, 1)
        torch.manual_seed(5)
        full = recomputes and how == "full"
        y = checkpoint(layer, x, use_reentrant=True) if full else layer(x)
        assert isinstance(y, torch.Tensor)
        y.float().square().sum().backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        found.append((y, x.grad, gradients, auxiliary.take()))
    (y, of_x, gradients, loss), again = found
    assert torch.equal(y, again[0]) and loss == again[3] > 0
    assert of_x is not None and again[1] is not None and torch.equal(of_x, again[1])
    assert all(torch.equal(one, other) for one, other in zip(gradients, again[2], strict=True))


@pytest.mark.parametrize("topk", [1, 2])
def test_evaluation_has_a_capacity_of_its_own_and_draws_nothing(topk: int) -> None:
    factors: dict[str, Any] = {"moe_train_capacity_factor": 0.25 / topk, "moe_eval_capacity_factor": 3.9 / topk}
    layer, _ = layer_of(topk=topk, moe_min_capacity=1, **factors)
    moe, x = layer.mlp, hidden_states()
    assert isinstance(moe, MoE)
    assert (moe(x).abs().sum(-1) > 0).sum() <= EXPERTS  # one token of each
    before = torch.get_rng_state()
    assert (moe.eval()(x).abs().sum(-1) > 0).all()
    assert torch.equal(torch.get_rng_state(), before), "an evaluation draws random numbers"


def test_one_number_of_experts_is_the_same_model_as_that_number_for_each_layer() -> None:
    one, each, other = (
        ModelConfig(num_layers=4, hidden_size=HIDDEN, num_attention_heads=2, seq_length=SEQ, num_experts=experts)
        for experts in ((4,), (4, 4), (4, 8))
    )
    assert one == each != other


def test_stages_that_divide_experts_differently_are_refused_without_bf16() -> None:
    """Parts of 4 blocks on two stages, of the pipeline layers that gpt_model.py numbers."""
    check_stages([1, 4, 1, 4], [0, 4, 8], ep=2)
    check_stages([1, 1, 1, 1], [0, 4, 8], ep=2)
    for experts, shown in (([1, 1, 1, 4], "0: 1; 1: 2"), ([1, 4, 1, 8], "0: 4; 1: 8")):
        with pytest.raises(ConfigError, match=f"^--moe-expert-parallel-size .: in fp16 and fp32 .* over {shown}: give"):
            check_stages(experts, [0, 4, 8], ep=2 if shown.endswith("2") else 8)
