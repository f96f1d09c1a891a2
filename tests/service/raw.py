"""Requests exactly as they are written: libraries put `..` and percent signs right before they send them."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Mapping
from contextlib import closing
from email.message import Message

from tests.service.running import Service


def exchange(
    service: Service, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = {}
) -> tuple[int, Message, bytes]:
    """Status, headers and body of an answer. Raises http.client.IncompleteRead when it breaks off."""
    with closing(http.client.HTTPConnection("127.0.0.1", service.settings.port, timeout=60)) as connection:
        connection.putrequest(method, path)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def begin(service: Service, head: str, body: bytes = b"") -> socket.socket:
    """A connection on which a request was begun: its first line and headers, and the beginning of its body."""
    connection = socket.create_connection(("127.0.0.1", service.settings.port), timeout=60)
    connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
    return connection


def finish(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of the answer to a request that was begun. Whatever is told to continue, is passed over."""
    with http.client.HTTPResponse(connection) as answer:
        answer.begin()
        return answer.status, answer.read()
