"""One service for all tests of a process, on the session's Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.running import Service, running
from tests.support.redis_server import RedisServer


@pytest.fixture(scope="session")
def _service_of_the_session(
    _redis_of_the_session: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    with running(_redis_of_the_session.url, tmp_path_factory.mktemp("service")) as each:
        yield each


@pytest.fixture
def service(redis_url: str, _service_of_the_session: Service) -> Iterator[Service]:
    """A running service without a job. A test that counts what it did, or sets it up, makes its own with `running`."""
    with _service_of_the_session.emptied() as each:
        yield each
