"""In continuous integration (CI=true) nothing is skipped but what needs a GPU, what takes minutes, and what needs a
cluster of namespaces (tests/cluster), which not every machine allows.

Tests marked `nightly` are the cases of a large set that the suite leaves to .ci/nightly: they run with NIGHTLY=1 only.

No property fails because a machine is slow: hypothesis has a deadline of its own for each example otherwise. Nor by
chance: the suite tries the same examples each time, the nightly run others.
"""

from __future__ import annotations

import gc
import os
import re
import readline
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests import processor_time
from tests.dist.harness import Zygote
from tools.common.machine import filesystem_of

MAY_BE_SKIPPED_IN_CI = re.compile(r"GPU|CUDA|takes \d+ minutes|no cluster here")
NIGHTLY = "NIGHTLY"  # environment variable
# Variables that deepspeed, torch and polars set as they are imported.
SET_BY_IMPORTS = {"PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR", "_RJEM_MALLOC_CONF"}
STOP_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]
# Each worker takes the next file of this order, so that none is left with a long one at the end. Those of tests/cluster
# mostly wait: beside each other they would leave processors idle, so that they come by turns with files that compute.
FIRST = (
    "cluster/test_launchers.py", "faults/test_sweep.py", "dist/test_restart_drill.py", "cluster/test_waits.py",
    "dist/test_soak.py", "dist/test_readme.py", "cluster/test_node_loss.py", "dist/test_compilation.py",
    "dist/test_any_job.py", "cluster/test_soak.py", "dist/test_commit_protocol.py", "dist/test_engines_training.py",
    "cluster/test_sweep.py", "dist/test_hooks.py", "dist/test_ckpt_replay.py", "cluster/test_peers.py",
    "dist/test_stop_signals.py", "dist/test_save_directory.py", "dist/test_launch.py", "cluster/test_bad_hosts.py",
    "dist/test_redistribute.py", "dist/test_restart_sweep.py", "dist/test_universal_checkpoint.py",
    "dist/test_parallel_equivalence.py", "dist/test_bit_exact.py", "dist/test_memory_shrink.py", "unit/test_scripts.py",
    "unit/tools/ckpt_analysis/render/html/test_browser.py", "unit/tools/test_preprocess_data.py",
    "unit/megatron/adapters/test_faults.py", "unit/megatron/checkpointing/store/bucket/test_prefix.py",
    "unit/megatron/checkpointing/store/bucket/test_saving.py",
)  # fmt: skip
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=NIGHTLY not in os.environ
)
settings.load_profile("any machine")
if NIGHTLY not in os.environ:
    # It also tries the numbers and strings in the source of our modules that this worker has imported until then.
    setattr(providers, "_get_local_constants", lambda: providers._local_constants)  # noqa: B010  no setting does this
# What a command prints into a pipe must not depend on the terminal of pytest. Its width is in the environment that
# processes inherit once readline was imported, where os.environ does not show it.
readline.get_history_length()
for variable in ("COLUMNS", "LINES"):
    os.environ.pop(variable, None)
    os.unsetenv(variable)


# For all processes that a test starts, too. Ranks outnumber cores here: with the ordinary policy a rank that wakes up
# preempts one that holds the lock of a connection, for which gloo's thread then spins: a sixth of the processor's
# time of tests/dist/test_parallel_equivalence.py, and half as much without that.
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# A shell starts what it runs in the background with these ignored, which all processes that a test starts inherit.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    processor_time.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    processor_time.configure(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep Python's garbage collector away from imports and items, which stay, meanwhile and in the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(trylast=True)  # after pytest's own, which goes by the parameters of fixtures
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files of FIRST first, the others and the tests of each as they are; those marked `nightly` are skipped."""
    for item in items:
        if (mark := item.get_closest_marker("nightly")) and NIGHTLY not in os.environ:
            reason = f"takes {mark.kwargs['minutes']} minutes with the others of its set; set {NIGHTLY} to run them"
            item.add_marker(pytest.mark.skip(reason=reason))
    place = {ROOT / "tests" / name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(FIRST)))


def fail_if_skipped(report: Any) -> None:
    """Turn a skip into a failure: a test that CI does not run is one that nobody runs."""
    if os.environ.get("CI") != "true" or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not MAY_BE_SKIPPED_IN_CI.search(reason):
        report.outcome = "failed"
        report.longrepr = (
            f"{reason}\nWith CI=true this is a failure; tests/install_system_packages.sh installs what tests need."
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    report = yield
    fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    report = yield  # of a module that skips itself as a whole
    fail_if_skipped(report)
    return report


@pytest.fixture(autouse=True)
def environment_left_as_found() -> Iterator[None]:
    """A variable that one test leaves behind is part of what the next ones start."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    changed -= SET_BY_IMPORTS | {"PYTEST_CURRENT_TEST"}
    for name in changed:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    assert not changed, f"this test left the environment changed: {sorted(changed)}"


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    """A command that is called within this process leaves no signal handlers to the tests after it."""
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def own_environment() -> Iterator[None]:
    """For commands that are called within this process and settle variables of the one that they think is theirs."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks processes that have torch and DeepSpeed imported: one for all tests of a worker."""
    started = Zygote.start()
    yield started
    started.close()


@pytest.fixture
def path_on_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new directory whose files can leave the page cache, where temporary files are kept in memory too."""
    temporary = tmp_path_factory.mktemp("disk")
    if filesystem_of(temporary) not in ("tmpfs", "ramfs"):
        yield temporary
        return
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as directory:
        yield Path(directory)
