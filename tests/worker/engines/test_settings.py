"""LONGHAUL_ENGINES: what is right, and what is said of what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.engines.registry import read_engines
from worker.engines.slurm import SlurmSettings
from worker.settings import from_environment

ENVIRONMENT = 'environment = { TOKENIZERS_PARALLELISM = "false" }'
RIGHT = """
[cluster]
kind = "slurm"
gpu_name = "NVIDIA H100 80GB HBM3"
gpu_memory_gib = 79.6
gpus = 4
at_once = 8
environment = { TOKENIZERS_PARALLELISM = "false" }
directory = "/shared/longhaul"
python = ["apptainer", "exec", "--nv", "longhaul.sif", "python"]
partition = "gpu"
time = "12:00:00"
sbatch = ["--constraint=h100"]

[small-one]
kind = "slurm"
device = "cpu"
directory = "/shared/longhaul"
python = [".venv/bin/python"]
"""


def test_a_section_is_an_engine_and_its_places_have_a_gpu_each(tmp_path: Path) -> None:
    file = tmp_path / "engines.toml"
    file.write_text(RIGHT)
    engines = from_environment({"LONGHAUL_ENGINES": str(file), "LONGHAUL_GPUS": "none"}).engines
    assert list(engines) == ["cluster", "small-one"]
    cluster = engines["cluster"]
    assert isinstance(cluster, SlurmSettings) and cluster.python[0] == "apptainer"
    gpu = cluster.gpu(3)
    assert gpu is not None and (gpu.uuid, gpu.count, gpu.facts.whole_gib) == ("cluster/3", 4, 80)
    assert engines["small-one"].gpu(0) is None


@pytest.mark.parametrize(
    ("keys", "gib"),
    [
        ("", None), ('memory = "64G"', 64), ('memory = "2048"', 2), ('memory = "0"', None), ('memory = "max"', None),
        ("host_memory_gib = 500.0", 500), ('memory = "64G"\nhost_memory_gib = 60.5', 60.5),
    ],
)  # fmt: skip
def test_the_memory_of_a_node_is_what_is_said_or_asked_for(tmp_path: Path, keys: str, gib: float | None) -> None:
    file = tmp_path / "engines.toml"
    file.write_text(RIGHT.replace("gpus = 4", f"gpus = 4\n{keys}"))
    gpu = read_engines(file)["cluster"].gpu(0)
    assert gpu is not None
    assert gpu.facts.host_memory_bytes == gpu.host_memory_bytes == (None if gib is None else gib * 2**30)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("", "[", "is not TOML"),
        ("[cluster]", "x = 1\n[cluster]", "[x]: x stands outside a section; an engine is a section such as [cluster]"),
        ('kind = "slurm"\ngpu', 'kind = "lsf"\ngpu', "[cluster]: kind is 'lsf'; it is one of "),
        ('kind = "slurm"\ngpu', 'kind = "kubeflow"\ngpu', "it is one of skypilot, slurm; SkyPilot reaches Kubernetes"),
        ("gpus = 4", "gpus = 0", "[cluster]: gpus: Input should be greater than or equal to 1"),
        ("gpus = 4", 'gpus = "4"', "[cluster]: gpus: Input should be a valid integer"),
        ("gpus = 4", "gpu = 4", "[cluster]: gpu: there is no such key"),
        ("gpus = 4", "gpus = 1979-05-27", "[cluster]: Object of type date is not JSON serializable"),
        ("gpu_memory_gib = 79.6", "", "[cluster]: gpu_name and gpu_memory_gib are missing; of an engine without"),
        ("[small-one]", "[Small]", "[Small]: name: String should match pattern"),
        ('"/shared/longhaul"\npython = ["app', '"longhaul"\npython = ["app', "directory: it must be an absolute path"),
        ("--constraint=h100", "--array=1-5", "sbatch: --array=1-5 cannot be set: Longhaul sets it, or it does not fit"),
        ("--constraint=h100", "--requ", "sbatch: --requ cannot be set"),
        ("--constraint=h100", "--clusters=b", "sbatch: --clusters=b cannot be set"),
        ("--constraint=h100", "-C h100", "sbatch: '-C h100' is no option of sbatch; write it with its dashes"),
        ('partition = "gpu"', 'partition = "gpu\\n#SBATCH --uid=0"', "partition: 'gpu\\n#SBATCH --uid=0' is not"),
        ('"12:00:00"', '"2"', "time: 2 is not longer than notice_s (120), so that no attempt could train"),
        ('"12:00:00"', '"0-0:1:59"', "time: 0-0:1:59 is not longer than notice_s (120)"),
        (ENVIRONMENT, 'environment = {HF_TOKEN = "hf_x"}', "HF_TOKEN looks like a secret, and a trainer needs none"),
        (ENVIRONMENT, 'environment = {hf_token = "hf_xy"}', "hf_token looks like a secret"),
        (ENVIRONMENT, 'environment = {X = "https://user:hf_x@host/"}', "X looks like a secret"),
        (ENVIRONMENT, 'environment = {"X=1; touch pwned; Y" = "v"}', "'X=1; touch pwned; Y' is no name of a variable"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, before: str, after: str, said: str) -> None:
    file = tmp_path / "engines.toml"
    file.write_text(RIGHT.replace(before, after, 1) if before else after)
    with pytest.raises(ValueError, match=r"engines\.toml") as error:
        read_engines(file)
    assert said in str(error.value) and "hf_x" not in str(error.value)


def test_a_file_that_is_not_there_and_a_box_where_nothing_would_train(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"LONGHAUL_ENGINES=/no/file cannot be read: No such file"):
        from_environment({"LONGHAUL_ENGINES": "/no/file"})
    with pytest.raises(ValueError, match="LONGHAUL_GPUS is none, and LONGHAUL_ENGINES names no engine"):
        from_environment({"LONGHAUL_GPUS": "none"})
