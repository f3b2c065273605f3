"""Command line: what `restart-trace run` costs jobs of users, in Markdown. Exit status: 0 measured, 2 could not run."""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.program import printed
from benchmarks.common.ranks import ROOT, MeasurementError, own_directory
from benchmarks.common.rounds import add_directory, add_repeat, in_turn
from benchmarks.overhead.client import call_s
from benchmarks.overhead.report import TARGET, spread, table_of
from megatron.net.free_port import free_port
from tools.common.cli import make_parser
from tools.common.machine import machine

_RANKS = 2
_PROGRAMS = ROOT / "tests" / "dist" / "scripts" / "clients"
_SITES = [Path(__file__).resolve().parent / "site", ROOT / "restart_trace" / "hooks" / "site"]
_LAST_WORDS = 2000  # characters
_VARIANTS = ("untraced", "traced")
_HEAD = [
    "job", "steps", "untraced processor s", "traced processor s", "untraced s", "traced s", "start ms", "calls ms",
    "share",
]  # fmt: skip
_EPILOG = """\
jobs: JOBS

examples:
  %(prog)s                                            all jobs, 3 rounds
  %(prog)s --only "mp.spawn" --repeat 1               a first look, in a minute

A round runs each job twice, with and without restart-trace run, in turn. Processor time is that of all processes of the
job, user and system. Each value is the median over the rounds, with the interquartile range after +-. `start` is what
tracing takes in all processes for the command, imports, opening and closing of traces, `calls` what it takes around
hooked functions; `share` is both over the processor time of the untraced job.

exit status: 0 measured, 2 could not run
"""
_TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", str(_RANKS)]


@dataclass(frozen=True)
class Job:
    """A program and its arguments, in which {} is the number of steps; `steps`: how many it makes by default."""

    words: tuple[str, ...]
    steps: int
    in_shell: bool = False
    spawns: bool = False

    def command(self, steps: int) -> list[str]:
        """The command of the user, who has the interpreter's directory on PATH."""
        script, *arguments = (word.format(steps) for word in self.words)
        starter = ["python"] if self.spawns else _TORCHRUN
        words = [*starter, str(_PROGRAMS / script), *arguments]
        return ["sh", "-c", f"{' '.join(words)}; exit $?"] if self.in_shell else words


# Each takes some 20 s of processor time at the default width, in all its processes, and saves once or twice.
JOBS = {
    "DDP, torch.save to a path": Job(("ddp_snapshot.py", "path", "{}"), 30),
    "DDP, torch.save into an open file": Job(("ddp_snapshot.py", "file", "{}"), 30),
    "FSDP2, dcp.save": Job(("fsdp_checkpoint.py", "save", "{}"), 30),
    "FSDP2, dcp.async_save": Job(("fsdp_checkpoint.py", "async_save", "{}"), 30),
    "Trainer": Job(("hf_alone.py", "{}"), 30),
    "Trainer, ZeRO-3": Job(("hf_trainer.py", "{}", "3"), 12),
    "Accelerate": Job(("accelerate_alone.py", "{}"), 30),
    "Lightning, DDP": Job(("lightning_ddp.py", "{}"), 30),
    "shell script, DDP": Job(("ddp_snapshot.py", "path", "{}"), 30, in_shell=True),
    "mp.spawn": Job(("spawn_checkpoint.py", "{}"), 300, spawns=True),
}
Sample = dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    parser = make_parser(
        "python -m benchmarks.overhead.jobs",
        "Measure what restart-trace run costs whole jobs that do not use this project's trainer.",
        _EPILOG.replace("JOBS", ", ".join(JOBS)),
    )
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS), metavar="JOB", help="(default: all)")
    add_repeat(parser, 3)
    parser.add_argument("--steps", type=float, default=1.0, metavar="X", help="so many times the steps (default: 1)")
    parser.add_argument("--width", type=int, default=2048, metavar="N", help="of the models' layers (default: 2048)")
    parser.add_argument("--save-every", type=int, default=25, metavar="N", help="steps between saves (default: 25)")
    add_directory(parser)
    parser.add_argument("--samples", type=Path, metavar="FILE", help="also write every sample there, as JSON")
    arguments = parser.parse_args(argv)
    for flag in ("repeat", "width", "save_every"):
        if getattr(arguments, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')} {getattr(arguments, flag)}: must be at least 1")
    if arguments.steps <= 0:
        parser.error(f"--steps {arguments.steps:g}: must be more than 0")
    return printed("jobs", lambda: _measured(arguments))


def _measured(arguments: argparse.Namespace) -> str:
    compileall.compile_dir(ROOT / "restart_trace", quiet=1)  # as an installation does
    found_at, of_call_s = machine(), call_s()
    samples: dict[str, dict[str, list[Sample]]] = {
        name: {variant: [] for variant in _VARIANTS} for name in arguments.only
    }
    for number, name in in_turn(arguments.only, arguments.repeat):
        for variant in _VARIANTS[:: -1 if number % 2 else 1]:  # neither is always the second
            with own_directory(arguments.dir, "jobs_") as directory:
                sample = measure(name, directory, arguments, traced=variant == "traced")
            sample["calls_s"] = sample.get("calls_s", 0.0) + sample.pop("calls", 0) * of_call_s
            samples[name][variant].append(sample)
        print(f"round {number + 1} of {arguments.repeat}: {name}", file=sys.stderr)
        if arguments.samples is not None:
            arguments.samples.write_text(json.dumps({"machine": found_at, "samples": samples}) + "\n")
    return table({name: (steps_of(name, arguments), of["untraced"], of["traced"]) for name, of in samples.items()})


def steps_of(name: str, arguments: argparse.Namespace) -> int:
    """Number of steps of a job."""
    return max(1, round(arguments.steps * JOBS[name].steps))


def measure(name: str, directory: Path, arguments: argparse.Namespace, *, traced: bool) -> Sample:
    """A job once, from its command to its end. Raises MeasurementError if it fails, or a hook does."""
    work, notes = directory / "work", directory / "notes"
    work.mkdir()
    notes.mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    environment = kept | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]), "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "LOCAL_SIZE": str(_RANKS), "WIDTH": str(arguments.width),
        "SAVE_EVERY": str(arguments.save_every), "PORT": str(free_port()),
    }  # fmt: skip
    command = JOBS[name].command(steps_of(name, arguments))
    if traced:
        environment |= {"OVERHEAD_DIR": str(notes), "OVERHEAD_ROOT": str(ROOT)}
        path = f"PYTHONPATH={os.pathsep.join(map(str, _SITES))}"
        command = ["restart-trace", "run", "--trace-dir", str(directory / "trace"), "--", "env", path, *command]
    sample = _run(name, command, environment, work, directory / "log.txt")
    if traced:
        sample |= _noted(name, notes)
        sample["start_s"] += _of_the_command_s(environment, directory)
    return sample


