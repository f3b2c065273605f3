"""Memory that a rank needs on its device while it trains, by the arithmetic of DeepSpeed 0.19's ZeRO-1 optimizers:

    weights         parameters of the stage in the training type
    gradients       bf16: one flat fp32 buffer of all parameters, and without bf16.immediate_grad_update the parameters'
                    own .grad in bf16 (their peak, at the end of the backward pass); fp16 and fp32: .grad in the
                    training type
    master_weights  fp32 partition of this DP rank
    moments         of the same size, two with Adam
    activations     of the micro batches in flight (tools/ckpt_plan/activations.py)

This is a lower bound: the .grad that exists at a time with immediate_grad_update, communication buckets, workspaces of
kernels and fragmentation of the allocator are not counted.
"""

from __future__ import annotations

from megatron.config import Config
from megatron.config.deepspeed_config import immediate_grad_update

from .activations import ELEMENT_SIZE, activation_bytes
from .kinds import MASTER_WEIGHTS, MOMENTS

# Nominal memory sizes of devices, bytes. They report some gigabytes more, which CUDA, NCCL and the allocator use.
DEVICE_SIZES = (80 * 10**9, 40 * 10**9)
_FP32_BUFFER = 4  # of a bf16 gradient


def device_bytes(
    config: Config, parameters: int, num_blocks: int, pp: int, padded_vocab_size: int, kinds: dict[str, int]
) -> dict[str, int]:
    """Bytes on the device of a rank of stage `pp`, which has so many parameters and blocks, by purpose.

    `kinds`: bytes that are saved, by kind.
    """
    model, optimizer = config.model, config.optimizer
    element_size = ELEMENT_SIZE[model.params_dtype]
    # If the optimizer is not saved (--no-save-optim), its size is computed by the formula, without alignment.
    master = kinds[MASTER_WEIGHTS] or 4 * -(-parameters // config.parallel.weight_copies)
    moments = 2 if optimizer.optimizer == "adam" else int(optimizer.sgd_momentum > 0)
    return {
        "weights": parameters * element_size,
        "gradients": parameters * _gradient_bytes(config),
        MASTER_WEIGHTS: master,
        MOMENTS: kinds[MOMENTS] or moments * master,
        "activations": activation_bytes(config, padded_vocab_size, num_blocks, pp),
    }


def _gradient_bytes(config: Config) -> int:
    """Of one parameter."""
    element_size = ELEMENT_SIZE[config.model.params_dtype]
    if not config.model.bf16:
        return element_size
    return _FP32_BUFFER if immediate_grad_update(config) else _FP32_BUFFER + element_size
