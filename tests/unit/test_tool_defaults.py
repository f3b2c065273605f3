"""What notes the options of command lines (tests/tool_defaults.py) leaves an environment as it was."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.dist.harness import ROOT, wait_for
from tests.tool_defaults import line_of_site
from tests.unit.fresh_environment import site_packages

pytestmark = pytest.mark.slow  # interpreters are started

COMMAND = """
import shutil, site, sys
from pathlib import Path
site.addsitedir(sys.argv[1])
if sys.argv[2:] == ["gone meanwhile"]:
    shutil.rmtree(Path(sys.argv[1]) / "records")
from tools.common.cli import make_parser
def main():
    make_parser("ckpt-something", "", "").parse_args([])
main()
"""


@pytest.mark.parametrize("directory", ["there", "gone", "gone meanwhile"])
def test_a_command_line_is_noted_only_while_the_records_are_there(tmp_path: Path, directory: str) -> None:
    """A file that a killed run has left in site-packages fails no command."""
    records = tmp_path / "records"
    (tmp_path / "tool_defaults.pth").write_text(line_of_site(records))
    if directory != "gone":
        records.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, tmp_path, directory], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    if directory == "there":
        (of_process,) = records.iterdir()
        (line,) = of_process.read_text().splitlines()
        assert json.loads(line)["command"] == "ckpt-something"
    else:
        assert not records.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_it_leaves_nothing_in_the_environment(tmp_path: Path, number: signal.Signals) -> None:
    environment, began = tmp_path / "environment", tmp_path / "began"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    site = site_packages(environment)
    (site / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    waits = tmp_path / "test_waits.py"
    waits.write_text(f"import time\ndef test_waits():\n    open({str(began)!r}, 'w').close()\n    time.sleep(600)\n")
    command = [environment / "bin" / "python", "-m", "tests.tool_defaults", waits]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_for(lambda: began.exists() or started.poll() is not None, "the first test")
        assert started.poll() is None and (site / "tool_defaults.pth").exists()
        started.send_signal(number)
        assert started.wait() == 128 + number
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    assert not (site / "tool_defaults.pth").exists()
