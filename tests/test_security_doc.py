"""What docs/security.md points to is there."""

from __future__ import annotations

import re
from pathlib import Path

from service import body, connections, limits
from service.settings import Settings

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "security.md").read_text()


def test_every_threat_names_tests_that_exist() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("|")][2:]
    for row in rows:
        named = re.findall(r"`(tests/\S+?)`", row.split("|")[-2])
        assert named and all((ROOT / name).is_file() for name in named), row
        assert not re.search(r"`test_\w+\.py`", row), f"say where: {row}"


def test_its_figures_are_those_of_the_code() -> None:
    for figure in (
        f"{body.MAX_BYTES >> 20} MiB",
        f"{connections.LIMITS['h11_max_incomplete_event_size'] >> 10} KiB of head",
        f"{connections.HEAD_WITHIN_S:.0f} s for a head",
        f"{body.SILENCE_S:.0f} s between pieces",
        f"{body.JSON_WITHIN_S:.0f} s for JSON",
        f"{connections.TAKEN_WITHIN_S:.0f} s in which nothing of an answer is taken",
        f"{connections.MOST:,} connections",
        f"after {limits.REFUSALS_PER_S * limits.BURST:.0f} refusals {limits.REFUSALS_PER_S:.0f} a second",
        f"({Settings.rate_limit:.0f}/s, {Settings.rate_limit * limits.BURST:.0f} at once)",
    ):
        assert figure in TEXT, figure
