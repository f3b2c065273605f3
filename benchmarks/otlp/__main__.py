"""What --otlp costs a training step: one training, whose sending process is stopped in every other block of steps.

A round is three blocks of steps: without the process that sends, with it, and without it again (the control). Steps are
those of the trace. The collector runs here and takes what it gets.

Times of steps are as noisy as the machine. The processor time of the process that sends, over that of the training, is
not: it includes what is sent later of the blocks in which it was stopped, and not its start, which is told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.program import printed
from benchmarks.common.ranks import ROOT, MeasurementError, own_directory
from benchmarks.common.rounds import add_directory, add_format
from benchmarks.common.samples import ratio_of_medians, verdict
from restart_trace.follower import refusal
from restart_trace.reading import read_records
from tools.common.cli import make_parser

_TARGET = 0.01
_WARM_UP = 20  # steps that are not counted
_POLL_S = 0.1
_EPILOG = """\
examples:
  %(prog)s
      20 rounds of three blocks of 50 steps, a few minutes
  %(prog)s --rounds 12 --steps 20 --format json
      fewer steps, and every sample

exit status: 0 measured, 2 could not run
"""
_MODEL = """
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --global-batch-size 2
    --lr 1e-4 --train-iters 1000000 --bf16 --tokenizer-type NullTokenizer --vocab-size 1000 --split 1,0,0
    --eval-iters 0 --log-interval 1000
"""


class Training:
    """The training: its process, the process that sends, and the steps so far."""

    def __init__(self, process: subprocess.Popen[bytes], trace: Path, log: Path) -> None:
        self._process = process
        self._trace = trace
        self._log = log

    def steps(self) -> dict[int, float]:
        """Step -> its seconds, of those that have ended."""
        paths = [*self._trace.glob("rank_*.jsonl")]
        records = [record for path in paths for record in read_records(path)]
        return {
            record["step"]: (record["end_ns"] - record["start_ns"]) / 1e9
            for record in records
            if record.get("type") == "iteration"
        }

    def wait_for(self, step: int) -> None:
        """Wait until this step has ended. Raises MeasurementError if the training ends before."""
        while max(self.steps(), default=0) < step:
            if self._process.poll() is not None:
                raise MeasurementError(f"the training has ended:\n{self._log.read_text()[-2000:]}")
            time.sleep(_POLL_S)

    def processor_s(self) -> float:
        """Processor time of the training so far, of its threads and of children that have ended."""
        return sum(psutil.Process(self._process.pid).cpu_times()[:4])

    def find_sender(self) -> psutil.Process:
        """The process that sends, once it does: then it has imported what it needs."""
        for child in psutil.Process(self._process.pid).children():
            if "follow" in child.cmdline():
                return child
        raise MeasurementError("the training has not started the process that sends")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table or JSON. Returns the exit status."""
    description = "Measure what --otlp costs a training step."
    parser = make_parser("python -m benchmarks.otlp", description, _EPILOG)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="rounds of three blocks (default: 20)")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="steps of a block (default: 50)")
    add_directory(parser)
    add_format(parser)
    arguments = parser.parse_args(argv)
    return printed(parser.prog, lambda: _shown(_measure(arguments), arguments.format))


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    if reason := refusal("http://127.0.0.1"):
        raise MeasurementError(f"--otlp: {reason}")
    with (
        own_directory(arguments.dir, "otlp-") as directory,
        _collector() as (endpoint, received),
        _training(directory, endpoint) as training,
    ):
        training.wait_for(_WARM_UP)
        while not received:  # it sends when it has imported what it needs
            time.sleep(_POLL_S)
        sender = training.find_sender()
        first, started_s = max(training.steps()) + 2, sum(sender.cpu_times()[:2])
        trained_s = -training.processor_s()
        for block in range(3 * arguments.rounds):
            sender.send_signal(signal.SIGCONT if block % 3 == 1 else signal.SIGSTOP)
            training.wait_for(first + (block + 1) * arguments.steps)
        trained_s += training.processor_s()
        sender.send_signal(signal.SIGCONT)
        requests = len(received)
        while len(received) < requests + 2:  # then it has sent what it has not yet
            time.sleep(_POLL_S)
        processor = {"start_s": started_s, "sender_s": sum(sender.cpu_times()[:2]) - started_s, "training_s": trained_s}
        return _analyse(training.steps(), first, arguments, processor, len(received))


def _analyse(
    steps: dict[int, float], first: int, arguments: argparse.Namespace, processor: dict[str, float], requests: int
) -> dict[str, Any]:
    medians = []
    for block in range(3 * arguments.rounds):
        begin = first + block * arguments.steps + 1  # the first step of a block may belong to the one before
        medians.append(statistics.median(steps[step] for step in range(begin + 1, begin + arguments.steps)))
    off, on, again = medians[::3], medians[1::3], medians[2::3]
    ratio, control = ratio_of_medians(on, [off, again]), ratio_of_medians(again, [off])
    return {
        "rounds": arguments.rounds, "steps": arguments.steps, "requests": requests,
        "median_s": {"without": statistics.median(off + again), "with": statistics.median(on)},
        "ratio": vars(ratio), "control": vars(control),
        "verdict": verdict(ratio, control, _TARGET, arguments.rounds),
        "processor": processor, "samples": {"without": off, "with": on, "again": again},
    }  # fmt: skip


def _shown(found: dict[str, Any], form: str) -> str:
    if form == "json":
        return json.dumps(found, indent=1)

    def percent(ratio: dict[str, float]) -> str:
        value, low, high = (100 * (number - 1) for number in (ratio["value"], ratio["low"], ratio["high"]))
        return f"{value:+.2f} % (95 %: {low:+.2f} to {high:+.2f} %)"

    median, processor = found["median_s"], found["processor"]
    share = processor["sender_s"] / processor["training_s"]
    met = "met" if share < _TARGET else "not met"
    return "\n".join((
        f"{found['rounds']} rounds of 3 blocks of {found['steps']} steps of one rank",
        f"  step without      {median['without'] * 1e3:8.2f} ms",
        f"  step with --otlp  {median['with'] * 1e3:8.2f} ms",
        f"  overhead          {percent(found['ratio'])}   target < {_TARGET:.0%}: {found['verdict']}",
        f"  noise             {percent(found['control'])}",
        f"  processor time    {processor['training_s']:.2f} s of the training",
        f"                    {processor['sender_s']:.2f} s of what sends: {share:.2%}   target < {_TARGET:.0%}: {met}",
        f"                    {processor['start_s']:.2f} s of what sends before that, for its start",
    ))  # fmt: skip


@contextmanager
def _training(directory: Path, endpoint: str) -> Iterator[Training]:
    data, log = directory / "data", directory / "log.txt"
    words = ["-m", "tools.make_synthetic_dataset", "--output-prefix", str(data), "--tokens", "200000"]
    env = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    env |= {"MASTER_PORT": "0"}
    env.setdefault("OMP_NUM_THREADS", "1")
    flags = [*_MODEL.split(), "--data-path", str(data), "--restart-trace-dir", str(directory / "trace")]
    with log.open("wb") as output:
        subprocess.run([sys.executable, *words, "--vocab-size", "1000"], cwd=ROOT, check=True, stdout=output)
        command = [sys.executable, "pretrain_gpt.py", *flags, "--otlp", endpoint]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield Training(process, directory / "trace", log)
    finally:
        process.kill()
        process.wait()


@contextmanager
def _collector() -> Iterator[tuple[str, list[int]]]:
    """A collector on loopback: its endpoint, and the bytes of each request."""
    received: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    sys.exit(main())
