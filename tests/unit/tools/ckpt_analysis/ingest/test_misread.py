"""What polars takes for text though it is none: the quick look at a column passes over no such value."""

from __future__ import annotations

import json
from typing import Any

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tools.ckpt_analysis.common.names import TYPE_SCHEMAS
from tools.ckpt_analysis.ingest.misread import is_misread

NO_TEXT = [5, -5, 0, 1.5, -0.25, True, False, [], [1], {}, {"a": "b"}]
# Before, between and after all that a number, a list or a word may begin with, so that no order hides one.
TEXTS = [
    "", " ", "+", "-", "/a", "Main", "[", "\\", "a", "falsf", "g", "tr", "truth", "z", "{", "~",
    "\N{MICRO SIGN}", "5", "true",
]  # fmt: skip
LABEL = "operation_label"
SCHEMA = TYPE_SCHEMAS[LABEL]


def line(**fields: Any) -> bytes:
    return json.dumps({"type": LABEL, "op": 1} | fields, separators=(",", ":")).encode() + b"\n"


def misread(text: bytes) -> bool:
    frame = pl.read_ndjson(text, schema=SCHEMA)
    assert frame.height == text.count(b"\n")
    return is_misread(LABEL, frame, text)


def tags(values: list[Any]) -> bytes:
    return b"".join(line(tag=value) for value in values)


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(st.sampled_from(TEXTS), max_size=5), value=st.sampled_from(NO_TEXT), place=st.integers(0, 5))
@example(texts=["a", "z"], value=False, place=1)
def test_a_value_that_is_no_text_is_found_among_any_texts(texts: list[str], value: Any, place: int) -> None:
    assert misread(tags([*texts[:place], value, *texts[place:]]))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(texts=st.lists(st.sampled_from(TEXTS) | st.text(st.characters(codec="utf-8"), max_size=4), min_size=1))
@example(texts=['a "quoted" word'])
def test_texts_are_not_taken_for_anything_else(texts: list[str]) -> None:
    backslash_before_quote = any(text.endswith("\\") or '\\"' in text for text in texts)
    assert backslash_before_quote or not misread(tags(texts))


@pytest.mark.parametrize(
    "wrong",
    [
        b'{"type":"operation_label","op":1,"tag":null}\n',
        b'{"type":"operation_label","op":1,"other": null}\n',
        b'{"type":"operation_label","op":1,"other":1}\n',
        b'{"type":"operation_label","op":1,"op":2}\n',
        b'{"type":"operation_label","op":1,"tag":"a","tag":"b"}\n',
    ],
)
def test_what_no_column_shows_is_found(wrong: bytes) -> None:
    assert misread(line(tag="a") + wrong)
    assert not misread(line(tag="null"))


def test_a_field_that_is_read_by_nobody_must_be_there() -> None:
    event = {"type": "event", "operation": "save", "phase": "notice", "time_ns": 1, "wall_ns": 2}
    frame = pl.DataFrame([{name: event.get(name) for name in TYPE_SCHEMAS["event"]}], schema=TYPE_SCHEMAS["event"])
    assert not is_misread("event", frame, json.dumps(event).encode())
    del event["wall_ns"]
    assert is_misread("event", frame, json.dumps(event).encode())
