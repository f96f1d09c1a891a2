"""Jobs long enough to be stopped in the middle."""

from __future__ import annotations

from tests.support.stack import tiny_job

LONG = {"epochs": 5, "batch_size": 8, "learning_rate": 0.003}  # 40 steps


def long_job(**more: object) -> dict[str, object]:
    return tiny_job(
        training=LONG, evaluation={"every_steps": 40, "samples": 0}, checkpoint={"every_steps": 30, "keep": 2}, **more
    )
