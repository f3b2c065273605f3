"""At every seventh system call of a save and of a start something goes wrong: nothing is lost, and it is said.

Of two ranks, of which each fault takes a second, at every 41st.

Every fault at every call: `python -m tests.faults.sweep --processes 2`, which .ci/nightly runs.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing.engines.registry import builtin_engines
from tests.conformance.subjects import EXCEPTIONS
from tests.faults.injection import Fault
from tests.faults.sweep import SCENARIOS, TWO_RANKS, read

# Those of which others have all the code.
LEFT_TO_THE_NIGHT = ("fastpersist", "dcp")
OF_THE_SUITE = [name for name in SCENARIOS if name not in (*LEFT_TO_THE_NIGHT, *TWO_RANKS)]


def swept(out: Path, names: Sequence[str], every: int) -> list[dict[str, Any]]:
    scenarios = [text for name in names for text in ("--scenario", name)]
    command = [sys.executable, "-m", "tests.faults.sweep", "--every", str(every), "--processes", "2", *scenarios]
    ended = subprocess.run([*command, "--out", str(out)], check=False, capture_output=True, text=True)
    assert ended.returncode in (0, 1), ended.stdout[-2000:] + ended.stderr[-6000:]
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("faults")
    return swept(directory / "one.jsonl", OF_THE_SUITE, 7) + swept(directory / "two.jsonl", [*TWO_RANKS], 41)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("names", [*([name] for name in OF_THE_SUITE), [*TWO_RANKS]], ids=lambda names: names[0])
def test_a_fault_loses_nothing(verdicts: list[dict[str, Any]], names: list[str]) -> None:
    mine = [verdict for verdict in verdicts if verdict["scenario"] in names]
    assert {verdict["of"] for verdict in mine} == {"save", "start"}, "the sweep has ended early"
    broken = [verdict for verdict in mine if verdict["outcome"] not in ("whole", "told")]
    assert not broken, json.dumps(broken, indent=1)
    assert any(verdict["fault"]["effect"] == "kill" for verdict in mine)
    assert {verdict["outcome"] for verdict in mine} == {"whole", "told"}


def test_each_engine_is_swept() -> None:
    engines = {flags[flags.index("--checkpoint-engine") + 1] for flags in SCENARIOS.values()}
    assert engines | EXCEPTIONS.keys() == builtin_engines().keys()


def test_a_sweep_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """The newest verdict on a fault counts; the line at which a kill came does not."""
    out = tmp_path / "out.jsonl"
    assert read(out) == []
    fault = Fault("read", 2, "EIO")
    verdict = {"scenario": "lazy", "of": "save", "fault": dataclasses.asdict(fault), "hit": "read x", "said": None}
    lines = [json.dumps(verdict | {"outcome": outcome, "seconds": 0.1}) for outcome in ("hangs", "whole")]
    out.write_text("\n".join(lines) + "\n" + lines[0][:-9])
    assert [(told.key, told.survived) for told in read(out)] == [(("lazy", "save", fault), True)]
