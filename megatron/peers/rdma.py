"""The RDMA ports that NCCL uses on this host, and the counters of what they carry.

RDMA bypasses the kernel's network stack, so its traffic is not in the counters of network interfaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

DEVICES = Path("/sys/class/infiniband")
_EFA = "efa"  # driver of Amazon's devices: NCCL uses them through a plugin, which NCCL_IB_* do not concern

# Of a port, received and sent: (file, file, octets in a unit). The first are words of four octets (Linux,
# Documentation/ABI/stable/sysfs-class-infiniband); a driver whose device has none counts octets itself (efa, bnxt_re).
_FILES = (("counters/port_rcv_data", "counters/port_xmit_data", 4), ("hw_counters/rx_bytes", "hw_counters/tx_bytes", 1))


class Port(NamedTuple):
    """`directory`: /sys/class/infiniband/DEVICE/ports/NUMBER. `files`: of _FILES, or None if it has none of them."""

    directory: Path
    files: tuple[Path, Path, int] | None


def ports_of_nccl(environment: Mapping[str, str], devices: Path = DEVICES) -> list[Port]:
    """The active ports that NCCL uses instead of the kernel's TCP (InfiniBand, RoCE, EFA), by its variables.

    NCCL_NET and NCCL_IB_DISABLE exclude them, NCCL_IB_HCA chooses among them: `^` and `=` before a list of
    DEVICE[:PORT], which are beginnings of names without `=` (NCCL's documentation, Environment Variables).
    """
    if environment.get("NCCL_NET", "").lower() == "socket":
        return []
    with_ib = environment.get("NCCL_IB_DISABLE", "0") in ("", "0")
    chosen = environment.get("NCCL_IB_HCA", "")
    found = []
    for directory in sorted(devices.glob("*/ports/*")):
        device = directory.parents[1]
        if (device / "device" / "driver").resolve().name != _EFA and not (with_ib and _chooses(chosen, directory)):
            continue
        if _is_active(directory):
            found.append(Port(directory, _counters(directory)))
    return found


def _is_active(directory: Path) -> bool:
    try:
        return (directory / "state").read_text().startswith("4:")
    except OSError:  # it has gone, or is not for this process
        return False


def _chooses(given: str, directory: Path) -> bool:
    """Whether NCCL_IB_HCA chooses this port."""
    excluded = given.startswith("^")
    exact = given.removeprefix("^").startswith("=")
    listed = [one for one in given.removeprefix("^").removeprefix("=").split(",") if one]
    device = directory.parents[1].name

    def names(one: str) -> bool:
        name, _, number = one.partition(":")
        return (device == name if exact else device.startswith(name)) and number in ("", directory.name)

    return not listed or any(map(names, listed)) != excluded


def _counters(directory: Path) -> tuple[Path, Path, int] | None:
    """Those of the port that can be read: a virtual function may have the files, and refuse to read them."""
    for received, sent, unit in _FILES:
        files = directory / received, directory / sent
        try:
            if all(file.read_text().strip().isdecimal() for file in files):
                return *files, unit
        except OSError:
            continue
    return None
