"""API keys; what looks like a secret, and how a text is shown without it.

Known by their form: Discord webhooks, `Bearer …`, user and password of a URL, tokens of the Hugging Face hub, keys of
W&B and Longhaul, and what is assigned to a name such as `api_key` or `PASSWORD`. Known by their value: the secrets of
this process's own environment, once passed to `register`.

A rule looks only where one of its words stands, and from there on reads a character a bounded number of times, so that
a long log costs little. What a rule takes out holds neither quote nor backslash: JSON text stays the JSON text it was.
A bare number of 40 or 64 hex digits is a commit or a checksum here and stays; it goes only after words like `api key`.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Collection, Mapping
from urllib.parse import quote, unquote, urlsplit

from jobs import integrations
from jobs.errors import UserError

# -- keys --------------------------------------------------------------------------------------------------------------
# API keys: how one is made, and the file of those who may come in, which holds hashes only.
#
# A line of the file is `name sha256-hex`; empty lines and those that begin with # are passed over. A key is 256 random
# bits behind `lh_` (so that it is recognized where it should not be): it cannot be guessed, so one SHA-256 is enough.

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


# -- secrets -----------------------------------------------------------------------------------------------------------

HIDDEN = "***"
HUB = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
OF_SINKS = tuple(variable.name for variable in integrations.variables() if variable.secret)
VARIABLES = (
    "LONGHAUL_API_KEY",
    "LONGHAUL_REDIS_PASSWORD",
    "LONGHAUL_REDIS_URL",
    *OF_SINKS,
    *HUB,
)
"""Variables whose values are secret, whatever they look like; of a URL its password, or the end of its path."""
NEEDED = {
    "redis": (),
    "warm": (),
    "service": ("LONGHAUL_API_KEY", "LONGHAUL_REDIS_URL"),
    "check": ("LONGHAUL_REDIS_URL", *HUB),
    "prepare": ("LONGHAUL_REDIS_URL", *HUB),
    "train": ("LONGHAUL_REDIS_URL",),
    "generate": ("LONGHAUL_REDIS_URL",),
    "push": ("LONGHAUL_REDIS_URL", *HUB),
    "publish": ("LONGHAUL_REDIS_URL", *OF_SINKS),
}
"""Which of them each process is given; compose gives its containers the same."""
SHORTEST = 8
"""Characters of a registered value: a shorter one would be found everywhere."""
NAMES = (
    "api_key", "api-key", "apikey", "api_token", "hub_token", "hf_token", "access_token", "auth_token", "session_token",
    "access_key", "password", "passwd", "secret", "rediscli_auth",
    *map(str.lower, OF_SINKS),
)  # fmt: skip
"""What is assigned to these, or to a name that ends so, is secret."""

_QUOTE = r"\\?[\"']"


def _spelled(*words: str) -> str:
    """One of these words, as people spell them. Literals are found ten times as fast as with the flag for any case."""
    spellings = {way(word) for word in words for way in (str, str.upper, str.title, str.capitalize)}
    return "(?:" + "|".join(sorted(spellings)) + ")"


# Words in lower case, one of which is in every text that the pattern fits; the pattern; what is shown instead.
_SPACE = r"(?:\s|\\[nrt])"
"""White space, also as JSON and `repr` write it."""
_SPACES = rf"{_SPACE}{{0,4}}"
_RULES: tuple[tuple[tuple[str, ...], re.Pattern[str], str], ...] = (
    (("/webhooks/",), re.compile(r"(/webhooks/\d+/)[^\s\"'\\/?#<>]+"), rf"\1{HIDDEN}"),
    (("://",), re.compile(r"://[^\s/?#\"'\\<>]+@"), f"://{HIDDEN}@"),
    (("hf_",), re.compile(r"hf_[A-Za-z0-9]{16,}"), f"hf_{HIDDEN}"),
    (("lh_",), re.compile(r"lh_[A-Za-z0-9_-]{32,}"), f"lh_{HIDDEN}"),
    (("wandb_v1_",), re.compile(r"wandb_v1_[A-Za-z0-9_-]{8,}"), f"wandb_v1_{HIDDEN}"),
    (
        ("authorization",),
        re.compile(
            rf"({_spelled('authorization')}(?:{_QUOTE})?{_SPACES}[:=]{_SPACES}(?:{_QUOTE})?"
            rf"{_spelled('bearer', 'basic', 'token')}{_SPACE}{_SPACES})[^\s\"'\\,;`…]+"
        ),
        rf"\1{HIDDEN}",
    ),
    (("bearer",), re.compile(rf"({_spelled('bearer')}{_SPACE}{_SPACES})[\w.~+/=-]{{16,}}"), rf"\1{HIDDEN}"),
    # Forty hex digits after what announces a key: a prompt, a command line, a line of .netrc.
    (
        ("wandb:", "login", "api key", "password "),
        re.compile(
            rf"({_spelled('wandb', 'api key', 'API key', 'login', 'password')}[\s:=]{{1,4}}"
            r"(?:is\s|--[a-z-]{1,20}[\s=])?)[0-9a-f]{40}\b"
        ),
        rf"\1{HIDDEN}",
    ),
    # A name in quotes is a key of JSON: there only a value in quotes is taken, so that it stays JSON.
    (
        NAMES,
        re.compile(
            rf"({_spelled(*NAMES, 'API-Key')})(?:({_QUOTE}{_SPACES}:{_SPACES}{_QUOTE})[^\"'\\\n]{{4,}}"
            rf"|({_SPACES}[:=]{_SPACES})(?:({_QUOTE})[^\"'\\\n]{{4,}}|(?!\*\*\*)[^\s\"'\\,;{{}}\[\]]{{6,}}))"
        ),
        rf"\1\2\3\4{HIDDEN}",
    ),
)

_registered: tuple[str, ...] = ()


def register(environment: Mapping[str, str]) -> None:
    """From now on `redact` takes out the secrets of this environment, too. Called once, when a process starts."""
    global _registered
    found: set[str] = set()
    for name in VARIABLES:
        for secret in _secret_parts(environment.get(name, "")):
            if len(secret) >= SHORTEST:
                # As it is, and as it stands in a JSON text or in a URL.
                found |= {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], quote(secret)}
    _registered = tuple(sorted(found, key=len, reverse=True))


def minimal_environment(environment: Mapping[str, str], needed: Collection[str]) -> dict[str, str]:
    """The environment with these secrets and no others."""
    return {key: value for key, value in environment.items() if key in needed or key not in VARIABLES}


def redact(text: str) -> str:
    """The text with `***` for what looks like a secret."""
    for secret in _registered:
        text = text.replace(secret, HIDDEN)
    lower = text.lower()
    for words, pattern, shown in _RULES:
        if any(word in lower for word in words):
            text = pattern.sub(shown, text)
    return text


def where_secret(document: object, path: str = "") -> str | None:
    """Dotted key of the first string in a JSON document that is not shown as it is, or whose key says what it is."""
    match document:
        case str():
            name = path.rpartition(".")[2]
            text = json.dumps({name: document}, ensure_ascii=False)
            return path if redact(text) != text or redact(document) != document or redact(path) != path else None
        case dict():
            children = [(f"{path}.{key}" if path else str(key), value) for key, value in document.items()]
        case list():
            children = [(f"{path}.{number}", value) for number, value in enumerate(document)]
        case _:
            return None
    return next((found for each, value in children if (found := where_secret(value, each)) is not None), None)


def _secret_parts(value: str) -> list[str]:
    if "://" not in value:
        return [value]
    try:
        url = urlsplit(value)
    except ValueError:  # not a URL after all
        return [value]
    password = url.password or ""
    if url.scheme in ("http", "https"):  # a webhook: who knows the end of its path may post
        return [password, url.path.rsplit("/", 1)[-1]]
    return [password, unquote(password)]
