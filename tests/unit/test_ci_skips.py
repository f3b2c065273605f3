"""A skipped test fails in continuous integration, unless it needs a GPU or minutes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unit.script_helpers import ROOT

INSTALL = ROOT / "tests" / "install_system_packages.sh"
TESTS = '''
import pytest

@pytest.mark.skipif(True, reason="needs a CUDA device")
def test_gpu(): pass

@pytest.mark.skipif(True, reason="takes 10 minutes; set ALL to run it")
def test_walk(): pass

@pytest.mark.nightly(minutes=7)
def test_of_a_large_set(): pass

@pytest.mark.skipif(True, reason="no browser here")
def test_marked(): pass

def test_told():
    pytest.skip("no strace here")

@pytest.fixture
def tool():
    pytest.skip("no tool here")

def test_fixture(tool): pass

@pytest.mark.xfail(reason="known")
def test_expected(): raise AssertionError

def test_passes(): pass
'''  # fmt: skip


def outcome(tmp_path: Path, **variables: str) -> str:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text('import pytest\npytest.importorskip("no_such_module")\n')
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "NIGHTLY", "PYTEST_ADDOPTS")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rsfEp", "-p", "tests.conftest", "-c", os.devnull,
         "-o", "markers=nightly", "--rootdir", str(tmp_path), str(tmp_path), "--continue-on-collection-errors"],
        cwd=ROOT, env=kept | variables, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stderr == "", done.stderr
    return done.stdout


@pytest.mark.slow
def test_elsewhere_skips_are_skips(tmp_path: Path) -> None:
    told = outcome(tmp_path)
    assert "1 passed, 7 skipped, 1 xfailed" in told
    assert "takes 7 minutes with the others of its set; set NIGHTLY to run them" in told


@pytest.mark.slow
def test_in_ci_they_are_failures_with_the_reason(tmp_path: Path) -> None:
    """The nightly run of CI has the tests that are marked for it, besides."""
    told = outcome(tmp_path, CI="true", NIGHTLY="1")
    assert "1 failed, 2 passed, 2 skipped, 1 xfailed, 3 errors" in told, told
    assert "/test_some.py::test_of_a_large_set\n" in told
    for reason in ("no browser here", "no strace here", "no tool here", "could not import 'no_such_module'"):
        assert f"Skipped: {reason}" in told, told
    assert "tests/install_system_packages.sh" in told


def collect(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_tests_of_a_cuda_build_are_no_part_of_the_suite() -> None:
    """So they are not skipped either; whoever names them is told what runs them."""
    others = [path for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "cuda_build"]
    done = collect("tests", *(f"--ignore={path}" for path in others))
    assert (done.returncode, "cuda_build" in done.stdout) == (pytest.ExitCode.NO_TESTS_COLLECTED, False), done.stdout
    named = collect("tests/cuda_build")
    if torch.version.cuda is None:
        assert named.returncode == pytest.ExitCode.USAGE_ERROR
        assert "is no CUDA build, which tests/cuda_build needs; run: bash tests/cuda_build.sh" in named.stderr
    else:
        assert named.returncode == pytest.ExitCode.OK and "tests/cuda_build/test_launch.py" in named.stdout


OTHERS = ("google-chrome", "strace", "etcd", "prometheus", "promtool", "mount", "umount", "unshare")
CLUSTER = ("ip", "ssh", "sshd", "pdsh", "munged", "slurmd")


def install(tmp_path: Path, *there: str, apt: str = "") -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the script where these commands are, and apt-get is a stand-in; what it was asked for."""
    for name in (*there, "apt-get"):
        command = tmp_path / name
        command.write_text(f'#!/bin/bash\necho "$*" >>{tmp_path}/asked\n{apt}\n')
        command.chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", str(INSTALL)], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=300
    )
    asked = tmp_path / "asked"
    return done, asked.read_text() if asked.exists() else ""


def test_nothing_is_installed_where_all_is_there(tmp_path: Path) -> None:
    done, asked = install(tmp_path, *OTHERS, *CLUSTER)
    assert (done.returncode, done.stdout, done.stderr, asked) == (0, "", "", "")


def test_what_is_missing_is_installed_by_root(tmp_path: Path) -> None:
    done, asked = install(tmp_path, "mount", "umount", "unshare", *CLUSTER[:-1])
    assert done.returncode == 0
    if os.geteuid() == 0:
        assert asked.splitlines()[0].startswith("update")
        assert re.fullmatch("install .* chromium strace etcd-server prometheus", asked.splitlines()[1])
        assert asked.endswith(" slurm-wlm\n")
    else:
        assert (
            asked == ""
            and "tests will be skipped without: chromium strace etcd-server prometheus slurm-wlm" in done.stderr
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="no cluster here: it takes root")
def test_what_the_cluster_needs_may_fail_to_install(tmp_path: Path) -> None:
    """Its tests are skipped, then; the others are run."""
    done, _ = install(tmp_path, *OTHERS, *CLUSTER[1:], apt="exit 100")
    assert done.returncode == 0 and "tests/cluster will be skipped without: iproute2" in done.stderr
