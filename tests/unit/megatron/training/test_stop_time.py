"""Whether a stop at a signal takes longer than the launcher waits for it."""

from __future__ import annotations

import logging

import pytest

from megatron.config import CheckpointConfig, Config, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megatron.processes.parent_process import SHUTDOWN_TIMEOUT_VARIABLE
from megatron.training.stop_time import StopTime


def stop_time(shutdown_timeout: str | None, *, handler: bool = True, save: str | None = "checkpoints") -> StopTime:
    config = Config(
        model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8, max_position_embeddings=8),
        parallel=ParallelConfig(),
        training=TrainingConfig(micro_batch_size=1, train_iters=1, exit_signal_handler=handler),
        optimizer=OptimizerConfig(lr=1.0),
        checkpoint=CheckpointConfig(save=save, save_interval=1 if save else None),
    )
    return StopTime(config, {} if shutdown_timeout is None else {SHUTDOWN_TIMEOUT_VARIABLE: shutdown_timeout})


@pytest.mark.parametrize(
    ("shutdown_timeout", "iteration_s", "save_s", "asynchronous", "told"),
    [
        ("60", 20.0, 40.0, False, None),
        (
            "60",
            20.5,
            40.0,
            False,
            "a stop takes 60.5 s, since an iteration takes 20.5 s and a save 40 s, and the ranks are killed 60 s",
        ),
        ("60", 20.0, 40.0, True, "a stop takes 80 s"),  # a save that has just begun comes first
        ("60", 50.0, 10.0, True, None),
        ("60", 500.0, None, True, None),  # nothing was saved yet
        (None, 20.0, 11.0, False, "launchers kill the ranks 30 s after the signal by default"),
        (None, 20.0, 10.0, False, None),
    ],
)
def test_a_stop_that_takes_too_long_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
    shutdown_timeout: str | None,
    iteration_s: float,
    save_s: float | None,
    asynchronous: bool,
    told: str | None,
) -> None:
    compared = stop_time(shutdown_timeout)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            compared.compare(iteration_s, save_s, asynchronous=asynchronous)
    assert len(caplog.messages) == (told is not None)
    assert told is None or told in caplog.messages[0]


@pytest.mark.parametrize("given", [{"handler": False}, {"save": None}])
def test_without_a_save_at_the_stop_nothing_is_told(caplog: pytest.LogCaptureFixture, given: dict[str, bool]) -> None:
    stop_time("1", **given).compare(100.0, 100.0, asynchronous=True)  # type: ignore[arg-type]
    assert caplog.messages == []


@pytest.mark.parametrize("text", ["two minutes", "-1", "nan", "inf"])
def test_what_is_no_number_of_seconds_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"{SHUTDOWN_TIMEOUT_VARIABLE}={text}: give the seconds"):
        stop_time(text)
