"""The fast reader against the format: it reads all that the recorder writes, and never what no record may hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from restart_trace.schema import RECORD_FIELDS, SPAN, WORDS, Field, check_record, int_range
from tools.ckpt_analysis.common.names import FILE, LINE, NAME, TYPE_SCHEMAS
from tools.ckpt_analysis.ingest.columns import read_columns
from tools.ckpt_analysis.ingest.discover import TraceFile
from tools.ckpt_analysis.ingest.files import FileText, Head
from tools.ckpt_analysis.ingest.lines import parse_json

Record = dict[str, Any]
UNREAD = {"wall_ns"}  # fields that must be there and that no column is for
TEXTS = st.one_of(
    st.sampled_from(
        ["", "5", "null", "true", "{}", "a:b", ',"op":5', "\\", 'a "quoted": word', "global_step5", "\x00"]
    ),
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.text("ab", min_size=7, max_size=40),
)


def read(lines: list[bytes]) -> list[Record] | None:
    """The records that the columns hold, in the order of their lines; None if the lines are not for columns."""
    content = b"".join(line + b"\n" for line in lines)
    frames = read_columns([FileText(0, Head(TraceFile(Path("rank"), 0, 0), {}), content, 0)])
    if frames is None:
        return None
    found = {}
    for kind, frame in frames.items():
        assert dict(frame.drop(FILE, LINE).schema) == TYPE_SCHEMAS[kind]
        for row in frame.iter_rows(named=True):
            record = {name: value for name, value in row.items() if value is not None and name not in (FILE, LINE)}
            objects = {name: json.loads(record[name]) for name in ("values", "layout") if name in record}
            found[row[LINE]] = ({} if kind == SPAN else {"type": kind}) | record | objects
    return [found[place] for place in range(len(lines))]


def dump(record: Record) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode()


def as_columns(record: Record) -> Record:
    return {name: value for name, value in record.items() if name not in UNREAD}


def values(record_type: str, name: str, field: Field) -> st.SearchStrategy[Any]:
    if name in WORDS:
        return st.sampled_from(WORDS[name])
    if record_type == SPAN and name in ("phase", "detail"):
        return st.sampled_from(list(NAME.categories))
    numbers = st.integers(-(10**15), 10**15) | st.floats(-1e9, 1e9).filter(lambda x: x == 0 or abs(x) > 1e-90)
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "int": st.integers(0, int_range(name)[1]) | st.integers(0, 12) | st.sampled_from([9999, 10000]),
        "float": numbers,
        "str": TEXTS,
        "bool": st.booleans(),
        "object": st.dictionaries(
            st.text("abc_:", max_size=9), st.integers(0, 10**14) if name == "layout" else numbers, max_size=3
        ),
    }
    return kinds[field.json_type]


@st.composite
def valid_records(draw: Any) -> Record:
    record_type = draw(st.sampled_from([SPAN, *TYPE_SCHEMAS]))
    record: Record = {} if record_type == SPAN else {"type": record_type}
    for name, field in RECORD_FIELDS[record_type].items():
        if name != "type" and (field.required or draw(st.booleans())):
            record[name] = draw(values(record_type, name, field))
    if "start_ns" in record and "end_ns" in record:
        record["start_ns"], record["end_ns"] = sorted((record["start_ns"], record["end_ns"]))
    if "duration_ns" in record:
        record["duration_ns"] = draw(st.integers(0, record["end_ns"] - record["start_ns"]))
    first, *others = record
    return {name: record[name] for name in (first, *draw(st.permutations(others)))}


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(records=st.lists(valid_records(), min_size=1, max_size=6))
def test_what_the_recorder_writes_is_read(records: list[Record]) -> None:
    assert all(check_record(record) == [] for record in records)
    assert read([dump(record) for record in records]) == [as_columns(record) for record in records]


SPLICES = [
    b",", b":", b'"', b"\\", b"{", b"}", b" ", b"0", b"9", b"-", b".", b"e", b"5", b'""', b"[]", b"null", b"true",
    b"\x00", b"\xff", b'"op":1,', b',"op":1', b'"x":1,', b'"type":"span",', b'"tag":5,', b'"error":null,', b'{"op":1}',
    b'"phase":"flush",',
]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(
    records=st.lists(valid_records(), min_size=1, max_size=3),
    line=st.integers(0, 2),
    place=st.integers(0, 300),
    cut=st.integers(0, 6),
    splice=st.sampled_from([b"", *SPLICES]),
)
@example(records=[{"op": 1, "phase": "flush", "start_ns": 1, "end_ns": 2}], line=0, place=6, cut=1, splice=b"null")
@example(records=[{"op": 1, "phase": "flush", "start_ns": 1, "end_ns": 2}], line=0, place=6, cut=0, splice=b"0")
@example(records=[{"op": 1, "phase": "flush", "start_ns": 1, "end_ns": 2}], line=0, place=1, cut=0, splice=b'"op":1,')
def test_no_altered_line_is_read_as_what_it_is_not(
    records: list[Record], line: int, place: int, cut: int, splice: bytes
) -> None:
    lines = [dump(record) for record in records]
    altered = lines[line % len(lines)]
    place %= len(altered) + 1
    lines[line % len(lines)] = altered[:place] + splice + altered[place + cut :]
    found = read(lines)
    if found is None:
        return
    decoded = [parse_json(one) for one in lines]
    assert all(check_record(record) == [] for record in decoded)
    assert found == [as_columns(record) for record in decoded]


SPAN_LINE = b'{"op":1,"phase":"flush","detail":"write","start_ns":5,"end_ns":9}'


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b" ",
        b"{}",
        b"null",
        b'{"op":1}',
        SPAN_LINE[:-1],
        SPAN_LINE + SPAN_LINE,
        b'{"type":"operation_label","op":1,"tag":null}',
        b'{"type":"operation_label","op":1,"tag":5}',
        b'{"type":"operation_label","op":1,"tag":"a","tag":"b"}',
        b'{"type":"operation_label","op":1,"other":1}',
        b'{"type":"operation_label","op":18446744073709551617}',
        b'{"type":"operation_label","op":01}',
        b'{"type":"operation_label","op":1.0}',
        b'{"type":"operation_label"}',
        b'{"type":"operation_label","op":1,"tag":"a\tb"}',
        b'{"type":"operation_label","op":1,"tag":"\xff"}',
        b'{"type":"unknown","op":1}',
        b'{"type":"event","operation":"save","phase":"notice","time_ns":1}',
        b'{"type":"event","operation":"safe","phase":"notice","time_ns":1,"wall_ns":2}',
        b'{"type":"iteration","step":1,"start_ns":2,"end_ns":1}',
        b'{"type":"iteration","step":1,"start_ns":1,"end_ns":2,"loss":NaN}',
        b'{"type":"iteration","step":1,"start_ns":1,"end_ns":2,"loss":1e400}',
        b'{"type":"probe","op":1,"at":"start","time_ns":1,"values":{"a":1,"a":2}}',
        b'{"type":"probe","op":1,"at":"start","time_ns":1,"values":{"a":{"b":1}}}',
        SPAN_LINE.replace(b'"flush"', b'"flash"'),
        SPAN_LINE.replace(b'"end_ns":9', b'"end_ns":9,"duration_ns":5'),
        SPAN_LINE.replace(b'"end_ns":9', b'"end_ns":2305843009213693953'),
        SPAN_LINE.replace(b'"op"', b'"up"'),
        SPAN_LINE.replace(b'"start_ns"', b'"START_ns"'),
    ],
)
def test_what_is_no_record_is_left_to_the_line_reader(wrong: bytes) -> None:
    assert read([SPAN_LINE, SPAN_LINE]) is not None
    assert read([SPAN_LINE, wrong, SPAN_LINE]) is None


@pytest.mark.parametrize(
    "line", [SPAN_LINE + b" ", SPAN_LINE.replace(b":", b": "), SPAN_LINE.replace(b"o", b"\\u006f")]
)
def test_a_line_that_the_recorder_would_write_otherwise_is_read_all_the_same(line: bytes) -> None:
    (record,) = read([SPAN_LINE]) or []
    assert read([SPAN_LINE, line, SPAN_LINE]) == [record] * 3


def test_lines_of_more_shapes_than_are_compared_are_read_all_the_same() -> None:
    records = [
        {"op": 1, "phase": "flush", "detail": "write", "error": chr(32 + n), "start_ns": 5, "end_ns": 9}
        for n in range(94)
    ]
    assert read([dump(record) for record in records]) == records


def test_texts_that_share_a_beginning_an_end_or_a_slot_stay_apart() -> None:
    names = [f"{'x' * (n % 23)}{n:05d}{'y' * (n % 17)}" for n in range(70_000)]
    lines = [b'{"type":"operation_label","op":%d,"tag":"%b"}' % (n, name.encode()) for n, name in enumerate(names)]
    found = read(lines)
    assert found is not None and [record["tag"] for record in found] == names
