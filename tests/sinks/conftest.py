"""Fixtures of tests of sinks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fakes import FakeDiscord


@pytest.fixture
def discord() -> Iterator[FakeDiscord]:
    """A Discord that takes everything, unless told otherwise."""
    with FakeDiscord() as fake:
        yield fake
