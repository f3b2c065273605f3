"""Runs the commands of a part, each in a process group of its own, and records what came of them."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from restart_trace.version import __version__
from tests.gpu.files import pack, write_json, write_text
from tests.gpu.parts import ENGINES, ENGINES_HERE, PARTS, ROOT, Part, Setting, Step

PASSED, FAILED, LEFT_OUT = "passed", "failed", "left out"
# The outcome of a part that did not run to its end for want of time, or is running: nothing was observed.
UNKNOWN = None
RECORD = "part.json"
GRACE_S, KILL_S = 10.0, 5.0  # from SIGTERM to SIGKILL: the drill ends its launches; and to the end of what hangs
_LAST_WORDS = 1500  # characters
_IMPORTS_S = 120.0
_OF_LADDER, _OF_PART = "the ladder's time was over", "the part's time was over"
_ASK_DEVICE = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
_ASK_ENGINES = "import sys, json; from tools.ckpt_replay.prepare import unavailable_engines; "
_ASK_ENGINES += "print(json.dumps(unavailable_engines(tuple(sys.argv[1:]))))"


class TierError(Exception):
    """The tier cannot run here."""


@functools.cache
def device_problem(setting: Setting) -> str | None:
    """Why the tier cannot run on this machine; None if it can. Asked once."""
    done = _asked(setting, _ASK_DEVICE)
    if done.returncode != 0:
        return (
            f"{sys.executable} cannot import torch; set PYTHON to one that can:\n{done.stderr.strip()[-_LAST_WORDS:]}"
        )
    if not setting.rehearsal and done.stdout.strip() == "0":
        return "torch sees no CUDA device here; --rehearse runs the same on CPUs with small sizes"
    return None


def run_part(part: Part, setting: Setting, until: float = math.inf) -> str | None:
    """Run a part and record it in OUT/PART/part.json; PASSED, FAILED, LEFT_OUT or UNKNOWN.

    `until`: end of the ladder, a value of time.monotonic(); a part that it ends is UNKNOWN, one that takes longer than
    the part's own limit has FAILED. Raises TierError if OUT/PART is not of this tier.
    """
    directory = setting.out / part.name
    if directory.exists() and not (directory / RECORD).exists():
        raise TierError(f"--out {setting.out}: {directory.name} in it is not of this tier; give another directory")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    start = time.monotonic()
    record: dict[str, Any] = {
        "part": part.name, "shows": part.shows, "rehearsal": setting.rehearsal, "version": __version__,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "expected_s": part.expected_s,
        "outcome": UNKNOWN, "seconds": 0.0, "steps": [],
    }  # fmt: skip
    try:
        write_json(directory / RECORD, record)
        for step in part.steps(setting):
            found = _run_step(step, setting, directory, min((start + part.limit_s, _OF_PART), (until, _OF_LADDER)))
            record["steps"].append(found)
            _say(f"{part.name}: {step.name}: {found['outcome'] or 'not finished'} after {found['seconds']:.1f} s")
        outcomes = [step["outcome"] for step in record["steps"]]
        record["outcome"] = next((outcome for outcome in (FAILED, UNKNOWN, LEFT_OUT) if outcome in outcomes), PASSED)
    finally:
        shutil.rmtree(setting.work, ignore_errors=True)
        record["seconds"] = round(time.monotonic() - start, 2)
        write_json(directory / RECORD, record)
    return record["outcome"]


def _run_step(step: Step, setting: Setting, directory: Path, end: tuple[float, str]) -> dict[str, Any]:
    """Run a step until `end`: a value of time.monotonic(), and whose time is over then."""
    began = time.monotonic()
    deadline, whose = end
    over = UNKNOWN if whose == _OF_LADDER else FAILED
    found: dict[str, Any] = {"step": step.name, "command": step.shown(), "left_out": {}}

    def ended(outcome: str | None, why: str | None = None, **more: Any) -> dict[str, Any]:
        return found | {"outcome": outcome, "why": why, "seconds": round(time.monotonic() - began, 2)} | more

    try:
        asked = engine_problems(setting) if step.engines else {}
    except TierError as exc:
        return ended(FAILED, str(exc))
    found["left_out"] = {name: why for name, why in asked.items() if name in step.engines}
    engines = [name for name in step.engines if name not in found["left_out"]]
    if found["left_out"] and not engines:
        return ended(LEFT_OUT, "; ".join(found["left_out"].values()))
    if time.monotonic() >= deadline:
        return ended(over, f"not started: {whose}")
    log = directory / f"{step.name}.log"
    argv = [",".join(engines) if word == ENGINES_HERE else word for word in step.argv]
    try:
        status = _status_of(argv, step, setting, log, deadline)
    except subprocess.TimeoutExpired:
        return ended(over, f"ended: {whose}", log=_end_of(log))
    if status == 0:
        return ended(PASSED)
    return ended(FAILED, f"exit status {status}", log=_end_of(log))


def _status_of(argv: list[str], step: Step, setting: Setting, log: Path, deadline: float) -> int:
    """Exit status of a command in a process group of its own. Raises subprocess.TimeoutExpired."""
    (setting.work / "tmp").mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("wb"))
        output = stack.enter_context((log.parent / step.stdout).open("wb")) if step.stdout else errors
        process = subprocess.Popen(
            argv, cwd=ROOT, env=setting.environment() | step.environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(None if deadline == math.inf else deadline - time.monotonic())
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the group of a command; one that ended by itself may have left processes in it.

    A process that waits in a driver may outlast SIGKILL; then the tier goes on without it.
    """
    for signum, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, KILL_S)):
        if not _signalled(process.pid, signum):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    deadline = time.monotonic() + KILL_S
    while _signalled(process.pid, 0) and time.monotonic() < deadline:  # its children are waited for by init
        time.sleep(0.01)


