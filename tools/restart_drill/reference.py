"""The reference run, without a fault, that a drill is compared with: run here, or taken from an earlier drill."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config import Config
from megatron.config.flags import spec_of
from restart_trace.redaction import redact_command

from . import command as commands
from .facts import CycleFacts, facts_of
from .launch import GRACE_S, DrillError, launched
from .plan import Plan

DIRECTORY = "reference"  # below --out
_TRAINING = "training.json"  # the command of the run; written once the run has ended with 0
# Flags of the other groups, of checkpoints and of the trace, cannot change a loss.
_GROUPS = ("model", "parallel", "training", "optimizer", "data")
_MAY_DIFFER = ("exit_signal_handler", "exit_signal")


@dataclass(frozen=True)
class Reference:
    """The facts of an uninterrupted run, and its directory."""

    facts: CycleFacts
    directory: Path


def run_reference(plan: Plan, training: list[str], engine: str | None) -> Reference:
    """Train without a fault, with separate checkpoints and trace. Raises DrillError."""
    return _train(training, plan.out / DIRECTORY, engine, plan.persist_interval, plan.limit_s, echo=plan.echo)


def reference_of(training: list[str], out: Path, steps: int, limit_s: float, *, spare: int = 0) -> Reference:
    """A run of at least `steps` iterations without faults and checkpoints: that of an earlier call, or a new one.

    A new one has `spare` more, for later calls. It may take `limit_s`, and one second for each iteration. Raises
    DrillError.
    """
    where = out / DIRECTORY
    if (where / _TRAINING).is_file():
        facts = facts_of(where / "trace")[0]
        if max(facts.losses) >= steps:
            return Reference(facts, where)
    shutil.rmtree(where, ignore_errors=True)
    steps += spare
    return _train(training, where, "none", None, limit_s + steps, flags=("--exit-interval", str(steps)))


def _train(
    training: list[str], where: Path, engine: str | None, persist_interval: int | None, limit_s: float,
    *, flags: Sequence[str] = (), echo: bool = False,
) -> Reference:  # fmt: skip
    """Train until the command ends with 0, then record `training`. Raises DrillError."""
    trace, log = where / "trace", where / "launch.log"
    trace.mkdir(parents=True)
    command = [*commands.completed(training, where / "checkpoints", trace, engine, persist_interval), *flags]
    with launched(command, log, echo) as launch:
        exit_code = launch.wait(limit_s)
        if exit_code != 0:
            raise DrillError(f"the reference run ended with exit code {exit_code}; see {log}")
        launch.wait_until_gone(GRACE_S)
    (where / _TRAINING).write_text(json.dumps({"command": redact_command(training)}) + "\n")
    return Reference(facts_of(trace)[0], where)


def stored_reference(out: Path, training: list[str]) -> Reference:
    """The reference run of the drill or matrix with --out `out`, for a drill of the command `training`.

    Raises DrillError if there is none, or if it trained something that need not have the same losses.
    """
    where = out.absolute() / DIRECTORY
    file = where / _TRAINING
    facts = facts_of(where / "trace").get(0) if file.is_file() else None
    if facts is None:
        raise DrillError(
            f"--reference {out}: holds no finished reference run ({file} and its trace do not exist); give the --out "
            "of a drill or a matrix with a finished reference run"
        )
    different = _differences(_stored_command(file, out), redact_command(training))
    if different:
        raise DrillError(
            f"--reference {out}: is of another training: {'; '.join(different)}; give the reference run of this one, "
            "or remove --reference to run one"
        )
    return Reference(facts, where)


def _stored_command(path: Path, out: Path) -> list[str]:
    """The command in the file at `path`."""
    try:
        return [str(word) for word in json.loads(path.read_text())["command"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
        raise DrillError(
            f"--reference {out}: {path} cannot be read ({exc!r}); give the --out of another drill, or "
            "remove --reference to run a reference run"
        ) from None


def _differences(theirs: list[str], mine: list[str]) -> list[str]:
    """Differences between two commands that may change losses; any word, if a command does not show its flags."""
    one, other = _configuration(theirs), _configuration(mine)
    if one is None or other is None:
        return [] if theirs == mine else [f"{shlex.join(theirs)} there, and {shlex.join(mine)} here"]
    found = []
    for group in _GROUPS:
        old, new = getattr(one, group), getattr(other, group)
        for field in dataclasses.fields(old):
            pair = getattr(old, field.name), getattr(new, field.name)
            if pair[0] == pair[1] or field.name in _MAY_DIFFER:
                continue
            # The first iterations of a longer run have the same losses: another flag sets the learning-rate decay.
            if field.name == "train_iters" and pair[0] > pair[1]:
                continue
            found.append(f"{_shown(field)} {pair[0]} there, and {pair[1]} here")
    return found


def _configuration(training: list[str]) -> Config | None:
    nowhere = Path("reference")  # some flags are refused without --save
    return commands.configuration(commands.completed(training, nowhere, nowhere, None))


def _shown(field: dataclasses.Field[object]) -> str:
    """The flag that sets a field, or the field's name if it is set by the environment."""
    spec = spec_of(field)
    return field.name if spec is None else spec.names[0]
