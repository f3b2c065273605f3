"""The order in which files are tested: tests/conftest.py."""

from __future__ import annotations

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
