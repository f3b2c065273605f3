"""The device of a rank, and whether the default group is bound to it; torch.accelerator is that of a made-up host."""

from __future__ import annotations

import os

import pytest
import torch
from torch.torch_version import TorchVersion

from megatron.config import ConfigError
from megatron.startup.initialize import binds_device, choose_device


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices that torch.accelerator was told."""
    devices: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", devices.append)
    return devices


@pytest.mark.parametrize(
    ("kind", "local_rank", "visible", "device"),
    [("cuda", 0, 4, 0), ("xpu", 3, 4, 3), ("cuda", 3, 1, 0)],  # the last: srun --gpus-per-task
)
def test_a_rank_takes_its_device_and_tells_deepspeed(
    kind: str, local_rank: int, visible: int, device: int, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: visible)
    assert choose_device(kind, local_rank) == torch.device(kind, device)
    assert chosen == [device]
    assert os.environ["LOCAL_RANK"] == str(device)  # which DeepSpeed takes for the number of the device


@pytest.mark.parametrize(
    ("kind", "variable", "visible", "text"),
    [
        ("cuda", "CUDA_VISIBLE_DEVICES", 2, "1,0"),
        ("cuda", "CUDA_VISIBLE_DEVICES", 0, None),
        ("xpu", "ZE_AFFINITY_MASK", 2, "0,1"),
    ],
)
def test_too_few_devices_are_refused_by_name(
    kind: str, variable: str, visible: int, text: str | None, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: visible)
    monkeypatch.delenv(variable, raising=False)
    if text is not None:
        monkeypatch.setenv(variable, text)
    shown = text or "not set"
    with pytest.raises(
        ConfigError, match=rf"^LOCAL_RANK 2: .* sees {visible} {kind.upper()} devices \({variable}={shown}\); start"
    ):
        choose_device(kind, 2)
    assert chosen == []


def test_the_default_group_is_bound_where_deepspeed_binds_it() -> None:
    """With NCCL and several ranks, but not with the versions of torch that hang."""
    versions = ("2.6.0", "2.6.0+cu126", "2.7.0", "2.7.1", "2.7.1+cu128", "2.11.0+cu130")
    bound = [version for version in versions if binds_device("nccl", 2, TorchVersion(version))]
    assert bound == ["2.6.0", "2.7.1", "2.7.1+cu128", "2.11.0+cu130"]
    assert not binds_device("nccl", 1, TorchVersion("2.11.0"))
    assert not binds_device("gloo", 2, TorchVersion("2.11.0"))
