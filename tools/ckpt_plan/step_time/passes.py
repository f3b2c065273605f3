"""The operations that code performs, with their floating-point operations and bytes, counted while it runs.

PassRecorder sees every operation of torch, so what is counted is the model's own code. On the meta device nothing is
computed, and no memory is needed. There, torch takes other paths than on CUDA in two places: CudaKernels puts the
kernels of CUDA in their stead, fused attention and fused RMSNorm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Kind = Literal["product", "attention", "memory", "collective"]

_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
_ONLY_WRITES = {"copy_", "fill_", "zero_", "_foreach_zero_", "_foreach_copy_"}
# Their first argument is a table of which only the elements that an index names are touched.
_INDEXED = {"embedding", "gather", "index_select", "scatter_", "scatter_add_", "index_add_", "index_put_"}
# Arguments that a schema declares as written, and that are so only with a loss scale.
_NOT_WRITTEN = {("_fused_adam_", "grads"), ("_fused_adamw_", "grads")}
ALL_TO_ALL = "all_to_all"  # of tokens, between the ranks that experts are divided over
_COLLECTIVES = {
    "allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": ALL_TO_ALL,
}  # fmt: skip


@dataclass(frozen=True)
class Pass:
    """One operation. `reads`, `writes`: (number of a storage, bytes of it that are touched)."""

    name: str
    kind: Kind
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    backward: bool
    flops: int = 0
    shape: tuple[int, ...] = ()  # (m, k, n) of the product of m x k and k x n
    payload: int = 0  # bytes of a collective's whole tensor
    beside: bool = False  # a collective that the operations after it need not wait for

    @property
    def num_bytes(self) -> int:
        """Bytes read and written."""
        return sum(size for _, size in (*self.reads, *self.writes))


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements that a tensor shows; an expanded dimension shows the same ones again."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(size for size, stride in sizes if stride != 0 or size == 0)


class PassRecorder(TorchDispatchMode):
    """Appends a Pass to `passes` for each operation that touches memory; set `backward` for those of that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[Pass] = []
        self.backward = False
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.UntypedStorage] = []  # so that no storage gets the address of an earlier one

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number that the passes give to the tensor's storage."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._numbers)
            self._kept.append(storage)
        return self._numbers[storage._cdata]

    def add(
        self, name: str, kind: Kind, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor], **more: Any
    ) -> None:
        """Record an operation that reads and writes all elements of these tensors; `more`: further fields of Pass."""
        touched = [tuple((self.number_of(each), touched_bytes(each)) for each in part) for part in (reads, writes)]
        self.passes.append(Pass(name, kind, touched[0], touched[1], self.backward, **more))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        given, written = _tensors((args, kwargs)), _mutated(func, name, args, kwargs)
        storages = {self.number_of(tensor) for tensor in given}
        made = [tensor for tensor in _tensors(out) if self.number_of(tensor) not in storages]
        if func.namespace == "c10d":
            self._add_collective(func, name, given, args, kwargs)
        elif name in _ALLOCATES or not (made or written):  # the latter: only another view of the same elements
            pass
        elif func._overloadpacket in flop_registry:
            flops = int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out))
            self.add(name, "product", given, [*written, *made], flops=flops, shape=_product_shape(given))
        elif name in _INDEXED:
            self._add_indexed(name, given, made)
        else:
            overwritten = {id(tensor) for tensor in (written if name in _ONLY_WRITES else _out(func, kwargs))}
            reads = [tensor for tensor in given if id(tensor) not in overwritten]
            self.add(name, "memory", reads, [*written, *made])
        return out

    def _add_indexed(self, name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        table, *others = given
        part = touched_bytes((made or others)[-1])  # as large as the result, or as the values that are put in place
        reads = ((self.number_of(table), part), *((self.number_of(each), touched_bytes(each)) for each in others))
        writes = ((self.number_of((made or given)[0]), part),)
        self.passes.append(Pass(name, "memory", reads, writes, self.backward))

    def _add_collective(self, func: Any, name: str, given: list[torch.Tensor], args: Any, kwargs: Any) -> None:
        arguments = func._schema.arguments
        # Arguments that have their default are left out. torch before 2.8 does not say whether a call is asynchronous.
        named = {each.name: each.default_value for each in arguments if each.has_default_value()} | kwargs
        named |= dict(zip((each.name for each in arguments), args, strict=False))
        payload = max(map(touched_bytes, given))
        # The first tensor is the result, for an all-reduce in place.
        beside = named.get("async_op") is True
        self.add(_COLLECTIVES.get(name, name), "collective", given, given[:1], payload=payload, beside=beside)


class CudaKernels(TorchFunctionMode):
    """Attention and RMSNorm as the kernels that torch selects on CUDA, recorded by `recorder`."""

    def __init__(self, recorder: PassRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in (F.rms_norm, torch.rms_norm):
            return self._rms_norm(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _attention(self, query: Any, key: Any, value: Any, **options: Any) -> Any:
        if options.get("attn_mask") is not None:
            raise NotImplementedError("attention with a mask takes another kernel, which is not counted")
        return _Attention.apply(self._recorder, query, key, value, options.get("is_causal", False))

    def _rms_norm(self, func: Any, x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
        if weight is not None and weight.dtype != x.dtype:
            return func(x, shape, weight, eps)  # in pieces on CUDA, too
        return _RMSNorm.apply(self._recorder, x, weight)


class _Attention(torch.autograd.Function):
    """FlashAttention (arXiv:2307.08691): 2 products forward and 5 backward; the scores are never written.

    Each product of b h s s' d elements takes 2 operations for each; a causal mask leaves half of them.
    """

    @staticmethod
    def forward(ctx: Any, recorder: PassRecorder, query: Any, key: Any, value: Any, is_causal: bool) -> torch.Tensor:
        batch, heads, length, width = query.shape
        # The kernel's layout: heads of a token side by side.
        out = query.new_empty((batch, length, heads, width)).transpose(1, 2)
        sums = query.new_empty((batch, heads, length), dtype=torch.float32)
        ctx.product = 2 * batch * heads * length * key.shape[2] * width // (2 if is_causal else 1)
        ctx.recorder = recorder
        ctx.save_for_backward(query, key, value, out, sums)
        recorder.add("attention", "attention", (query, key, value), (out, sums), flops=2 * ctx.product)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, out, sums = ctx.saved_tensors
        found = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
        reads = (grads[0], query, key, value, out, sums)
        ctx.recorder.add("attention_backward", "attention", reads, found, flops=5 * ctx.product)
        return None, *found, None


class _RMSNorm(torch.autograd.Function):
    """Forward one kernel; backward two, of the input and of the weight, each of which reads input and gradient."""

    @staticmethod
    def forward(ctx: Any, recorder: PassRecorder, x: Any, weight: Any) -> torch.Tensor:
        out = torch.empty_like(x)
        rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.recorder = recorder
        ctx.save_for_backward(x, weight, rstd)
        recorder.add("rms_norm", "memory", (x,) if weight is None else (x, weight), (out, rstd))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        of_x, of_weight = torch.empty_like(x), None
        scale = () if weight is None else (weight,)
        ctx.recorder.add("rms_norm_backward", "memory", (grads[0], x, rstd, *scale), (of_x,))
        if weight is not None:
            of_weight = torch.empty_like(weight)
            ctx.recorder.add("rms_norm_backward_weight", "memory", (grads[0], x, rstd), (of_weight,))
        return None, of_x, of_weight


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _out(func: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of `out=`, which are not read."""
    names = [each.name for each in func._schema.arguments if each.is_write and each.kwarg_only]
    return _tensors([kwargs.get(name) for name in names])


def _mutated(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that `func` writes in place, by its schema."""
    arguments = func._schema.arguments
    named = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    written = [each.name for each in arguments if each.is_write and (name, each.name) not in _NOT_WRITTEN]
    return _tensors([named.get(argument) for argument in written])


def _product_shape(operands: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """(m, k, n) of the last two operands; the batches of a batched product count as rows."""
    left, right = operands[-2], operands[-1]
    return math.prod(left.shape[:-1]), left.shape[-1], right.shape[-1]
