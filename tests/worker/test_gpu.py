"""Which GPU a train worker takes, and what it says when there is none. nvidia-smi is a script on PATH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.heartbeat import Gpu
from worker.gpu import NoGpu, ask_driver, check_fit, find_gpu, named_gpus, usable_gpu

ROW = "{}, GPU-{}, NVIDIA GeForce RTX 5090, 32607, 580.95.05, {}\n"
TWO = ROW.format(0, "aaa", "12.0") + ROW.format(1, "bbb", "12.0")


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH; `answer` puts an nvidia-smi into it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def answer(folder: Path, text: str, code: int = 0) -> None:
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{text}END\nexit {code}\n")
    script.chmod(0o755)


def test_the_first_gpu_or_the_one_that_is_named(smi: Path) -> None:
    answer(smi, TWO)
    first = Gpu(uuid="GPU-aaa", name="NVIDIA GeForce RTX 5090", memory_bytes=32607 * 2**20, driver="580.95.05")
    assert find_gpu("") == first
    assert find_gpu("1").uuid == find_gpu("GPU-bbb").uuid == "GPU-bbb"
    with pytest.raises(
        NoGpu, match=r"'GPU-ccc' names no GPU here: there is GPU-aaa, GPU-bbb \(`nvidia-smi -L` also lists slices\)"
    ):
        find_gpu("GPU-ccc")


def test_no_driver_no_gpu_and_a_driver_that_is_not_loaded(smi: Path) -> None:
    with pytest.raises(NoGpu, match=r"no NVIDIA driver was found here .*driver 580 or newer"):
        find_gpu("")
    answer(smi, "No devices were found\n")
    with pytest.raises(NoGpu, match="no usable GPU: nvidia-smi says 'No devices were found'"):
        find_gpu("")
    answer(smi, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", code=9)
    with pytest.raises(NoGpu, match="couldn't communicate with the NVIDIA driver"):
        find_gpu("")


def test_a_gpu_whose_memory_is_not_told_is_refused_and_its_neighbour_is_not(smi: Path) -> None:
    answer(smi, TWO.replace("32607", "[N/A]", 1))
    with pytest.raises(
        NoGpu, match=r"does not say how much memory NVIDIA GeForce RTX 5090 has \(memory.total is '\[N/A\]"
    ):
        find_gpu("")
    assert find_gpu("1").uuid == "GPU-bbb"


def test_a_slice_that_is_not_there_is_refused(smi: Path) -> None:
    answer(smi, TWO)
    with pytest.raises(NoGpu, match="'MIG-aaa' names no GPU here"):
        find_gpu("MIG-aaa")


def test_the_gpus_that_train_are_named_by_all_by_indexes_or_by_uuids_and_slices_stand_for_their_gpu(smi: Path) -> None:
    (smi / "nvidia-smi").write_text(
        f"""#!/bin/sh
if [ "$1" != -L ]; then /bin/cat <<'END'
{TWO}END
exit 0; fi
/bin/cat <<'END'
GPU 0: NVIDIA GeForce RTX 5090 (UUID: GPU-aaa)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbb)
  MIG 1g.5gb      Device  0: (UUID: MIG-one)
  MIG 1g.5gb      Device  1: (UUID: MIG-two)
