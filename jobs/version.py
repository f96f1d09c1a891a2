"""Which Longhaul this is, and which run directories it can read (architecture.md: Formats)."""

VERSION = "0.2.0.dev0"
FORMAT = 1
"""Of run directories. It goes up with a change that an older version would misread; newer ones read all before."""
