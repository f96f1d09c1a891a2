"""Which Longhaul this is, on which libraries, and which run directories it can read (architecture.md: Formats)."""

from importlib.metadata import PackageNotFoundError, version

VERSION = "0.2.0.dev0"
FORMAT = 1
"""Of run directories. It goes up with a change that an older version would misread; newer ones read all before."""


def library_versions(*names: str) -> dict[str, str]:
    """The versions of those of these libraries that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
