"""docs/engines.md says of each engine what it is seen to do."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.flags import spec_of
from tests.conformance import capabilities
from tests.conformance.subjects import all_engines
from tests.dist.harness import ROOT
from tests.engines import EXCEPTIONS, EXPECTED

HINT = "python -m tests.conformance.capabilities --write docs/engines.md"


@pytest.fixture(scope="module")
def rows() -> list[str]:
    return capabilities.table_in((ROOT / "docs" / "engines.md").read_text()).splitlines()


@pytest.mark.parametrize("name", EXPECTED)
def test_the_table_says_what_is_seen(rows: list[str], name: str, tmp_path: Path) -> None:
    seen = capabilities.observe(name, tmp_path)
    assert capabilities.row(name, seen) in rows, f"not as observed; to record the table again: {HINT}"
    assert {heading: seen[heading] for heading in capabilities.ALIKE} == capabilities.ALIKE, "every engine must"


def test_the_table_has_every_engine_and_no_other(rows: list[str]) -> None:
    assert "\n".join(rows[:2]) == capabilities.header()
    assert [line.split("`")[1] for line in rows[2:]] == list(all_engines()), f"to record the table again: {HINT}"
    for name in EXCEPTIONS:
        assert capabilities.row(name, capabilities.exception_row(name)) in rows


def test_the_options_are_those_of_the_command_line() -> None:
    """Every flag of the section is one, and every engine has a line; --help has choices and defaults."""
    document = (ROOT / "docs" / "engines.md").read_text()
    options = document.partition("\n## Options\n")[2].partition("\n## ")[0]
    flags = {name for field in fields(CheckpointConfig) if (spec := spec_of(field)) for name in spec.names}
    named = set(re.findall(r"`(--[\w-]+)", options))
    assert len(named) >= 8 and named - {"--help"} <= flags
    lines = re.findall(r"^\| (`[a-z].*?) \|", options, re.MULTILINE)
    named = {name for line in lines for name in line.split("`")[1::2]}
    assert named == set(all_engines()), "docs/engines.md, Options: a row for each engine"
