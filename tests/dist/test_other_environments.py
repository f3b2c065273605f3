"""Jobs whose libraries cannot be in this environment: each is installed beside it, where its programs find it first.

megatron-core's package is called `megatron`, as this project's is. torchtitan and the trackers of experiments require
much that their checkpoints and scalars do not need, MLflow also an older importlib_metadata.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.harness import ROOT
from tests.dist.job_table import DOCUMENT, HINT, TITLES, check_row, covered, enough, operations, rows, sizes
from tests.dist.test_any_job import JOBS, STARTED
from tests.dist.test_hooks import CLIENTS, RANKS, SCRIPTS, trace_command
from tests.unit.tools.ckpt_analysis.trace_factory import write_trace
from tools.ckpt_analysis import open_trace
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.render.json_output import to_dict
from tools.ckpt_analysis.render.scalars import scalars
from tools.ckpt_analysis.report import analyse

MEGATRON_CORE, TORCHTITAN = "megatron_core.py", "titan_checkpoint.py"
# Program -> what pip installs for it, without dependencies: torch and the others are those of this environment
PACKAGES = {
    MEGATRON_CORE: ["megatron-core==0.16.1"],
    TORCHTITAN: [
        "torchtitan==0.3.0", "torch_checkpointing==0.1.1", "torchdata==0.11.0", "spmd_types==0.2.3", "tyro==1.0.17",
        "docstring-parser==0.18.0", "typeguard==4.6.1", "einops==0.8.2",
    ],
}  # fmt: skip
INSTALLED_JOBS = [
    (MEGATRON_CORE, "save", ("2", "4")),
    (MEGATRON_CORE, "async_save", ("2",)),
    (TORCHTITAN, "disabled", ("2", "4")),
    (TORCHTITAN, "async", ("2",)),
]
WIDTH = "1024"
# Reads what wandb writes offline, a log of LevelDB's format: blocks of 32 KiB, and headers of 7 bytes before each part
WANDB_READER = """
import sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

data, at, record = Path(sys.argv[1]).read_bytes(), 7, b""
while at + 7 <= len(data):
    left = 32768 - at % 32768
    if left < 7:
        at += left
        continue
    length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
    record += data[at + 7 : at + 7 + length]
    at += 7 + length
    if kind in (1, 4):  # the last part of a record
        found, record = Record.FromString(record), b""
        for item in found.history.item:
            print(item.key or "/".join(item.nested_key), item.value_json, found.history.step.num)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Program -> the directory that has its packages."""
    places = {}
    for program, packages in PACKAGES.items():
        places[program] = tmp_path_factory.mktemp(Path(program).stem)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", places[program], *packages]
        subprocess.run(pip, check=True)
    # A package without an __init__.py gives way to any other of its name, such as this project's.
    (places[MEGATRON_CORE] / "megatron" / "__init__.py").touch()
    return places


@pytest.mark.nightly(minutes=9)
@pytest.mark.parametrize(("program", "how", "launches"), INSTALLED_JOBS)
def test_its_saves_and_loads_are_traced_as_the_row_of_the_table_has_them(
    installed: dict[str, Path], tmp_path: Path, program: str, how: str, launches: tuple[str, ...]
) -> None:
    """Within the client's own clock, with the bytes of the disk, and at least 95 % of them in phases."""
    trace_dir = tmp_path / "trace"
    logs = []
    for cycle, steps in enumerate(launches):
        done = trace_command(
            tmp_path, "torchrun", "--standalone", "--nproc-per-node", str(RANKS), "--redirects", "3",
            "--log-dir", f"logs{cycle}", str(SCRIPTS / program), how, steps,
            PYTHONPATH=str(installed[program]), WIDTH=WIDTH,
        )  # fmt: skip
        said = {log.parent.name: log.read_text() for log in (tmp_path / f"logs{cycle}").rglob("stdout.log")}
        errors = "".join(log.read_text() for log in (tmp_path / f"logs{cycle}").rglob("stderr.log"))
        assert done.returncode == 0 and "switched off" not in errors, (done.stderr + errors)[-3000:]
        logs.append([said[str(rank)] for rank in range(RANKS)])
        for rank in range(RANKS):
            made = [len(operations(trace_dir, kind, cycle, rank)) for kind in ("save", "load")]
            assert made == [1, cycle]
    shares = [covered(trace_dir, kind, len(launches)) for kind in ("save", "load")]
    assert enough(shares), shares
    report = analyse(load_trace(trace_dir)).report
    assert [problem.message for problem in report.problems] == []
    save = report.saves[-1]
    on_disk = sizes(next(tmp_path.rglob(save.tag or "")))
    assert (save.bytes, save.num_files, save.ranks) == (sum(on_disk), len(on_disk), RANKS)
    for load in report.loads:
        assert load.bytes is not None and load.bytes >= 0.99 * sum(on_disk)
    blocked = [span for op in operations(trace_dir, "save", 0, 0) for span in op if span.get("blocking") is False]
    assert bool(blocked) is (how in ("async_save", "async"))
    check_row(f"{program} {how}", trace_dir, logs, to_dict(report), sum(on_disk), shares)


def test_the_table_has_every_job_and_no_other() -> None:
    assert list(rows(DOCUMENT.read_text())) == list(TITLES.values()), HINT
    run = {" ".join(words) for words, *_ in (*JOBS.values(), *CLIENTS.values())}
    run |= {f"job.sh {program}" for program in STARTED} | {f"{program} {how}" for program, how, _ in INSTALLED_JOBS}
    assert set(TITLES) == run


@pytest.mark.nightly(minutes=3)
@pytest.mark.parametrize(
    ("tracker", "packages"),
    [
        ("wandb", ["--no-deps", "wandb==0.31.0", "click", "platformdirs", "xxhash"]),
        ("mlflow", ["mlflow-skinny==3.17.2"]),
    ],
)
def test_a_tracker_of_experiments_takes_the_scalars_as_the_page_shows(
    tmp_path: Path, tracker: str, packages: list[str]
) -> None:
    """What it wrote is read by its own classes, or is plain text."""
    page = (ROOT / "docs" / "prometheus.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if f"import {tracker}" in block]
    trace = write_trace(tmp_path / "trace")
    place = tmp_path / "packages"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--target", place, *packages], check=True)
    environment = os.environ | {
        "PYTHONPATH": f"{place}{os.pathsep}{ROOT}", "WANDB_DIR": str(tmp_path), "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(), "MLFLOW_DISABLE_TELEMETRY": "true", "TRACE": str(trace),
    }  # fmt: skip
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True)
    if tracker == "wandb":
        (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
        read = subprocess.run(
            [sys.executable, "-c", WANDB_READER, written], env=environment, check=True, capture_output=True, text=True
        )
        rows = [line.split() for line in read.stdout.splitlines() if not line.startswith("_")]
        found = {name: (float(value), int(step)) for name, value, step in rows}
    else:
        metrics = next(tmp_path.glob("mlruns/*/*/metrics"))
        found = {}
        for path in metrics.iterdir():
            _, value, step = path.read_text().split()
            found[path.name.replace(".", "/")] = (float(value), int(step))
    expected = dict(scalars(open_trace(trace).analysis))
    assert found == {name: (pytest.approx(value), 12) for name, value in expected.items()}
