"""Warm-up of the device: what a rank's first step would do once, done before its checkpoint is loaded.

With --warmup-kernels, one layer of each kind of this stage computes the losses of a micro-batch of zeros, and their
gradients. The libraries then have loaded the kernels of these shapes (CUDA 12 loads each at its first use) and have
chosen algorithms, cuBLAS has its handle and its workspace, and torch's allocator has taken from the device what a layer
needs. Then an optimizer of the same kind updates a parameter of a few elements, which loads the kernels of the
accumulation of gradients, their norm, clipping and the update. Parameters, gradients, moments and random numbers stay
as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.config import Config
from megatron.parallel.accelerator import accelerator
from megatron.parallel.random import get_rng_state, set_rng_state
from megatron.startup.initialize import Runtime


def warm_up_kernels(config: Config, runtime: Runtime, model: Any, batch_fn: Callable[[Any], tuple[Any, Any]]) -> None:
    """Compute with one layer of each kind of `model`, this stage; collective over the groups that divide a layer.

    `batch_fn`: that of the training, which makes (inputs, labels) of {"text": [b, s + 1]}. Waits for the device, so
    that its time counts as this one's.
    """
    import torch

    state = get_rng_state()
    text = torch.zeros(config.training.micro_batch_size, config.model.seq_length + 1, dtype=torch.int64)
    inputs, labels = batch_fn({"text": text})
    if inputs is None:
        inputs = from_earlier_stage(config, runtime.device, next(model.parameters()).dtype)
    output = inputs
    for layer in _one_of_each_kind(model.forward_funcs):
        output = layer(output)
    if labels is not None:
        output = model.loss_fn(output, labels)
    leaves = [tensor for tensor in (inputs, *model.parameters()) if getattr(tensor, "requires_grad", False)]
    # Not `backward`: it would add to gradients, and run DeepSpeed's hooks, which reduce them.
    torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)
    set_rng_state(state)
    accelerator().synchronize()


def warm_up_optimizer(optimizer: Any, dtype: Any, device: Any) -> None:
    """Accumulate, reduce on one rank, clip and update a parameter of its own, as DeepSpeed does with all of the rank's.

    `optimizer`: the inner one, whose class and options are used; it stays as it is. `dtype`: that of the parameters;
    their gradients are accumulated in fp32. Not collective.
    """
    import torch
    from deepspeed.runtime.utils import clip_tensors_by_global_norm, get_global_norm_of_tensors, is_invalid_grad_norm

    master = torch.nn.Parameter(torch.zeros(16, device=device))
    master.grad = torch.zeros_like(master)
    master.grad.add_(torch.ones(16, dtype=dtype, device=device).float())
    bucket = torch.cat([master.grad, master.grad]).mul_(0.5)
    master.grad.copy_(bucket[:16])
    norm = get_global_norm_of_tensors([master.grad])
    if not is_invalid_grad_norm(norm):
        clip_tensors_by_global_norm([master.grad], max_norm=0.5 * float(norm), global_norm=norm)
    type(optimizer)([master], **optimizer.defaults).step()
    torch.zeros(16, dtype=dtype, device=device).copy_(master.detach())
    master.grad.zero_()


def from_earlier_stage(config: Config, device: Any, dtype: Any) -> Any:
    """Zeros for the activations that a stage but the first receives: [b, s, hidden], or a part of the sequence."""
    import torch

    parallel = config.parallel
    length = config.model.seq_length // parallel.ds_sequence_parallel_size
    if parallel.sequence_parallel:
        length //= parallel.tensor_model_parallel_size
    shape = config.training.micro_batch_size, length, config.model.hidden_size
    return torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)


def _one_of_each_kind(layers: list[Callable[..., Any]]) -> Iterator[Callable[..., Any]]:
    """The layers of a stage, of those of the same parts one; what is no module, such as a tied head, counts each."""
    import torch

    seen = set()
    for layer in layers:
        kind = tuple(map(type, layer.modules())) if isinstance(layer, torch.nn.Module) else layer
        if kind not in seen:
            seen.add(kind)
            yield layer
