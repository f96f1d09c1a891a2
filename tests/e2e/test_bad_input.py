"""Bad input gets a clear error and loses nothing; sinks that are gone cost nothing."""

from __future__ import annotations

from pathlib import Path

from jobs.events import JobFailed
from tests.support.redis_server import free_port
from tests.support.shared_stack import data_of, dry_run, restarted, succeeds
from tests.support.stack import Stack, tiny_job


def test_what_check_finds_fails_the_job_with_cause_and_hint(stack: Stack, tmp_path: Path) -> None:
    data = data_of(stack)
    (data / "empty.jsonl").write_text("")
    (data / "odd.jsonl").write_text('{"asked": "q", "answered": "a"}\n' * 3)
    (data / "link.jsonl").symlink_to(tmp_path / "outside.jsonl")
    (tmp_path / "outside.jsonl").write_text('{"input": "a", "target": "b"}\n')
    cases = {
        "file_missing": tiny_job(data={"train": "none.jsonl"}),
        "file_empty": tiny_job(data={"train": "empty.jsonl"}),
        "no_usable_columns": tiny_job(data={"train": "odd.jsonl"}),
        "path_outside_data": tiny_job(data={"train": "link.jsonl"}),
        "model_not_found": tiny_job(model="./no-such-model"),
    }
    runs = {code: stack.submit(spec) for code, spec in cases.items()}
    for code, run in runs.items():
        failed = stack.wait_for_event(run, "job.failed", "job.checked").fact
        assert isinstance(failed, JobFailed), code
        assert failed.error.code == code, failed.error
        assert failed.error.message and failed.error.hint
        shown = stack.shown(run)
        assert (shown["status"], shown["error"]["code"]) == ("failed", code)
    # the queue resumes after five failures, and a dry run ends validated
    run = dry_run(stack, tiny_job())
    assert stack.wait_for_event(run, "job.validated", "job.failed").type == "job.validated"


def test_sinks_that_are_gone_cost_nothing(stack: Stack) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    gone = {
        "DISCORD_WEBHOOK": f"{nobody}/api/webhooks/1/token", "WANDB_API_KEY": "1" * 40, "WANDB_BASE_URL": nobody,
    }  # fmt: skip
    with restarted(stack, "publish", **gone):
        run = stack.submit(tiny_job())
        succeeds(stack, run)
        # W&B could not be reached: the run is on disk, for `wandb sync`
        stack.wait_for(lambda: list((run.path / "wandb").rglob("*.wandb")) or None, "an offline W&B run")
