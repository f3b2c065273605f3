"""The storage that checkpoints are saved to and loaded from, as text."""

from __future__ import annotations

from ...common.formatting import plural
from ..model.run_info import Storage


def storage_text(storage: Storage) -> str:
    """The directory, its mount as mount(8) lists it, and how many ranks use it."""
    return f"{storage.directory} on {plural(storage.ranks, 'rank')}: {storage.mount}"
