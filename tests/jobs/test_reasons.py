"""The table of reasons: what each is on disk, and what its exit code means."""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError

from jobs.errors import OutOfMemory, StageError
from jobs.events import AttemptEnded
from jobs.reasons import Reason
from jobs.trainer_facts import Fault


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (0, None), (1, None), (2, None), (-9, None), (75, Reason.INTERRUPTED), (76, Reason.OUT_OF_MEMORY),
        (77, Reason.REJECTED), (78, Reason.NON_FINITE), (79, Reason.NO_VALID_CHECKPOINT), (80, Reason.GPU_LOST),
        (83, Reason.BASE_CHANGED),
        (82, Reason.DISK_FULL),
        (81, Reason.NOT_PREPARED),
    ],
)  # fmt: skip
def test_what_an_exit_code_alone_means(code: int, reason: Reason | None) -> None:
    assert Reason.of_exit_code(code) is reason


def test_an_exit_code_that_is_read_alone_means_what_all_reasons_with_it_have_in_common() -> None:
    codes = Counter(reason.exit_code for reason in Reason if reason.exit_code > 1)
    assert {code for code, count in codes.items() if count > 1} == {75, 76, 77}


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_is_its_code_on_disk(reason: Reason) -> None:
    ended = AttemptEnded(reason=reason, error=Fault.of(reason, ": details"))
    assert f'"reason":"{reason.name.lower()}"' in ended.model_dump_json()
    again = AttemptEnded.model_validate_json(ended.model_dump_json())
    assert again == ended and again.reason is reason
    assert again.error == Fault(code=reason.name.lower(), message=f"{reason.sentence}: details", hint=reason.hint)


def test_an_error_may_bring_its_reason_along() -> None:
    error = StageError("it froze", reason=Reason.STALLED)
    assert Fault.raised(error) == Fault(code="stalled", message="it froze", hint=Reason.STALLED.hint)
    assert OutOfMemory("no").reason is Reason.OUT_OF_MEMORY


def test_what_is_not_in_the_table_is_no_reason() -> None:
    with pytest.raises(ValidationError):
        AttemptEnded.model_validate({"reason": "silent"})


@pytest.mark.parametrize("reason", Reason)
def test_sentences_fit_into_others_and_headlines_stand_alone(reason: Reason) -> None:
    assert reason.sentence[0].islower() and reason.headline[0].isupper()
    assert not any(text.endswith(".") for text in (reason.sentence, reason.headline, reason.hint or ""))
