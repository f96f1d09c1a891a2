"""Who may come in: one key from the environment, more from a file that is read again when it changes."""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path

from jobs.process.secrets import digest_of, read_keys

log = logging.getLogger("longhaul.service")
DEFAULT_NAME = "default"
"""What the key of LONGHAUL_API_KEY is called in the log and counted under."""


class Keys:
    """Names by key, held as digests only. Raises ValueError when the file cannot be used at the start."""

    def __init__(self, single: str | None, file: Path | None) -> None:
        self._single = {DEFAULT_NAME: digest_of(single.encode())} if single else {}
        self._file = file
        self._seen: tuple[int, int, int] | None = None
        self._of_file: dict[str, bytes] = {}
        if file is not None:
            try:
                self._seen = _state_of(file)
                self._of_file = self._read(file)
            except (OSError, ValueError) as error:
                raise ValueError(f"LONGHAUL_API_KEYS_FILE={file} cannot be used: {_why(error)}") from None
            if not self._of_file and not single:
                raise ValueError(
                    f"LONGHAUL_API_KEYS_FILE={file} holds no key, so nobody could come in: `longhaul key NAME`"
                )

    @property
    def needed(self) -> bool:
        """Whether requests have to carry a key: one is set, or a file is named, even if its last key was taken out."""
        return bool(self._single) or self._file is not None

    def name_of(self, key: bytes) -> str | None:
        """Whose key this is; None: nobody's."""
        self._follow_file()
        given, found = digest_of(key), None
        # Every key is compared, and each in constant time: how long it takes says nothing about any of them.
        for name, expected in (*self._single.items(), *self._of_file.items()):
            if hmac.compare_digest(given, expected):
                found = name
        return found

    def digest(self, name: str) -> bytes | None:
        """Of the key that has this name; None: there is none, any more."""
        self._follow_file()
        return self._single.get(name) or self._of_file.get(name)

    def _follow_file(self) -> None:
        """Apply changes of the file. An unreadable file changes nothing: a mistake locks nobody out."""
        if self._file is None:
            return
        try:
            state = _state_of(self._file)
        except OSError as error:
            if self._seen is not None:
                log.error("LONGHAUL_API_KEYS_FILE=%s: %s; the keys stay as they were", self._file, _why(error))
            self._seen = None
            return
        if state == self._seen:
            return
        self._seen = state
        try:
            self._of_file = self._read(self._file)
            log.info("LONGHAUL_API_KEYS_FILE=%s was read again: %d keys", self._file, len(self._of_file))
        except (OSError, ValueError) as error:
            log.error("LONGHAUL_API_KEYS_FILE=%s: %s; the keys stay as they were", self._file, _why(error))

    def _read(self, file: Path) -> dict[str, bytes]:
        found = read_keys(file.read_text())
        if DEFAULT_NAME in found and self._single:
            raise ValueError(f"{DEFAULT_NAME} is the name of the key in LONGHAUL_API_KEY: take another")
        return found


def _state_of(file: Path) -> tuple[int, int, int]:
    """Something else whenever the content is."""
    found = os.stat(file)
    return found.st_mtime_ns, found.st_size, found.st_ino


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "it is not text (UTF-8)" if isinstance(error, UnicodeError) else str(error)
