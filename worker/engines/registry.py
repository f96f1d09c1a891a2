"""The engines that LONGHAUL_ENGINES names: a TOML file with a section for each."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from worker.engines.settings import EngineSettings
from worker.engines.skypilot import SkyPilotSettings
from worker.engines.slurm import SlurmSettings

KINDS: Mapping[str, type[EngineSettings]] = {"skypilot": SkyPilotSettings, "slurm": SlurmSettings}
"""What each kind may set."""


def read_engines(file: Path) -> dict[str, EngineSettings]:
    """The engines by name. Raises ValueError, which names the file, the section and the key."""
    try:
        sections = tomllib.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"LONGHAUL_ENGINES={file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"LONGHAUL_ENGINES={file} is not TOML: {error}") from None
    return {name: _settings(f"{file}: [{name}]", name, section) for name, section in sections.items()}


def _settings(place: str, name: str, section: object) -> EngineSettings:
    if not isinstance(section, dict):
        raise ValueError(f"{place}: {name} stands outside a section; an engine is a section such as [cluster]")
    kind = section.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        instead = '; SkyPilot reaches Kubernetes (infra = "k8s")' if kind == "kubeflow" else ""
        raise ValueError(f"{place}: kind is {kind!r}; it is one of {', '.join(sorted(KINDS))}{instead}")
    try:
        # As JSON: TOML has arrays and texts alone, where the settings have tuples and paths.
        return KINDS[kind].model_validate_json(json.dumps({**section, "name": name}))
    except TypeError as error:
        raise ValueError(f"{place}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        what = (
            "there is no such key" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
        )
        raise ValueError(f"{place}: {f'{key}: ' if key else ''}{what}") from None
