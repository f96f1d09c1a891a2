"""What is remembered of a webhook that is gone, so that a restart does not ask Discord again (architecture.md: Sinks).

Discord bans addresses that keep asking for what is not there. The file holds a hash, never the URL: reading
the runs directory must not allow posting to the channel. A token is long and random, so a hash does not reveal it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

log = logging.getLogger("longhaul.discord")


class GoneFile:
    """`runs/.publish/discord.json`: the last webhook found gone. Another DISCORD_WEBHOOK is not concerned by it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def why(self, url: str) -> str | None:
        """Why this webhook is gone; None if nothing is known against it."""
        try:
            known = json.loads(self.file.read_bytes())
            return str(known["why"]) if known["webhook_sha256"] == _sha256(url) else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be read and is skipped: %r", self.file, error)
            return None

    def remember(self, url: str, why: str) -> None:
        """Keep it for the next start. A disk that does not take it costs one more question then."""
        temporary = self.file.with_name(f".{self.file.name}")
        try:
            self.file.parent.mkdir(exist_ok=True)
            temporary.write_text(json.dumps({"webhook_sha256": _sha256(url), "why": why}) + "\n")
            os.replace(temporary, self.file)
        except OSError as error:
            log.warning("%s cannot be written: %s", self.file, error)


def _sha256(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()
