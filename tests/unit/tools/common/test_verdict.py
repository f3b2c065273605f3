"""The sentence on variants side by side: what is claimed, where no difference is shown, and what a claim stands on."""

from __future__ import annotations

import pytest

from tools.common.verdict import (
    BLOCKED,
    COLD_LOAD,
    LOAD,
    NOTHING,
    RESTART,
    STEP,
    in_brief,
    standing,
    verdict,
    with_load,
)

FEW = "Too few repeats to tell: "
SHORT, LONG = [1.0, 1.1, 1.0, 1.2], [4.0, 4.5, 4.1, 4.3]


def test_a_difference_and_what_is_level() -> None:
    goals = [(BLOCKED, {"torch": LONG, "lazy": SHORT}), (LOAD, {"torch": [1.0, 3.0], "lazy": [2.0, 2.5]})]
    assert verdict(goals) == "lazy blocks training 4.0 times shorter than torch; no difference shown in loads."


def test_a_caveat_that_holds_for_all_is_said_once() -> None:
    few = {"a": [4.0, 4.1], "b": [1.0, 1.1]}
    assert verdict([(LOAD, few), (COLD_LOAD, few)]) == (
        "Too few repeats to tell: "
        "b loads 3.9 times faster than a; b loads cold 3.9 times faster than a (2 values each)."
    )
    assert verdict([(LOAD, few), (COLD_LOAD, {"a": LONG, "b": SHORT})]) == (
        "b loads cold 4.0 times faster than a. "
        "Too few repeats to tell: b loads 3.9 times faster than a (2 values each)."
    )
    assert verdict([(LOAD, few), (COLD_LOAD, {"a": [1.0], "b": [3.0]}), (BLOCKED, {"a": LONG, "b": LONG})]) == (
        "No difference shown in blocked times. Too few repeats to tell: "
        "b loads 3.9 times faster than a (2 values each); a loads cold 3.0 times faster than b (one value each)."
    )


def test_the_load_of_the_machine_stands_beside_what_was_not_tested() -> None:
    few = verdict([(LOAD, {"a": [4.0, 4.1], "b": [1.0, 1.1]})])
    assert with_load(few, [4.6, 4.7], 2) == f"{few} Load of the machine before: 4.6 to 4.7, of 2 processors."
    assert with_load(few, [0.04, 0.01], None) == f"{few} Load of the machine before: 0.0."
    tested = verdict([(LOAD, {"a": LONG, "b": SHORT})])
    assert with_load(tested, [4.6], 2) == tested and with_load(few, [], 2) == few


def test_several_variants_have_a_best_and_a_next() -> None:
    alone = [(COLD_LOAD, {"a": LONG, "b": SHORT, "c": [100 * value for value in SHORT]})]
    assert verdict(alone) == "b loads cold 4.0 times faster than the next, a."
    tied = [(COLD_LOAD, {"a": LONG, "b": SHORT, "c": SHORT[::-1]})]
    assert verdict(tied) == "cold loads of b and c show no difference, and are 4.0 times faster than the next, a."


def test_a_verdict_among_many_is_one_sentence() -> None:
    """What it leaves out, the tables have: who comes next, and how many values there are."""
    few = {"torch": [4.0], "lazy": [1.0], "dcp": [2.0]}
    tested = {"torch": LONG, "lazy": SHORT, "dcp": LONG[::-1]}
    goals = [(BLOCKED, tested), (COLD_LOAD, {**tested, "lazy": []}), (LOAD, {**tested, "dcp": SHORT}), (RESTART, few)]
    assert in_brief(goals) == (
        "lazy leads in blocked times (4.0 times shorter); lazy and dcp lead in loads (4.0 times faster); no difference "
        "shown in cold loads of torch and dcp; too few repeats to tell in restarts (lazy ahead)."
    )
    assert in_brief([(RESTART, few), (LOAD, few), (STEP, {"torch": [1.0], "lazy": [2.0]})]) == (
        "too few repeats to tell in restarts and loads (lazy ahead) and in steps (torch ahead)."
    )
    assert in_brief([(LOAD, {"a": [1.0], "b": []})]) == NOTHING


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([1.0], [1.02], f"{FEW}b loads 2.0 % faster than a (one value each)."),
        ([1.0, 1.1], [2.0, 2.4, 2.2], f"{FEW}b loads 2.1 times faster than a (2 and 3 values)."),
        ([1.0, 1.1, 1.2], [2.0, 2.4, 2.2], f"{FEW}b loads 2.0 times faster than a (3 values each)."),
        ([1.0, 1.5], [1.4, 2.4, 2.2], "No difference shown in loads."),  # ranges overlap
        ([1.0] * 3 + [9.0], [1.1] * 3 + [9.1], "No difference shown in loads."),  # the test shows nothing
        ([2.0], [2.0], "No difference shown in loads."),
        (
            [0.0, 0.0],
            [2.0, 2.0],
            "Too few repeats to tell: b loads faster than a (2 values each).",
        ),  # no factor of nothing
        ([20.0], [400.0], f"{FEW}b loads 20 times faster than a (one value each)."),
    ],
)
def test_what_few_values_say(first: list[float], second: list[float], said: str) -> None:
    assert verdict([(LOAD, {"a": second, "b": first})]) == said


def test_what_is_missing_is_not_compared() -> None:
    assert verdict([(LOAD, {"a": [1.0], "b": []})]).startswith("No time was measured in two of them")
    assert standing({"a": LONG, "b": SHORT}).leaders == ("b",)
