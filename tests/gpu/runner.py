"""Runs the commands of a part, each in a process group of its own, and records what came of them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from restart_trace.version import __version__
from tests.gpu.parts import ENGINES, ENGINES_HERE, PARTS, ROOT, Part, Setting, Step

PASSED, FAILED, LEFT_OUT = "passed", "failed", "left out"
RECORD = "part.json"
_LAST_WORDS = 1500  # characters
_GRACE_S = 20.0  # from SIGTERM to SIGKILL: the drill ends its launches
_ASK_DEVICE = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
_ASK_ENGINES = "import sys, json; from tools.ckpt_replay.prepare import unavailable_engines; "
_ASK_ENGINES += "print(json.dumps(unavailable_engines(tuple(sys.argv[1:]))))"


class TierError(Exception):
    """The tier cannot run here."""


def device_problem(setting: Setting) -> str | None:
    """Why the tier cannot run on this machine; None if it can."""
    done = _asked(setting, _ASK_DEVICE)
    if done.returncode != 0:
        return (
            f"{sys.executable} cannot import torch; set PYTHON to one that can:\n{done.stderr.strip()[-_LAST_WORDS:]}"
        )
    if not setting.rehearsal and done.stdout.strip() == "0":
        return "torch sees no CUDA device here; --rehearse runs the same on CPUs with small sizes"
    return None


def run_part(part: Part, setting: Setting) -> str:
    """Run a part and record it in OUT/PART/part.json; PASSED, FAILED or LEFT_OUT."""
    directory = setting.out / part.name
    if directory.exists() and not (directory / RECORD).exists():
        raise TierError(f"--out {setting.out}: {directory.name} in it is not of this tier; give another directory")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    start = time.monotonic()
    record: dict[str, Any] = {
        "part": part.name, "shows": part.shows, "rehearsal": setting.rehearsal, "version": __version__,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "expected_s": part.expected_s,
        "outcome": FAILED, "seconds": 0.0, "steps": [],
    }  # fmt: skip
    (directory / RECORD).write_text(json.dumps(record))  # a part that is interrupted has failed
    try:
        for step in part.steps(setting):
            found = _run_step(step, setting, directory, start + part.limit_s)
            record["steps"].append(found)
            _say(f"{part.name}: {step.name}: {found['outcome']} after {found['seconds']:.1f} s")
        outcomes = [step["outcome"] for step in record["steps"]]
        record["outcome"] = next((outcome for outcome in (FAILED, LEFT_OUT) if outcome in outcomes), PASSED)
    finally:
        shutil.rmtree(setting.work, ignore_errors=True)
        record["seconds"] = round(time.monotonic() - start, 2)
        (directory / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    return str(record["outcome"])


def _run_step(step: Step, setting: Setting, directory: Path, deadline: float) -> dict[str, Any]:
    began = time.monotonic()
    found: dict[str, Any] = {"step": step.name, "command": step.shown()}

    def ended(outcome: str, why: str | None = None, **more: Any) -> dict[str, Any]:
        return found | {"outcome": outcome, "why": why, "seconds": round(time.monotonic() - began, 2)} | more

    asked = engine_problems(setting) if step.engines else {}
    problems = {name: why for name, why in asked.items() if name in step.engines}
    engines = [name for name in step.engines if name not in problems]
    if problems and not engines:
        return ended(LEFT_OUT, "; ".join(problems.values()))
    found["left_out"] = problems
    if began >= deadline:
        return ended(FAILED, "not started: the time of the part was over")
    (setting.work / "tmp").mkdir(parents=True, exist_ok=True)
    log = directory / f"{step.name.split(',')[0].replace(' ', '_')}.log"
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("wb"))
        output = stack.enter_context((directory / step.stdout).open("wb")) if step.stdout else errors
        process = subprocess.Popen(
            [",".join(engines) if word == ENGINES_HERE else word for word in step.argv],
            cwd=ROOT, env=setting.environment() | step.environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(deadline - began)
        except subprocess.TimeoutExpired:
            return ended(FAILED, "ended: the time of the part was over", log=_end_of(log))
        finally:
            _end(process)
    if status == 0:
        return ended(PASSED)
    return ended(FAILED, f"exit status {status}", log=_end_of(log))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the group of a command; one that ended by itself may have left processes in it."""
    for signum, grace_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)


@functools.cache
def engine_problems(setting: Setting) -> dict[str, str]:
    """Of all engines of the tier that cannot save here: why; asked once, which takes seconds of imports.

    Raises TierError if they cannot even be asked.
    """
    done = _asked(setting, _ASK_ENGINES, *ENGINES)
    if done.returncode != 0:
        raise TierError(f"the engines cannot be imported:\n{done.stderr.strip()[-_LAST_WORDS:]}")
    problems: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return problems


def _asked(setting: Setting, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, cwd=ROOT, env=setting.environment(), capture_output=True, text=True)


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-_LAST_WORDS:]


def records(out: Path) -> list[dict[str, Any]]:
    """Records of the parts that have run, in the order of the tier."""
    paths = [out / part.name / RECORD for part in PARTS]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def write_overview(setting: Setting) -> str:
    """Write OUT/overview.md, a line for each part that has run, and return it."""
    lines = ["| part | outcome | s | why |", "|---|---|---|---|"]
    for record in records(setting.out):
        why = "; ".join(f"{step['step']}: {step['why']}" for step in record["steps"] if step["why"])
        shown = " ".join(why.split()).replace("|", "/")
        lines.append(f"| {record['part']} | {record['outcome']} | {record['seconds']:.1f} | {shown} |")
    text = "\n".join(lines) + "\n"
    (setting.out / "overview.md").write_text(text)
    return text


def _say(text: str) -> None:
    print(f"[gpu tier] {text}", file=sys.stderr, flush=True)
