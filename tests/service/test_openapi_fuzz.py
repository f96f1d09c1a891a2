"""schemathesis over the live document: no 5xx, nothing undocumented, no answer that its schema does not allow."""

from __future__ import annotations

from pathlib import Path

from jobs.redis.connection import connect
from jobs.redis.requests import Requests
from tests.service.fuzzing import fuzz
from tests.service.running import running
from tests.service.seeded import seed
from tests.support.samples import beating

EXAMPLES, OF_LARGE = 5, 0.2
"""Of each operation; of coverage's cases for large bodies. benchmarks/schemathesis_full.py has far more, and all."""
PHASES = ("examples", "coverage", "fuzzing")
UNANSWERED = {
    "POST /jobs/{job}/generate",
    "POST /v1/chat/completions",
    "POST /jobs/{job}/exports",
    "DELETE /jobs/{job}/exports/{format}",
}
"""What a model process answers, of which there is none here; and exports, of which this model has one format of four:
whether that is asked for, and then cancelled, is chance."""


def test_what_the_service_answers_is_what_its_document_says(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path, api_key="k" * 40) as service, beating(service.store, "generate", "push"):
        jobs = seed(service)
        asked = {"repository": "kitchen/chef", "license": "mit"}
        assert service.post(f"/jobs/{jobs['succeeded']}/push", json=asked).status_code == 202
        requests = Requests(connect(redis_url))
        uploaded = requests.take("push")
        assert uploaded is not None and requests.answer(uploaded.id, 1, "done", {}), "another one may be asked for"
        outcome = fuzz(service, jobs, examples=EXAMPLES, phases=PHASES, of_large=OF_LARGE)
    assert outcome.errors == []
    assert outcome.failures == {}
    documented = {label for label, _ in outcome.statuses}
    assert len(documented) >= 20
    for label in documented - UNANSWERED:  # it was not refused all the time
        assert any(status < 300 for each, status in outcome.statuses if each == label), label
