"""`pytest -p tests.suite_report --suite-report=FILE` adds a line to FILE for each phase of each test, as soon as it has
ended: what is cut off later has said what it did. `.ci/table.py` reads them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite-report", type=Path, help="file to which the outcome and seconds of each test are added")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--suite-report")
    if file is not None and not hasattr(config, "workerinput"):  # processes of pytest-xdist report to the first one
        config.pluginmanager.register(_Lines(file))


class _Lines:
    def __init__(self, file: Path) -> None:
        self._file = file

    def _add(self, test: str, outcome: str, seconds: float) -> None:
        with self._file.open("a") as lines:
            print(json.dumps({"test": test, "outcome": outcome, "seconds": round(seconds, 3)}), file=lines)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._add(report.nodeid, report.outcome, report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._add(report.nodeid, "failed", 0.0)
