"""The settings of the service, from its environment: read once, in `__main__`, and passed down."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jobs.process.logs import log_format
from jobs.process.public_url import public_url

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
DEFAULT_UPLOAD_GB = 100


@dataclass(frozen=True)
class ServiceSettings:
    """Where the service listens and where it finds Redis, run directories and data."""

    redis_url: str = field(default=DEFAULT_REDIS_URL, repr=False)
    runs: Path = Path("runs")
    data: Path = Path("data")
    uploads: Path = Path("uploads")
    max_upload_bytes: int = DEFAULT_UPLOAD_GB * 10**9
    """Of one uploaded data set."""
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    api_keys_file: Path | None = None
    """Names and hashes of more keys (jobs/process/secrets.py)."""
    public_url: str | None = None
    """Where people reach the service: what they copy from its pages goes there, and links begin with its path. None:
    where they asked."""
    rate_limit: float = 300.0
    """Requests a second for each key, or for each address where no key is needed; 0: no limit."""
    keep_alive_s: float = 15.0
    """Seconds of silence on an event stream before a comment is sent."""
    log: str = "text"
    """Form of the log: text or json."""
    max_streams: int = 1000
    """Event streams and followed logs that may be open at a time."""

    def __post_init__(self) -> None:
        if self.api_key is None and self.api_keys_file is None and not is_loopback(self.host):
            raise ValueError(
                f"LONGHAUL_HOST={self.host} can be reached from other machines: set LONGHAUL_API_KEY "
                "(make env writes one into .env) or LONGHAUL_API_KEYS_FILE, or listen on 127.0.0.1"
            )

    def __repr__(self) -> str:
        return (
            f"ServiceSettings(redis={mask_password(self.redis_url)}, runs={self.runs}, data={self.data}, "
            f"uploads={self.uploads}, listen={self.host}:{self.port}, api_key={'set' if self.api_key else 'none'}, "
            f"api_keys_file={self.api_keys_file or 'none'}, rate_limit={self.rate_limit:g}/s)"
        )


def read_settings(environment: Mapping[str, str]) -> ServiceSettings:
    """Settings from the environment. Raises ValueError naming the variable. An empty variable is an unset one."""
    given = {name: value for name, value in environment.items() if value}
    port = given.get("LONGHAUL_PORT", "8000")
    if not port.isdecimal() or not 1 <= int(port) <= 65_535:
        raise ValueError(f"LONGHAUL_PORT={port!r} is not a port: give a number from 1 to 65535")
    redis_url = given.get("LONGHAUL_REDIS_URL", DEFAULT_REDIS_URL)
    if not redis_url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError(
            f"LONGHAUL_REDIS_URL={mask_password(redis_url)} is not a Redis URL such as {DEFAULT_REDIS_URL}"
        )
    return ServiceSettings(
        redis_url=redis_url,
        runs=Path(given.get("LONGHAUL_RUNS", "runs")),
        data=Path(given.get("LONGHAUL_DATA", "data")),
        uploads=Path(given.get("LONGHAUL_UPLOADS", "uploads")),
        max_upload_bytes=_gigabytes(given.get("LONGHAUL_MAX_UPLOAD_GB", str(DEFAULT_UPLOAD_GB))),
        host=given.get("LONGHAUL_HOST", "127.0.0.1"),
        port=int(port),
        api_key=given.get("LONGHAUL_API_KEY"),
        api_keys_file=Path(keys) if (keys := given.get("LONGHAUL_API_KEYS_FILE")) else None,
        public_url=public_url(given.get("LONGHAUL_PUBLIC_URL")),
        rate_limit=_rate(given.get("LONGHAUL_RATE_LIMIT", "300")),
        log=log_format(given.get("LONGHAUL_LOG", "text")),
    )


def _gigabytes(given: str) -> int:
    """Bytes of LONGHAUL_MAX_UPLOAD_GB, which may be a fraction."""
    if not re.fullmatch(r"\d{1,6}(\.\d{1,9})?", given, re.ASCII) or not (size := int(float(given) * 10**9)):
        raise ValueError(f"LONGHAUL_MAX_UPLOAD_GB={given!r} is no size: give gigabytes, such as {DEFAULT_UPLOAD_GB}")
    return size


def _rate(given: str) -> float:
    """Requests a second of LONGHAUL_RATE_LIMIT."""
    if not re.fullmatch(r"\d{1,6}(\.\d{1,3})?", given, re.ASCII):
        raise ValueError(
            f"LONGHAUL_RATE_LIMIT={given!r} is no rate: give requests a second, such as 300, or 0 for none"
        )
    return float(given)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def mask_password(url: str) -> str:
    """The URL without its user and password."""
    return re.sub(r"//[^@/]*@", "//***@", url)
