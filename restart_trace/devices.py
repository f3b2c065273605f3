"""Which accelerator torch has, and which device of it a rank computes on: its index for torch, and for NVML.

torch numbers the devices in CUDA_VISIBLE_DEVICES, in that order. NVML numbers all devices of the machine by their
position on the bus and ignores that variable. (Its syntax: "CUDA Environment Variables" in NVIDIA's CUDA C++
Programming Guide.)
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_ORDINAL = re.compile(r"[+-]?\d+")
_OLD_MIG = re.compile(r"MIG-(GPU-[^/]+)/(\d+)/(\d+)")  # of drivers before R470: device, GPU and compute instance
_MOST_MIG = 8  # instances of one device


def built_accelerator() -> str | None:
    """The device type that torch is built for: cuda (also with ROCm), xpu, ...; None: CPUs alone, or no torch imported.

    Calls no driver, so that this process can still fork users of the device. Whether there is a device is not asked.
    """
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "accelerator"):  # not imported, or older than 2.6
        return None
    if str(torch.__version__).startswith("2.6."):  # whose current_accelerator asks the driver, and raises on CPUs
        return "cuda" if torch.version.cuda or torch.version.hip else "xpu" if torch.version.xpu else None
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def available_accelerator() -> str | None:
    """The device type that torch can compute on here; None: CPUs alone. torch must be imported.

    Calls the driver: a process that forks users of the device asks in a child.
    """
    found = built_accelerator()
    return found if found is not None and sys.modules["torch"].get_device_module(found).is_available() else None


def accelerator_in_use() -> str | None:
    """The device type that this process has initialised in torch, as a rank that computes on it has; None if none.

    Calls no driver.
    """
    found = built_accelerator()
    if found is None:
        return None
    initialized = getattr(sys.modules["torch"].get_device_module(found), "is_initialized", None)  # mps has none
    return found if initialized is not None and initialized() else None


def visible_devices(env: Mapping[str, str]) -> list[int | str] | None:
    """The devices of CUDA_VISIBLE_DEVICES, in torch's order: numbers, or the beginnings of UUIDs (GPU-, MIG-).

    None: all devices of the machine are visible. As in CUDA, a list ends at the first invalid entry, and a list that
    names a device twice is empty.
    """
    text = env.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    found: list[int | str] = []
    for entry in map(str.strip, text.split(",")):
        number = _ORDINAL.match(entry)
        device = entry if entry.startswith(("GPU-", "MIG-")) else int(number.group()) if number else -1
        if isinstance(device, int) and device < 0:
            break
        if device in found:
            return []
        found.append(device)
    return found


def device_index(local_rank: int, num_visible: int) -> int | None:
    """The device that torch calls cuda:INDEX in the rank `local_rank` of a host; None if there is none for it.

    A rank that sees one device takes it, whichever rank it is: some launchers (srun --gpus-per-task) show each task
    its own, and on a machine with one device all ranks share it.
    """
    if local_rank < num_visible:
        return local_rank
    return 0 if num_visible == 1 else None


def nvml_device(env: Mapping[str, str], local_rank: int, nvml: Any) -> Any:
    """NVML's handle of the device that the rank `local_rank` computes on, by `nvml`, the module pynvml, initialised.

    None if there is no such device, or if it cannot be identified: CUDA and NVML number the devices alike only with
    CUDA_DEVICE_ORDER=PCI_BUS_ID or if all devices are the same model. Raises nvml.NVMLError.
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    visible = visible_devices(env)
    chosen: Sequence[int | str] = range(len(handles)) if visible is None else _usable(visible, len(handles))
    index = device_index(local_rank, len(chosen))
    if index is None:
        return None
    device = chosen[index]
    if isinstance(device, str):
        return _by_uuid(device, handles, nvml)
    kinds = {_text(nvml.nvmlDeviceGetName(handle)) for handle in handles}
    same_order = env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(kinds) == 1
    return handles[device] if same_order else None


def _usable(visible: Sequence[int | str], num_devices: int) -> list[int | str]:
    """The devices of the list that CUDA uses: those before a number that no device has, and at most one MIG device.

    (The latter by NVIDIA's Multi-Instance GPU User Guide, "CUDA Device Enumeration".)
    """
    found = list(itertools.takewhile(lambda device: isinstance(device, str) or device < num_devices, visible))
    return found[:1] if found and str(found[0]).startswith("MIG-") else found


def _by_uuid(uuid: str, handles: Sequence[Any], nvml: Any) -> Any:
    """The device whose UUID begins with `uuid`; None if there is none, or several."""
    old = _OLD_MIG.fullmatch(uuid)
    if old is not None:
        parent = _by_uuid(old.group(1), handles, nvml)
        instances = (int(old.group(2)), int(old.group(3)))
        mine = [mig for mig in _mig_devices([parent] if parent else [], nvml) if _instances(mig, nvml) == instances]
    else:
        candidates = handles if uuid.startswith("GPU-") else _mig_devices(handles, nvml)
        mine = [handle for handle in candidates if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(uuid)]
    return mine[0] if len(mine) == 1 else None


def _mig_devices(handles: Sequence[Any], nvml: Any) -> list[Any]:
    """The MIG devices of these devices."""
    found = []
    for handle in handles:
        for index in range(_MOST_MIG):
            try:
                found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
            except nvml.NVMLError:  # the device is not divided, or into fewer instances; numbers may have gaps
                continue
    return found


def _instances(mig: Any, nvml: Any) -> tuple[int, int]:
    return nvml.nvmlDeviceGetGpuInstanceId(mig), nvml.nvmlDeviceGetComputeInstanceId(mig)


def _text(value: str | bytes) -> str:
    """pynvml before version 11.5 returns bytes."""
    return value.decode() if isinstance(value, bytes) else value
