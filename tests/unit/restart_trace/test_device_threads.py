"""Which device a thread works on; torch is a stand-in: one that computes on devices cannot be had without them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from restart_trace.device_threads import current_device, device_selector, device_thread
from restart_trace.sampler import Sampler
from tests.unit.restart_trace.stand_in_devices import StandInDevices

Installed = Callable[[StandInDevices], StandInDevices]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    def install(devices: StandInDevices) -> StandInDevices:
        torch = SimpleNamespace()
        monkeypatch.setitem(sys.modules, "torch", torch)
        devices.install(monkeypatch, torch)
        return devices

    return install


def test_a_thread_and_an_executor_take_over_the_device_of_their_maker(installed: Installed) -> None:
    devices = installed(StandInDevices())
    devices.set_device_index(3)
    found: list[int] = []
    thread = device_thread(lambda more: found.append(devices.current_device_index() + more), name="copies", args=(10,))
    assert thread.daemon and thread.name == "copies" and not device_thread(print, name="x", daemon=False).daemon
    thread.start()
    thread.join()
    with ThreadPoolExecutor(1, "pool", initializer=device_selector()) as pool:
        assert pool.submit(devices.current_device_index).result() == 3
    assert found == [13] and devices.selected["copies"] == devices.selected["pool_0"] == [3]


def test_a_thread_that_a_thread_makes_takes_over_its_device(installed: Installed) -> None:
    devices = installed(StandInDevices())
    devices.set_device_index(2)

    def outer() -> None:
        inner = device_thread(lambda: None, name="inner")
        inner.start()
        inner.join()

    thread = device_thread(outer, name="outer")
    thread.start()
    thread.join()
    assert devices.selected["inner"] == devices.selected["outer"] == [2]


def test_nothing_is_asked_of_an_accelerator_that_this_process_has_not_initialised(installed: Installed) -> None:
    """It may be the launcher's, in which a call of the driver would make ranks unable to use it after the fork."""
    devices = installed(StandInDevices(initialized=False))
    assert current_device() is None
    thread = device_thread(lambda: None, name="copies")
    thread.start()
    thread.join()
    assert not devices.selected


@pytest.mark.parametrize("torch", [None, SimpleNamespace(), "no accelerator"])
def test_processes_without_torch_or_without_an_accelerator(monkeypatch: pytest.MonkeyPatch, torch: object) -> None:
    if torch == "no accelerator":  # a build for CPUs
        torch = SimpleNamespace(__version__="2.7.0", accelerator=SimpleNamespace(current_accelerator=lambda: None))
    if torch is None:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "torch", torch)
    assert current_device() is None
    device_selector()()


def test_the_sampler_reads_counters_of_its_makers_device(installed: Installed) -> None:
    devices = installed(StandInDevices())
    devices.set_device_index(1)
    sampled = threading.Event()
    found: list[int] = []

    def probe() -> dict[str, float]:
        found.append(devices.current_device_index())
        sampled.set()
        return {}

    sampler = Sampler(lambda *_, **__: None, probe, 3600.0)
    assert sampled.wait(300)
    sampler.stop()
    assert found == [1]
