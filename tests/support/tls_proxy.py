"""TLS in front of a server that speaks none: the redis-server of the tests has none, that of compose has its own."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from pathlib import Path
from types import TracebackType
from typing import Self


class TlsProxy:
    """`with TlsProxy(("10.0.0.1", 6380), port, certificate, key):` takes connections there to `port` of loopback."""

    def __init__(self, at: tuple[str, int], port: int, certificate: Path, key: Path) -> None:
        self._to = ("127.0.0.1", port)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._server = socket.create_server(at)
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def _accept(self) -> None:
        while True:
            try:
                taken, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(taken,), daemon=True).start()

    def _serve(self, taken: socket.socket) -> None:
        with contextlib.suppress(OSError), taken:
            taken.settimeout(10)  # of the handshake
            with (
                self._context.wrap_socket(taken, server_side=True) as outer,
                socket.create_connection(self._to) as inner,
            ):
                outer.settimeout(None)
                self._connections |= {outer, inner}
                back = threading.Thread(target=_copy, args=(inner, outer), daemon=True)
                back.start()
                _copy(outer, inner)
                back.join()
                self._connections -= {outer, inner}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()
        for each in list(self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _copy(one: socket.socket, other: socket.socket) -> None:
    """Until one end is closed: then both are."""
    with contextlib.suppress(OSError):
        while piece := one.recv(65536):
            other.sendall(piece)
    for each in (one, other):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
