"""What polars takes for text though it is none: the quick look at a column passes over no such value."""

from __future__ import annotations

import json
from typing import Any

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tools.ckpt_analysis.ingest.misread import is_misread

NO_TEXT = [5, -5, 0, 1.5, -0.25, True, False, [], [1], {}, {"a": "b"}]
# Before, between and after all that a number, a list or a word may begin with, so that no order hides one.
TEXTS = [
    "", " ", "+", "-", "/a", "Main", "[", "\\", "a", "falsf", "g", "tr", "truth", "z", "{", "~",
    "\N{MICRO SIGN}", "5", "true",
]  # fmt: skip
SCHEMA = {"tag": pl.String(), "n": pl.Int64()}


def misread(values: list[Any]) -> bool:
    text = b"".join(json.dumps({"n": 1, "tag": value}, separators=(",", ":")).encode() + b"\n" for value in values)
    frame = pl.read_ndjson(text, schema=SCHEMA)
    assert frame.height == len(values)
    return is_misread(frame, text)


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(st.sampled_from(TEXTS), max_size=5), value=st.sampled_from(NO_TEXT), place=st.integers(0, 5))
@example(texts=["a", "z"], value=False, place=1)
def test_a_value_that_is_no_text_is_found_among_any_texts(texts: list[str], value: Any, place: int) -> None:
    assert misread([*texts[:place], value, *texts[place:]])


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(texts=st.lists(st.sampled_from(TEXTS) | st.text(st.characters(codec="utf-8"), max_size=4), min_size=1))
def test_texts_are_not_taken_for_anything_else(texts: list[str]) -> None:
    assert not misread(texts)


@pytest.mark.parametrize("text", [b'{"n":1,"tag":null}\n', b'{"n":null,"tag":"a"}\n', b'{"n":1,"other": null}\n'])
def test_a_null_is_found(text: bytes) -> None:
    frame = pl.read_ndjson(b'{"n":1,"tag":"a"}\n' + text, schema=SCHEMA)
    assert is_misread(frame, b'{"n":1,"tag":"a"}\n' + text)
    assert not is_misread(frame.head(1), b'{"n":1,"tag":"null"}\n')
