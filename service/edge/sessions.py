"""Sessions of browsers: whoever signed in with a key has a signed cookie in place of it, for a week.

Nothing is kept of a session: the cookie says whose it is and how long it lasts, and its signature needs a secret file
of the service and the digest of the key. So a session outlives a restart, and ends with its key.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from service.edge.keys import Keys

CSRF_HEADER = "x-csrf-token"
LASTS_S = 7 * 24 * 3600
SECRET = ".session-secret"
"""In the folder of uploads, which no other process of Longhaul writes."""
SECRET_BYTES = 32


def cookie_name(host: str) -> str:
    """Of a session at this `Host`. It has the port, for browsers send a cookie to every port of a host."""
    port = host.rpartition(":")[2]
    return f"longhaul_session_{port}" if port.isdecimal() else "longhaul_session"


class Sessions:
    """Opens and reads sessions."""

    def __init__(self, keys: Keys, folder: Path, *, now: Callable[[], float] = time.time) -> None:
        self._keys, self._folder, self._now = keys, folder, now
        self._secret: bytes | None = None

    def open(self, name: str) -> str:
        """The cookie of a new session of this key's owner. OSError: the secret cannot be written."""
        fields = f"{name}|{int(self._now()) + LASTS_S}|{secrets.token_hex(8)}"
        signature = self._signature("session", fields, name)
        assert signature is not None, "the key was just accepted"
        return f"{base64.urlsafe_b64encode(fields.encode()).decode()}.{signature}"

    def name_of(self, cookie: str) -> str | None:
        """Whose session this is; None: nobody's, or not any more."""
        encoded, _, signature = cookie.partition(".")
        try:
            fields = base64.b64decode(encoded.encode(), altchars=b"-_", validate=True).decode()
            name, until, _ = fields.split("|")
            lasts = int(until) > self._now()
        except ValueError:
            return None
        expected = self._signature("session", fields, name)
        return name if expected and hmac.compare_digest(signature.encode(), expected.encode()) and lasts else None

    def csrf_token(self, cookie: str) -> str:
        """What a change has to carry beside this cookie: a page of another origin cannot read it."""
        name = self.name_of(cookie)
        return (self._signature("csrf", cookie, name) if name else None) or ""

    def _signature(self, purpose: str, text: str, name: str) -> str | None:
        digest = self._keys.digest(name)
        if digest is None:
            return None
        return hmac.new(self._read_secret() + digest, f"{purpose}|{text}".encode(), hashlib.sha256).hexdigest()

    def _read_secret(self) -> bytes:
        """From the file, which is made once; of two services that begin together the first one's."""
        if self._secret is None:
            file = self._folder / SECRET
            self._folder.mkdir(parents=True, exist_ok=True)
            fresh = file.with_name(f"{SECRET}-{secrets.token_hex(8)}")
            if not file.exists():
                with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as made:
                    made.write(secrets.token_bytes(SECRET_BYTES))
                try:
                    os.link(fresh, file)
                except FileExistsError:
                    pass
                finally:
                    fresh.unlink()
            found = file.read_bytes()
            if len(found) != SECRET_BYTES:
                reason = f"{SECRET_BYTES} bytes are expected, not {len(found)}: remove it, and all sign in again"
                raise OSError(errno.EINVAL, reason, str(file))
            self._secret = found
        return self._secret
