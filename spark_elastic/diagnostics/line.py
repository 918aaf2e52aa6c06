"""Questions and answers between the doctor and its probes: JSON in authenticated frames over one TCP connection.

Standard library only: this source travels to executors that may not have the package.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import time
from typing import Any

MOST_BYTES = 4 * 2**20
_NONCE = 16
_MAC = 32


class LineError(Exception):
    """The other side is not one of this checkup, or is gone."""


class Line:
    """One end of a connection. Both ends know `key`, which never travels here; nothing is believed without it.

    Raises: OSError, LineError: from every method; TimeoutError is an OSError.
    """

    def __init__(self, connection: socket.socket, key: bytes, *, server: bool, timeout_s: float) -> None:
        self._connection = connection
        self._key = key
        self._mine, self._theirs = (b"server", b"client") if server else (b"client", b"server")
        self._sent = self._received = 0
        own = os.urandom(_NONCE)
        until = time.monotonic() + timeout_s
        connection.settimeout(timeout_s)
        connection.sendall(own)
        other = self._read(_NONCE, until)
        self._session = own + other if server else other + own

    def send(self, message: Any, timeout_s: float) -> None:
        body = json.dumps(message).encode()
        mac = self._mac(self._mine, self._sent, body)
        self._sent += 1
        self._connection.settimeout(timeout_s)
        self._connection.sendall(struct.pack("<I", len(body)) + mac + body)

    def receive(self, timeout_s: float) -> Any:
        until = time.monotonic() + timeout_s
        head = self._read(4 + _MAC, until)
        (size,) = struct.unpack("<I", head[:4])
        if size > MOST_BYTES:
            raise LineError(f"a message of {size} bytes")
        body = self._read(size, until)
        if not hmac.compare_digest(head[4:], self._mac(self._theirs, self._received, body)):
            raise LineError("a message that was not written by this checkup")
        self._received += 1
        return json.loads(body)

    def close(self) -> None:
        self._connection.close()

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        text = self._session + direction + struct.pack("<Q", number) + body
        return hmac.new(self._key, text, hashlib.sha256).digest()

    def _read(self, count: int, until: float) -> bytes:
        out = bytearray()
        while len(out) < count:
            self._connection.settimeout(max(until - time.monotonic(), 0.001))
            data = self._connection.recv(min(count - len(out), 65536))
            if not data:
                raise LineError("the connection was closed")
            out += data
        return bytes(out)
