"""The same GPT and the same training once more, in plain single-process torch: what the trainer is compared with.

Nothing of the trainer's mathematics is used: attention is a softmax of explicit scores, rotary embeddings are
multiplications of complex numbers, norms, activations, loss and schedule are written out. Only the initial weights
and the samples come from outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class PlainConfig:
    """Sizes and style; `llama`: RoPE, RMSNorm, SwiGLU, untied, no biases; else GPT-2's counterparts.

    `bloom`: GPT-2's counterparts, but ALiBi instead of learned positions, and a LayerNorm of the word embeddings.
    """

    llama: bool
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    epsilon: float = 1e-5
    bloom: bool = False
    experts: int = 1  # of every second layer; each token goes to the two most probable

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class PlainTraining:
    """How to train: batches are counted in micro-batches of equal weight; the schedule in iterations."""

    iterations: int
    micro_batch_size: int
    num_micro_batches: int
    lr: float
    min_lr: float
    warmup: int
    weight_decay: float
    clip_grad: float
    optimizer: str
    ignored_token: int | None  # predicting from it does not count


def logits_of(
    weights: Weights, config: PlainConfig, tokens: torch.Tensor, unequal: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """[b, s] token ids to [b, s, vocabulary]. `weights` are named LAYER.NAME as in a checkpoint's layer files.

    `unequal` takes the loss of the gate of each layer with experts (arXiv:2006.16668, l_aux).
    """
    unequal = [] if unequal is None else unequal
    x = weights["1.word_embeddings.weight"][tokens]
    if config.bloom:
        x = _norm(weights, "1.word_embeddings.norm", config, x)
    elif not config.llama:
        x = x + weights["1.position_embeddings.weight"][: tokens.shape[1]]
    for layer in range(2, config.num_layers + 2):
        normed = _norm(weights, f"{layer}.input_layernorm", config, x)
        x = x + _attention(weights, f"{layer}.self_attention", config, normed)
        normed = _norm(weights, f"{layer}.post_attention_layernorm", config, x)
        if config.experts > 1 and layer % 2:
            x = x + _experts(weights, f"{layer}.mlp.deepspeed_moe", config, normed, unequal)
        else:
            x = x + _mlp(weights, f"{layer}.mlp", config, normed)
    x = _norm(weights, str(config.num_layers + 2), config, x)
    head = f"{config.num_layers + 3}.lm_head.weight" if config.llama else "1.word_embeddings.weight"
    return x @ weights[head].T


def _linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _norm(weights: Weights, name: str, config: PlainConfig, x: torch.Tensor) -> torch.Tensor:
    if config.llama:
        return x / (x.square().mean(-1, keepdim=True) + config.epsilon).sqrt() * weights[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + config.epsilon).sqrt()
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _attention(weights: Weights, name: str, config: PlainConfig, x: torch.Tensor) -> torch.Tensor:
    batch, seq, _ = x.shape
    counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    fused = _linear(weights, f"{name}.query_key_value", x)
    parts = fused.split([count * config.head_dim for count in counts], dim=-1)
    query, key, value = (
        part.reshape(batch, seq, count, config.head_dim) for part, count in zip(parts, counts, strict=True)
    )
    if config.llama:
        query, key = _rotate(query), _rotate(key)
    heads = []
    for head in range(config.num_heads):  # consecutive query heads share one key/value head
        kv_head = head // (config.num_heads // config.num_kv_heads)
        scores = query[:, :, head] @ key[:, :, kv_head].transpose(1, 2) / math.sqrt(config.head_dim)
        if config.bloom:  # arXiv:2108.12409, of a number of heads that is a power of two
            scores = scores + 2.0 ** (-8 * (head + 1) / config.num_heads) * torch.arange(seq)
        future = torch.ones(seq, seq).triu(1).bool()
        heads.append(functional.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ value[:, :, kv_head])
    return _linear(weights, f"{name}.dense", torch.cat(heads, dim=-1))


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Channels i and i + d/2 at position t as one complex number, times exp(1j t 10000^(-2i/d)).

    x is [b, s, heads, d]; arXiv:2104.09864, halves paired as in GPT-NeoX.
    """
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half) / half)
    angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies)[:, None, :]
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def _mlp(weights: Weights, name: str, config: PlainConfig, x: torch.Tensor) -> torch.Tensor:
    h = _linear(weights, f"{name}.dense_h_to_4h", x)
    if config.llama:
        gate, up = h.split(h.shape[-1] // 2, dim=-1)
        h = gate * torch.sigmoid(gate) * up
    else:  # GELU by tanh, as GPT-2
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    return _linear(weights, f"{name}.dense_4h_to_h", h)


def _experts(
    weights: Weights, name: str, config: PlainConfig, x: torch.Tensor, unequal: list[torch.Tensor]
) -> torch.Tensor:
    """Every expert computes every token, and the weights of all but two are 0."""
    probabilities = functional.softmax(x @ weights[f"{name}.gate.wg.weight"].T, dim=-1)
    highest, which = probabilities.topk(2, dim=-1)
    share = torch.zeros_like(probabilities).scatter(-1, which, highest / highest.sum(-1, keepdim=True))
    firsts = functional.one_hot(which[..., 0], config.experts).float()
    unequal.append(config.experts * (probabilities.mean((0, 1)) * firsts.mean((0, 1))).sum())
    names = [f"{name}.experts.deepspeed_experts.{expert}" for expert in range(config.experts)]
    results = torch.stack([_mlp(weights, expert, config, x) for expert in names], dim=-1)
    return (results * share.unsqueeze(-2)).sum(-1)


def loss_of(
    weights: Weights, config: PlainConfig, text: torch.Tensor, ignored: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss of predicting each token of `text` [b, s + 1] from those before it, and that of all gates."""
    unequal: list[torch.Tensor] = []
    tokens, targets = text[:, :-1], text[:, 1:]
    log_probabilities = functional.log_softmax(logits_of(weights, config, tokens, unequal), dim=-1)
    losses = -log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    counted = torch.ones_like(losses) if ignored is None else (tokens != ignored).float()
    return (losses * counted).sum() / counted.sum(), 0.1 * torch.stack([torch.zeros(()), *unequal]).sum()


def learning_rate(training: PlainTraining, iteration: int) -> float:
    """Of the iteration counted from 0: linear warm-up from 0, then half a cosine down to min_lr."""
    if iteration <= training.warmup:
        return training.lr * iteration / training.warmup
    done = (iteration - training.warmup) / (training.iterations - training.warmup)
    return training.min_lr + (training.lr - training.min_lr) * (1 + math.cos(math.pi * done)) / 2


def train_plainly(
    initial: Weights, config: PlainConfig, training: PlainTraining, sample: Callable[[int], torch.Tensor]
) -> list[tuple[float, float]]:
    """(loss, gradient norm before clipping) of each iteration. `sample(i)`: the i-th sample, [s + 1] token ids."""
    weights = {name: torch.nn.Parameter(value.clone()) for name, value in initial.items()}
    decayed = [value for value in weights.values() if value.dim() > 1]
    others = [value for value in weights.values() if value.dim() == 1]
    groups = [{"params": decayed, "weight_decay": training.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer
    if training.optimizer == "adam":
        optimizer = torch.optim.AdamW(groups, lr=training.lr, betas=(0.9, 0.999), eps=1e-8)
    else:
        optimizer = torch.optim.SGD(groups, lr=training.lr, momentum=0.9)
    curve = []
    for iteration in range(training.iterations):
        total = 0.0
        for micro_batch in range(training.num_micro_batches):
            first = (iteration * training.num_micro_batches + micro_batch) * training.micro_batch_size
            text = torch.stack([sample(first + i) for i in range(training.micro_batch_size)])
            loss, of_gates = loss_of(weights, config, text, training.ignored_token)
            ((loss + of_gates) / training.num_micro_batches).backward()
            total += float(loss.detach()) / training.num_micro_batches
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), training.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, iteration)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((total, float(norm)))
    return curve
