"""The sentence of an event, where it depends on what the event knows."""

from __future__ import annotations

from jobs.events import Event, OomRecovered
from service.wording import level, sentence

BARE = OomRecovered(step=1234, micro_batch_before=8, micro_batch_after=4, message="no", milliseconds_lost=812.5)


def told(fact: OomRecovered) -> str:
    return sentence(Event(number=9, job="j", at=1.0, attempt=1, fact=fact))


def test_memory_that_ran_out_is_told_with_cause_bucket_and_figures() -> None:
    assert told(BARE) == (
        "step 1,234: memory ran out; the step was redone with micro-batches of 4 instead of 8, "
        "and nothing was lost but 0.8 s"
    )
    known = {"cause": "foreign", "bucket": "input ≤ 256, target ≤ 512", "requested_bytes": 2 * 2**30}
    known |= {"allocated_bytes": 27 * 2**30, "foreign_bytes": 6 * 2**30, "micro_batch_after": 8}
    assert told(BARE.model_copy(update=known)) == (
        "step 1,234: memory ran out: other processes hold memory of the card (2.0 GiB asked for, 27.0 GiB allocated, "
        "6.0 GiB held by others); the step was redone with the same micro-batches of 8 (input ≤ 256, target ≤ 512), "
        "and nothing was lost but 0.8 s"
    )
    assert level(Event(number=9, job="j", at=1.0, fact=BARE)) == "warn"