def _run(name: str, command: list[str], environment: dict[str, str], work: Path, log: Path) -> Sample:
    """Wall time and processor time of a command and of all processes that it starts and waits for."""
    with log.open("wb") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, cwd=work, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
    text = log.read_text(errors="replace")
    if process.returncode or "switched off" in text:
        raise MeasurementError(f"{name}: ended with exit code {process.returncode}:\n{text[-_LAST_WORDS:]}")
    return {"wall_s": time.perf_counter() - started, "cpu_s": used.ru_utime + used.ru_stime}


def _noted(name: str, notes: Path) -> Sample:
    """What tracing took in all processes together, as the sitecustomize beside this module noted it."""
    found = [json.loads(path.read_text()) for path in notes.iterdir()]
    if sum(one["calls"] > 0 for one in found) < _RANKS:
        raise MeasurementError(f"{name}: of {len(found)} processes, fewer than {_RANKS} have called a hook")
    return {key: sum(one[key] for one in found) for key in found[0]}


def _of_the_command_s(environment: dict[str, str], directory: Path) -> float:
    """Processor time of `restart-trace run` itself, before it is the command."""
    command = ["restart-trace", "run", "--trace-dir", str(directory / "trace"), "--", "true"]
    return _run("true", command, environment, directory, directory / "log_of_true.txt")["cpu_s"]


def table(samples: dict[str, tuple[int, list[Sample], list[Sample]]]) -> str:
    """The table in Markdown; `samples`: job -> its steps, and the samples of its untraced and of its traced runs."""
    rows, met = [], 0
    for name, (steps, untraced, traced) in samples.items():
        plain_s = statistics.median(sample["cpu_s"] for sample in untraced)
        share = statistics.median((sample["start_s"] + sample["calls_s"]) / plain_s for sample in traced)
        met += share < TARGET
        rows.append([
            name, str(steps), *(spread(of, key, 1, 1) for key in ("cpu_s", "wall_s") for of in (untraced, traced)),
            *(spread(traced, key, 1e3, 1) for key in ("start_s", "calls_s")), f"{share:.2%}".replace("%", " %"),
        ])  # fmt: skip
    return table_of(
        [_HEAD, *rows], f"Tracing takes less than {TARGET:.0%} of the processor time of {met} of {len(samples)} jobs."
    )


if __name__ == "__main__":
    sys.exit(main())
