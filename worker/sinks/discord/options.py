"""What the operator wants of the messages: which, whom they call, where they lead."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jobs.process.public_url import public_url

KINDS = ("progress", "plan", "warnings", "done", "failed", "paused", "cancelled")
"""Of messages. Warnings: out of memory, low disk, no GPU, an attempt that is repeated, a repair, damage."""
_MENTION = re.compile(r"<@(&?)(\d{1,20})>")


@dataclass(frozen=True)
class DiscordOptions:
    """Everything, nobody in particular, and no link, unless said."""

    kinds: frozenset[str] = frozenset(KINDS)
    mention: str | None = None
    """`<@ID>`, a user, or `<@&ID>`, a role: called by messages that need a person."""
    public_url: str | None = None
    """Where people reach the service."""

    @classmethod
    def of(cls, events: str | None, mention: str | None, url: str | None) -> DiscordOptions:
        """From the texts of the environment. ValueError names the variable."""
        kinds = frozenset(word for word in re.split(r"[,\s]+", events or "") if word) or frozenset(KINDS)
        if unknown := sorted(kinds - {*KINDS}):
            raise ValueError(f"LONGHAUL_DISCORD_EVENTS names {unknown[0]!r}; it is a list of: {', '.join(KINDS)}")
        if mention and not _MENTION.fullmatch(mention):
            raise ValueError(f"LONGHAUL_DISCORD_MENTION is {mention!r}; it is <@ID> of a user or <@&ID> of a role")
        return cls(kinds, mention or None, public_url(url))

    def link(self, job: str) -> str | None:
        """To the job."""
        return f"{self.public_url}/jobs/{job}" if self.public_url else None

    def sweep_link(self, sweep: str) -> str | None:
        """To the sweep."""
        return f"{self.public_url}/sweeps/{sweep}" if self.public_url else None

    def call(self) -> dict[str, object]:
        """The parts of a message that call the person, and nobody else."""
        if self.mention is None:
            return {}
        found = _MENTION.fullmatch(self.mention)
        assert found is not None, "checked when it was read"
        who = "roles" if found[1] else "users"
        return {"content": self.mention, "allowed_mentions": {"parse": [], who: [found[2]]}}
