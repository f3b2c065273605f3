"""Unpickles what a checkpoint holds: only classes of an allow-list, and only new objects of them are changed.

`find_class` alone is not enough. The opcode BUILD sets attributes of any object on the stack, such as a class of the
allow-list, a function or a member of an enumeration, and the change would stay after the file was refused.
(Opcodes: Lib/pickletools.py. torch's weights_only unpickler has the same rule, by type(instance).)
"""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import io
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar


class PlainUnpickler(pickle._Unpickler):
    """`find_class` of a subclass says what is on the allow-list. In Python, since C's BUILD cannot be replaced."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def __init__(self, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled))
        self._classes: set[type] = set()

    def allowed(self, found: Any) -> Any:
        """`found`, and its instances may be built from now on if it is a class; enumerations have their members."""
        if isinstance(found, type) and not issubclass(found, enum.Enum):
            self._classes.add(found)
        return found

    def _build(self) -> None:
        instance = self.stack[-2]
        if not isinstance(instance, tuple(self._classes)):  # of a class of its own each: NumPy's types
            raise pickle.UnpicklingError(
                f"it sets attributes of {ascii(instance)[:80]}, which is no instance of a class on the allow-list"
            )
        build: Any = pickle._Unpickler.dispatch[pickle.BUILD[0]]
        build(self)

    dispatch[pickle.BUILD[0]] = _build


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
    from deepspeed.checkpoint.universal_checkpoint import SubparamShape
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
        SubparamShape,
        fragment_address,
        (_member_of(ZeroStageEnum), f"{ZeroStageEnum.__module__}.{ZeroStageEnum.__qualname__}"),
        (_member_of(ModelType), "megatron.core.enums.ModelType"),
        *numpy_types,
        (reconstruct, "numpy.core.multiarray._reconstruct"),  # its place in NumPy 1
        (reconstruct, "numpy._core.multiarray._reconstruct"),  # and in NumPy 2
        torch.Size,
    ]
    return torch.serialization.safe_globals(known)
