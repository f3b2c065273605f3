"""docs/engines.md says of each engine what it is seen to do."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.flags import spec_of
from tests.conformance import capabilities
from tests.conformance.subjects import EXCEPTIONS, EXPECTED, all_engines
from tests.dist.harness import ROOT

HINT = "python -m tests.conformance.capabilities --write docs/engines.md"


@pytest.fixture(scope="module")
def rows() -> list[str]:
    return capabilities.table_in((ROOT / "docs" / "engines.md").read_text()).splitlines()


@pytest.mark.parametrize("name", EXPECTED)
def test_the_table_says_what_is_seen(rows: list[str], name: str, tmp_path: Path) -> None:
    seen = capabilities.observe(name, tmp_path)
    assert capabilities.row(name, seen) in rows, f"not as observed; to record the table again: {HINT}"
    assert (seen["fsync"], seen["finds a flipped bit"]) == ("yes", "yes"), "every engine must"


def test_the_table_has_every_engine_and_no_other(rows: list[str]) -> None:
    assert "\n".join(rows[:2]) == capabilities.header()
    assert [line.split("`")[1] for line in rows[2:]] == list(all_engines()), f"to record the table again: {HINT}"
    for name in EXCEPTIONS:
        assert capabilities.row(name, capabilities.exception_row(name)) in rows


def test_the_options_are_those_of_the_command_line() -> None:
    """Flags, choices and defaults of the table, and a line for every engine that they reach."""
    document = (ROOT / "docs" / "engines.md").read_text()
    options = document.partition("\n## Options\n")[2].partition("\n## ")[0]
    specs = {spec.names[0]: (spec, field.default) for field in fields(CheckpointConfig) if (spec := spec_of(field))}
    rows = re.findall(r"^\| `(--\S+?)(?: (\S+))?` \| (.*?) \|", options, re.MULTILINE)
    assert len(rows) == 8
    for name, values, default in rows:
        spec, real_default = specs[name]
        if spec.choices:
            assert values == r"\|".join(spec.choices)
        if real_default is not None:
            assert default.strip("`") == f"{real_default:g}" if isinstance(real_default, float) else str(real_default)
    lines = re.findall(r"^\| (`[a-z].*?) \|", options, re.MULTILINE)
    named = {name for line in lines for name in line.split("`")[1::2]}
    assert named == set(all_engines()), "docs/engines.md, Options: a row for each engine"
