"""schemathesis over the live OpenAPI document, all phases and checks: real uvicorn, real Redis, jobs in every state.

    python -m benchmarks.schemathesis_full [EXAMPLES]

EXAMPLES of each operation (default 1000). JSON on the last line; exit code 1 when anything is not as it should be, or
fewer than 5,000 requests were made.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.command_line import parse
from tests.service.fuzzing import fuzz
from tests.service.running import running
from tests.service.seeded import seed
from tests.support.redis_server import RedisServer
from tests.support.samples import beating

KEYS = (
    "requests", "operations", "failures", "server_errors", "undocumented_statuses", "schema_violations", "answers",
    "checks",
)  # fmt: skip
REQUESTS = 5_000
PHASES = ("examples", "coverage", "fuzzing", "stateful")


def main(argv: list[str]) -> int:
    """Run, and say what came of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schemathesis_full", description="Every operation.")
    parser.add_argument("examples", type=int, nargs="?", default=1000, help="of each operation")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    arguments = parse(parser, argv, examples=1, phases=["examples", "fuzzing"])
    with (
        tempfile.TemporaryDirectory() as name,
        RedisServer(Path(name) / "redis") as redis,
        running(redis.url, Path(name), api_key="k" * 40) as service,
        beating(service.store, "generate", "push"),
    ):
        outcome = fuzz(service, seed(service), examples=arguments.examples, phases=tuple(arguments.phases))
    for failure, how in outcome.failures.items():
        print(f"{failure}\n{how}\n")
    for error in outcome.errors:
        print(error)
    answers = Counter({status: 0 for _, status in outcome.statuses})
    for (_, status), count in outcome.statuses.items():
        answers[status] += count
    server_errors = sum(count for status, count in answers.items() if status >= 500)
    result = {
        "requests": outcome.requests,
        "operations": len({label for label, _ in outcome.statuses}),
        "failures": len(outcome.failures) + len(outcome.errors),
        "server_errors": server_errors,
        "undocumented_statuses": outcome.counted("status_code_conformance", "content_type_conformance"),
        "schema_violations": outcome.counted("response_schema_conformance", "response_headers_conformance"),
        "answers": dict(sorted(answers.items())),
        "checks": dict(sorted(outcome.checks.items())),
    }
    print(json.dumps(result))
    enough = outcome.requests >= REQUESTS or arguments.smoke
    return 0 if enough and not result["failures"] and not server_errors else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
