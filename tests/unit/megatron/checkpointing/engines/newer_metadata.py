"""Metadata of torch.distributed.checkpoint as torch 2.15 pickles it, with any version of torch."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import TensorProperties


def pickle_with_strides(patched: pytest.MonkeyPatch) -> None:
    """Have what is kept of a tensor pickled with a sixth value, on which torch before 2.15 fails."""
    original = TensorProperties.__getstate__

    def with_strides(self: TensorProperties) -> tuple[Any, ...]:
        return (*original(self)[:5], (1,))

    patched.setattr(TensorProperties, "__getstate__", with_strides)
