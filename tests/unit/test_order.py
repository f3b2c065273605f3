"""What tests/conftest.py makes of a collection: the order in which files are tested, and no work for the collector."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

from tests.conftest import FIRST, ROOT, pytest_collection_modifyitems


def test_long_files_come_first_and_the_rest_stays_as_it_is() -> None:
    assert [name for name in FIRST if not (ROOT / "tests" / name).is_file()] == []
    collected = ["unit/test_order.py", FIRST[1], FIRST[0], "unit/test_layering.py", FIRST[1]]
    items: list[Any] = [
        SimpleNamespace(path=ROOT / "tests" / name, number=i, get_closest_marker=lambda name: None)
        for i, name in enumerate(collected)
    ]
    pytest_collection_modifyitems(items)
    assert [item.number for item in items] == [2, 1, 4, 0, 3]


def test_what_was_collected_is_not_looked_at_for_garbage() -> None:
    """What pytest and the imports of tests have made, half a million objects. What a test makes is collected."""
    assert gc.isenabled() and gc.get_freeze_count() > 10_000
