"""Whether a W&B run is online, and the environment of the process that holds it."""

from __future__ import annotations

from collections.abc import Mapping

from jobs.process.secrets import minimal_environment

KEPT_VARIABLES = frozenset({"WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_HTTP_TIMEOUT"})


def why_offline(api_key: str | None, mode: str | None) -> str | None:
    """Why runs are offline from the beginning; None: they are online."""
    if mode == "offline":
        return "WANDB_MODE is offline"
    if not api_key:
        return "there is no WANDB_API_KEY"
    if mode not in (None, "online", "disabled"):
        return f"WANDB_MODE is {mode!r}; it is online, offline or disabled"
    return None


def child_environment(
    inherited: Mapping[str, str], api_key: str | None, base_url: str | None, online: bool
) -> dict[str, str]:
    """What is inherited, without other secrets and without settings of W&B that could change what we rely on.

    The key travels here: a command line can be read by every user of the machine.
    """
    environment = {
        key: value
        for key, value in minimal_environment(inherited, ()).items()
        if key in KEPT_VARIABLES or not key.startswith("WANDB_")
    } | {"WANDB_X_DISABLE_VIEWER": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    environment |= {"WANDB_API_KEY": api_key} if api_key and online else {}
    return environment | ({"WANDB_BASE_URL": base_url} if base_url else {})
