"""DeepSpeed's accelerator: the device type of this process, cpu or cuda, behind one interface."""

from __future__ import annotations

from typing import Any


def accelerator() -> Any:
    """The accelerator DeepSpeed chose (deepspeed.accelerator); imports DeepSpeed."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()
