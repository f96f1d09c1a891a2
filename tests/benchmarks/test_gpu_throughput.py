"""`gpu_throughput` without a GPU: a dry run of all configurations, on a machine that has only torch and transformers.

Of speed it says nothing; that needs a GPU.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement

from benchmarks import gpu_throughput
from benchmarks.gpu_bench import (
    LADDER,
    OURS,
    SEED,
    Bench,
    Epoch,
    LadderConfiguration,
    TimeUp,
    make_model,
    recompile_limit_is_known,
)
from benchmarks.random_rows import LENGTHS, random_rows, read_lengths, synthetic_lengths, write_lengths
from tests.training.workplace import EXAMPLES
from worker.training.steps.order import rounded
from worker.training.tasks.seq2seq.layout import PairFlops

DRY = "--device cpu --shape tiny"
ROOT = Path(__file__).parents[2]
Result = dict[str, Any]
ALLOCATOR = "PYTORCH_ALLOC_CONF"
NAMES = [chosen.name for chosen in LADDER]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("gpu")
    bare = folder / "site"
    bare.mkdir()
    for name, place in sorted(needed_by(["torch", "transformers", "pydantic"]).items()):
        (bare / name).symlink_to(place)
    assert not any((bare / name).exists() for name in ("redis", "fastapi", "pyarrow", "torchao"))
    lengths = folder / "lengths.npy"
    np.save(lengths, np.array([[8, 16, 30], [16, 8, 20], [24, 40, 30], [40, 64, 6]]))
    options = f"{DRY} --rounds 2 --micro-batches 1 --largest 8 --dropout 0 --peak-tflops 1 --lengths {lengths}"
    command = [sys.executable, "-S", "-m", "benchmarks.gpu_throughput", *options.split()]
    done = subprocess.run(
        [*command, "--out", str(folder / "out.json")],
        cwd=ROOT,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LONGHAUL"))},
            "PYTHONPATH": str(bare),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: Result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((folder / "out.json").read_text()) == result
    return result


def needed_by(names: Iterable[str]) -> dict[str, Path]:
    """What these packages and all that they require have in site-packages: name there → place."""
    found: dict[str, Path] = {}
    waiting, seen = list(names), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        package = importlib.metadata.distribution(name)
        for file in package.files or []:
            if file.parts[0] not in ("..", "__pycache__"):
                found[file.parts[0]] = Path(str(package.locate_file(file.parts[0])))
        requirements = [Requirement(line) for line in package.requires or []]
        waiting += [one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def test_every_configuration_is_measured_in_every_round_and_the_json_is_complete(dry_run: Result) -> None:
    assert dry_run["complete"]
    assert dry_run["broken"] == []
    for name in NAMES:
        lines = [line for line in dry_run["table"] if line["configuration"] == name]
        assert {line["round"] for line in lines} == {1, 2}
        for line in lines:
            assert {"rows_per_s", "mean_rows_per_s", "tokens_per_s", "mfu", "peak_gib", "waste_fraction"} <= line.keys()
            assert min(line["rows_per_s"], line["mean_rows_per_s"], line["mfu"], line["peak_gib"]) > 0
            assert line["round"] == 2 or line["kernels"] > 0
    assert dry_run["rows"] == 86
    assert len(dry_run["drift"]) == len({(line["configuration"], line["micro_batch"]) for line in dry_run["table"]})


def test_figures_follow_from_the_table(dry_run: Result) -> None:
    def mean(name: str, size: int, figure: str) -> float:
        values: list[float] = [
            line[figure]
            for line in dry_run["table"]
            if (line["configuration"], line["micro_batch"]) == (name, size)
        ]  # fmt: skip
        assert len(values) == 2
        return sum(values) / 2

    name, _, size = dry_run["best"].rpartition(" at ")
    assert name in OURS
    seed = mean(SEED, 8, "mean_rows_per_s")
    assert dry_run["vs_seed"] == pytest.approx(mean(name, int(size), "mean_rows_per_s") / seed)
    name, _, size = dry_run["mfu_of"].rpartition(" at ")
    assert dry_run["mfu"] == pytest.approx(mean(name, int(size), "mfu"))
    # With one peak and one corpus, rows of the mean row and MFU are the same figure.
    ratios = [line["mfu"] / line["mean_rows_per_s"] for line in dry_run["table"]]
    assert max(ratios) == pytest.approx(min(ratios))


def test_all_configurations_compute_the_same(dry_run: Result) -> None:
    assert list(dry_run["same"]) == NAMES
    seed = dry_run["same"][SEED]
    for one in dry_run["same"].values():
        assert one["loss"] == pytest.approx(seed["loss"], rel=2**-7)  # the stock loss is rounded to bf16
        assert one["grad_norm"] == pytest.approx(seed["grad_norm"], rel=0.01)


def test_kernels_decrease(dry_run: Result) -> None:
    kernels = {
        line["configuration"]: line["kernels"]
        for line in dry_run["table"]
        if line["round"] == 1 and line["micro_batch"] == 8
    }
    assert kernels["sdpa"] < kernels["sdpa, recomputed"]
    assert kernels["+ our batches"] <= kernels["sdpa"]
    # Without bf16 instructions (below AVX-512) torch multiplies the matrices of a batch one by one, which the seed's
    # attention and ours then count as dozens of operators.
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert kernels["+ attention, masks"] < kernels["+ gelu, norm, dropout"]
        assert kernels["+ loss"] < kernels["sdpa"] < kernels[SEED]


# -- memory and time -------------------------------------------------------------------------------------------


def make_bench(folder: Path, *, left: float = 1e9) -> Bench:
    config = gpu_throughput.SHAPES["tiny"]
    lengths = np.random.default_rng(0).integers(4, 33, (96, 2))
    return Bench(
        make_model(config, torch.device("cpu")),
        Epoch(random_rows(lengths, config["vocab_size"], folder), PairFlops.of_config(config)),
        dropout=0.1, budget_bytes=None, backend="eager", seconds=1.0, micro_batches=1, largest=64,
        deadline=lambda: left,
    )  # fmt: skip


def exhaust(bench: Bench, positions: int) -> None:
    """Memory for so many input positions."""

    def refuse(module: torch.nn.Module, arguments: Any, options: dict[str, Any]) -> None:
        if max(value.numel() for name, value in options.items() if name in ("input_ids", "attention_mask")) > positions:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    bench.model.get_encoder().register_forward_pre_hook(refuse, with_kwargs=True)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (8, [(8, False)]),
        (30, [(8, False), (24, False)]),
        (5, [(8, True), (5, False)]),
        (0, [(8, True)]),
    ],
)
def test_the_largest_micro_batch_that_fits_is_found(
    tmp_path: Path, rows: int, expected: list[tuple[int, bool]]
) -> None:
    bench, chosen = make_bench(tmp_path), LadderConfiguration("random", ordered=False)
    exhaust(bench, rows * 32)
    bench.apply(chosen)
    sizes = list(bench.sizes(chosen))
    assert [(size["micro_batch"], "out_of_memory" in size) for size in sizes] == expected
    for size in sizes:
        assert ("out_of_memory" in bench.measure(chosen, size["micro_batch"])) == ("out_of_memory" in size)
    assert all(parameter.grad is not None for parameter in bench.model.parameters())


def test_a_larger_micro_batch_is_not_tried_where_steps_have_no_larger_groups(tmp_path: Path) -> None:
    bench, chosen = make_bench(tmp_path), LadderConfiguration("ours", step_rows=16)
    bench.apply(chosen)
    first, *others = [size["micro_batch"] for size in bench.sizes(chosen)]
    assert first == 8
    assert max(others, default=8) < 64  # which would fit


def test_what_fails_for_another_reason_than_memory_is_told_and_the_rest_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ALLOCATOR, "expandable_segments:True")  # undone afterwards
    bad = LadderConfiguration("bad", ordered=False, patches=("wings",))  # type: ignore[arg-type]  # no such patch
    good = LadderConfiguration("good", ordered=False, search=False)
    monkeypatch.setattr(gpu_throughput, "LADDER", (bad, good))
    code = gpu_throughput.main(f"{DRY} --rounds 1 --micro-batches 1 --rows 16 --dropout 0".split())
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 1
    assert result["broken"] == ["bad: KeyError: 'wings'"]
    assert "good" in result["same"]
    assert result["vs_seed"] is result["mfu"] is None


def test_when_time_is_up_it_prints_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv(ALLOCATOR, "expandable_segments:True")
    assert gpu_throughput.main(f"{DRY} --minutes 0 --rows 48".split()) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["complete"], result["table"], result["vs_seed"]) == (False, [], None)
    with pytest.raises(TimeUp):
        make_bench(tmp_path, left=0.0).apply(LADDER[0])


def test_torch_without_a_recompile_limit_of_compile_is_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    def older(model: Any, *, dynamic: bool) -> Any:
        told.update(dynamic=dynamic, limit=torch._dynamo.config.recompile_limit)
        return model

    monkeypatch.setattr(torch, "compile", older)
    # Not by monkeypatch: what it undoes in this module is gone for all tests that follow.
    with torch._dynamo.config.patch(recompile_limit=8), recompile_limit_is_known():
        torch.compile(len, dynamic=True, recompile_limit=32)  # type: ignore[call-overload]  # too new
    assert told == {"dynamic": True, "limit": 32}
    assert torch.compile is older


# -- lengths ---------------------------------------------------------------------------------------------------


def test_the_lengths_that_are_kept_are_those_of_the_recipes() -> None:
    lengths = read_lengths(LENGTHS)
    assert len(lengths) == 19_972
    assert lengths.mean(0) == pytest.approx([94.1, 160.4], abs=0.1)
    assert (rounded(lengths).max(0) == 512).all()
    assert 100 < synthetic_lengths(1000).mean(0)[0] < synthetic_lengths(1000).mean(0)[1] < 300


def test_lengths_travel_as_padded_widths(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    pairs = write_lengths(EXAMPLES, None, file)
    found = read_lengths(file)
    assert found.min() >= 1
    assert sorted(map(tuple, rounded(found).tolist())) == sorted(map(tuple, rounded(pairs).tolist()))
    rows = random_rows(found, 128, tmp_path)
    assert rows.input_lengths.tolist() == found[:, 0].tolist()
    assert rows.target(3).tolist()[-1] == 1
    assert 3 <= rows.target(3)[:-1].min() <= rows.target(3).max() < 128


def test_another_file_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "pairs.npy", np.ones((4, 2), np.int64))
    with pytest.raises(ValueError, match=r"int64 \(4, 2\) is not \[cells, 3\] .* --write-lengths"):
        read_lengths(tmp_path / "pairs.npy")
