"""What both directions of state_skeleton agree on."""

from __future__ import annotations

import struct

import torch

_DOUBLE = struct.Struct(">d")

# Objects that a checkpoint may hold, by the name under which they are kept: module and class to use. The first four
# are DeepSpeed's; ModelType is upstream's, for which safe_unpickling has a stand-in.
CLASSES = {
    f"{module}.{name}": (module, name)
    for module, name in (
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
        ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
        ("deepspeed.utils.tensor_fragment", "fragment_address"),
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    )
} | {"megatron.core.enums.ModelType": ("megatron.checkpointing.engines.codec.safe_unpickling", "ModelType")}

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
ARRAY_KINDS = "biufcSUmM"  # kinds of NumPy types whose elements are plain bytes, without references


class SkeletonError(ValueError):
    """A state cannot be split, or a skeleton not joined; the message says where in the nest."""


def float_bits(value: float) -> str:
    """The IEEE 754 bits of `value`, 16 hexadecimal digits: keeps the payload of a NaN."""
    return _DOUBLE.pack(value).hex()


def float_of_bits(bits: str) -> float:
    """Inverse of float_bits. Raises ValueError or struct.error if they are no 16 hexadecimal digits."""
    return _DOUBLE.unpack(bytes.fromhex(bits))[0]
