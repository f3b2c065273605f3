"""JSON that says one thing is read; what json.loads takes beyond that is refused, with one line that says why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from restart_trace.regular import NotRegularFileError
from restart_trace.strict_json import StrictJsonError, parse_json, read_json


@pytest.mark.parametrize(
    "content", ['{"a": [1, -2.5e3, true, null, "\\u00e4"]}', b'{"a": [1, -2500.0, true, null, "\xc3\xa4"]}']
)
def test_values(content: str | bytes) -> None:
    assert parse_json(content) == {"a": [1, -2500.0, True, None, "ä"]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"a": {"b": 1, "c": 2, "b": 1}}', "key 'b' is given twice in one object"),
        (r'{"\u001b[2J": 1, "\u001b[2J": 1}', r"key '\x1b[2J' is given twice in one object"),
        ('{"' + "k" * 999 + '": 1, "' + "k" * 999 + '": 1}', "kkk... is given twice in one object"),
        ("[NaN]", "NaN is not a JSON number"),
        ("-Infinity", "-Infinity is not a JSON number"),
        ("1e999", "1e999 is too large for a number"),
        ("-" + "9" * 500 + ".0", "999... is too large for a number"),
        ("[" * 100_000, "it is nested too deeply"),
        (b'{"a": "\xff"}', "it is not UTF-8 at byte 7"),
        ("{'a': 1}", "Expecting property name"),
        ("9" * 5000, "Exceeds the limit"),
        ("", "Expecting value"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_refused(content: str | bytes, why: str) -> None:
    with pytest.raises(StrictJsonError) as caught:
        parse_json(content)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 200 and str(caught.value).isprintable()


def test_only_regular_files_of_a_limited_size(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text("[1]")
    assert read_json(path, 3) == [1]
    with pytest.raises(ValueError, match="has 3 bytes; the limit is 2"):
        read_json(path, 2)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(NotRegularFileError, match="is a FIFO"):
        read_json(tmp_path / "fifo", 3)
