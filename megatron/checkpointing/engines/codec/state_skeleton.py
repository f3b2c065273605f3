"""Split a state into typed JSON and its tensors, and join them again: how engines keep a state without pickle.

The JSON, called the skeleton, stands for a value as follows; whatever is not listed is refused.

    null, true, 5, 2.5, "text"            None, bool, int within 64 bits, finite float, str
    [...]                                 list
    {"dict": {...}}                       dict whose keys are all str
    {"tensor": "name"}                    a tensor, kept beside the skeleton under that name
    {"tuple": [...]}, {"Size": [...]}     tuple, torch.Size
    {"items": [[key, value], ...]}        dict with other keys; {"OrderedDict": ...} likewise
    {"float": hex}, {"int": hex}          float that is not finite (its IEEE 754 bits); int beyond 64 bits
    {"complex": [real, imaginary]}, {"bytes": base64}, {"bytearray": base64}
    {"str": base64}                       str that is not Unicode (lone surrogates), as UTF-32
    {"dtype": "bfloat16"}, {"device": "cpu"}
    {"ndarray": dtype, "shape", "data", "order"}    a NumPy array; its bytes are the tensor named by `data`
    {"scalar": dtype, "data": base64}     a NumPy scalar
    {"Namespace": [[name, value], ...]}   argparse.Namespace
    {"namedtuple": "module.Name", "fields": [...], "values": [...]}
    {"class": "module.Name", "state": ...}          an object or enum member of a class of the allow-list

Names of tensors are their paths in the nest, joined by "/". What torch.save keeps and this does not: requires_grad,
and that two different tensors share storage (an entry that is the very same tensor object stays the same).
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.checkpointing.engines.codec import decoding as skeleton_decoding
from megatron.checkpointing.engines.codec import encoding as skeleton_encoding
from megatron.checkpointing.engines.codec.values import SkeletonError

__all__ = ["SkeletonError", "join", "split"]


def split(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """(skeleton that json.dumps takes, tensors by name in the order of the nest).

    The tensors are those of `state`, not copies; of NumPy arrays they are copies of the bytes, of dtype uint8. The
    skeleton shares nothing with `state`, which may change from then on. Works on meta tensors.
    Raises SkeletonError, naming the path in the nest, for a value that has no place in a skeleton.
    """
    return skeleton_encoding.encode(state)


def join(skeleton: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The state that was split: equal in type, order and every bit. Tensors are used as they are given.

    Runs no code of the checkpoint's choice: classes come from an allow-list, and the class of a namedtuple is only
    looked up among the modules that are already imported.
    Raises SkeletonError if the skeleton is damaged, lacks a tensor or names a class that may not be used.
    """
    return skeleton_decoding.decode(skeleton, tensors)
