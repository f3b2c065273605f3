"""Standby ranks in the trainer: with which flags nothing is loaded ahead of a restart."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import CheckpointConfig
from megatron.training.standby import why_not_ahead


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"load": "checkpoints"}, None),
        ({"load": "checkpoints", "checkpoint_engine": "lazy"}, None),
        ({}, "without --load nothing is loaded"),
        ({"load": "s3://bucket/run"}, "--load s3://bucket/run is object storage"),
        ({"load": "checkpoints", "checkpoint_engine": "memory"}, "--checkpoint-engine memory loads from memory"),
        ({"load": "checkpoints", "no_load_optim": True}, "--no-load-optim is given"),
        ({"load": "checkpoints", "load_tag": "global_step5"}, "--load-tag is given"),
        ({"load": "pretrained", "finetune": True, "save": "run", "save_interval": 1}, None),
        (
            {"load": "pretrained", "finetune": True, "save": "s3://bucket/run", "save_interval": 1},
            "--load s3://bucket/run is object storage",
        ),
    ],
)
def test_what_is_loaded_otherwise_is_not_loaded_ahead(options: dict[str, Any], why: str | None) -> None:
    assert why_not_ahead(CheckpointConfig(**options)) == why
