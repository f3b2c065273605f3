"""What the drill reads off a trace, and when it says of a restart that it is verified."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from restart_trace.schema import SPAN
from tools.restart_drill.facts import CycleFacts, facts_of
from tools.restart_drill.output import lost_work
from tools.restart_drill.plan import Injection
from tools.restart_drill.verify import check_losses, judge, repeated, repetition_table, with_last_resume_source

INJECTION = Injection(0, "sigkill-all", "mid-step", 9, 2, 1, expected_step=8)
ONE, OTHER = (2, 1, 1), (1, 2, 1)
REFERENCE = CycleFacts(losses={step: 10.0 / step for step in range(1, 13)})


def cycle(steps: range, resumed: int | None = None, layout: tuple[int, int, int] = ONE) -> CycleFacts:
    """A launch of two ranks that was right in everything."""
    ranks = {} if resumed is None else {0: resumed, 1: resumed}
    losses = {step: REFERENCE.losses[step] for step in steps}
    return CycleFacts(world_size=2, layout=layout, losses=losses, resumed=ranks, hashed=set(ranks))


def verdict(
    cycles: dict[int, CycleFacts], reference: CycleFacts | None = REFERENCE, injection: Injection = INJECTION
) -> Any:
    return judge(injection, cycles, check_losses(cycles, reference, 1e-2))


def good() -> dict[int, CycleFacts]:
    return {0: cycle(range(1, 10)), 1: cycle(range(9, 13), resumed=8)}


def test_a_restart_that_is_right() -> None:
    found = verdict(good())
    assert (found.resumed_step, found.losses, found.state_hashes, found.wrong) == (8, "identical", "equal", [])


def test_every_loss_is_compared_with_the_reference() -> None:
    cycles = good()
    cycles[1].losses[12] += 1e-12
    (line,) = verdict(cycles).wrong
    assert line == f"iteration 12: loss {10.0 / 12 + 1e-12!r}, and {10.0 / 12!r} in the reference run"
    cycles = good()
    cycles[0].losses[3] = 1.0  # before the fault
    assert verdict(cycles).wrong
    cycles = good()
    cycles[1].losses[13] = 1.0  # which the reference run did not do
    assert verdict(cycles).wrong == ["iteration 13: loss 1.0, and None in the reference run"]


def test_it_must_resume_where_it_was_saved() -> None:
    cycles = good()
    cycles[1].resumed = {0: 5, 1: 5}
    assert verdict(cycles).wrong == ["resumed from iteration 5, expected iteration 8 on all ranks"]
    cycles[1].resumed = {0: 8}
    assert "on all ranks" in verdict(cycles).wrong[0]
    cycles[1].resumed = {}
    assert "resumed from no checkpoint" in verdict(cycles).wrong[0]


def test_it_must_load_from_where_the_newest_save_was() -> None:
    """Where saves are kept in memory, too. Elsewhere nothing is expected."""
    cycles, in_memory = good(), replace(INJECTION, expected_tier="local_memory")
    assert verdict(cycles).tier is None and verdict(cycles).wrong == []
    expected = "loaded from a tier that was not recorded, expected local_memory"
    assert verdict(cycles, injection=in_memory).wrong == [expected]
    cycles[1].tiers = {0: "local_memory", 1: "local_memory"}
    assert verdict(cycles, injection=in_memory) == replace(verdict(good()), tier="local_memory")
    cycles[1].tiers[1] = "storage"
    found = verdict(cycles, injection=in_memory)
    assert found.tier is None and found.wrong == ["loaded from local_memory, storage, expected local_memory"]


def test_a_fault_during_a_restart_may_take_the_resume_source_away() -> None:
    """Cycle 1 starts from memory, and its launcher is killed before it trains."""
    first = replace(INJECTION, expected_tier="local_memory", lost_at_most=1)
    second = Injection(1, "sigkill-launcher", "mid-load", 0, 1, 137, 7, expected_tier="storage", lost_at_most=4)
    cycles = {0: cycle(range(1, 10)), 1: cycle(range(0)), 2: cycle(range(8, 13), resumed=7)}
    cycles[2].tiers = dict.fromkeys((0, 1), "storage")
    assert verdict(cycles, injection=first).wrong
    expected = with_last_resume_source([first, second], cycles)
    assert [verdict(cycles, injection=one).wrong for one in expected] == [[], []]
    cycles = {0: cycle(range(1, 3)), 1: cycle(range(1, 3))}
    assert with_last_resume_source([first, replace(second, cycle=2)], cycles)[0] == first


def test_copies_on_peers_must_be_used_where_a_host_is_gone_and_storage_not_read() -> None:
    cycles, on_peers = good(), replace(INJECTION, expected_tier="peer")
    cycles[1].tiers = {0: "local_memory", 1: "peer"}
    assert verdict(cycles, injection=on_peers) == replace(verdict(good()), tier="peer")
    expected = "loaded from local_memory, peer, expected local_memory"
    assert verdict(cycles, injection=replace(INJECTION, expected_tier="local_memory")).wrong == [expected]
    for read in ("storage", "local_memory"):
        cycles[1].tiers[1] = read
        assert verdict(cycles, injection=on_peers).wrong


def test_saves_in_memory_lose_no_more_steps_than_lie_between_two() -> None:
    """Of any rank; what damage, or a save that failed, takes away is lost besides."""
    cycles, injection = good(), replace(INJECTION, expected_tier="local_memory", lost_at_most=1)
    cycles[1].tiers = dict.fromkeys((0, 1), "local_memory")
    assert verdict(cycles, injection=injection).wrong == []
    cycles[0] = cycle(range(1, 11))
    expected = "2 finished steps were lost, but there are only 1 between two saves"
    assert verdict(cycles, injection=injection).wrong == [expected]
    assert verdict(cycles, injection=replace(injection, failed_save="full")).wrong == []
    assert verdict(cycles, injection=replace(injection, lost_at_most=2)).wrong == []


def test_lost_work_is_shown_by_tier() -> None:
    def lost(tier: str | None, steps: int | None, at_most: int | None = 1) -> dict[str, Any]:
        return {"tier": tier, "lost_steps": steps, "lost_at_most": at_most}

    assert lost_work([lost("local_memory", 1), lost("local_memory", 2), lost("storage", 5, 8), lost(None, 3)]) == (
        "Lost work: from local memory 1 of 2 restarts lost at most 1 finished step, and none more than 2; from storage "
        "1 of 1 restart lost at most 8 finished steps, and none more than 5."
    )
    assert lost_work([lost("storage", 5, None), lost("storage", None)]) == "Lost work: not known."


def test_hashes_are_not_assumed() -> None:
    cycles = good()
    cycles[1].hashed = {0}
    found = verdict(cycles)
    assert found.state_hashes == "not compared"
    assert found.wrong == ["only 1 of 2 ranks compared the state with its hashes"]


def test_a_restart_without_an_iteration_is_not_verified() -> None:
    assert verdict({0: cycle(range(1, 10))}).wrong == ["no iteration was trained after it"]
    failed_again = {**good(), 1: CycleFacts(world_size=2, layout=ONE), 2: good()[1]}
    assert verdict(failed_again).wrong == []


def test_damage_must_be_reported_by_name() -> None:
    damaged = replace(INJECTION, damaged="/save/global_step9/rank_00001.safetensors")
    cycles = good()
    assert verdict(cycles, injection=damaged).wrong == [f"no launch reported that {damaged.damaged} is damaged"]
    cycles[1].rejected = [f"rank 1: {damaged.damaged}: tensor 3: checksum"]
    assert verdict(cycles, injection=damaged).wrong == []


def test_another_layout_has_a_tolerance_and_no_hashes() -> None:
    cycles = {0: cycle(range(1, 10)), 1: cycle(range(9, 13), resumed=8, layout=OTHER)}
    cycles[1].hashed = set()
    cycles[1].losses[9] *= 1.001
    found = verdict(cycles)
    assert (found.losses, found.wrong) == ("within 0.01 relative", [])
    assert found.state_hashes == "not compared: saved on another layout"
    cycles[1].losses[10] *= 1.02
    assert len(verdict(cycles).wrong) == 1
    cycles = {0: cycle(range(1, 10)), 1: cycle(range(9, 13), resumed=8, layout=OTHER)}
    cycles[0].losses[2] *= 1.001  # on the first layout every bit counts
    assert len(verdict(cycles).wrong) == 1


def test_launches_on_the_same_other_layout_agree_to_the_last_bit() -> None:
    cycles = {
        0: cycle(range(1, 10)),
        1: cycle(range(9, 12), resumed=8, layout=OTHER),
        2: cycle(range(11, 13), resumed=10, layout=OTHER),
    }
    cycles[2].losses[11] += 1e-9
    found = check_losses(cycles, REFERENCE, 1e-2)
    assert found[1].different == [] and "in an earlier launch" in found[2].different[0]


def test_without_a_reference_repeated_iterations_are_compared() -> None:
    cycles = good()
    found = verdict(cycles, None)
    assert (found.losses, found.wrong) == ("identical", [])
    assert [step for step, _ in repeated(cycles)] == [9]
    assert repetition_table(repeated(cycles)).endswith("are identical, to the last bit.")
    cycles[1].losses[9] += 1e-12
    assert "in an earlier launch" in verdict(cycles, None).wrong[0]
    assert "THE REPEATED ITERATIONS DIFFER" in repetition_table(repeated(cycles))
    assert repetition_table([]) == "No iteration was repeated."


def test_without_a_repeated_iteration_the_hashes_are_the_proof() -> None:
    cycles = {0: cycle(range(1, 9)), 1: cycle(range(9, 13), resumed=8)}
    found = verdict(cycles, None)
    assert (found.losses, found.state_hashes, found.wrong) == ("not compared", "equal", [])
    cycles[1] = cycle(range(9, 13), resumed=8, layout=OTHER)
    cycles[1].hashed = set()
    why = "no iteration was repeated, so no loss was compared; compare with a reference run"
    assert verdict(cycles, None).wrong == [why]


def line(kind: str, rank: int = 0, **fields: Any) -> str:
    expected = {"op": 0, "start_ns": 1, "end_ns": 2} if kind == SPAN else {"type": kind}
    return json.dumps(expected | {"cycle": 1, "rank": rank} | fields, separators=(",", ":")) + "\n"


def test_facts_of_a_trace(tmp_path: Path) -> None:
    layout = {"tp": 2, "pp": 1, "dp": 1}
    load = {"operation": "load", "step": 5}
    name = "tensor_hashes_rank_0000{}.json"
    rank_0 = [
        line("process", world_size=2, layout=layout, host="node0"),
        line("event", operation="load", phase="checkpoint_rejected", detail="a is damaged"),
        line("span", **load, phase="load", detail="verify", file=name.format(0)),
        line("operation_end", **load, outcome="ok"),
        line("operation_end", operation="save", step=7, outcome="ok"),
        line("iteration", step=6, loss=1.5),
        '{"type":"iteration","cycle":1,"st',
    ]
    rank_1 = [
        line("span", 1, operation="save", phase="flush", detail="write", file=name.format(1)),
        line("span", 1, **load, phase="load", detail="verify", file=name.format(1), error="CheckpointDamagedError"),
        line("operation_end", 1, **load, outcome="failed"),
        line("iteration", 1, step=6, loss=9.0),
        line("iteration", 1, step=7, loss=1.25),
    ]
    (tmp_path / "rank_00000_cycle_001.jsonl").write_text("".join(rank_0))
    (tmp_path / "rank_00001_cycle_001.jsonl").write_text("".join(rank_1))
    (tmp_path / "cycle_001.json").write_text("{}")
    expected = CycleFacts(
        2, (2, 1, 1), {6: 1.5, 7: 1.25}, {0: 5}, {0}, ["a is damaged"], committed=[7], hosts={"node0"}
    )
    assert facts_of(tmp_path) == {1: expected}
