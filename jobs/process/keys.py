"""API keys: how one is made, and the file of those who may come in, which holds hashes only.

A line of the file is `name sha256-hex`; empty lines and those that begin with # are passed over. A key is 256 random
bits behind `lh_` (so that it is recognized where it should not be): it cannot be guessed, so one SHA-256 is enough.
"""

from __future__ import annotations

import hashlib
import re
import secrets

from jobs.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def new_key(name: str) -> tuple[str, str]:
    """A new key, kept nowhere, and its line for LONGHAUL_API_KEYS_FILE. UserError for an illegal name."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot name a key: 1 to 64 letters, digits and . _ @ -, a letter or digit first")
    key = f"lh_{secrets.token_urlsafe(32)}"
    return key, f"{name} {digest_of(key.encode()).hex()}"


def digest_of(key: bytes) -> bytes:
    """What is kept of a key, 32 bytes."""
    return hashlib.sha256(key).digest()


def read_keys(text: str) -> dict[str, bytes]:
    """Name and digest of every line. ValueError names the first invalid line, not its text: that may be a key."""
    found: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not _NAME.fullmatch(words[0]) or not _DIGEST.fullmatch(words[1].lower()):
            raise ValueError(f"line {number} is not `name sha256-hex`: `longhaul key NAME` makes a key and its line")
        name, digest = words
        if name in found:
            raise ValueError(f"line {number}: the name {name} was given before; every key needs its own")
        found[name] = bytes.fromhex(digest)
    return found
