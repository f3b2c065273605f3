"""Lines that the llm-restart-perf branches of Megatron-DeepSpeed and DeepSpeed add to upstream's."""

from __future__ import annotations

from ..draft import NUMBER, Draft, reads

PROGRAMS: tuple[str, ...] = ()  # lines that branches of them add
LOGS = ""


@reads(rf"\[(\w+)\] CkptTime (\S+) {NUMBER}")
def _file_call(run: Draft, engine: str, file: str, seconds: str) -> None:
    run.engine = run.engine or engine
    if run.saves:
        run.saves[-1].calls_s[file] = float(seconds)
    else:
        run.leave_out("CkptTime")


@reads(rf"Waited for all snapshots to complete in {NUMBER}s", rf"Wait time in checkpointing engine {NUMBER} for \d")
def _waited(run: Draft, seconds: str) -> None:
    if run.saves:
        waits = run.saves[-1].drains_s if run.has_trained else run.saves[-1].waits_s
        waits.append(float(seconds))
    else:
        run.leave_out("wait of the checkpointing engine")


@reads(rf"<TIMER:([\w-]+)[,:]{NUMBER}>")
def _named_timer(run: Draft, name: str, seconds: str) -> None:
    run.timers.setdefault(name, []).append(float(seconds))


@reads(r"TOTAL_PARAMS=(\d+)")
def _parameters(run: Draft, number: str) -> None:
    run.parameters.add(int(number))
