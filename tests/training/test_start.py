"""What an attempt trains with: by figures of a GPU that are passed in, and with a real tiny model on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jobs.attempt import Finished
from jobs.disk.files import append_line
from jobs.disk.rundir import RunDir
from jobs.errors import DeviceBusy, HostMemoryInUse, HostOutOfMemory, OutOfMemory, Rejected
from jobs.gpus import REFERENCE
from jobs.memory_plan import HostPlan, MemoryPlan
from jobs.plan import Plan, Resolved
from jobs.reasons import Reason
from jobs.spec import JobSpec
from jobs.text.units import GIB
from jobs.trainer_facts import GpuProcess, MemoryPlanned, ModelLoaded
from tests.training.attempts import attempt, facts
from tests.training.conftest import MakeRun, tiny_spec
from tests.training.planned import CONTEXT, FakeAlternatives, planned
from worker.training import start
from worker.training.journal import Journal
from worker.training.machine.host import HostMemory
from worker.training.machine.process_monitor import OtherProcessesUse, ProcessMonitor
from worker.training.models.model_files import read_config
from worker.training.planning.alternatives import Alternatives
from worker.training.planning.budget import Budget
from worker.training.planning.memory_plan import plan_memory
from worker.training.start import (
    GpuNow,
    adjust_plan,
    apply_fallbacks,
    check_host,
    make_room,
    planned_event,
    reserved_bytes,
    times_out_of_memory,
    within_reserved,
)
from worker.training.tasks.seq2seq.task import Seq2Seq

AUTO = {"memory": {"micro_batch": "auto", "optimizer": "auto"}}
HOLDER = GpuProcess(pid=4711, name="python3", memory_bytes=12 * GIB)


def with_memory(plan: Plan, memory: MemoryPlan | None) -> Plan:
    resolved = Resolved(micro_batch=8, activation_checkpointing=0, optimizer="adamw_8bit", compile=True)
    return plan.model_copy(update={"memory": memory, "resolved": resolved})


@pytest.fixture
def plan(make_run: MakeRun) -> Plan:
    return with_memory(make_run("plan").plan(), planned())


def gpu(total: float = 31.4, free: float | None = None, other_processes: OtherProcessesUse | None = None) -> GpuNow:
    rest = total - CONTEXT / GIB if free is None else free
    return GpuNow("NVIDIA GeForce RTX 4090", int(total * GIB), int(rest * GIB), other_processes or OtherProcessesUse(0))


def test_a_plan_that_fits_the_gpu_stands(plan: Plan) -> None:
    alternatives = FakeAlternatives()
    adjusted = adjust_plan(tiny_spec(**AUTO), plan, gpu(), 0, alternatives)
    assert adjusted == plan and alternatives.asked == []
    event = planned_event(plan, adjusted, gpu())
    assert (event.micro_batch, event.budget_bytes, event.other_processes_bytes, event.changed) == (8, 31 * GIB, 0, None)


def test_a_gpu_with_less_than_planned_but_enough_only_lowers_the_budget(plan: Plan) -> None:
    alternatives = FakeAlternatives()
    adjusted = adjust_plan(tiny_spec(**AUTO), plan, gpu(28), 0, alternatives)
    assert adjusted.memory is not None and plan.memory is not None and alternatives.asked == []
    assert adjusted.memory.budget_bytes == 28 * GIB and adjusted.memory.peak_bytes == plan.memory.peak_bytes
    assert planned_event(plan, adjusted, gpu(28)).changed is None


def test_a_trial_has_what_it_reserves_whatever_there_is(plan: Plan) -> None:
    trial = within_reserved(plan)
    assert plan.memory is not None and trial.memory is not None
    assert reserved_bytes(plan) == trial.memory.budget_bytes < plan.memory.budget_bytes
    assert trial.memory.limit_bytes == trial.memory.peak_bytes == plan.memory.peak_bytes
    assert adjust_plan(tiny_spec(**AUTO), trial, gpu(), 0, FakeAlternatives()) == trial
    assert within_reserved(with_memory(plan, None)).memory is None


def test_on_a_smaller_gpu_the_ladder_is_walked_again(plan: Plan) -> None:
    alternatives, small = FakeAlternatives(), gpu(23.5)
    adjusted = adjust_plan(tiny_spec(**AUTO), plan, small, 0, alternatives)
    assert [(budget.bytes, budget.source, budget.gpu_name) for budget in alternatives.asked] == [
        (int(23.5 * GIB), "gpu", "NVIDIA GeForce RTX 4090")
    ]
    assert adjusted.resolved == Resolved(
        micro_batch=4, activation_checkpointing=2, optimizer="adamw_8bit", compile=True
    )
    event = planned_event(plan, adjusted, small)
    assert event.changed == "NVIDIA GeForce RTX 4090 has 23.5 GiB, and the plan was made for 31.0 GiB"
    assert (event.micro_batch, event.activation_checkpointing) == (4, 2)


def test_a_real_ladder_is_walked_again_with_the_optimizer_that_checkpoints_hold(
    make_run: MakeRun, model_folder: Path
) -> None:
    spec = tiny_spec(**AUTO, training={"batch_size": 512})
    config = read_config(model_folder, "model")
    large = Budget(2 * GIB, "assumed", REFERENCE, margin=0)
    memory = plan_memory(spec, Seq2Seq(), config, (512, 512), device="cuda", budget=large)
    before = make_run("a").plan()
    before = before.model_copy(
        update={
            "memory": memory,
            "resolved": Resolved(
                micro_batch=memory.micro_batch,
                activation_checkpointing=memory.activation_checkpointing,
                optimizer=memory.optimizer,
            ),
        }
    )
    between = memory.peak_bytes - sum(memory.parts[name] for name in ("activations", "temporaries")) // 2
    small = GpuNow("small", between, between, OtherProcessesUse(0))
    adjusted = adjust_plan(spec, before, small, 0, Alternatives(spec, before, torch.device("cpu")))
    assert adjusted.memory is not None
    assert adjusted.memory.optimizer == memory.optimizer and adjusted.memory.peak_bytes <= between
    assert (adjusted.memory.activation_checkpointing, adjusted.memory.micro_batch) != (
        memory.activation_checkpointing, memory.micro_batch,
    )  # fmt: skip
    tiny = GpuNow("tiny", 2**20, 2**20, OtherProcessesUse(0))
    with pytest.raises(Rejected) as caught:
        adjust_plan(spec, before, tiny, 0, Alternatives(spec, before, torch.device("cpu")))
    assert caught.value.detail_code == "does_not_fit"


# -- fallbacks ---------------------------------------------------------------------------------------------------


def ended(run: RunDir, number: int, reason: str) -> None:
    run.attempt_file(number).parent.mkdir(exist_ok=True)
    append_line(run.attempt_file(number), Finished.model_validate({"at": 1.0, "reason": reason}))


def test_rungs_are_counted_from_the_attempts_before(make_run: MakeRun) -> None:
    run = make_run()
    assert times_out_of_memory(run, 1) == 0
    for number, reason in enumerate(("oom_in_optimizer", "interrupted", "oom_in_optimizer"), start=1):
        ended(run, number, reason)
    run.attempt_file(4).touch()  # a crash says nothing
    assert [times_out_of_memory(run, number) for number in (1, 2, 3, 4, 5)] == [0, 1, 1, 2, 2]


def test_each_time_one_rung_lower_until_there_is_none(plan: Plan) -> None:
    spec, alternatives = tiny_spec(**AUTO), FakeAlternatives()
    seen = []
    for lower in range(1, 6):
        adjusted = adjust_plan(spec, plan, None, lower, alternatives)
        assert adjusted.memory is not None
        assert adjusted.resolved.optimizer == "adamw_8bit" and adjusted.resolved.compile
        assert adjusted.memory.peak_bytes == sum(adjusted.memory.parts.values())
        seen.append((adjusted.resolved.micro_batch, adjusted.resolved.activation_checkpointing))
        assert planned_event(plan, adjusted, None).changed == "memory ran out in the optimizer"
    assert seen == [(4, 0), (2, 0), (1, 0), (1, 2), (1, 1)]
    with pytest.raises(OutOfMemory, match="micro-batch 1 with activation_checkpointing 1 and adamw_8bit") as caught:
        adjust_plan(spec, plan, None, 6, alternatives)
    assert caught.value.hint is not None
    assert caught.value.hint.endswith("or set memory.optimizer: adafactor, which needs 11.2 GiB")


def test_what_the_job_says_of_recomputation_is_not_changed(plan: Plan) -> None:
    spec = tiny_spec(memory={"micro_batch": 8, "activation_checkpointing": 0})
    with pytest.raises(OutOfMemory, match="micro-batch 1 with activation_checkpointing 0"):
        adjust_plan(spec, plan, None, 4, FakeAlternatives())


def test_real_predictions_of_rungs_fall(make_run: MakeRun, model_folder: Path) -> None:
    spec = tiny_spec(**AUTO)
    budget = Budget(GIB, "host", None, margin=0)
    memory = plan_memory(spec, Seq2Seq(), read_config(model_folder, "model"), (16, 16), device="cpu", budget=budget)
    alternatives = Alternatives(spec, make_run("a").plan(), torch.device("cpu"))
    peaks = [
        memory.peak_bytes,
        *(apply_fallbacks(spec, memory, lower, alternatives).peak_bytes for lower in (1, 2, 3)),
    ]
    assert peaks == sorted(peaks, reverse=True)


def test_a_plan_that_does_not_say_how_many_gpus_train_has_as_many_as_the_job_says(make_run: MakeRun) -> None:
    for asked in (1, 2):
        run = make_run(f"job-{asked}", resources={"gpus": asked}, training={"batch_size": 8})
        plan = run.plan()
        run.write_plan(plan.model_copy(update={"resolved": plan.resolved.model_copy(update={"gpus": 1})}))
        assert start.planned(run).resolved.gpus == asked


# -- states on the host --------------------------------------------------------------------------------------


def test_a_host_whose_memory_others_have_now_ends_the_attempt_and_the_job_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "host_memory", lambda: HostMemory(used=30 * GIB, available=34 * GIB, total=64 * GIB))
    for states in (0, 32 * GIB):
        host = HostPlan(optimizer_bytes=states, copy_bytes=60 * GIB, available_bytes=64 * GIB, fits=False)
        check_host(planned().model_copy(update={"host": host}))
    check_host(planned().model_copy(update={"host": None}))
    host = HostPlan(optimizer_bytes=33 * GIB, copy_bytes=1, available_bytes=64 * GIB, fits=True)
    with pytest.raises(HostMemoryInUse, match=r"33\.0 GiB .* are needed .*, 34\.0 GiB of 64\.0 GiB are free") as caught:
        check_host(planned().model_copy(update={"host": host}))
    assert not caught.value.reason.counted, "as long as they have it"
    host = host.model_copy(update={"optimizer_bytes": 57 * GIB})
    with pytest.raises(
        HostOutOfMemory, match=r"57\.0 GiB .* are needed .*, 34\.0 GiB of 64\.0 GiB are free"
    ) as lacking:
        check_host(planned().model_copy(update={"host": host}))
    assert lacking.value.reason.counted, "tried again, a limited number of times"


# -- others on the GPU --------------------------------------------------------------------------------------


def spec_of(other_processes: str) -> JobSpec:
    return JobSpec.model_validate(tiny_spec().model_dump() | {"memory": {"other_processes": other_processes}})


def never(needed: int) -> bool:
    raise AssertionError(f"waited for {needed} bytes")


def test_others_that_leave_room_enough_are_no_reason_to_wait() -> None:
    make_room(spec_of("wait"), planned(), gpu(31.4, 25.1, OtherProcessesUse(5 * GIB, (HOLDER,))), never)
    make_room(spec_of("fail"), planned(), gpu(31.4, 25.1, OtherProcessesUse(5 * GIB, (HOLDER,))), never)


def test_with_others_in_the_way_the_job_waits_or_is_refused_as_it_says() -> None:
    memory, full = planned(), gpu(31.4, 18.4, OtherProcessesUse(12 * GIB, (HOLDER,)))
    waited: list[int] = []

    def wait(needed: int) -> bool:
        waited.append(needed)
        return len(waited) == 1

    make_room(spec_of("wait"), memory, full, wait)
    with pytest.raises(DeviceBusy, match=r"25\.0 GiB of the GPU are needed, 18\.4 GiB of 31\.4 GiB are free") as busy:
        make_room(spec_of("wait"), memory, full, wait)
    assert waited == [25 * GIB] * 2, "what is needed besides the context, which is there"
    with pytest.raises(Rejected, match=r"12\.0 GiB by python3 \(pid 4711\)") as refused:
        make_room(spec_of("fail"), memory, full, never)
    assert "12.0 GiB by python3 (pid 4711)" in str(busy.value)
    assert refused.value.detail_code == "gpu_memory_in_use" and refused.value.hint


def test_the_event_names_who_else_is_on_the_gpu(plan: Plan) -> None:
    event = planned_event(plan, plan, gpu(31.4, 18.4, OtherProcessesUse(12 * GIB, (HOLDER,))))
    assert (event.other_processes_bytes, event.other_processes) == (12 * GIB, [HOLDER])


# -- a whole attempt -----------------------------------------------------------------------------------------


def plan_on_cpu(run: RunDir) -> MemoryPlan:
    """As prepare does it."""
    spec, plan = run.spec(), run.plan()
    folder = Path(plan.model.folder or "")
    memory = plan_memory(
        spec,
        Seq2Seq(),
        read_config(folder, "model"),
        (16, 16),
        device="cpu",
        budget=Budget(GIB, "host", None, margin=0),
    )
    run.write_plan(plan.model_copy(update={"memory": memory}))
    return memory


def test_an_attempt_says_what_it_trains_with_before_it_loads(make_run: MakeRun) -> None:
    run = make_run()
    memory = plan_on_cpu(run)
    assert attempt(run) == 0
    [event] = facts(run, MemoryPlanned)
    assert event == MemoryPlanned(
        micro_batch=4,
        activation_checkpointing=memory.activation_checkpointing,
        optimizer=memory.optimizer,
        peak_bytes=memory.peak_bytes,
        budget_bytes=GIB,
    )
    kinds = [type(fact) for fact in facts(run, object)]
    assert kinds.index(MemoryPlanned) < kinds.index(ModelLoaded)
    assert {row.memory_planned_bytes for row in run.metrics()} == {memory.peak_bytes}


def test_the_attempt_after_one_that_ran_out_in_the_optimizer_goes_on_one_rung_lower(make_run: MakeRun) -> None:
    run = make_run(checkpoint={"every_steps": 5})
    plan_on_cpu(run)
    assert attempt(run, stop_at=14) == 75
    last = run.attempt_lines(1)[-1]
    assert isinstance(last, Finished) and last.reason == "interrupted" and last.step >= 5
    append_line(run.attempt_file(1), last.model_copy(update={"reason": Reason.OOM_IN_OPTIMIZER}))
    assert attempt(run, 2) == 0
    [event] = facts(run, MemoryPlanned, 2)
    assert (event.micro_batch, event.changed) == (2, "memory ran out in the optimizer")
    [loaded] = facts(run, ModelLoaded, 2)
    assert loaded.resumed_step == last.step
    assert {row.micro_batch for row in run.metrics() if row.attempt == 2} == {2}


def test_a_plan_of_an_earlier_version_stands_and_its_optimizer_gets_no_second_chance(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run()
    plan = run.plan()
    assert plan.memory is None
    assert attempt(run) == 0
    assert facts(run, MemoryPlanned) == []
    assert "plan.json is of a version that did not plan memory" in caplog.text
    with pytest.raises(OutOfMemory, match="did not plan memory"):
        adjust_plan(run.spec(), plan, None, 1, FakeAlternatives())


def test_a_wait_is_a_phase_of_its_own(run_journal: tuple[RunDir, Journal], monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.training.attempts import StopAt

    run, journal = run_journal
    monitor = ProcessMonitor(None, torch.device("cpu"))
    assert start.wait(monitor, 1, journal, StopAt())
    assert [getattr(line, "phase", None) for line in run.attempt_lines(1)] == ["wait", "load"]


@pytest.fixture
def run_journal(make_run: MakeRun) -> tuple[RunDir, Journal]:
    run = make_run()
    return run, Journal(run.attempt_file(1))


def test_memory_that_runs_out_while_loading_is_said_and_not_a_crash(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    plan_on_cpu(run)

    def fails(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")

    monkeypatch.setattr("worker.training.context.make_optimizer", fails)
    with pytest.raises(OutOfMemory, match=r"were loaded, which take 313 KiB: CUDA out of memory") as caught:
        attempt(run)
    assert caught.value.hint is not None and "memory.optimizer: adafactor" in caught.value.hint
    with pytest.raises(RuntimeError, match="another"), start.loading(run):
        raise RuntimeError("another")


@pytest.mark.parametrize("failure", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_where_a_gpu_trains_and_the_hosts_memory_runs_out_the_hosts_is_named(
    make_run: MakeRun, failure: Exception
) -> None:
    run = make_run()
    plan_on_cpu(run)
    plan = run.plan()
    assert plan.memory is not None
    for device, kind in (("cpu", OutOfMemory), ("cuda", HostOutOfMemory)):
        host = HostPlan(optimizer_bytes=32 * GIB, copy_bytes=1, available_bytes=64 * GIB, fits=True)
        run.write_plan(
            plan.model_copy(update={"memory": plan.memory.model_copy(update={"device": device, "host": host})})
        )
        with pytest.raises(kind) as caught, start.loading(run):
            raise failure
        assert ("states of the optimizer take 32.0 GiB" in str(caught.value)) is (device == "cuda")
