"""Seeds and the two random streams of a rank.

The default stream is equal on all TP ranks (dropout of replicated activations); the tracked stream
"model-parallel-rng" differs between them (dropout of split activations: of heads, and of parts of a sequence). Ranks
that share sequences by --ds-sequence-parallel-size differ in both. The tracker is DeepSpeed's, because its activation
checkpointing saves and restores it around a recomputation.
"""

from __future__ import annotations

import contextlib
import random
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from megatron.parallel.accelerator import accelerator
from megatron.parallel.topology import Coordinates, SequenceGroup, TensorParallelGroup

if TYPE_CHECKING:
    import torch

MODEL_PARALLEL_RNG = "model-parallel-rng"
_STAGE_OFFSET, _REPLICA_OFFSET, _TENSOR_PARALLEL_OFFSET = 100, 10, 2718  # upstream's constants
_SEQUENCE_PARALLEL_OFFSET = 1 << 20  # more than the others add up to


def seed_everything(
    seed: int, at: Coordinates, *, sequence_parallel_size: int = 1, replicas_differ: bool = False
) -> None:
    """Seed Python, NumPy, torch and the tracker of the rank at these coordinates.

    Stages, parts of a sequence and, through the tracker, TP ranks differ; DP replicas are equal unless
    `replicas_differ`.
    """
    import numpy as np
    import torch
    from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

    replica = at.dp // sequence_parallel_size if replicas_differ else 0
    part = SequenceGroup.of(at, sequence_parallel_size).rank
    rank_seed = seed + _STAGE_OFFSET * at.pp + _REPLICA_OFFSET * replica + _SEQUENCE_PARALLEL_OFFSET * part
    random.seed(rank_seed)
    np.random.seed(rank_seed)
    torch.default_generator.manual_seed(rank_seed)  # not torch.manual_seed, which looks after every kind of device
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    accelerator().manual_seed(rank_seed)
    tracker.add(MODEL_PARALLEL_RNG, rank_seed + _TENSOR_PARALLEL_OFFSET + at.tp)


def model_parallel_rng() -> AbstractContextManager[None]:
    """A context in which random numbers come from the stream of this TP rank."""
    from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

    return get_cuda_rng_tracker().fork(MODEL_PARALLEL_RNG)


def residual_dropout(x: torch.Tensor, probability: float, training: bool, tp: TensorParallelGroup) -> torch.Tensor:
    """Dropout of the residual stream: the same mask on all TP ranks, or one for each part of the sequence."""
    from torch.nn.functional import dropout

    if not (probability and training):  # in this order: compiled code without dropout is one for both
        return x
    with model_parallel_rng() if tp.splits_sequence else contextlib.nullcontext():
        return dropout(x, probability)


def get_rng_state() -> dict[str, Any]:
    """All random state of this process, under upstream's key names."""
    import numpy as np
    import torch
    from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": accelerator().get_rng_state(),
        # The tracker replaces its tensors rather than changing them, but its dict is live: copy it.
        "rng_tracker_states": dict(get_cuda_rng_tracker().get_states()),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what get_rng_state returned."""
    import numpy as np
    import torch
    from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

    version, internal, gauss = state["random_rng_state"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    accelerator().set_rng_state(state["cuda_rng_state"])
    get_cuda_rng_tracker().set_states(dict(state["rng_tracker_states"]))
