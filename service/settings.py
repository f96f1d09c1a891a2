"""What the service is told by its environment: read once, in `__main__`, and passed down."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"


@dataclass(frozen=True)
class Settings:
    """Where the service listens and where it finds Redis, run directories and data."""

    redis_url: str = field(default=DEFAULT_REDIS_URL, repr=False)
    runs: Path = Path("runs")
    data: Path = Path("data")
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    keep_alive_s: float = 15.0
    """Seconds of silence on an event stream before a comment is sent."""

    def __post_init__(self) -> None:
        if self.api_key is None and not is_loopback(self.host):
            raise ValueError(
                f"LONGHAUL_HOST={self.host} can be reached from other machines: set LONGHAUL_API_KEY "
                "(make env writes one into .env), or listen on 127.0.0.1"
            )

    def __repr__(self) -> str:
        return (
            f"Settings(redis={masked(self.redis_url)}, runs={self.runs}, data={self.data}, "
            f"listen={self.host}:{self.port}, api_key={'set' if self.api_key else 'none'})"
        )


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Settings from environment variables. Raises ValueError naming the variable. An empty variable is an unset one."""
    given = {name: value for name, value in environment.items() if value}
    port = given.get("LONGHAUL_PORT", "8000")
    if not port.isdecimal() or not 1 <= int(port) <= 65_535:
        raise ValueError(f"LONGHAUL_PORT={port!r} is not a port: give a number from 1 to 65535")
    redis_url = given.get("LONGHAUL_REDIS_URL", DEFAULT_REDIS_URL)
    if not redis_url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError(f"LONGHAUL_REDIS_URL={masked(redis_url)} is not a Redis URL such as {DEFAULT_REDIS_URL}")
    return Settings(
        redis_url=redis_url,
        runs=Path(given.get("LONGHAUL_RUNS", "runs")),
        data=Path(given.get("LONGHAUL_DATA", "data")),
        host=given.get("LONGHAUL_HOST", "127.0.0.1"),
        port=int(port),
        api_key=given.get("LONGHAUL_API_KEY"),
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def masked(url: str) -> str:
    """The URL without its user and password."""
    return re.sub(r"//[^@/]*@", "//***@", url)
