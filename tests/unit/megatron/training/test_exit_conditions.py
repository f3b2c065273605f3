"""When training stops before --train-iters."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.config import Config, ConfigError, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megatron.config.training import EXIT_SIGNALS
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


ASKING = (*EXIT_SIGNALS, "SIGHUP")  # signals by which schedulers, launchers and terminals end a rank


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Begin with the default ones, whatever an earlier test of this process has left, and put those back."""
    before = {signal.Signals[name]: signal.getsignal(signal.Signals[name]) for name in ASKING}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def conditions(control: CountingControl | None = None, **training: Any) -> tuple[ExitConditions, CountingControl]:
    control = control or CountingControl()
    config = Config(
        model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8),
        parallel=ParallelConfig(),
        training=TrainingConfig(micro_batch_size=1, train_iters=10, **training),
        optimizer=OptimizerConfig(lr=1e-3),
    )
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
    terminated = signal.getsignal(signal.SIGTERM)
    exits, _ = conditions(exit_signal_handler=True, exit_signal=("SIGUSR2", name))
    assert signal.getsignal(signal.SIGTERM) == terminated
    os.kill(os.getpid(), signal.Signals[name])
    assert exits.reason(1) == exits.reason_at_once() == f"{name} was received (--exit-signal-handler)"


class OtherRankSignalled(CountingControl):
    def agree(self, error: str | None) -> list[tuple[int, str]]:
        return [(1, "SIGUSR1")]


@pytest.mark.parametrize("here", [True, False], ids=["", "another rank got the first one"])
def test_a_second_signal_does_not_end_a_rank_that_saves(here: bool) -> None:
    """As SIGTERM at the time limit of a job, to which Slurm has sent SIGUSR1 before, or of DeepSpeed's launcher."""
    control = CountingControl() if here else OtherRankSignalled()
    exits, _ = conditions(control, exit_signal_handler=True, exit_signal=("SIGUSR1",))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if here:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert exits.reason_at_once() == "SIGUSR1 was received (--exit-signal-handler)"
    for name in ASKING:
        os.kill(os.getpid(), signal.Signals[name])  # the process lives


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
