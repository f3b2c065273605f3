"""What the replay makes of its samples: figures, ratios, and verdicts on targets."""

from __future__ import annotations

import json
import re

import pytest

from tests.unit.tools.ckpt_replay.replay_helpers import figures, load, samples
from tools.ckpt_replay.figures import storage_figures
from tools.ckpt_replay.plan import STORAGE_KINDS
from tools.ckpt_replay.replay import Samples
from tools.ckpt_replay.table import render


def test_operations_are_told_as_the_connectors_benchmark_does() -> None:
    found = samples()
    found.tasks_s = {"torch": {"save": [20.0] * 5}}
    result = figures(found)
    save, load = (result["engines"]["torch"]["operations"][name] for name in ("save", "load"))
    assert save["throughput_MiBps"]["median"] == pytest.approx(2e9 / 2**20 / 8.8)
    assert save["coordination_s"]["median"] == pytest.approx(0.5) and save["processing_s"]["median"] == 20
    assert save["requests"] == 20 and save["requests_per_s"] == pytest.approx(20 / 8.8)
    assert save["success_ratio"] == pytest.approx(0.9)
    assert load["duration_s"]["median"] == pytest.approx(4.4) and load["coordination_s"]["median"] == 0
    assert load["requests"] is None and load["success_ratio"] is None  # nobody counted them
    text = render(result | {"in_object_storage": True, "verdict": None})
    assert re.search(r"torch save +217 +8\.800 .*20 +2 +90\.00%", text) and "warm load s" not in text


def test_loads_beside_saves_have_the_rate_of_all_readers() -> None:
    """Two readers beside five saves, three of which failed; of each two loads on two ranks, the slower takes 2 s."""
    found = samples()
    loads = [{**load(took, "cold"), "requests": 8, "retries": 2} for took in (1.0, 2.0)]
    found.engines["torch"]["load_beside"] = [[{"loads": [one] * 2} for one in loads]] * 10
    found.engines["torch"]["load_beside"] += [[{"loads": [], "skipped": "the save ended before"}] * 2]
    found.engines["torch"]["save"] = found.engines["torch"]["save"][:2]
    found.failures = {"torch": {"save": ["no space"] * 3, "load_beside": ["why"]}}
    engine = figures(found)["engines"]["torch"]
    assert engine["failed"] == "no space"
    beside = engine["operations"]["load_beside"]
    assert beside["duration_s"]["samples"] == [2.0] * 20
    assert beside["requests"] == 16 and beside["requests_per_s"] == pytest.approx(2 * 16 / 2)
    assert beside["success_ratio"] == 0.75 and beside["throughput_MiBps"]["median"] == pytest.approx(2e9 / 2**20 / 2)
    assert engine["attempts"]["load_beside"] == {"done": 10, "failed": 1}
    assert not engine["verified"]


def test_a_load_that_was_skipped_was_neither_done_nor_failed() -> None:
    found = samples()
    del found.engines["torch"]["load_cold"]
    found.engines["torch"]["load_warm"] = [[{"loads": [], "skipped": "no room"}] * 2] * 5
    engine = figures(found)["engines"]["torch"]
    assert engine["attempts"] == {"save": {"done": 5, "failed": 0}, "load_warm": {"done": 0, "failed": 0}}
    assert not engine["verified"] and engine["not_measured"]["load_warm_s"] == "no room"


def test_the_slowest_rank_counts_and_all_samples_are_kept() -> None:
    result = figures(samples())
    torch_engine = result["engines"]["torch"]
    assert torch_engine["durable_s"]["samples"] == pytest.approx([8.8] * 5)
    assert torch_engine["durable_GBps"] == pytest.approx(2 / 8.8)
    assert torch_engine["first_durable_s"]["median"] == pytest.approx(9.9)
    assert torch_engine["load_cold_s"]["median"] == pytest.approx(4.4)
    assert torch_engine["load_warm_again_s"]["median"] == 0.2
    assert torch_engine["first_write_cold_s"]["median"] == pytest.approx(8.8)
    assert torch_engine["first_write_warm_s"]["median"] == 4.0
    assert result["storage"]["write_direct_gbps"] == pytest.approx(2.0)
    assert result["storage"]["details"]["write_direct"]["best"] == "4x8"
    assert result["bytes_per_rank"] == 10**9
    assert result["ranks"] == [0, 1]
    json.dumps(result, allow_nan=False)


