"""Mixture of experts: an MLP of which each token uses one or two of many copies, chosen by a gate.

The method is that of GShard (arXiv:2006.16668) and Switch Transformer (arXiv:2101.03961), with the choices and the
parameter names of DeepSpeed's layer, which upstream uses: each expert takes a limited number of tokens, tokens beyond
that pass by the layer, and an auxiliary loss keeps the experts equally used. With --mlp-type residual each token also
passes an MLP that all share (arXiv:2201.05596). Experts are split over TP, and with --moe-expert-parallel-size they
are divided over data-parallel ranks, which exchange tokens (megatron/parallel/expert_parallel.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config import ModelConfig
from megatron.parallel.expert_parallel import ExpertParallelGroup
from megatron.parallel.layers import ReplicatedLinear
from megatron.parallel.placement import Placement


class AuxiliaryLoss:
    """The auxiliary loss of all layers of a stage.

    Its gradient begins where the layer's output is (`attach`), so that a stage needs none of another stage's losses:
    the sum over the layers is part of the loss that is trained, while the loss of the last stage is that of the model.
    """

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient
        self._gradient = 0.0
        self._total: torch.Tensor | None = None
        self._micro_batches = 0

    def begin_iteration(self, loss_scale: float, micro_batches: int) -> None:
        """`loss_scale`: what the loss is multiplied with before the backward pass; 1 without fp16."""
        self._gradient = self.coefficient * loss_scale / micro_batches
        self._micro_batches += micro_batches

    def attach(self, hidden: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """`hidden` as it is; its backward pass adds the gradient of `loss`, a number, of a layer and micro batch."""
        return _Attach.apply(hidden, loss, self)  # type: ignore[no-any-return]

    def passed(self, loss: torch.Tensor) -> float:
        """Count `loss` in the backward pass, which is once also where the forward pass is repeated; its gradient.

        Passes before the first iteration, to warm up, do not count.
        """
        if self._micro_batches:
            self._total = loss if self._total is None else self._total + loss
        return self._gradient

    def take(self) -> float:
        """The mean over the micro batches since the last call, times the coefficient."""
        total = 0.0 if self._total is None else float(self._total)
        mean = self.coefficient * total / max(self._micro_batches, 1)
        self._total, self._micro_batches = None, 0
        return mean


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, loss: torch.Tensor, to: AuxiliaryLoss) -> torch.Tensor:
        ctx.to = to
        ctx.save_for_backward(loss)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.full_like(loss, ctx.to.passed(loss.detach())), None


class Routes(NamedTuple):
    """Where k copies of each of n tokens go. Slots are numbered expert by expert, `capacity` for each."""

    slots: torch.Tensor  # [k, n]; experts x capacity of a token that the expert does not take
    weights: torch.Tensor  # [k, n], fp32: of the expert's output; 0 of a token that it does not take
    capacity: int
    loss: torch.Tensor


def route(
    logits: torch.Tensor,
    k: int,
    capacity: int | None,
    *,
    draw_tokens: bool = False,
    draw_second: bool = False,
    largest: Callable[[torch.Tensor], int] = int,
) -> Routes:
    """The experts of each token by `logits` [n, experts], fp32; `capacity`: tokens of each expert, None: no limit.

    Without a limit it is the number of tokens of the expert that has most; `largest`: that of all ranks that exchange.

    k 1: the most probable expert; one with too many tokens takes the earlier ones, or if `draw_tokens` some at random.
    k 2: also the second, if `draw_second` drawn by the probabilities of the others; first choices go before second
    ones, then earlier tokens.
    The loss, experts x sum of (mean probability x share of the first choices), is 1 if all are used equally.
    """
    experts = logits.shape[1]
    probabilities = F.softmax(logits, dim=1)
    choices = [probabilities.argmax(dim=1)]
    first = F.one_hot(choices[0], experts)
    loss = experts * (probabilities.mean(dim=0) * first.float().mean(dim=0)).sum()
    masks = [first]
    if k == 2:
        noise = -torch.empty_like(logits).exponential_().log() if draw_second else 0.0  # Gumbel's
        others = (logits.detach() + noise).masked_fill(first.bool(), -torch.inf)
        choices.append(others.argmax(dim=1))
        masks.append(F.one_hot(choices[1], experts))
    if capacity is None:
        capacity = largest(torch.stack(masks).sum(dim=(0, 1)).max())
    elif draw_tokens and k == 1 and capacity < len(logits):
        chance = first * torch.rand_like(probabilities)
        taken = torch.zeros_like(first).scatter_(0, chance.topk(capacity, dim=0).indices, 1)
        masks = [first * taken]
    slots, weights, before = [], [], torch.zeros_like(first[0])
    for choice, mask in zip(choices, masks, strict=True):
        position = ((mask.cumsum(dim=0) - 1 + before) * mask).sum(dim=1)
        before = before + mask.sum(dim=0)
        is_taken = mask.any(dim=1) & (position < capacity)
        slots.append(torch.where(is_taken, choice * capacity + position, experts * capacity))
        weights.append(probabilities.gather(1, choice.unsqueeze(1)).squeeze(1) * is_taken)
    weight = torch.stack(weights)
    if k == 2:
        weight = weight / weight.sum(dim=0).clamp(min=torch.finfo(weight.dtype).eps)
    return Routes(torch.stack(slots), weight, capacity, loss)


class Gate(nn.Module):
    """Scores of the experts for each token [n, hidden], in fp32: [n, experts]."""

    def __init__(self, config: ModelConfig, experts: int, place: Placement) -> None:
        super().__init__()
        self.wg = ReplicatedLinear(
            config.hidden_size, experts, bias=False, init_std=config.init_method_std, place=place
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(tokens.float(), self.wg.weight.float())


class Experts(nn.Module):
    """The copies of the MLP that this rank holds of all `experts`; input and output [held, tokens, hidden].

    Their names have their numbers among all, so that a name means the same on every rank and layout.
    """

    def __init__(self, experts: int, group: ExpertParallelGroup, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleDict({str(number): build() for number in group.held(experts)})
        for number, expert in self.deepspeed_experts.items():
            for parameter in expert.parameters():
                group.mark(parameter, int(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.deepspeed_experts.values()
        return torch.cat([expert(part) for expert, part in zip(held, x.split(1), strict=True)])


class RoutedExperts(nn.Module):
    """Gate and experts; input and output [b, s, hidden]."""

    def __init__(
        self, config: ModelConfig, experts: int, place: Placement, auxiliary: AuxiliaryLoss,
        build: Callable[[], nn.Module],
    ) -> None:  # fmt: skip
        super().__init__()
        self.config = config
        self.auxiliary = auxiliary
        self.gate = Gate(config, experts, place)
        self.group = place.experts.group_for(experts)
        self.experts = Experts(experts, self.group, build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        config, tokens = self.config, x.flatten(0, 1)
        logits = self.gate(tokens)
        (count, hidden), experts = tokens.shape, logits.shape[1]
        capacity = config.expert_capacity(count, experts, training=self.training)
        # Nothing is drawn in an evaluation, so that the training goes on as without it.
        draw_second = self.training and config.moe_top2_2nd_expert_sampling
        routes = route(
            logits, config.topk, capacity, draw_tokens=self.training, draw_second=draw_second,
            largest=self.group.largest,
        )  # fmt: skip
        unused = experts * routes.capacity
        # The token of each slot; slots that none goes to read a row of zeros, and so does the one behind the last.
        source = torch.full((unused + 1,), count, device=x.device)
        source.scatter_(0, routes.slots.flatten(), torch.arange(count, device=x.device).repeat(config.topk))
        sent = torch.cat([tokens, tokens.new_zeros(1, hidden)]).index_select(0, source[:-1])
        found = self.experts(self.group.to_experts(sent.view(experts, routes.capacity, hidden)))
        found = self.group.from_experts(found).view(unused, hidden)
        found = torch.cat([found, found.new_zeros(1, hidden)]).index_select(0, routes.slots.flatten())
        # Weights are in fp32, and so is the sum.
        out = (found.view(config.topk, count, hidden) * routes.weights.unsqueeze(-1)).sum(dim=0).to(x.dtype)
        return self.auxiliary.attach(out, routes.loss).view_as(x)


class MoE(nn.Module):
    """What takes the place of a block's MLP; input and output [b, s, hidden]. `build`: makes one such MLP."""

    def __init__(
        self, config: ModelConfig, experts: int, place: Placement, auxiliary: AuxiliaryLoss,
        build: Callable[[], nn.Module],
    ) -> None:  # fmt: skip
        super().__init__()
        self.deepspeed_moe = RoutedExperts(config, experts, place, auxiliary, build)
        self.mlp = self.coefficient = None
        if config.mlp_type == "residual":
            self.mlp = build()
            self.coefficient = ReplicatedLinear(
                config.hidden_size, 2, bias=True, init_std=config.init_method_std, place=place
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routed = self.deepspeed_moe(x)
        if self.mlp is None or self.coefficient is None:
            return routed
        share = F.softmax(self.coefficient(x), dim=-1)
        return routed * share[..., :1] + self.mlp(x) * share[..., 1:]
