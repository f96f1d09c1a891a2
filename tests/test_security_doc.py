"""What docs/security.md points to is there."""

from __future__ import annotations

import re
from pathlib import Path

from jobs.text.units import format_bytes, format_duration
from service.edge import body, connections, limits
from service.settings import ServiceSettings

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "security.md").read_text()


def test_every_threat_names_tests_that_exist() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("|")][2:]
    for row in rows:
        named = re.findall(r"`(tests/\S+?)`", row.split("|")[-2])
        assert named and all((ROOT / name).is_file() for name in named), row
        assert not re.search(r"`test_\w+\.py`", row), f"say where: {row}"


def test_figures_of_the_security_page_are_those_of_the_code() -> None:
    for figure in (
        format_bytes(body.MAX_BYTES),
        f"{format_bytes(connections.LIMITS['h11_max_incomplete_event_size'])} of head",
        f"{format_duration(connections.HEAD_WITHIN_S)} for a head",
        f"{format_duration(body.SILENCE_S)} between pieces",
        f"{format_duration(body.JSON_WITHIN_S)} for JSON",
        f"{format_duration(connections.TAKEN_WITHIN_S)} in which nothing of an answer is taken",
        f"{connections.MOST:,} connections",
        f"after {limits.REFUSALS_PER_S * limits.BURST:.0f} refusals {limits.REFUSALS_PER_S:.0f} a second",
        f"({ServiceSettings.rate_limit:.0f}/s, {ServiceSettings.rate_limit * limits.BURST:.0f} at once)",
    ):
        assert figure in TEXT, figure
