"""Batches on their way to the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from megatron.data.data_samplers import PretrainingSampler, build_pretraining_data_loader


class Constant:
    def __getitem__(self, i: int) -> dict[str, npt.NDArray[np.int64]]:
        return {"text": np.zeros(5, dtype=np.int64)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pinned_batches(num_workers: int) -> None:
    sampler = PretrainingSampler(None, 0, 2, 0, 1)
    loader = build_pretraining_data_loader(Constant(), sampler, num_workers, pin_memory=True)
    assert loader is not None and next(loader)["text"].is_pinned()
