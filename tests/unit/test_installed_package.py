"""What is installed: the packages that come into site-packages, and console scripts that work anywhere.

`pip install .` installs megatron-restart, `pip install distributions/restart-trace` its part for somebody else's job.
"""

from __future__ import annotations

import configparser
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.unit.fresh_environment import (
    ROOT,
    clean,
    copy_of_the_checkout,
    link_requirements,
    make_environment,
    required,
    run,
    site_packages,
)

pytestmark = pytest.mark.slow  # it builds and installs the package

GOLDEN = ROOT / "tests" / "golden" / "trace_tp2_pp2_dp2"
TOOLS = "megatron_restart_tools"
# A job that resumes from its own checkpoint.
TRAINING = """
import os, torch

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
if os.path.exists("state.pt"):
    model.load_state_dict(torch.load("state.pt"))
for _ in range(3):
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
torch.save(model.state_dict(), "state.pt")
torch.distributed.destroy_process_group()
"""
# What somebody's own code or notebook uses of this project; with every type known.
CLIENT = f"""
import restart_trace.hooks
from {TOOLS}.ckpt_analysis import open_trace

restart_trace.hooks.install("trace")
restart_trace.hooks.step(1)
print(open_trace("trace").summary().columns, open_trace("trace").spans().height)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout's code to build from."""
    return copy_of_the_checkout(tmp_path_factory.mktemp("source") / "checkout", "tests", "docs")


def build(directory: Path, place: Path) -> Path:
    """The wheel of the distribution in `directory`, made in the new directory `place`."""
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", place, directory, cwd=directory)
    (found,) = place.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return build(source, source.parent / "all")


@pytest.fixture(scope="module")
def trace_wheel(source: Path) -> Path:
    return build(source / "distributions" / "restart-trace", source.parent / "trace")


@pytest.fixture(scope="module")
def tracing(trace_wheel: Path) -> Path:
    """The environment of a job, which has torch, after `pip install distributions/restart-trace`."""
    place = make_environment(trace_wheel.parent / "tracing", str(trace_wheel))
    site, linked = site_packages(place), set[str]()
    link_requirements(required(site, "restart_trace"), site, linked)
    assert "polars" in linked and not linked & {"torch", "deepspeed"}
    link_requirements(["torch"], site, linked)
    return place


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """An environment with what `pip install WHEEL` brings: no torch."""
    place = make_environment(wheel.parent / "installed", str(wheel))
    site, linked = site_packages(place), set[str]()
    link_requirements(required(site), site, linked)
    assert "polars" in linked and not linked & {"torch", "deepspeed"}
    return place


