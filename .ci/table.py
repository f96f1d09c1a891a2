"""`python3 .ci/table.py FOLDER SECONDS`: what `.ci/run` has run in so many seconds.

FOLDER holds for each suite NAME.json (how it ended, its seconds and its limit) and, where its tests are counted,
NAME.tests (tests/suite_report.py). Exit code 1 if one is red.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

SLOWEST = 5


@dataclass
class Suite:
    name: str
    ended: str
    """"passed", or why not: "failed", "cut off after 900 s"; "not run: …" is no failure."""
    seconds: int
    limit: int
    """Seconds that it may take on a quiet machine with 2 cores."""
    outcomes: dict[str, str] = field(default_factory=dict)
    times: Counter[str] = field(default_factory=Counter)

    @property
    def red(self) -> bool:
        return not self.ended.startswith(("passed", "not run"))

    def count(self, outcome: str) -> int:
        return sum(each == outcome for each in self.outcomes.values())


def read(file: Path) -> Suite:
    suite = Suite(file.stem, **json.loads(file.read_text()))
    tests = file.with_suffix(".tests")
    for line in tests.read_text().splitlines() if tests.exists() else []:
        test, outcome, seconds = (json.loads(line)[key] for key in ("test", "outcome", "seconds"))
        suite.times[test] += seconds
        # A test has three phases; the worst says how it ended.
        suite.outcomes[test] = min(
            suite.outcomes.get(test, outcome), outcome, key=["failed", "skipped", "passed"].index
        )
    return suite


def rows(suite: Suite) -> list[str]:
    tests = str(len(suite.outcomes) or "")
    of = f"{suite.seconds:,} of {suite.limit:,}"
    slowest = [f"{seconds:7.1f}  {test}" for test, seconds in suite.times.most_common(SLOWEST)] or [""]
    first = f"{suite.name:<16} {tests:>6} {of:>15}  {suite.ended:<10} {slowest[0]}"
    return [first.rstrip(), *(" " * (len(f"{suite.name:<16}") + 36) + each for each in slowest[1:])]


def main() -> int:
    suites = [read(file) for file in sorted(Path(sys.argv[1]).glob("*.json"), key=lambda file: file.stat().st_mtime)]
    print(f"{'suite':<16} {'tests':>6} {'seconds':>15}  {'':<10} slowest")
    for suite in suites:
        print("\n".join(rows(suite)))
    for suite in suites:
        for test, outcome in suite.outcomes.items():
            if outcome == "failed":
                print(f"FAILED {test}")
    red = [suite.name for suite in suites if suite.red]
    print(f"red: {', '.join(red)}" if red else "every suite that could run is green")
    counts = ", ".join(
        f"{sum(suite.count(each) for suite in suites)} {each}" for each in ("passed", "failed", "skipped")
    )
    print(f"{counts} in {sys.argv[2]} s")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
