"""A server for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.object_storage import Server, environment_of, serving


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with serving() as started:
        yield started


@pytest.fixture
def here(server: Server) -> Iterator[None]:
    with environment_of(server.environment()):
        yield
