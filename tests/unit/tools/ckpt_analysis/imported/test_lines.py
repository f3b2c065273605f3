"""Lines of logs to import: sizes, statistics, lines that are torn, mixed, or others' altogether."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.tools.ckpt_analysis.upstream_log_factory import LogOptions, upstream_log
from tools.ckpt_analysis.imported.draft import Draft
from tools.ckpt_analysis.imported.formats.fastpersist import parse_statistics
from tools.ckpt_analysis.imported.listing import size_range
from tools.ckpt_analysis.imported.reader import feed
from tools.ckpt_analysis.imported.saves import FileStatistics
from tools.ckpt_plan.listing import human_size


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 10**19))
def test_a_listed_size_bounds_the_bytes(num_bytes: int) -> None:
    low, high = size_range(human_size(num_bytes))
    assert low <= num_bytes <= high
    assert high - low <= max(num_bytes, 1024) // 9  # two digits at least, so never coarser than a ninth


@settings(deadline=None, derandomize=True)
@given(st.text(alphabet="0123456789.KMGx -", max_size=8))
def test_what_is_no_size_is_refused(text: str) -> None:
    try:
        low, high = size_range(text)
    except ValueError:
        return
    assert re.fullmatch(r"\d+(\.\d)?[KMGTPE]?", text) and 0 <= low <= high


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 10**15), st.floats(0, 1e6), st.text(alphabet="abc/_0.", min_size=1, max_size=30))
def test_statistics_survive_their_print(num_bytes: int, seconds: float, path: str) -> None:
    printed = str({"bytes": num_bytes, "write_secs": seconds, "path": path, "flush": 0})
    assert parse_statistics(printed) == FileStatistics(path, num_bytes, seconds)


@pytest.mark.slow
@settings(deadline=None, derandomize=True)
@given(st.text(max_size=200))
@example("[]")  # a set cannot hold it
def test_damaged_statistics_are_none(text: str) -> None:
    found = parse_statistics("{" + text + "}")
    assert found is None or (found.bytes >= 0 and found.write_s >= 0)


def read_lines(lines: list[str]) -> Draft:
    run = Draft()
    for line in lines:
        feed(run, line)
    return run


WORDS = st.sampled_from(
    ["saving checkpoint at iteration", "save-checkpoint ....:", "(1.0, 2.0)", "<TIMER:x,", "7", "global_step3", "nan",
     "steps:", "iter time (s):", "CkptTime", "[Torch]", "total 41G", "stats = {", "}", "drwxr-xr-x", "\x1b[92m", "é"]
)  # fmt: skip


@pytest.mark.slow
@settings(deadline=None, derandomize=True)
@given(st.lists(st.lists(st.one_of(WORDS, st.text(max_size=8)), max_size=8).map(" ".join), max_size=12))
def test_lines_torn_and_mixed_never_crash_it(lines: list[str]) -> None:
    reader = read_lines(lines)
    reader.finish("x.log", "0" * 12, 4)


@pytest.mark.parametrize(
    "line",
    ["time (ms) | " + "a" * (1 << 20), "[Torch] Loading checkpoint from " + "." * (1 << 20) + "b c"],
    ids=["word", "dots"],
)
def test_a_line_of_the_greatest_length_is_read_at_once(line: str) -> None:
    """Not in hours, as where a pattern goes over the rest of it from each of its letters."""
    assert read_lines([line]).loads == []


@pytest.mark.parametrize("prefix", ["node7: ", "x3202c0s37b0n0.hsn.cluster: ", "0: ", "[1,3]<stdout>:"])
def test_what_launchers_of_several_nodes_put_before_lines(prefix: str) -> None:
    plain = upstream_log(LogOptions(waits_s=[0.5, 1.0], loads_step=2))
    timer = plain.replace("(1200.50, 1250.75)", "1250.75")  # --timing-log-option max
    for log in (plain, timer):
        expected = read_lines(log.splitlines()).finish("x.log", "0" * 12, None)
        found = read_lines([prefix + line for line in log.splitlines()]).finish("x.log", "0" * 12, None)
        assert found == expected
        assert found.loads[0].call is not None and found.loads[0].call.max_s == 1.25075


def test_the_waits_of_datastates() -> None:
    lines = upstream_log(LogOptions(save_ms=[100.0, 100.0])).splitlines()
    second = next(index for index, line in enumerate(lines) if line.startswith("saving") and "2 to" in line)
    waits = [
        f"[DataStates.llm] Wait time in checkpointing engine {s} for {r}: Host: 0" for r, s in enumerate((0.5, 2.5))
    ]
    run = read_lines([*lines[:second], *waits, *lines[second:], *waits]).finish("x.log", "0" * 12, None)
    assert [(save.wait and save.wait.max_s, save.drain and save.drain.max_s) for save in run.saves] == [
        (2.5, None), (None, 2.5),
    ]  # fmt: skip


@pytest.mark.slow
@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 200), st.text(alphabet="abc xyz=#", max_size=40)), max_size=20))
def test_other_lines_change_nothing(others: list[tuple[int, str]]) -> None:
    lines = upstream_log().splitlines()
    expected = read_lines(lines).finish("x.log", "0" * 12, None)
    for place, text in others:
        lines.insert(place % len(lines), text)
    assert read_lines(lines).finish("x.log", "0" * 12, None) == expected
