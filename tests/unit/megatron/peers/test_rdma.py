"""Which RDMA ports NCCL uses, and which files count what they carry."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.peers.rdma import ports_of_nccl
from megatron.peers.traffic import read_port

WORDS = {"counters/port_rcv_data": 3, "counters/port_xmit_data": 5}
OCTETS = {"hw_counters/rx_bytes": 7, "hw_counters/tx_bytes": 11}


def port(devices: Path, device: str, number: int, state: str, files: dict[str, int], driver: str = "mlx5_core") -> Path:
    """As Linux shows one: /sys/class/infiniband/DEVICE/ports/NUMBER."""
    directory = devices / device / "ports" / str(number)
    directory.mkdir(parents=True)
    (directory / "state").write_text(f"{state}\n")
    for name, value in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(f"{value}\n")
    (devices / device / "device").mkdir(exist_ok=True)
    link = devices / device / "device" / "driver"
    if not link.is_symlink():
        link.symlink_to(f"/sys/bus/pci/drivers/{driver}")
    return directory


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    port(tmp_path, "mlx5_0", 1, "4: ACTIVE", WORDS)
    port(tmp_path, "mlx5_1", 1, "1: DOWN", WORDS)
    port(tmp_path, "mlx5_1", 2, "4: ACTIVE", WORDS)
    port(tmp_path, "mlx5_10", 1, "4: ACTIVE", WORDS)
    port(tmp_path, "rdmap16s27", 1, "4: ACTIVE", OCTETS, driver="efa")
    return tmp_path


EFA = "rdmap16s27:1"


@pytest.mark.parametrize(
    ("environment", "used"),
    [
        ({}, ["mlx5_0:1", "mlx5_1:2", "mlx5_10:1", EFA]),
        ({"NCCL_IB_HCA": "mlx5"}, ["mlx5_0:1", "mlx5_1:2", "mlx5_10:1", EFA]),
        ({"NCCL_IB_HCA": "mlx5_1"}, ["mlx5_1:2", "mlx5_10:1", EFA]),
        ({"NCCL_IB_HCA": "=mlx5_1"}, ["mlx5_1:2", EFA]),
        ({"NCCL_IB_HCA": "=mlx5_1:1,mlx5_0:1"}, ["mlx5_0:1", EFA]),
        ({"NCCL_IB_HCA": "^mlx5_1"}, ["mlx5_0:1", EFA]),
        ({"NCCL_IB_HCA": "^=mlx5_1,mlx5_0"}, ["mlx5_10:1", EFA]),
        ({"NCCL_IB_HCA": "irdma"}, [EFA]),
        ({"NCCL_IB_DISABLE": "1"}, [EFA]),
        ({"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"}, ["mlx5_0:1", "mlx5_1:2", "mlx5_10:1", EFA]),
        ({"NCCL_NET": "Socket"}, []),
    ],
)
def test_ports_that_nccl_uses(devices: Path, environment: dict[str, str], used: list[str]) -> None:
    found = ports_of_nccl(environment, devices)
    assert [f"{one.directory.parents[1].name}:{one.directory.name}" for one in found] == used


def test_without_rdma_there_are_none(tmp_path: Path) -> None:
    assert ports_of_nccl({}, tmp_path / "infiniband") == []


@pytest.mark.parametrize(("files", "counted"), [(WORDS, (12, 20)), (OCTETS, (7, 11)), (WORDS | OCTETS, (12, 20))])
def test_bytes_that_a_port_has_carried(tmp_path: Path, files: dict[str, int], counted: tuple[int, int]) -> None:
    port(tmp_path, "mlx5_0", 1, "4: ACTIVE", files)
    (found,) = ports_of_nccl({}, tmp_path)
    while (counters := read_port(found)) is None:  # reading took long
        pass
    assert (counters.received, counters.sent) == counted


def test_a_port_that_counts_nothing_is_known(tmp_path: Path) -> None:
    directory = port(tmp_path, "mlx5_0", 1, "4: ACTIVE", {"counters/port_rcv_data": 1})
    (found,) = ports_of_nccl({}, tmp_path)
    assert found == (directory, None)
    with pytest.raises(ValueError, match="has no counters"):
        read_port(found)


def test_a_port_that_goes_away_is_none(devices: Path) -> None:
    (devices / "mlx5_0" / "ports" / "1" / "state").unlink()
    assert "mlx5_0" not in {found.directory.parents[1].name for found in ports_of_nccl({}, devices)}
