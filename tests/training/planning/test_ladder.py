"""The ladder: what is chosen, what is looked at, what is refused; on a model whose memory is plain to see."""

from __future__ import annotations

import pytest

from jobs.gpus import GpuFacts
from jobs.measured import MeasuredGpu
from jobs.memory_plan import Candidate
from jobs.text.units import GIB
from tests.training.conftest import XL
from worker.training.planning.ladder import (
    RECOMPUTE,
    WORTH,
    Fixed,
    Ladder,
    ModelSize,
    Prediction,
    RowTime,
    Setting,
    choice,
)
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.seq2seq.task import Seq2Seq

PARAMETERS = 2_849_757_184
CONTEXT = GIB // 2
SIZE = ModelSize(2 * PARAMETERS, PARAMETERS, 2 * PARAMETERS, 4 * PARAMETERS)
STATES = {"adamw": 12, "adamw_offload": 0, "adamw_8bit": 2, "adafactor": 0}


class Plain:
    """Weights and gradients of 2 bytes, states, and 1 GiB a row; of recomputed layers a tenth. Remembers what it was
    asked."""

    size = SIZE

    def __init__(self) -> None:
        self.asked: list[tuple[int, Setting]] = []

    def predict(self, shape: MicroBatchShape, setting: Setting, *, padded: bool = True) -> Prediction:
        self.asked.append((shape.rows, setting))
        every = setting.activation_checkpointing
        row = GIB if not every else int(GIB * (1 - 0.9 / every))
        parts = {
            "weights": 2 * PARAMETERS, "gradients": 2 * PARAMETERS,
            "optimizer": STATES[setting.optimizer] * PARAMETERS, "activations": shape.rows * row, "temporaries": 0,
        }  # fmt: skip
        peak = sum(parts.values())
        return Prediction(
            parts=parts, peak=peak, pass_peak=peak, evaluation_peak=0, update_peak=peak, activations_after_forward=0
        )

    def most_rows(
        self, inputs: int, targets: int, setting: Setting, limit_bytes: int, cap: int
    ) -> tuple[int, Prediction]:
        one, two = (self.predict(MicroBatchShape(rows, inputs, targets), setting).peak for rows in (1, 2))
        rows = max(0, min(cap, 1 + (limit_bytes - one) // (two - one)))
        return rows, self.predict(MicroBatchShape(max(1, rows), inputs, targets), setting)


def ladder(
    limit_gib: float, *, cap: int = 128, model: Plain | None = None, gpu: str | None = None, offload: bool = False
) -> Ladder:
    pace = RowTime(Seq2Seq(), XL, Seq2Seq().flops(XL), 256, 256, SIZE, None if gpu is None else GpuFacts(gpu, 0), cap)
    return Ladder(model or Plain(), pace, limit=int(limit_gib * GIB), context=CONTEXT, cap=cap, offload=offload)


def way(candidate: Candidate | None) -> tuple[str, int, int] | None:
    return None if candidate is None else (
        candidate.optimizer, candidate.activation_checkpointing, candidate.micro_batch
    )  # fmt: skip


def test_with_room_for_all_the_best_is_the_fastest_and_nothing_else_is_traced() -> None:
    model = Plain()
    (only,) = ladder(1000, model=model).walk(Fixed())
    assert way(only) == ("adamw", 0, 128)
    assert (only.slowdown, only.score) == pytest.approx((1, 1))
    assert {setting for _, setting in model.asked} == {Setting(0, "adamw")}


def test_an_optimizer_whose_states_alone_are_too_much_is_listed_and_not_traced() -> None:
    model = Plain()
    candidates = ladder(30, model=model).walk(Fixed())
    # 16 GiB without activations; 0.5 for the context; so 13 rows.
    assert way(choice(candidates)) == ("adamw_8bit", 0, 13)
    untraced = [each for each in candidates if not each.parts]
    assert {each.optimizer for each in untraced} == {"adamw"}
    assert {each.peak_bytes for each in untraced} == {16 * PARAMETERS + CONTEXT}
    assert {setting.optimizer for _, setting in model.asked} == {"adamw_8bit"}


@pytest.mark.parametrize("limit", [12, 14, 17.2, 18, 20, 24, 30, 44, 48, 60])
def test_looking_no_further_than_can_win_finds_what_looking_at_everything_finds(limit: float) -> None:
    every = [
        candidate
        for optimizer in WORTH
        for activation_checkpointing in RECOMPUTE
        for candidate in ladder(limit).walk(Fixed(optimizer, activation_checkpointing))
        if candidate.fits
    ]
    chosen = choice(ladder(limit, offload=True).walk(Fixed()))
    assert chosen is not None
    assert chosen.score == max(candidate.score for candidate in every)
    assert chosen.peak_bytes <= limit * GIB


def test_a_score_is_speed_times_worth() -> None:
    pace = RowTime(Seq2Seq(), XL, Seq2Seq().flops(XL), 256, 256, SIZE, None, 128)
    for candidate in ladder(20).walk(Fixed()):
        rows = candidate.micro_batch or 1
        seconds = pace.seconds(rows, candidate.activation_checkpointing, candidate.optimizer)
        slowdown = seconds / pace.seconds(128, 0, "adamw")
        assert candidate.slowdown == pytest.approx(slowdown)
        assert candidate.score == pytest.approx(WORTH[candidate.optimizer] / slowdown)


def test_candidates_come_best_first_and_parts_are_the_peak() -> None:
    candidates = ladder(20).walk(Fixed())
    scores = [candidate.score for candidate in candidates]
    assert scores == sorted(scores, reverse=True)
    for candidate in candidates:
        assert sum(candidate.parts.values()) in (0, candidate.peak_bytes)
        assert candidate.parts.get("context", CONTEXT) == CONTEXT


def test_recomputation_is_taken_where_it_lets_in_enough_rows() -> None:
    # One row fits without; recomputing lets in more, whose launches and weights are then shared.
    chosen = choice(ladder(17.2 + 0.9).walk(Fixed()))
    assert chosen is not None and chosen.activation_checkpointing > 0 and chosen.micro_batch > 1


@pytest.mark.parametrize(
    ("fixed", "limit"),
    [
        (Fixed(optimizer="adafactor"), 30), (Fixed(activation_checkpointing=1), 30),
        (Fixed(activation_checkpointing=7), 30), (Fixed(micro_batch=2), 30), (Fixed("adamw", 0, 3), 60),
    ],
)  # fmt: skip
def test_what_the_job_sets_is_never_changed(fixed: Fixed, limit: float) -> None:
    chosen = choice(ladder(limit).walk(fixed))
    assert chosen is not None
    for key in fixed.keys:
        assert getattr(chosen, key) == getattr(fixed, key)


def test_the_nearest_setting_changes_the_fewest_keys_and_of_those_the_best() -> None:
    fixed = Fixed(activation_checkpointing=0, micro_batch=64)
    assert choice(ladder(30).walk(fixed)) is None
    found = ladder(30).nearest(fixed)
    assert found is not None
    freed, fits = found
    assert (freed, way(fits)) == (("micro_batch",), ("adamw_8bit", 0, 13))
    assert ladder(30).nearest(Fixed("adamw", None, 64)) == (
        ("optimizer",),
        ladder(30).walk(Fixed("adamw_8bit", 1, 64))[0],
    )
    # No change alone helps here; of two, fewer rows are better than recomputing every layer.
    found = ladder(30).nearest(Fixed("adamw", 0, 64))
    assert found is not None
    assert (set(found[0]), way(found[1])) == ({"optimizer", "micro_batch"}, ("adamw_8bit", 0, 13))


def test_states_on_the_host_cost_time_a_step_and_are_taken_only_where_it_has_room() -> None:
    pace = RowTime(Seq2Seq(), XL, Seq2Seq().flops(XL), 256, 256, SIZE, GpuFacts("NVIDIA GeForce RTX 5090", 0), 64)
    assert pace.update_s("adamw_offload") == pytest.approx(PARAMETERS / 1e9) and pace.update_s("adamw") == 0
    later = pace.seconds(8, 0, "adamw_offload") - pace.seconds(8, 0, "adamw")
    assert later == pytest.approx(PARAMETERS / 1e9 / 64)
    slow_slot = MeasuredGpu(driver="580", device_to_host_bytes_per_s=1e9, host_to_device_bytes_per_s=9e9)
    assert GpuFacts("", 0, slow_slot).offloaded_update_s(10**9, 2) == 2.0, "the slowest of what overlaps"
    examined = slow_slot.model_copy(update={"host_update_per_s": 2.5e9})
    assert GpuFacts("", 0, examined).offloaded_update_s(10**9, 2) == 0.4
    optimizers = [{each.optimizer for each in ladder(14, offload=offload).walk(Fixed())} for offload in (False, True)]
    assert "adamw_offload" not in optimizers[0] and "adamw_offload" in optimizers[1]
    # Every row recomputes layers, or none does and the host updates 128 rows' weights.
    chosen = choice(ladder(14, offload=True).walk(Fixed()))
    assert chosen is not None and chosen.optimizer == "adamw_offload"


def test_where_nothing_fits_the_smallest_is_known() -> None:
    low = ladder(8)
    assert choice(low.walk(Fixed())) is None
    assert low.nearest(Fixed(micro_batch=4)) is None
    smallest = low.smallest(Fixed())
    assert way(smallest) == ("adafactor", 1, 1)
    assert smallest.peak_bytes == 4 * PARAMETERS + CONTEXT + int(GIB * (1 - 0.9))
    assert way(low.smallest(Fixed("adamw", None, 4))) == ("adamw", 1, 4)


def test_the_slower_the_memory_the_more_a_small_micro_batch_costs() -> None:
    def cost(gpu: str, measured: MeasuredGpu | None = None) -> float:
        pace = RowTime(Seq2Seq(), XL, Seq2Seq().flops(XL), 256, 256, SIZE, GpuFacts(gpu, 0, measured), 128)
        return pace.seconds(1, 0, "adamw") - pace.seconds(2, 0, "adamw")

    assert cost("NVIDIA GeForce RTX 3090") > cost("NVIDIA GeForce RTX 5090") > cost("NVIDIA H200")
    assert cost("a GPU that nobody knows") == cost("NVIDIA GeForce RTX 5090")
    slow = MeasuredGpu(driver="580", memory_bytes_per_s=0.9e12)
    assert cost("NVIDIA GeForce RTX 5090", slow) > cost("NVIDIA GeForce RTX 3090"), "what was measured counts"


def test_eight_rows_are_looked_at_first_where_no_more_are_wanted() -> None:
    model = Plain()
    (only,) = ladder(1000, cap=8, model=model).walk(Fixed())
    assert way(only) == ("adamw", 0, 8)
    assert model.asked == [(8, Setting(0, "adamw"))]
