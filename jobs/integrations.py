"""Where reports go: for each sink that a job can switch off, its key in the job and the variables of its settings.

`worker/sinks/registry.py` finds the sink by the name of the key. The reference, `.env.example`, compose and the list of
secrets follow from the row here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, StringConstraints

from jobs.frozen import Part


@dataclass(frozen=True)
class Variable:
    """A setting of a sink, which the process *publish* reads from its environment."""

    name: str
    meaning: str
    """For people who fill it in, and what it is if it is empty."""
    secret: bool = False
    """Only *publish* is given it, and it is shown nowhere."""


class WandbSpec(Part):
    """Where the run appears in Weights & Biases."""

    project: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")] = "longhaul"
    """Project name."""
    entity: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")] | None = None
    """Team or user; null: the key's default."""
    artifacts: bool = False
    """Prepared rows and final model are artifacts of the run: as references to where they are, never their bytes."""


def _switched(value: object) -> object:
    """What `true` and `false` stand for."""
    return (WandbSpec() if value else None) if isinstance(value, bool) else value


class IntegrationsSpec(Part):
    """Where reports go. Keys and webhook come from the environment of the process *publish*, never from a job."""

    wandb: Annotated[
        WandbSpec | None,
        BeforeValidator(_switched, json_schema_input_type=WandbSpec | bool | None),
        Variable(
            "WANDB_API_KEY",
            "API key of Weights & Biases. Empty: runs are written offline, for `wandb sync`.",
            secret=True,
        ),
        Variable("WANDB_BASE_URL", "URL of your own W&B server. Empty: the public one."),
        Variable("WANDB_MODE", "`offline`: runs are written to disk even with a key."),
    ] = WandbSpec()
    """Null or false: nothing is sent to Weights & Biases. True: the defaults."""
    discord: Annotated[
        bool,
        Variable(
            "DISCORD_WEBHOOK",
            "URL of a Discord webhook: channel settings, Integrations, Webhooks. Empty: no messages.",
            secret=True,
        ),
        Variable(
            "LONGHAUL_DISCORD_EVENTS",
            "Which messages Discord gets, with commas between: progress, plan, warnings, done, failed, paused, "
            "cancelled. Empty: all.",
        ),
        Variable(
            "LONGHAUL_DISCORD_MENTION",
            "Whom messages call that need a person: <@ID> of a user or <@&ID> of a role (Discord: developer mode, "
            "Copy ID).",
        ),
    ] = True
    """Messages to the webhook in DISCORD_WEBHOOK, when there is one."""

    def wants(self, name: str) -> bool:
        """Whether the job reports to the sink of this name; one that is no key cannot be switched off."""
        return getattr(self, name, True) not in (False, None)


INTEGRATIONS: tuple[str, ...] = tuple(IntegrationsSpec.model_fields)
"""Their names."""


def variables() -> Iterator[Variable]:
    """Of all integrations."""
    for field in IntegrationsSpec.model_fields.values():
        yield from (each for each in field.metadata if isinstance(each, Variable))
