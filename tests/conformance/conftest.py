"""Fixtures of the conformance suite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.subjects import Subject, subjects_under_test
from tests.dist import forked_writers
from tests.dist.harness import Zygote

_HERE = os.path.join(Path(__file__).parent, "")  # compared as text: as paths it takes each worker a quarter of a second
# What libraries say of being used as they are meant to be: by one rank alone, through torch.jit.
_KNOWN_WARNINGS = (
    "ignore:torch.distributed is disabled, unavailable or uninitialized",
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(_HERE):
            for warning in _KNOWN_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session", params=subjects_under_test())
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    made = Subject(request.param)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def helpers_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Those of engines that begin processes, for what such a process must import takes longer than most tests."""
    if not any(engine in request.node.name for engine in ("fastpersist-decoupled", "dcp-process")):
        yield
        return
    zygote: Zygote = request.getfixturevalue("zygote")
    with forked_writers.installed(zygote.forks):
        yield


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An empty directory of a save's own."""
    made = tmp_path / "checkpoint"
    made.mkdir()
    return made
