"""Whether a process can write where it must; if not, one line with the owner of the folder and what helps."""

from __future__ import annotations

import errno
import os
import shlex
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from jobs.disk.files import write_synced

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Work continues once there is room; any other obstacle to writing lasts until the process is restarted."""
FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
PROBE_BYTES = 32 * 1024
"""As much as a new run directory takes, its folders included."""


def probe(folder: Path) -> None:
    """Make a folder in it with a file that is on disk, and remove both. Raises OSError."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".ready-") as name:
        write_synced(Path(name) / "probe", bytes(PROBE_BYTES))


def unwritable(folders: Iterable[Path]) -> str | None:
    """Make these folders where they are missing. One line on the first that cannot be written; None: all can.

    A full disk does not count: the write that fails reports it, and it passes.
    """
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe(folder)
        except OSError as error:
            if error.errno not in FULL:
                return f"{folder} cannot be written: {error.strerror}; {_whose(folder)}"
    return None


def _whose(folder: Path) -> str:
    """Whose it is, or whose the nearest folder above it is, who we are, and the command that helps."""
    for place in (folder, *folder.parents):
        try:
            found = place.stat()
        except OSError:
            continue
        break
    uid, gid = os.geteuid(), os.getegid()
    here = "it" if place == folder else str(place)
    mode = stat.S_IMODE(found.st_mode)
    state = f"{here} is owned by {found.st_uid}:{found.st_gid} with mode {mode:o}, and this process runs as {uid}:{gid}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{state}. It is not a folder: name another place"
    name = shlex.quote(str(place))
    if found.st_uid == uid and mode & 0o700 != 0o700:
        return f"{state}. What helps: chmod u+rwx {name}"
    if uid in (0, found.st_uid):
        return f"{state}. Its file system takes no writes: mount it writable, or name another place"
    return f"{state}. What helps: sudo chown -R {uid}:{gid} {name} (in a container: the folder that is mounted there)"
