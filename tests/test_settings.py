"""`.env.example` names every variable that the code reads, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml

import service.settings
import worker.settings
import worker.training.settings
from jobs.integrations import variables
from jobs.process.secrets import NEEDED, VARIABLES

ROOT = Path(__file__).parents[1]
READ_BY_OTHERS = {
    "COMPOSE_FILE",
    "UID",
    "GID",
    "HF_TOKEN",
    "LONGHAUL_REDIS_PASSWORD",
    "LONGHAUL_SHARED",
    "LONGHAUL_BOXES_ADDRESS",
    "NCCL_P2P_DISABLE",
}
"""By compose, the hub's own library, and NCCL."""


def example() -> dict[str, str]:
    lines = (ROOT / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def read_by_code() -> set[str]:
    """Names in the settings modules that look like variables of ours: what they read, whichever way they do it."""
    names = {variable.name for variable in variables()}
    for module in (service.settings, worker.settings, worker.training.settings):
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text())
        strings = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        names |= {
            text for text in strings if re.fullmatch(r"(LONGHAUL|DISCORD|WANDB)_[A-Z_]+", text) and text[-1] != "_"
        }
    for place in ("RUNS", "DATA", "UPLOADS", "PREPARED", "MODELS"):
        names.add(f"LONGHAUL_{place}")
    return names


def test_the_example_and_the_code_agree() -> None:
    assert set(example()) - READ_BY_OTHERS == read_by_code()


def test_the_example_is_a_legal_environment() -> None:
    values = {key: value for key, value in example().items() if value}
    settings = worker.settings.from_environment(values)
    assert (settings.device, settings.integrations) == ("cuda", {})
    assert worker.training.settings.from_environment(values).device == "cuda"
    assert service.settings.read_settings(values).host == "127.0.0.1"


def test_compose_gives_each_container_the_secrets_that_its_processes_need() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.training.yml").read_text())
    for name, container in compose["services"].items():
        processes = container.get("command", [name])  # of a worker's image these are its roles
        needed = {secret for process in processes for secret in NEEDED[process]}
        # The older name of the hub's token is for environments that have it already.
        assert set(container["environment"]) & set(VARIABLES) == needed - {"HUGGING_FACE_HUB_TOKEN"}, name


def test_secrets_are_never_shown_nor_handed_to_a_trainer() -> None:
    secret = "s3cr3t"
    values = {
        "LONGHAUL_DEVICE": "cpu",
        "LONGHAUL_REDIS_URL": f"redis://user:{secret}@127.0.0.1/0",
        "LONGHAUL_API_KEY": secret,
        "DISCORD_WEBHOOK": f"https://discord.com/api/webhooks/1/{secret}",
        "WANDB_API_KEY": secret,
    }
    settings = worker.settings.from_environment(values)
    assert secret not in repr(settings) + settings.masked_redis_url + repr(service.settings.read_settings(values))
    assert secret not in "".join(settings.trainer_environment.values())