def _signalled(group: int, signum: int) -> bool:
    """Send a signal to a process group; whether there was a process in it."""
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return False
    return True


def engine_problems(setting: Setting) -> dict[str, str]:
    """Of all engines of the tier that cannot save here: why. Raises TierError if they cannot even be asked."""
    problems, error = _asked_engines(setting)
    if error is not None:
        raise TierError(error)
    return problems


@functools.cache
def _asked_engines(setting: Setting) -> tuple[dict[str, str], str | None]:
    """Asked once, which takes seconds of imports: problems, and why there is no answer."""
    done = _asked(setting, _ASK_ENGINES, *ENGINES)
    if done.returncode != 0:
        return {}, f"the engines cannot be imported:\n{done.stderr.strip()[-_LAST_WORDS:]}"
    return json.loads(done.stdout.splitlines()[-1]), None


def _asked(setting: Setting, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *words]
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(
            command, cwd=ROOT, env=setting.environment(), capture_output=True, text=True, timeout=_IMPORTS_S
        )
    return subprocess.CompletedProcess(command, 1, "", f"it took more than {_IMPORTS_S:.0f} s, and was ended")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-_LAST_WORDS:]


def records(out: Path) -> list[dict[str, Any]]:
    """Records of the parts that have run, or begun to, in the order of the tier."""
    paths = [out / part.name / RECORD for part in PARTS]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def publish(setting: Setting, rest: dict[str, str]) -> str:
    """Write OUT/overview.md, a line for each part that has run and for `rest`, and return it; then pack the archive.

    `rest`: of parts that were to run and did not, why. Raises OSError.
    """
    lines = ["| part | outcome | s | why |", "|---|---|---|---|"]
    for record in records(setting.out):
        if record["part"] not in rest:
            outcome = record["outcome"] or "not finished"
            lines.append(f"| {record['part']} | {outcome} | {record['seconds']:.1f} | {why(record)} |")
    lines += [f"| {name} | not run | | {reason} |" for name, reason in rest.items()]
    text = "\n".join(lines) + "\n"
    write_text(setting.out / "overview.md", text)
    if setting.archive is not None:
        for name in pack(setting.out, setting.archive):
            _say(f"{name} is not in the archive: it is too large")
    return text


def why(record: dict[str, Any]) -> str:
    """Why steps of a part did not pass, or which engines they left out; one line, without the sign of a table."""
    said = [f"{step['step']}: {step['why']}" for step in record["steps"] if step["why"]]
    said += [problem for step in record["steps"] if not step["why"] for problem in step["left_out"].values()]
    return " ".join("; ".join(said).split()).replace("|", "/")


def _say(text: str) -> None:
    print(f"[gpu tier] {text}", file=sys.stderr, flush=True)
