"""The examples of a property are the same in each run, whichever tests its worker has run before."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.skipif("NIGHTLY" in os.environ, reason="the nightly run tries others each time")
def test_modules_that_were_imported_do_not_change_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []

    @settings(max_examples=200, database=None)
    @given(st.floats())
    def one(value: float) -> None:
        tried.append(value)

    one()
    before = [repr(value) for value in tried]
    tried.clear()
    (tmp_path / "a_module_with_numbers.py").write_text(
        "NUMBERS = [" + ", ".join(f"{n}.8125" for n in range(900)) + "]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("a_module_with_numbers")
    one()
    assert [repr(value) for value in tried] == before
