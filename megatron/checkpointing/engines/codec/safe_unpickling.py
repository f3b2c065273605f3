"""The classes that a checkpoint of ours, of DeepSpeed's or of upstream's may hold. Nothing else is unpickled."""

from __future__ import annotations

import argparse
import collections
import enum
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class ModelType(enum.Enum):
    """Stands for megatron.core.enums.ModelType in upstream's `args`; the numbers are those it pickles."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
    retro_encoder = 3
    retro_decoder = 4


@functools.cache
def _member_of(kind: type[enum.Enum]) -> Callable[[Any], enum.Enum]:
    """Looks a member up. On the allow-list in place of its class, whose members an unpickler would let be altered."""

    def member(value: Any) -> enum.Enum:
        return kind(value)

    return member


def known_classes() -> AbstractContextManager[None]:
    """Within it, torch.load(weights_only=True) accepts the classes of checkpoints, and only those."""
    import numpy as np
    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    codes = "?" + np.typecodes["AllInteger"] + np.typecodes["Float"] + np.typecodes["Complex"]
    numpy_types = [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in codes}]
    reconstruct = np.zeros(1).__reduce__()[0]
    known: list[Any] = [
        argparse.Namespace,
        bytes,  # empty ones are pickled as a call
        collections.OrderedDict,
        DynamicLossScaler,
        LossScaler,
        fragment_address,
        (_member_of(ZeroStageEnum), f"{ZeroStageEnum.__module__}.{ZeroStageEnum.__qualname__}"),
        (_member_of(ModelType), "megatron.core.enums.ModelType"),
        *numpy_types,
        (reconstruct, "numpy.core.multiarray._reconstruct"),  # its place in NumPy 1
        (reconstruct, "numpy._core.multiarray._reconstruct"),  # and in NumPy 2
        torch.Size,
    ]
    return torch.serialization.safe_globals(known)
