"""Which device a rank has, for torch and for NVML; pynvml's place takes a machine that is made up."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from restart_trace.devices import accelerator_in_use, built_accelerator, device_index, nvml_device, visible_devices
from restart_trace.probes import make_probe, nvml_values
from tests.unit.restart_trace.stand_in_devices import StandInDevices


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None), ("", []), ("0,1", [0, 1]), ("3,1", [3, 1]), (" 2 , 0 ", [2, 0]), ("1gpu,2b", [1, 2]),
        ("0,-1,2", [0]), ("0,x,2", [0]), ("1,1", []), ("NoDevFiles", []), ("-1", []),
        ("GPU-ab,GPU-cd", ["GPU-ab", "GPU-cd"]), ("GPU-ab,GPU-ab", []), ("MIG-1-2", ["MIG-1-2"]),
        ("MIG-GPU-ab/1/0", ["MIG-GPU-ab/1/0"]),
    ],
)  # fmt: skip
def test_visible_devices_are_read_as_cuda_reads_them(text: str | None, expected: list[int | str] | None) -> None:
    assert visible_devices({} if text is None else {"CUDA_VISIBLE_DEVICES": text}) == expected


def test_what_torch_reads_is_read_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for text in ("0,1", "3,1", "1gpu,2b", "0,-1,2", "1,1", "GPU-ab,GPU-cd", "GPU-ab,GPU-ab", "MIG-1", "7"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert visible_devices({"CUDA_VISIBLE_DEVICES": text}) == torch.cuda._parse_visible_devices()


@pytest.mark.parametrize(
    ("version", "built_for", "expected"),
    [
        ("2.6.0+cu124", {"cuda": "12.4", "hip": None, "xpu": None}, "cuda"),
        ("2.6.0+rocm6.2", {"cuda": None, "hip": "6.2", "xpu": None}, "cuda"),
        ("2.6.0+xpu", {"cuda": None, "hip": None, "xpu": "20250000"}, "xpu"),
        ("2.6.0+cpu", {"cuda": None, "hip": None, "xpu": None}, None),
    ],
)
def test_torch_2_6_is_not_asked_for_its_accelerator(
    monkeypatch: pytest.MonkeyPatch, version: str, built_for: dict[str, str | None], expected: str | None
) -> None:
    """It calls the driver to answer, and raises where there is no device."""
    accelerator = types.SimpleNamespace()  # without current_accelerator
    torch = types.SimpleNamespace(
        __version__=version, accelerator=accelerator, version=types.SimpleNamespace(**built_for)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert built_accelerator() == expected


class DevicesWithMemory(StandInDevices):
    def device_count(self) -> int:
        return 2

    def memory_allocated(self, device: int) -> int:
        return 100 + device

    def memory_reserved(self, device: int) -> int:
        return 200 + device

    def max_memory_allocated(self, device: int) -> int:
        return 300 + device


def test_memory_of_any_accelerator_is_sampled_once_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = DevicesWithMemory(initialized=False, kind="xpu")
    torch = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch", torch)
    devices.install(monkeypatch, torch)
    assert (built_accelerator(), accelerator_in_use()) == ("xpu", None)
    assert "device_allocated_bytes" not in make_probe(1)()
    devices.initialized = True
    assert accelerator_in_use() == "xpu"
    values = make_probe(1)()
    names = ("device_allocated_bytes", "device_reserved_bytes", "device_peak_allocated_bytes")
    assert [values[name] for name in names] == [101, 201, 301]


def test_a_rank_takes_its_own_device_or_the_only_one() -> None:
    assert [device_index(rank, 4) for rank in range(5)] == [0, 1, 2, 3, None]
    assert [device_index(rank, 1) for rank in range(3)] == [0, 0, 0]
    assert device_index(0, 0) is None


class NVMLError(Exception):
    pass


@dataclasses.dataclass(frozen=True)
class Machine:
    """The functions of pynvml that are used, of a machine with those devices: (UUID, name)."""

    devices: tuple[tuple[str, str], ...]
    mig: dict[str, tuple[tuple[str, int, int], ...]] = dataclasses.field(default_factory=dict)
    NVMLError = NVMLError

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return self.devices[index][0]

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return dict(self.devices)[handle]

    def nvmlDeviceGetUUID(self, handle: Any) -> bytes | str:  # noqa: N802
        return handle[0] if isinstance(handle, tuple) else handle.encode()

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> Any:  # noqa: N802
        parts = self.mig.get(handle, ())
        if index >= len(parts):
            raise NVMLError("not found")
        return parts[index]

    def nvmlDeviceGetGpuInstanceId(self, mig: Any) -> int:  # noqa: N802
        return mig[1]

    def nvmlDeviceGetComputeInstanceId(self, mig: Any) -> int:  # noqa: N802
        return mig[2]


ALIKE = Machine((("GPU-aa1", "H100"), ("GPU-ab2", "H100"), ("GPU-bb3", "H100")))
MIXED = Machine((("GPU-aa1", "T4"), ("GPU-ab2", "H100")))
DIVIDED = Machine(
    (("GPU-aa1", "H100"), ("GPU-ab2", "H100")), {"GPU-ab2": (("MIG-1", 7, 0), ("MIG-25", 9, 0), ("MIG-26", 9, 1))}
)


@pytest.mark.parametrize(
    ("machine", "variables", "local_rank", "expected"),
    [
        (ALIKE, {}, 2, "GPU-bb3"),
        (ALIKE, {}, 3, None),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "2,0"}, 0, "GPU-bb3"),  # reordered
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "2,0"}, 1, "GPU-aa1"),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "1"}, 2, "GPU-ab2"),  # one device per task
        (ALIKE, {"CUDA_VISIBLE_DEVICES": ""}, 0, None),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "7"}, 0, None),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "1,7,2"}, 2, "GPU-ab2"),  # CUDA ends the list at 7: there is one device
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "GPU-bb,GPU-aa1"}, 0, "GPU-bb3"),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "GPU-a"}, 0, None),  # two begin so
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "GPU-ff"}, 0, None),
        (MIXED, {}, 0, None),  # CUDA puts the fastest first
        (MIXED, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 0, "GPU-aa1"),
        (MIXED, {"CUDA_VISIBLE_DEVICES": "GPU-ab"}, 0, "GPU-ab2"),
        (DIVIDED, {"CUDA_VISIBLE_DEVICES": "MIG-25"}, 3, ("MIG-25", 9, 0)),
        (DIVIDED, {"CUDA_VISIBLE_DEVICES": "MIG-GPU-ab2/9/1"}, 0, ("MIG-26", 9, 1)),
        (DIVIDED, {"CUDA_VISIBLE_DEVICES": "MIG-26,MIG-1"}, 1, ("MIG-26", 9, 1)),  # a process sees one
        (DIVIDED, {"CUDA_VISIBLE_DEVICES": "MIG-GPU-ff/9/1"}, 0, None),
    ],
)
def test_nvml_is_asked_for_the_device_that_torch_uses(
    machine: Machine, variables: dict[str, str], local_rank: int, expected: Any
) -> None:
    assert nvml_device(variables, local_rank, machine) == expected


def test_the_stand_in_has_the_names_of_pynvml() -> None:
    import pynvml

    used = {name for name in vars(Machine) if name.startswith("nvml")} | {"NVMLError"}
    assert all(hasattr(pynvml, name) for name in used)
    text = Path(nvml_device.__code__.co_filename).read_text()
    assert all(f"nvml.{name}" in text for name in used)


@dataclasses.dataclass
class Bus:
    """The functions of pynvml that sample a device, where pynvml itself cannot run; `links`: it has NVLink."""

    links: bool
    calls: list[str] = dataclasses.field(default_factory=list)
    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139

    def nvmlDeviceGetMemoryInfo(self, _device: str) -> Any:  # noqa: N802
        return types.SimpleNamespace(used=5)

    def nvmlDeviceGetUtilizationRates(self, _device: str) -> Any:  # noqa: N802
        raise NVMLError("not supported")

    def nvmlDeviceGetPcieThroughput(self, _device: str, counter: int) -> int:  # noqa: N802
        self.calls.append("pcie")
        return 7 + counter

    def nvmlDeviceGetFieldValues(self, _device: str, fields: list[tuple[int, int]]) -> list[Any]:  # noqa: N802
        assert all(scope == 2**32 - 1 for _, scope in fields)  # all links
        found = [(field, types.SimpleNamespace(ullVal=field)) for field, _ in fields]
        return [types.SimpleNamespace(nvmlReturn=0 if self.links else 3, value=value) for _, value in found]


def test_a_device_is_sampled_and_what_it_has_not_is_left_out() -> None:
    with_links, without = Bus(links=True), Bus(links=False)
    assert nvml_values("GPU-0", with_links, bus=True) == {
        "gpu_memory_used_bytes": 5, "pcie_tx_bytes_per_s": 7000, "pcie_rx_bytes_per_s": 8000,
        "nvlink_tx_bytes": 138 * 1024, "nvlink_rx_bytes": 139 * 1024,
    }  # fmt: skip
    assert nvml_values("GPU-0", without, bus=False) == {"gpu_memory_used_bytes": 5}
    assert without.calls == []  # each takes 20 ms: nothing for the thread that trains


def test_a_driver_without_counts_of_links_still_gives_the_others() -> None:
    class WithoutFields(Bus):
        def nvmlDeviceGetFieldValues(self, _device: str, fields: list[tuple[int, int]]) -> list[Any]:  # noqa: N802
            raise NVMLError("function not found")

    assert nvml_values("GPU-0", WithoutFields(links=False), bus=True) == {
        "gpu_memory_used_bytes": 5, "pcie_tx_bytes_per_s": 7000, "pcie_rx_bytes_per_s": 8000,
    }  # fmt: skip
