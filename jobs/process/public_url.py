"""LONGHAUL_PUBLIC_URL: where people reach the service. Messages lead there; links of its pages begin with its path."""

from __future__ import annotations

import re

_URL = re.compile(r"(https?://[^\s/@\"'<>]+)((?:/[\w.~-]+)*)/?", re.ASCII)


def public_url(given: str | None) -> str | None:
    """`https://host` or `https://host/path`, without a slash at its end. ValueError for what is neither."""
    if not given:
        return None
    if not (found := _URL.fullmatch(given)):
        raise ValueError(
            f"LONGHAUL_PUBLIC_URL is {given!r}; it looks like https://longhaul.example.org or https://example.org/longhaul"
        )
    return found[1] + found[2]


def path_of(url: str | None) -> str:
    """What a proxy has before the paths of the service: `/longhaul`, or nothing."""
    found = _URL.fullmatch(url or "")
    return found[2] if found else ""
