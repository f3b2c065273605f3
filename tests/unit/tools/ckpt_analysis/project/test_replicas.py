"""Copies in the memory of other nodes: every probability against counting all choices of the nodes that are lost."""

from __future__ import annotations

import csv
import io
import json
from fractions import Fraction
from itertools import combinations
from math import comb

import pytest

from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.project.replicas import PLACEMENTS, survival_bound, survival_probability


def copies_of_parts(placement: str, nodes: int, replicas: int) -> list[frozenset[int]]:
    """Which nodes hold the copies of each node's part: the definitions, node by node."""
    groups = 0
    if placement != "ring":
        groups = nodes // replicas - (1 if nodes % replicas else 0)
    rest = range(groups * replicas, nodes)
    found = [frozenset(range(i * replicas, (i + 1) * replicas)) for i in range(groups)]
    found += [frozenset(rest[(i + j) % len(rest)] for j in range(replicas)) for i in range(len(rest))]
    return found


def cases() -> list[tuple[str, int, int]]:
    return [
        (placement, nodes, replicas)
        for placement in PLACEMENTS
        for nodes in range(1, 11)
        for replicas in range(1, min(nodes, 4) + 1)
        if placement != "group" or nodes % replicas == 0
    ]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_counts_every_loss(placement: str) -> None:
    for _, nodes, replicas in (case for case in cases() if case[0] == placement):
        parts = copies_of_parts(placement, nodes, replicas)
        for lost in range(nodes + 1):
            chosen = [set(gone) for gone in combinations(range(nodes), lost)]
            survived = sum(not any(part <= gone for part in parts) for gone in chosen)
            exact = survival_probability(placement, nodes, replicas, lost)
            bound = survival_bound(placement, nodes, replicas, lost)
            assert exact == Fraction(survived, len(chosen)), (nodes, replicas, lost)
            assert bound <= exact
            if lost < 2 * replicas and placement == "group":  # corollary 1 is an equation there
                assert bound == exact


def test_mixed_placement_is_as_near_the_best_as_theorem_1_says() -> None:
    for _, nodes, replicas in (case for case in cases() if case[0] == "mixed" and case[2] > 1):
        best = 1 - Fraction(-(-nodes // replicas), comb(nodes, replicas))
        gap = best - survival_probability("mixed", nodes, replicas, replicas)
        assert 0 <= gap <= Fraction(2 * replicas - 3 if nodes % replicas else 0, comb(nodes, replicas))


def test_thousands_of_nodes_are_counted_exactly() -> None:
    pairs = 1 - Fraction(2048, comb(4096, 2))
    assert survival_probability("group", 4096, 2, 2) == pairs == survival_bound("group", 4096, 2, 2)
    assert survival_probability("ring", 4096, 2, 3) == Fraction(4096 * comb(4096 - 3 - 1, 3 - 1), 3 * comb(4096, 3))


def ask(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(["project", *words.split()])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_answers_in_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    question = "--placement ring --nodes 16,32 --replicas 2 --lost-nodes 2,3 --format "
    _, text, _ = ask(f"{question}json", capsys)
    rows = json.loads(text)["rows"]
    assert [(row["nodes"], row["lost_nodes"]) for row in rows] == [(16, 2), (16, 3), (32, 2), (32, 3)]
    assert (rows[1]["probability"], rows[1]["bound"]) == (pytest.approx(352 / 560), pytest.approx(0.6))
    _, text, _ = ask(f"{question}csv", capsys)
    assert [row["probability"] for row in csv.DictReader(io.StringIO(text))] == [
        str(row["probability"]) for row in rows
    ]
    for name in ("table", "markdown"):
        status, text, _ = ask(question + name, capsys)
        assert status == 0 and "62.86 %" in text and "60.00 %" in text


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--placement group --nodes 5 --replicas 2 --lost-nodes 2", ("--nodes 5", "--placement mixed")),
        ("--placement ring --nodes 4 --replicas 5 --lost-nodes 2", ("--replicas 5", "--nodes 4")),
        ("--placement ring --nodes 4 --replicas 2 --lost-nodes 5", ("--lost-nodes 5", "--nodes 4")),
        ("--placement ring --nodes 4 --replicas 0 --lost-nodes 2", ("--replicas 0",)),
        ("--placement ring --nodes 4 --replicas 2", ("--lost-nodes is missing",)),
        ("--placement ring --nodes 4 --replicas 2 --lost-nodes 2 --mtbf-hours 9", ("--mtbf-hours 9", "--placement")),
        ("--nodes 4 --mtbf-hours 9 --replicas 2", ("--replicas 2", "--placement")),
        ("--nodes 4", ("--mtbf-hours is missing",)),
    ],
)
def test_names_what_cannot_be(words: str, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ask(words, capsys)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and all(name in err for name in names)
