"""A stand-in for torch's accelerator on a host with several devices, which notes what each thread selects."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest


class StandInDevices:
    """As torch: each thread has a current device, which is 0 until it selects another.

    `selected`: by the name of a thread, the devices that it selected, in order.
    """

    def __init__(self, *, initialized: bool = True, kind: str = "cuda") -> None:
        self.kind = SimpleNamespace(type=kind)  # as torch.device
        self.initialized = initialized
        self.selected: dict[str, list[int]] = {}
        self._of_thread = threading.local()

    def is_initialized(self) -> bool:
        return self.initialized

    def current_device_index(self) -> int:
        return getattr(self._of_thread, "device", 0)

    def set_device_index(self, device: int) -> None:
        self._of_thread.device = device
        self.selected.setdefault(threading.current_thread().name, []).append(device)

    def install(self, monkeypatch: pytest.MonkeyPatch, torch: object) -> None:
        """Let `torch`, the module or a stand-in for it, be a build for these devices."""
        monkeypatch.setattr(torch, "__version__", getattr(torch, "__version__", "2.7.0"), raising=False)
        accelerator = getattr(torch, "accelerator", None) or SimpleNamespace()
        monkeypatch.setattr(torch, "accelerator", accelerator, raising=False)
        monkeypatch.setattr(accelerator, "current_accelerator", lambda: self.kind, raising=False)
        monkeypatch.setattr(accelerator, "current_device_index", self.current_device_index, raising=False)
        monkeypatch.setattr(accelerator, "set_device_index", self.set_device_index, raising=False)
        monkeypatch.setattr(torch, "get_device_module", lambda kind: self, raising=False)
