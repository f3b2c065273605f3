"""What the GPU tier reads from a profile; the events of a device are invented in test_gpu_page.py."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import profile, supported_activities

from tests.gpu.profiles import Attention, attention, kernels


def test_backend_of_attention_in_a_profile_of_torch(tmp_path: Path) -> None:
    """Torch's own profile of a CPU: it names the backend, and has no kernel of a device, which is not zero seconds."""
    path = tmp_path / "profile_rank_00000_iterations_3-4.json.gz"
    heads = torch.randn(1, 2, 8, 16, requires_grad=True)
    with profile(activities=supported_activities()) as recorder:
        for _ in range(6):
            F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
    recorder.export_chrome_trace(str(path))
    assert attention(path) == Attention({"flash_attention_for_cpu": 3.0}, None, None)
    assert not kernels(path)


def test_profile_without_attention(tmp_path: Path) -> None:
    path = tmp_path / "profile_rank_00000_iterations_1-1.json.gz"
    with profile(activities=supported_activities()) as recorder:
        torch.ones(2).sum()
    recorder.export_chrome_trace(str(path))
    assert attention(path) is None