def test_cold_is_not_said_of_a_load_that_was_not() -> None:
    lazy = figures(samples(cold_cache="partly warm"))["engines"]["lazy"]
    assert lazy["load_cold_s"] is None
    assert "it was partly warm" in lazy["not_measured"]["load_cold_s"]


def test_storage_that_takes_no_direct_transfers() -> None:
    found = samples()
    found.storage = [[{"seconds": {kind: {} for kind in STORAGE_KINDS}, "bytes": 10}]]
    result = storage_figures(found)
    assert result["write_direct_gbps"] is None
    assert storage_figures(Samples())["bytes_per_rank"] == 0


def test_a_limited_share_says_so() -> None:
    result = figures(samples(), limit_bytes=10**9)
    assert result["limited"] == {"limit_bytes": 10**9, "full_bytes_per_rank": 2 * 10**9}
    assert "LIMITED by --limit-bytes to 50.0% of the 2.00 GB" in render(result)
    assert figures(samples())["limited"] is None


def test_the_table_has_ratios_against_torch_and_storage() -> None:
    text = render(figures(samples()), show_all=True)
    row = next(line for line in text.split("times torch's speed")[1].splitlines() if line.startswith("  lazy"))
    assert row.split() == ["lazy", "800.00", "8.00", "4.00", "4.00"]
    share = text.split("of the best raw direct")[1]
    assert next(line for line in share.splitlines() if line.startswith("  lazy")).split() == ["lazy", "91%", "91%"]


def test_the_verdict_comes_first_and_the_answer_last() -> None:
    text = render(figures(samples(), limit_bytes=10**9))
    first, _, rest = (" ".join(part.split()) for part in text.partition("\n\n"))
    assert first == (
        "lazy blocks training 800 times shorter than torch; lazy is durable 8.0 times sooner than torch; "
        "lazy loads cold 4.0 times faster than torch; lazy loads warm 4.0 times faster than torch."
    )
    assert "times torch's speed" not in rest and "--all adds" in rest
    last = " ".join(text.rpartition("\n\n")[2].split())
    assert last.startswith(
        "Answer for 70b TP8 PP8 DP1 on /scratch (ext4) measured: 2 ranks at once, 1.00 GB of the 2.00"
    )
    assert '"about" is for a whole rank, in proportion to its bytes (x 2.0), with steps of 6 s' in last
    assert "durable: lazy: 1.1 s [1.1 to 1.1], about 2.2 s; 8.0 times sooner than the next, torch" in last
    assert last.endswith("load, warm files: lazy: 0.5 s [0.5 to 0.5], about 1 s; 4.0 times faster than the next, torch")


def test_what_was_measured_whole_is_not_extrapolated() -> None:
    whole = render(figures(samples())).rpartition("\n\n")[2]
    assert "about" not in whole and "extrapolated" not in whole


def test_more_than_twenty_times_what_ran_is_not_estimated() -> None:
    result = figures(samples(), limit_bytes=10**9)
    for whole, told in ((20 * 10**9, True), (21 * 10**9, False)):
        result["limited"]["full_bytes_per_rank"] = whole
        text = " ".join(render(result).split())
        assert ("about 22 s" in text) is told is ("not extrapolated:" not in text)
        assert ("This ran 1/21 of a rank's bytes: too little to tell the times of whole ranks." in text) is not told
        assert ("--limit-bytes 1001MiB or more gives an estimate" in text) is not told


def test_the_load_of_the_machine_stands_beside_a_difference_of_two_values() -> None:
    tested = figures(samples())
    tested["machine"] |= {"load_average_1_min": 4.61, "processors": 2}
    assert "Load of the machine" not in render(tested)
    for engine in tested["engines"].values():
        for found in engine.values():
            if isinstance(found, dict) and "samples" in found:
                found["samples"] = found["samples"][:2]
    first = " ".join(render(tested).partition("\n\n")[0].split())
    assert first.endswith("(2 values each). Load of the machine before: 4.6, of 2 processors.")


def test_a_narrow_terminal_gets_fewer_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    text = render(figures(samples(), limit_bytes=10**9))
    assert "(no room for: memory MiB (kept), warm load s)" in text
    assert max(map(len, text.splitlines())) <= 90


def test_the_hosts_of_the_ranks_are_counted() -> None:
    found = samples()
    assert figures(found)["hosts"] == 1
    found.engines["torch"]["save"][0][1]["host"] = "node1"
    assert figures(found)["hosts"] == 2
    for kinds in found.engines.values():
        del kinds["save"]
    assert figures(found)["hosts"] is None
