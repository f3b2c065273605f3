"""When training stops before --train-iters."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.config import Config, ConfigError, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megatron.parallel.control_plane import ControlPlane
from megatron.training.exit_conditions import ExitConditions

BEGUN_NS = 10**12


class CountingControl(ControlPlane):
    """Counts the agreements that are asked for."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.agreements = 0

    def agree(self, error: str | None) -> list[tuple[int, str]]:
        self.agreements += 1
        return super().agree(error)


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    """Put the handler back that was there."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def conditions(**training: Any) -> tuple[ExitConditions, CountingControl]:
    config = Config(
        model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8),
        parallel=ParallelConfig(),
        training=TrainingConfig(micro_batch_size=1, train_iters=10, **training),
        optimizer=OptimizerConfig(lr=1e-3),
    )
    control = CountingControl()
    exits = ExitConditions(config, control, BEGUN_NS)
    exits.start()
    return exits, control


def test_without_flags_nothing_stops_and_nothing_is_agreed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    exits, control = conditions()
    assert [exits.reason(iteration) for iteration in range(1, 20)] == [None] * 19
    assert control.agreements == 0
    assert signal.getsignal(signal.SIGTERM) == before


def test_exit_interval_stops_at_its_multiples() -> None:
    exits, control = conditions(exit_interval=3)
    assert [i for i in range(1, 10) if exits.reason(i)] == [3, 6, 9]
    assert exits.reason(3) == "--exit-interval 3" and control.agreements == 0


def test_exit_duration_counts_from_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = BEGUN_NS
    monkeypatch.setattr("megatron.training.exit_conditions.now_ns", lambda: now)
    now += 29 * 10**9  # the start-up
    exits, _ = conditions(exit_duration_in_mins=0.5)
    assert exits.reason(1) is None
    now += 10**9 + 1
    assert exits.reason(2) == exits.reason_at_once() == "--exit-duration-in-mins 0.5"


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1", "SIGUSR2"])
def test_other_signals_by_name(name: str) -> None:
    number = signal.Signals[name]
    before, terminated = signal.getsignal(number), signal.getsignal(signal.SIGTERM)
    try:
        exits, _ = conditions(exit_signal_handler=True, exit_signal=("SIGUSR2", name))
        assert signal.getsignal(signal.SIGTERM) == terminated
        os.kill(os.getpid(), number)
        assert exits.reason(1) == exits.reason_at_once() == f"{name} was received (--exit-signal-handler)"
    finally:
        signal.signal(number, before)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"exit_signal_handler": True, "exit_signal": ("SIGKILL",)}, "SIGKILL is none of SIGTERM, SIGINT"),
        ({"exit_signal": ("SIGUSR1",)}, "does nothing without --exit-signal-handler"),
    ],
)
def test_signals_that_cannot_be_asked_for(flags: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"--exit-signal .*{why}"):
        TrainingConfig(micro_batch_size=1, train_iters=10, **flags)


def test_sigterm_is_remembered_until_the_iteration_is_done() -> None:
    exits, control = conditions(exit_signal_handler=True)
    assert exits.reason(1) is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert exits.reason(2) == "SIGTERM was received (--exit-signal-handler)"
    assert control.agreements == 2
