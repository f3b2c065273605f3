"""What a traced job compiles while it starts is the phase `compile`, and no part of the phase around it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from restart_trace.reading import read_records

pytestmark = pytest.mark.slow  # programs that import torch, and a compiler
ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
    import os, pathlib, torch
    import torch.distributed as dist
    from torch.utils.cpp_extension import load

    def build(name):
        source = pathlib.Path(f"{name}.cpp")
        source.write_text(f'extern "C" int {name}() {{ return 1; }}')
        load(name=name, sources=[str(source)], is_python_module=False, extra_cflags=["-O0"])

    def made():
        build("of_load")

    class Made:
        def __reduce__(self):
            return made, ()

    class Built(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x * 1

        @staticmethod
        def backward(context, gradient):
            if not os.path.exists(f"of_first_step.{os.getpid()}"):
                pathlib.Path(f"of_first_step.{os.getpid()}").touch()
                build("of_first_step")
                torch.compile(lambda x: x + 1, backend="eager")(gradient)
            return gradient

    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=1)
    build("of_init")
    torch.save({"made": Made(), "weight": torch.ones(1000)}, "made.pt")
    torch.load("made.pt", weights_only=False)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        Built.apply(model(torch.ones(2))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    build("of_later")
"""


def traced(directory: Path, cycle: int, program: str = PROGRAM, *words: str) -> list[dict[str, Any]]:
    """The trace of the program, run as a job would run it."""
    (directory / "program.py").write_text(textwrap.dedent(program))
    (directory / "store").unlink(missing_ok=True)
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("RESTART_", "TORCH_EXTENSIONS"))}
    rank = {"RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(directory / "built")}
    command = [sys.executable, "-m", "restart_trace.run", "--trace-dir", "trace", "program.py", *words]
    done = subprocess.run(
        command, env=kept | rank, cwd=directory, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "switched off" not in done.stderr
    return list(read_records(directory / "trace" / f"rank_00000_cycle_{cycle:03}.jsonl"))


def test_builds_and_graphs_are_a_phase_of_their_own(tmp_path: Path) -> None:
    cold, warm = (traced(tmp_path, cycle) for cycle in range(2))
    for records in (cold, warm):
        spans = [r for r in records if r["type"] == "span" and r["operation"] == "startup"]
        compiled = [span for span in spans if span["phase"] == "compile"]
        (first,) = [span for span in spans if span["phase"] == "first_step"]
        inside = [span for span in compiled if span["start_ns"] > first["start_ns"]]
        assert len(inside) > 1 and max(s["end_ns"] for s in spans) == first["end_ns"]  # an extension and graphs
        within = sum(s["duration_ns"] for s in spans if s["start_ns"] > first["start_ns"])
        assert compiled[0]["start_ns"] < first["start_ns"] and within < first["end_ns"] - first["start_ns"]
        assert first["duration_ns"] == first["end_ns"] - first["start_ns"] - within
        load = [r for r in records if r["type"] == "span" and r["operation"] == "load"]
        begun, ended = min(s["start_ns"] for s in load), max(s["end_ns"] for s in load)
        assert not [s for s in compiled if begun < s["end_ns"] <= ended]  # what a load compiles is a part of it


BACKWARD = """
    import pathlib, sys, threading, time, torch
    from functorch.compile import make_boxed_func, nop
    from restart_trace.clock import now_ns
    from torch._dynamo.backends.common import aot_autograd

    def noted(graph, inputs):
        begun_ns = now_ns()
        time.sleep(0.01)
        pathlib.Path("backward_compiled").write_text(f"{begun_ns} {now_ns()}")
        return make_boxed_func(graph)

    def backward(loss):
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    class OfAnotherThread(torch.autograd.Function):  # as of a CUDA device
        @staticmethod
        def forward(context, weight):
            return weight.sum()

        @staticmethod
        def backward(context, gradient):
            with torch.enable_grad():
                backward(compiled(torch.ones(3, 2)).sum())

    model = torch.nn.Linear(2, 2)
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=nop, bw_compiler=noted))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        if sys.argv[1] == "training":
            compiled(torch.ones(3, 2)).sum().backward()
        elif sys.argv[1] == "one of its backward pass":
            OfAnotherThread.apply(model.weight).backward()
        else:
            backward(compiled(torch.ones(3, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("thread", "recorded"), [("training", 1), ("one of its backward pass", 1), ("one that it may not wait for", 0)]
)
def test_the_graph_of_a_backward_pass_is_compiled_in_the_first_step(tmp_path: Path, thread: str, recorded: int) -> None:
    records = traced(tmp_path, 0, BACKWARD, thread)
    spans = [r for r in records if r["type"] == "span" and r["operation"] == "startup"]
    (first,) = [span for span in spans if span["phase"] == "first_step"]
    compiled = [span for span in spans if span["phase"] == "compile"]
    begun_ns, ended_ns = map(int, (tmp_path / "backward_compiled").read_text().split())
    assert sum(span["start_ns"] <= begun_ns <= ended_ns <= span["end_ns"] for span in compiled) == recorded
    others = sum(span["duration_ns"] for span in spans if span["start_ns"] > first["start_ns"])  # imports, too
    assert first["duration_ns"] == first["end_ns"] - first["start_ns"] - others
