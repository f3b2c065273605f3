"""--deterministic on: the same numbers from the same state, on the same devices and layout, to the last bit.

The settings, and what they cost:

    torch   deterministic algorithms: operations sum in a fixed order; one that cannot raises RuntimeError with its
            name. The backward passes of attention and of the embedding become slower. (torch's documentation of
            use_deterministic_algorithms lists the operations.)
    SDPA    flash attention, whose backward pass follows that setting, or plain arithmetic, with the matrix of scores,
            where it does not run (fp32, ALiBi); neither the memory-efficient kernel nor cuDNN's.
    cuBLAS  CUBLAS_WORKSPACE_CONFIG, so that streams do not choose among workspaces ("Results reproducibility" in its
            documentation); 24 MiB of device memory.
    NCCL    NCCL_ALGO=Ring, unless it is set: the order of sums then follows from the ring alone, not from what NCCL
            takes for the fastest. Slower for small messages on many nodes.
    cuDNN   no trials of kernels, which this model does not use anyway.
"""

from __future__ import annotations

import os

from megatron.config import ConfigError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = (":4096:8", ":16:8")  # those that cuBLAS documents as reproducible


def make_deterministic() -> None:
    """Apply the settings; before CUDA is initialised. Raises ConfigError if the environment contradicts them."""
    import torch

    workspace = os.environ.setdefault(_WORKSPACE, _WORKSPACES[0])
    if workspace not in _WORKSPACES:
        raise ConfigError(
            f"--deterministic on: {_WORKSPACE}={workspace}: cuBLAS gives the same results only with "
            f"{' or '.join(_WORKSPACES)}; unset it, or drop the flag"
        )
    os.environ.setdefault("NCCL_ALGO", "Ring")
    # As torch.use_deterministic_algorithms, which also imports torch's compiler: 800 modules, in each rank.
    torch.set_deterministic_debug_mode("error")
    # An aid for finding bugs, which costs time. (The module has it as a property, which type checkers do not see.)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
