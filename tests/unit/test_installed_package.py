"""The package as `pip install .` leaves it: what it puts into site-packages, and console scripts that work anywhere."""

from __future__ import annotations

import configparser
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # it builds and installs the package

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "trace_tp2_pp2_dp2"
TOOLS = "megatron_restart_tools"
# What a checkout has beside the code is no part of a build; build/ and *.egg-info may be of an older state.
LEFT_OUT = (".*", "build", "dist", "*.egg-info", "runs", "__pycache__", "tests", "docs", "examples_deepspeed")


def clean() -> dict[str, str]:
    """This environment without what leads a process to the checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def run(*words: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=clean() | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make_environment(place: Path, *install: str) -> Path:
    """An environment in `place` with this package; its dependencies are those of the one that runs the tests."""
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=place.parent)
    python, dependencies = place / "bin" / "python", sysconfig.get_path("purelib")
    # pip sees setuptools by PYTHONPATH, and by --ignore-installed not the package that is installed there.
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index",
        "--no-build-isolation", "--ignore-installed", *install, cwd=place.parent, PYTHONPATH=dependencies,
    )  # fmt: skip
    site = next(place.glob("lib/python3*/site-packages"))
    (site / "dependencies.pth").write_text(f"{dependencies}\n")  # of it the .pth files are not read
    return place


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout's code to build from."""
    copy = tmp_path_factory.mktemp("source") / "checkout"
    return shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    build = ("wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "-w", source.parent, source)
    run(sys.executable, "-m", "pip", *build, cwd=source.parent)
    (found,) = source.parent.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    return make_environment(wheel.parent / "installed", str(wheel))


def console_scripts(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        parser = configparser.ConfigParser()
        parser.read_string(archive.read(name).decode())
    return dict(parser["console_scripts"])


def test_no_common_name_is_taken_in_site_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
    names = {name for name in names if not name.endswith(".dist-info")}
    assert names >= {"megatron", TOOLS, "pretrain_gpt.py"}
    assert names <= {"megatron", TOOLS, "pretrain_gpt.py", "restart_trace"}


def test_a_job_is_traced_by_the_installed_command(installed: Path, tmp_path: Path) -> None:
    """What it puts in front of the job is in the wheel."""
    (tmp_path / "torch.py").write_text("class serialization: save = load = _open_zipfile_writer = len\n")
    (tmp_path / "train.py").write_text("import torch\n")
    command = (installed / "bin" / "restart-trace", "run", "--", installed / "bin" / "python", "train.py")
    run(*command, cwd=tmp_path, RANK="0", WORLD_SIZE="1")
    assert (tmp_path / "restart-trace" / "rank_00000_cycle_000.jsonl").exists()


def test_type_checkers_may_use_our_annotations(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert {"megatron/py.typed", "restart_trace/py.typed"} <= set(archive.namelist())


def test_every_console_script_answers(wheel: Path, installed: Path, tmp_path: Path) -> None:
    scripts = console_scripts(wheel)
    assert set(scripts) == {"ckpt-analysis", "megatron-preprocess-data", "restart-trace"}
    for name in scripts:
        assert "usage:" in run(installed / "bin" / name, "--help", cwd=tmp_path)


def test_the_installed_analysis_reads_a_trace_and_writes_a_page(installed: Path, tmp_path: Path) -> None:
    trace, page = GOLDEN / "restart_trace", tmp_path / "page.html"
    words = ("--format", "json", "--no-cache", "--quiet", "-o", page)
    found = json.loads(run(installed / "bin" / "ckpt-analysis", trace, *words, cwd=tmp_path))
    assert found["saves"] and found["restarts"]
    assert "<html" in page.read_text()[:1000]
    run(installed / "bin" / "ckpt-analysis", "validate", trace, "--no-cache", cwd=tmp_path)  # in processes of its own


@pytest.mark.parametrize("tool", ["ckpt_analysis", "ckpt_plan", "restart_drill"])
def test_tools_run_by_their_installed_name(installed: Path, tmp_path: Path, tool: str) -> None:
    assert "usage:" in run(installed / "bin" / "python", "-m", f"{TOOLS}.{tool}", "--help", cwd=tmp_path)


def test_targets_are_refused_where_there_are_no_benchmarks(installed: Path, tmp_path: Path) -> None:
    words = ("-m", f"{TOOLS}.ckpt_replay", "--small-tensors", "1", "--dir", ".", "--targets")
    done = subprocess.run(
        [installed / "bin" / "python", *words], cwd=tmp_path, env=clean(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2 and "--targets: the package `benchmarks`" in done.stderr


def test_an_editable_install_has_no_import_hook_and_the_same_scripts(source: Path, tmp_path: Path) -> None:
    place = make_environment(source.parent / "editable", "-e", str(source))
    site = next(place.glob("lib/python3*/site-packages"))
    (path_file,) = site.glob("__editable__*")
    assert path_file.read_text().strip() == str(source)
    assert "usage:" in run(place / "bin" / "ckpt-analysis", "--help", cwd=tmp_path)


@pytest.mark.parametrize(
    "name", ["ckpt_overhead", "redistribute_bench", "restart_speed", "ckpt_analysis.bench", "ckpt_analysis.synthetic"]
)
def test_former_names_of_benchmarks_lead_to_them(name: str) -> None:
    assert "usage: python -m benchmarks." in run(sys.executable, "-m", f"tools.{name}", "--help", cwd=ROOT)
