"""What the wheel needs: the client nothing but its own few packages, the service no ML."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
HEAVY = ("fastapi", "redis", "rq", "torch", "transformers", "wandb")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `pip install .` builds it, from a copy: setuptools writes beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for package in ("jobs", "longhaul", "service", "worker"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    build = ["wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "."]
    subprocess.run([sys.executable, "-m", "pip", *build], cwd=folder, check=True)
    (built,) = folder.glob("longhaul-*.whl")
    return built


class Environment:
    """A fresh one without an index: the wheel, and copies of the packages that it asks for."""

    def __init__(self, folder: Path, wheel: Path, extra: str = "") -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.bin = folder / "bin"
        (site,) = (folder / "lib").glob("python*/site-packages")
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python")]
        subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], check=True)
        (installed,) = site.glob("longhaul-*.dist-info")
        asked: list[tuple[Distribution, str]] = [(PathDistribution(installed), extra)]
        self.packages: set[str] = set()
        for package, of_extra in asked:
            for requirement in map(Requirement, package.requires or ()):
                wanted = requirement.marker is None or requirement.marker.evaluate({"extra": of_extra})
                if wanted and requirement.name not in self.packages:
                    self.packages.add(requirement.name)
                    asked += [(distribution(requirement.name), each) for each in (requirement.extras or {""})]
        for name in self.packages:
            copy(name, site)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """One of its programs, far from the repository."""
        words = [str(self.bin / command[0]), *command[1:]]
        return subprocess.run(words, cwd=self.bin, env={}, capture_output=True, text=True)


def copy(name: str, site: Path) -> None:
    """What is installed here of one package."""
    for file in distribution(name).files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.locate(), site / file)


def test_the_client_is_installed_without_torch_redis_or_a_web_framework(tmp_path: Path, wheel: Path) -> None:
    laptop = Environment(tmp_path / "laptop", wheel)
    assert not laptop.packages & {*HEAVY, "prometheus-client", "uvicorn"}

    helped = laptop.run("longhaul", "--help")
    assert helped.returncode == 0 and "submit FILE" in helped.stdout, helped.stderr
    asked = laptop.run("longhaul", "list")
    assert asked.returncode == 3 and "no answer from http://127.0.0.1:8000" in asked.stderr
    local = laptop.run("longhaul", "local")
    assert local.returncode == 2 and "only the client is installed here" in local.stderr


def test_the_service_needs_no_more_than_its_extra(tmp_path: Path, wheel: Path) -> None:
    box = Environment(tmp_path / "box", wheel, "service")
    started = box.run("python", "-c", "import service.main")
    assert started.returncode == 0, started.stderr


def test_importing_the_library_loads_no_heavy_package_even_where_all_are_installed() -> None:
    code = f"import sys, longhaul, longhaul.command_line; print([n for n in {HEAVY} if n in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