END
"""
    )
    (smi / "nvidia-smi").chmod(0o755)
    assert named_gpus("all") == ["GPU-aaa", "MIG-one", "MIG-two"]
    assert named_gpus("1") == named_gpus("GPU-bbb,1") == ["MIG-one", "MIG-two"]
    assert named_gpus("MIG-two,0,GPU-aaa") == ["MIG-two", "GPU-aaa"]
    with pytest.raises(NoGpu, match=r"joins a GPU with itself, or slices of GPUs"):
        named_gpus("MIG-one+MIG-two")
    assert named_gpus("0,GPU-away") == ["GPU-aaa", "GPU-away"], "it may come back"
    with pytest.raises(NoGpu, match="'2' names no GPU here: there is GPU-aaa, GPU-bbb"):
        named_gpus("2")


def test_a_lost_gpu_hides_none_of_the_others(smi: Path) -> None:
    lost = "Unable to determine the device handle for GPU1: 0000:02:00.0: GPU is lost.  Reboot the system\n"
    answer(smi, TWO.splitlines(keepends=True)[0] + lost, code=15)
    assert find_gpu("GPU-aaa").uuid == find_gpu("0").uuid == "GPU-aaa"
    assert named_gpus("all") == ["GPU-aaa"]
    for wanted in ("GPU-bbb", "1"):
        with pytest.raises(NoGpu, match="GPU is lost"):
            find_gpu(wanted)
    answer(smi, lost, code=15)
    with pytest.raises(NoGpu, match="GPU is lost"):
        named_gpus("all")


GPU = Gpu(uuid="GPU-aaa", name="NVIDIA GeForce RTX 5090", memory_bytes=32607 * 2**20, driver="570.86.10")


def test_a_driver_that_cannot_run_this_torch_is_named_with_the_one_that_can() -> None:
    needed = r"RTX 5090 with driver 570.86.10 runs CUDA 12.8, and this torch needs CUDA 13.0: driver 580 or newer is n"
    with pytest.raises(NoGpu, match=needed):
        check_fit(GPU, (13, 0), (12, 8))
    with pytest.raises(NoGpu, match=r"needs CUDA 14\.1: a newer driver is needed"):
        check_fit(GPU, (14, 1), (13, 0))
    with pytest.raises(
        NoGpu, match=r"built for the CPU alone \(found: NVIDIA GeForce RTX 5090 with driver 570.86.10\)"
    ):
        check_fit(GPU, None, (13, 0))
    check_fit(GPU, (13, 2), (13, 0))  # minor versions run on the driver of the first
    check_fit(GPU, (12, 6), (13, 0))
    check_fit(GPU, (13, 0), None)


def test_a_worker_takes_no_gpu_whose_driver_cannot_run_its_torch(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(smi, TWO)
    monkeypatch.setattr("worker.gpu.torch_cuda", lambda: (13, 0))
    monkeypatch.setattr("worker.gpu.ask_driver", lambda uuid: ((13, 1), 0))
    assert usable_gpu("1").uuid == "GPU-bbb"
    monkeypatch.setattr("worker.gpu.ask_driver", lambda uuid: ((13, 1), 999))
    with pytest.raises(
        NoGpu, match=r"RTX 5090 is there, but CUDA cannot be initialized \(cuInit fails with code 999\)"
    ):
        usable_gpu("1")
    monkeypatch.setattr("worker.gpu.ask_driver", lambda uuid: ((12, 8), 0))
    with pytest.raises(NoGpu, match=r"with driver 580.95.05 runs CUDA 12.8, and this torch needs CUDA 13.0"):
        usable_gpu("1")


def test_gpus_joined_by_plus_signs_are_a_group(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.gpu.torch_cuda", lambda: (13, 0))
    monkeypatch.setattr("worker.gpu.ask_driver", lambda uuid: ((13, 1), 0))
    first = TWO.splitlines(keepends=True)[0]
    answer(smi, first + first.replace("0, GPU-aaa", "1, GPU-bbb").replace("32607", "32000"))
    assert named_gpus("0+1") == ["GPU-aaa+GPU-bbb"]
    assert named_gpus("1,0+GPU-away") == ["GPU-bbb", "GPU-aaa+GPU-away"]
    for wanted, why in (
        ("0+1,1", "names GPU-bbb twice"),
        ("0+1,1+0", "names GPU-aaa, GPU-bbb twice"),
        ("0+0", "joins a GPU with itself"),
    ):
        with pytest.raises(NoGpu, match=why):
            named_gpus(wanted)
    assert named_gpus("0+7,1") == ["GPU-bbb"], "a group that is not whole is left out"
    group = usable_gpu("GPU-aaa+GPU-bbb")
    assert (group.uuid, group.count, group.memory_bytes) == ("GPU-aaa+GPU-bbb", 2, 32000 * 2**20)
    assert group.visible == "GPU-aaa,GPU-bbb" and group.text() == f"2 × {group.name}" and group.text(1) == group.name
    answer(smi, TWO.replace("RTX 5090", "RTX 4090", 1))
    kinds = r"0\+1 joins GPUs of several kinds: .*4090, .*5090; only GPUs of one kind train together"
    with pytest.raises(NoGpu, match=kinds):
        usable_gpu("0+1")


ASK_TORCH = """
import json, sys
from worker.gpu import torch_cuda
ours = torch_cuda()
assert "torch" not in sys.modules
import torch
print(json.dumps([ours, torch.version.cuda]))
"""


@pytest.mark.parametrize(("version", "parsed"), [(None, None), ("'13.0'", [13, 0]), ("'12.6'", [12, 6])])
def test_torch_is_not_imported_to_learn_its_cuda(tmp_path: Path, version: str | None, parsed: list[int] | None) -> None:
    """The torch installed here, whichever it is; and two made up."""
    environment = dict(os.environ)
    if version is not None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("from torch import version\n")
        (tmp_path / "torch" / "version.py").write_text(
            f"from typing import Optional\ncuda: Optional[str] = {version}\n"
        )
        environment["PYTHONPATH"] = os.fspath(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", ASK_TORCH], env=environment, capture_output=True, text=True, check=True
    )
    ours, torchs = json.loads(done.stdout)
    assert ours == (parsed if version else torchs and [int(part) for part in torchs.split(".")])


@pytest.mark.parametrize(
    ("version", "init", "said"),
    [
        ("*version = 12080; return 0", 'return strcmp(getenv("CUDA_VISIBLE_DEVICES"), "GPU-aaa")', ((12, 8), 0)),
        ("*version = 13000; return 0", "return 999", ((13, 0), 999)),
        ("return 999", "return 0", (None, 0)),
    ],
)
def test_the_driver_is_asked_for_its_cuda_and_whether_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, init: str, said: tuple[tuple[int, int] | None, int]
) -> None:
    """A driver made here: two of its functions, with their true names and signatures."""
    source = tmp_path / "cuda.c"
    source.write_text(
        f"#include <stdlib.h>\n#include <string.h>\nint cuDriverGetVersion(int *version) {{ {version}; }}\n"
        f"int cuInit(unsigned flags) {{ {init}; }}\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", os.fspath(tmp_path))
    assert ask_driver("GPU-aaa") == said


def test_a_gpu_without_bf16_is_one_that_says_so(smi: Path) -> None:
    answer(smi, ROW.format(0, "aaa", "7.5") + ROW.format(1, "bbb", "8.0"))
    assert named_gpus("all") == ["GPU-aaa", "GPU-bbb"]
    assert [find_gpu(index).native_bf16 for index in ("0", "1")] == [False, True]


def test_a_gpu_that_torch_has_no_kernels_for_is_left_out_of_all_and_refused_by_name(smi: Path) -> None:
    answer(smi, ROW.format(0, "aaa", "6.1") + ROW.format(1, "bbb", "12.0"))
    assert named_gpus("all") == ["GPU-bbb"]
    with pytest.raises(NoGpu, match=r"has compute capability 6\.1, and torch needs 7\.5"):
        find_gpu("0")
    answer(smi, ROW.format(0, "aaa", "6.1"))
    with pytest.raises(NoGpu, match=r"has compute capability 6\.1"):
        named_gpus("all")
    answer(smi, ROW.format(0, "aaa", "[N/A]"))
    assert find_gpu("").uuid == "GPU-aaa"


def test_an_index_that_is_missing_is_left_out(smi: Path) -> None:
    answer(smi, TWO)
    assert named_gpus("1,7") == ["GPU-bbb"]
    with pytest.raises(NoGpu, match="'7' names no GPU here"):
        named_gpus("7")
