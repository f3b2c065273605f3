"""The course of the made-up run: both launches, with every moment that all ranks share."""

from __future__ import annotations

from benchmarks.synthetic_traces.times import (
    FAILURE_US,
    LEAVE_US,
    RELAUNCH_US,
    STEP_SLOT_US,
    STEP_US,
    TAIL_US,
    Cycle,
    Save,
    Times,
    late,
)

RENDEZVOUS_US = 2_000  # after the last rank has come
BEFORE_LOOP_US = 500  # between the end of the start-up's phases and the training loop
AFTER_SAVE_US = 1_000


def make_schedule(times: Times) -> tuple[list[Cycle], dict[str, int]]:
    """Both cycles, and the moments of the failure between them."""
    first, second = times.shape.saves_of_cycle
    steps = times.shape.steps
    cycle_0 = _cycle(times, 0, 0, resumed=0, saves=first, until=(first + 1) * steps, index=0)
    last = _last_record(times, cycle_0)
    failure = {phase: last + after for phase, after in FAILURE_US.items()}
    cycle_1 = _cycle(
        times, 1, last + RELAUNCH_US, resumed=first * steps, saves=second, until=(first + second) * steps,
        index=first,
    )  # fmt: skip
    return [cycle_0, cycle_1], failure


def loop_start(times: Times, cycle: Cycle, rank: int) -> int:
    """When a rank enters the training loop."""
    if cycle.loaded:
        return cycle.loaded + TAIL_US + BEFORE_LOOP_US
    return engine_ready(times, cycle, rank) + BEFORE_LOOP_US


def engine_ready(times: Times, cycle: Cycle, rank: int) -> int:
    return cycle.together + sum(times.startup(cycle.number, rank)[3:])


def _cycle(times: Times, number: int, begin: int, *, resumed: int, saves: int, until: int, index: int) -> Cycle:
    ranks = range(times.shape.ranks)
    arrivals = (begin + late(rank) + sum(times.startup(number, rank)[:2]) for rank in ranks)
    cycle = Cycle(
        number, begin, max(arrivals) + RENDEZVOUS_US, 0, 0, resumed + 1, {}, [], resumed,
        resumed + times.shape.steps if number else None,
    )  # fmt: skip
    if number:
        loads = (times.load(engine_ready(times, cycle, rank), rank).arrival for rank in ranks)
        cycle.loaded = max(loads) + LEAVE_US
    cycle.first_step_end = max(loop_start(times, cycle, rank) for rank in ranks) + STEP_US
    cursor = cycle.first_step_end + AFTER_SAVE_US
    for step in range(resumed + 1, until + 1):
        if step > cycle.first_step:
            cycle.iterations[step] = cursor
            cursor += STEP_SLOT_US
        if (step - resumed) % times.shape.steps == 0 and len(cycle.saves) < saves:
            is_last = number == 1 and len(cycle.saves) + 1 == saves
            save, cursor = _save(times, cycle, step, cursor, index + len(cycle.saves), is_last)
            cycle.saves.append(save)
    return cycle


def _save(times: Times, cycle: Cycle, step: int, cursor: int, index: int, is_last: bool) -> tuple[Save, int]:
    """The save that begins at `cursor`, and when training goes on."""
    shape = times.shape
    previous = cycle.saves[-1] if shape.asynchronous and cycle.saves else None
    finished = not (is_last and "unfinished-save" in shape.plants)
    save = Save(index, cycle.number, step, cursor, max_end(times, previous) if previous else 0, 0, finished, None)
    parts = [times.save(save, rank) for rank in range(shape.ranks)]
    save.left = max(part.arrival for part in parts) + LEAVE_US
    if not shape.asynchronous:
        return save, max_end(times, save) + AFTER_SAVE_US
    resumes = max(part.blocked_until for part in parts) + AFTER_SAVE_US
    if is_last and finished and resumes + late(15) < save.over:
        save.drain_from = resumes
    return save, resumes


def max_end(times: Times, save: Save) -> int:
    return max(save.end(rank) for rank in range(times.shape.ranks))


def _last_record(times: Times, cycle: Cycle) -> int:
    """End of the last iteration or save of any rank."""
    step, begin = max(cycle.iterations.items(), default=(0, 0))
    ends = [begin + late(rank) + times.iteration(step, rank) for rank in range(times.shape.ranks)]
    return max([*(ends if begin else []), cycle.first_step_end, max_end(times, cycle.saves[-1])])
