"""Each phase and record is told in docs/log_format.md, each field in the schema, which its version number fixes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from restart_trace import schema
from tests.unit.tools.ckpt_analysis.trace_factory import RANKS, Options, rank_log, supervisor_log

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = (ROOT / "docs" / "log_format.md").read_text()
GOLDEN = ROOT / "tests" / "golden" / f"log_format_v{schema.SCHEMA_VERSION}.json"


def section(heading: str) -> str:
    """Text under a heading up to the next one."""
    match = re.search(rf"^#+ `?{re.escape(heading)}`?\n(.*?)(?=^#|\Z)", DOCUMENT, re.DOTALL | re.MULTILINE)
    assert match, f"docs/log_format.md has no section {heading}"
    return match.group(1)


def rows(heading: str) -> list[list[str]]:
    """Cells of the table in a section, without its header."""
    lines = [line for line in section(heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def schema_fields(record_type: str) -> dict[str, tuple[str, bool]]:
    return {name: (field.json_type, field.required) for name, field in schema.RECORD_FIELDS[record_type].items()}


def fingerprint() -> dict[str, Any]:
    """Everything of the schema that readers depend on; not the wording of meanings."""
    return {
        "version": schema.SCHEMA_VERSION,
        "files": [schema.RANK_FILE_PATTERN, schema.SUPERVISOR_FILE_PATTERN, schema.CYCLE_FILE_PATTERN],
        "phases": {operation: {p: list(d) for p, d in ps.items()} for operation, ps in schema.PHASES.items()},
        "records": {t: {n: list(f) for n, f in sorted(schema_fields(t).items())} for t in schema.RECORD_FIELDS},
    }


@pytest.mark.parametrize("record_type", schema.RECORD_FIELDS)
def test_every_record_and_field_has_a_meaning(record_type: str) -> None:
    """Fields have theirs in the schema alone."""
    fields = schema.RECORD_FIELDS[record_type]
    assert section(record_type).strip()
    assert ("type" in fields) == (record_type != schema.SPAN)
    assert all(field.meaning.strip() for field in fields.values())


def test_every_record_type_has_a_section_and_no_other_does() -> None:
    headings = set(re.findall(r"^### `(\w+)`$", DOCUMENT, re.MULTILINE))
    assert headings == set(schema.RECORD_FIELDS)


def test_every_phase_is_documented_and_every_documented_phase_exists() -> None:
    documented: dict[str, dict[str, tuple[str, ...]]] = {}
    for operation, phases in re.findall(r"^\*\*`(\w+)`\*\*\n\n(.*?)\n\n", section("Phases"), re.DOTALL | re.MULTILINE):
        lines = [line for line in phases.splitlines() if not line.startswith("  ")]  # the others continue a meaning
        told = [re.fullmatch(r"- `(\w+)`(?: \(([^)]*)\))?: \S.*", line) for line in lines]
        assert all(told), lines
        names = {match[1]: tuple(re.findall(r"`(\w+)`", match[2] or "")) for match in told if match}
        documented[operation] = names
    assert documented == schema.PHASES
    assert [list(phases) for phases in documented.values()] == [list(phases) for phases in schema.PHASES.values()]


def test_version_and_file_names_are_stated() -> None:
    assert re.search(r"^Schema version: \*\*(\d+)\*\*", DOCUMENT, re.MULTILINE).group(1) == str(  # type: ignore[union-attr]
        schema.SCHEMA_VERSION
    )
    names = {cells[0].strip("`") for cells in rows("Files")}
    assert names == {"rank_RRRRR_cycle_CCC.jsonl", "supervisor_NNN.jsonl", "cycle_CCC.json"}
    assert re.match(schema.RANK_FILE_REGEX, schema.RANK_FILE_PATTERN.format(rank=123456, cycle=1234))
    assert re.match(schema.SUPERVISOR_FILE_REGEX, schema.SUPERVISOR_FILE_PATTERN.format(index=0))
    assert re.match(schema.CYCLE_FILE_REGEX, schema.CYCLE_FILE_PATTERN.format(cycle=0))


def test_schema_is_that_of_its_version() -> None:
    """If this fails you changed the format: raise SCHEMA_VERSION, say what changed in docs/log_format.md, and
    record the new golden file with `python -m tests.unit.restart_trace.test_log_format`."""
    how = "record it with python -m tests.unit.restart_trace.test_log_format"
    assert GOLDEN.exists(), f"{GOLDEN.name} is missing: {how}"
    assert fingerprint() == json.loads(GOLDEN.read_text()), "the schema changed but SCHEMA_VERSION did not"


def test_records_of_the_factory_follow_the_schema() -> None:
    """The known-truth traces of the other tests are what the instrument could have written."""
    logs = [rank_log(Options(reject_newest=True), rank, cycle) for rank in range(RANKS) for cycle in (0, 1)]
    records = [record for log in [*logs, supervisor_log(Options())] for record in log.records]
    assert [fault for record in records for fault in schema.check_record(record)] == []
    assert {schema.type_of(record) for record in records} == set(schema.RECORD_FIELDS) - {
        "coordinates",
        "probe",
        "sample",
    }


GOOD_SPAN = {
    "op": 0, "phase": "collect", "start_ns": 1, "end_ns": 2, "duration_ns": 1, "thread": "t", "blocking": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"type": "spam"}, "unknown record type 'spam'"),
        ({"type": "span"}, "unknown field type"),
        ({"colour": "red"}, "unknown field colour"),
        ({"start_ns": 1.5}, "field start_ns is not int: 1.5"),
        ({"op": True}, "field op is not int: True"),
        ({"blocking": 1}, "field blocking is not bool: 1"),
        ({"operation": "save"}, "unknown field operation"),
        ({"duration_ns": 2}, "duration_ns 2 is not from 0 to end_ns - start_ns, 1"),
    ],
)
def test_check_record(change: dict[str, Any], fault: str | None) -> None:
    assert schema.check_record(GOOD_SPAN | change) == ([] if fault is None else [fault])


def test_only_where_a_supervisor_has_no_number_it_may_be_below_zero() -> None:
    for fields in schema.RECORD_FIELDS.values():
        for name in (name for name, field in fields.items() if field.json_type == "int"):
            least = -1 if name in ("rank", "tp", "pp", "dp") else 0
            assert schema.int_range(name)[0] == least, name
    assert schema.check_record(GOOD_SPAN | {"op": -1}) == ["field op is out of range: -1"]


def test_check_record_names_missing_fields() -> None:
    record = {name: value for name, value in GOOD_SPAN.items() if name != "phase"}
    assert schema.check_record(record) == ["missing field phase"]


@pytest.mark.parametrize(
    ("span", "fault"),
    [
        (("save", "flush", "write"), None),
        (("dump", "flush", "write"), "unknown operation 'dump'"),
        (("save", "read", None), "unknown phase 'read' of save"),
        (
            ("save", "flush", None),
            "phase flush of save needs one of the details ('write', 'fsync', 'upload'), got None",
        ),
        (("save", "collect", "write"), "phase collect of save has no details, got 'write'"),
    ],
)
def test_check_phase(span: tuple[str, str, str | None], fault: str | None) -> None:
    assert schema.check_phase(*span) == ([] if fault is None else [fault])


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(fingerprint(), indent=1) + "\n")