@pytest.fixture(scope="module")
def editable(source: Path) -> Path:
    return make_environment(source.parent / "editable", "-e", str(source))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a job that has packages of names which are ours in a checkout, to work in and on its path."""
    place = tmp_path_factory.mktemp("job")
    for name in ("tools", "megatron", "tests", "benchmarks"):
        (place / name).mkdir()
        (place / name / "__init__.py").write_text("raise RuntimeError('the package of the job')\n")
    return place


def console_scripts(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        parser = configparser.ConfigParser()
        parser.read_string(archive.read(name).decode())
    return dict(parser["console_scripts"])


def top_level(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
    return {name for name in names if not name.endswith(".dist-info")}


def test_an_installation_leaves_nothing_in_the_checkout(
    source: Path, wheel: Path, trace_wheel: Path, editable: Path
) -> None:
    """A build directory there would keep modules that are removed, and the next wheel would have them."""
    made = {path for path in source.rglob("*") if path.name in ("build", "dist") or path.suffix == ".egg-info"}
    assert made == set()


def test_no_common_name_is_taken_in_site_packages(wheel: Path) -> None:
    assert top_level(wheel) == {"megatron", TOOLS, "pretrain_gpt.py", "restart_trace"}


def test_a_job_is_traced_by_the_installed_command(installed: Path, tmp_path: Path) -> None:
    """What it puts in front of the job is in the wheel."""
    (tmp_path / "torch.py").write_text("class serialization: save = load = _open_zipfile_writer = len\n")
    (tmp_path / "train.py").write_text("import torch\n")
    command = (installed / "bin" / "restart-trace", "run", "--", installed / "bin" / "python", "train.py")
    run(*command, cwd=tmp_path, RANK="0", WORLD_SIZE="1")
    assert (tmp_path / "restart-trace" / "rank_00000_cycle_000.jsonl").exists()


def test_type_checkers_may_use_our_annotations(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert {"megatron/py.typed", "restart_trace/py.typed", f"{TOOLS}/py.typed"} <= set(archive.namelist())


def test_a_job_of_others_gets_the_trace_and_its_analysis_alone(trace_wheel: Path, tracing: Path) -> None:
    """Each module that it has can be imported without the trainer."""
    assert top_level(trace_wheel) == {TOOLS, "restart_trace"}
    assert {*console_scripts(trace_wheel)} == {"restart-trace", "ckpt-analysis"}
    with zipfile.ZipFile(trace_wheel) as archive:
        files = [Path(name) for name in archive.namelist() if name.endswith(".py") and "/site/" not in name]
    names = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]
    names = [name for name in names if not name.endswith(".__main__")]
    assert f"{TOOLS}.ckpt_analysis" in names and "restart_trace.hooks" in names
    code = "import importlib, sys; all(map(importlib.import_module, sys.argv[1:])); print('megatron' in sys.modules)"
    assert run(tracing / "bin" / "python", "-c", code, *names, cwd=tracing).strip() == "False"


def test_a_job_of_others_is_traced_and_analysed(tracing: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    launched = {"RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    traced = (tracing / "bin" / "restart-trace", "run", "--trace-dir", "trace", "--", tracing / "bin" / "python")
    for _ in range(2):
        run(*traced, "train.py", cwd=tmp_path, **launched)
    analysis = (tracing / "bin" / "ckpt-analysis", "trace", "--no-cache", "--quiet")
    found = json.loads(run(*analysis, "--format", "json", "-o", "page.html", cwd=tmp_path))
    assert [save["bytes"] > 16 << 10 for save in found["saves"]] == [True, True]
    assert (len(found["loads"]), len(found["restarts"])) == (1, 1)
    assert "<html" in (tmp_path / "page.html").read_text()[:1000]
    code = f"from {TOOLS}.ckpt_analysis import open_trace; print(len(open_trace('trace').iterations()))"
    assert run(tracing / "bin" / "python", "-c", code, cwd=tmp_path).strip() == "6"


def test_a_strict_type_checker_knows_what_is_imported(tracing: Path, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    check = (Path(sys.prefix) / "bin" / "pyright", "--pythonpath", tracing / "bin" / "python", "client.py")
    assert "0 errors, 0 warnings" in run(*check, cwd=tmp_path, PYRIGHT_PYTHON_IGNORE_WARNINGS="1")


def test_every_console_script_answers_whatever_the_job_calls_its_packages(
    wheel: Path, installed: Path, job: Path
) -> None:
    scripts = console_scripts(wheel)
    assert {"ckpt-analysis", "ckpt-plan", "ckpt-replay", "restart-drill", "restart-launch", "restart-trace"} < {
        *scripts
    }
    for name in scripts:
        command = installed / "bin" / name
        assert f"usage: {name} " in run(command, "--help", cwd=job, PYTHONPATH=str(job))


def test_the_installed_analysis_reads_a_trace_and_writes_a_page(installed: Path, job: Path, tmp_path: Path) -> None:
    analysis, trace, page = installed / "bin" / "ckpt-analysis", GOLDEN / "restart_trace", tmp_path / "page.html"
    quietly = ("--no-cache", "--quiet")
    report = run(analysis, trace, "--format", "json", *quietly, "-o", page, cwd=job, PYTHONPATH=str(job))
    found = json.loads(report)
    assert found["saves"] and found["restarts"]
    assert "<html" in page.read_text()[:1000]
    # in processes of its own
    run(analysis, "validate", trace, "--no-cache", cwd=job, PYTHONPATH=str(job))
    compared = run(analysis, "compare", f"a={trace}", f"b={trace}", "--format", "json", *quietly, cwd=tmp_path)
    assert json.loads(compared)


def test_notebooks_open_a_trace_by_the_name_of_a_checkout(installed: Path, job: Path) -> None:
    summary = f"open_trace({str(GOLDEN / 'restart_trace')!r}).summary()"
    code = f"from {TOOLS}.ckpt_analysis import open_trace; print({summary}[0, 'operation'])"
    assert run(installed / "bin" / "python", "-c", code, cwd=job, PYTHONPATH=str(job)).strip() == "launch"


def test_the_installed_plan_tells_the_tensors_of_a_preset(installed: Path, job: Path) -> None:
    plan = (installed / "bin" / "ckpt-plan", "--model", "70b", "--tp", "8", "--pp", "8")
    found = json.loads(run(*plan, "--format", "json", cwd=job, PYTHONPATH=str(job)))
    assert (found["bytes_by_kind"]["weights"], len(found["per_rank"])) == (138_600_906_752, 64)
    refused = subprocess.run([*plan, "--files"], cwd=job, env=clean(), capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2 and "pip install '.[train]' in the checkout" in refused.stderr


def test_megatron_core_can_be_imported_beside_it(installed: Path, editable: Path, tmp_path: Path) -> None:
    """Its wheel has the directory megatron/core, and no module megatron."""
    for environment in (installed, editable):
        core = site_packages(environment) / "megatron" / "core"
        core.mkdir(parents=True)
        (core / "__init__.py").write_text("")
        code = "import megatron.core, megatron.config; print(megatron.core.__file__, megatron.config.__file__)"
        core_file, config_file = run(environment / "bin" / "python", "-c", code, cwd=tmp_path).split()
        assert Path(core_file).parent == core
        assert (Path(config_file).parents[1] == core.parent) == (environment == installed)


@pytest.mark.parametrize("tool", ["ckpt_analysis", "ckpt_plan", "restart_drill"])
def test_tools_run_by_their_installed_name(installed: Path, tmp_path: Path, tool: str) -> None:
    assert "usage:" in run(installed / "bin" / "python", "-m", f"{TOOLS}.{tool}", "--help", cwd=tmp_path)


def test_an_editable_install_has_no_import_hook_and_the_same_scripts(
    source: Path, wheel: Path, editable: Path, job: Path
) -> None:
    (path_file,) = site_packages(editable).glob("__editable__*")
    assert path_file.read_text().strip() == str(source)
    assert {script.name for script in (editable / "bin").iterdir()} > console_scripts(wheel).keys()
    for name in ("ckpt-analysis", "ckpt-plan"):
        assert f"usage: {name} " in run(editable / "bin" / name, "--help", cwd=job, PYTHONPATH=str(job))
