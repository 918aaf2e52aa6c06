"""The bytes of a channel, without I/O: mutual authentication, then frames with a MAC and a sequence number.

The caller owns the socket: it passes received bytes to `receive` and sends the bytes that `start`, `send` and `receive`
return.

Handshake, with the job's random key K, which travels only in Spark's own task serialisation or through a pipe::

    client -> server   magic, nonce_c
    server -> client   magic, nonce_s, HMAC(K, "server" nonce_c nonce_s)
    client -> server   HMAC(K, "client" nonce_c nonce_s)
    server -> client   an empty frame

Both sides derive one key for each direction. A frame is its length (4 bytes), 16 bytes of HMAC-SHA256 over the sequence
number and the body, and the body. Nothing is encrypted. The empty frame says that the server has checked the client's
proof: a busy server may drop a connection whose handshake takes long, and the client must not take that for a loss.

Standard library only, apart from `spark_elastic.errors`: the doctor sends both sources to executors that may lack the
package.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct

from spark_elastic.errors import AuthenticationError, FrameTooLargeError, ProtocolError

KEY_BYTES = 32
MAGIC = b"SPEL2"
MAX_FRAME_BYTES = 32 * 2**20
"""Enough for any message; results and functions travel through Spark instead."""

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_MAC_BYTES = 16
_LENGTH = struct.Struct(">I")
_SEQUENCE = struct.Struct(">Q")


def new_key() -> bytes:
    """Return a random key for one job."""
    return os.urandom(KEY_BYTES)


def _hmac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), hashlib.sha256)


class Connection:
    """One end of a channel. Not thread-safe: `send` and `receive` each need one caller at a time.

    After any `ProtocolError` the caller has to close the connection.
    """

    def __init__(self, key: bytes, *, server: bool, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._key = key
        self._server = server
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._nonce = os.urandom(_NONCE_BYTES)
        self._send_key = b""
        self._receive_key = b""
        self._expected_proof = b""
        self._sent = 0
        self._received = 0
        self._proved = False  # a client has checked the server's proof and waits for the empty frame
        self.authenticated = False
        """True once both sides have proved that they hold the key; at a client, once the server has said so."""

    def start(self) -> bytes:
        """Return the first bytes to send: a client's greeting, nothing for a server."""
        return b"" if self._server else MAGIC + self._nonce

    def send(self, body: bytes) -> bytes:
        """Return the frame that carries `body`.

        Raises:
            FrameTooLargeError: `body` is larger than the peer accepts.
        """
        if not self.authenticated:
            raise ProtocolError("a frame cannot be sent before the handshake is complete")
        if len(body) > self._max_frame_bytes:
            raise FrameTooLargeError(size=len(body), limit=self._max_frame_bytes)
        mac = _hmac(self._send_key, _SEQUENCE.pack(self._sent), body)[:_MAC_BYTES]
        self._sent += 1
        return _LENGTH.pack(len(body)) + mac + body

    def receive(self, data: bytes) -> tuple[list[bytes], bytes]:
        """Process bytes from the peer.

        Returns:
            The bodies that are complete now, in order, and the bytes to send back (during the handshake only).

        Raises:
            AuthenticationError: the peer does not hold the key, or a frame was altered, dropped or repeated.
            FrameTooLargeError: a frame announces more than the limit.
        """
        self._buffer += data
        reply = b""
        if not self.authenticated:
            reply = self._greet_client() if self._server else self._greet_server()
        return (self._bodies() if self.authenticated else []), reply

    def _greet_client(self) -> bytes:
        reply = b""
        if not self._expected_proof:
            greeting = self._take(len(MAGIC) + _NONCE_BYTES)
            if greeting is None:
                return b""
            nonces = greeting[len(MAGIC) :] + self._nonce
            self._expected_proof = _hmac(self._key, b"client", nonces)
            self._derive(nonces)
            reply = MAGIC + self._nonce + _hmac(self._key, b"server", nonces)
        proof = self._take(_PROOF_BYTES)
        if proof is not None:
            self._check(proof, self._expected_proof)
            self.authenticated = True
            reply += self.send(b"")
        return reply

    def _greet_server(self) -> bytes:
        reply = b""
        if not self._proved:
            answer = self._take(len(MAGIC) + _NONCE_BYTES + _PROOF_BYTES)
            if answer is None:
                return b""
            nonces = self._nonce + answer[len(MAGIC) : len(MAGIC) + _NONCE_BYTES]
            self._check(answer[len(MAGIC) + _NONCE_BYTES :], _hmac(self._key, b"server", nonces))
            self._derive(nonces)
            self._proved = True
            reply = _hmac(self._key, b"client", nonces)
        accepted = self._bodies(most=1)
        if accepted:
            if accepted[0]:
                raise ProtocolError("the peer sent a message before it accepted the connection")
            self.authenticated = True
        return reply

    def _take(self, size: int) -> bytes | None:
        """Return the next `size` bytes of the handshake, None if they are incomplete.

        Wrong first bytes are refused before the rest has arrived.
        """
        if self._buffer[: len(MAGIC)] != MAGIC[: len(self._buffer)] and not (self._server and self._expected_proof):
            raise AuthenticationError("the peer does not speak this protocol")
        if len(self._buffer) < size:
            return None
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def _check(self, proof: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(proof, expected):
            raise AuthenticationError("the peer does not hold this job's key")

    def _derive(self, nonces: bytes) -> None:
        up, down = _hmac(self._key, b"client to server", nonces), _hmac(self._key, b"server to client", nonces)
        self._send_key, self._receive_key = (down, up) if self._server else (up, down)

    def _bodies(self, most: int | None = None) -> list[bytes]:
        """Return the bodies of the complete frames, at most that many."""
        bodies: list[bytes] = []
        start = 0
        header = _LENGTH.size + _MAC_BYTES
        while len(self._buffer) - start >= header and (most is None or len(bodies) < most):
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > self._max_frame_bytes:
                raise FrameTooLargeError(size=size, limit=self._max_frame_bytes)
            end = start + header + size
            if len(self._buffer) < end:
                break
            mac = bytes(self._buffer[start + _LENGTH.size : start + header])
            body = bytes(self._buffer[start + header : end])
            expected = _hmac(self._receive_key, _SEQUENCE.pack(self._received), body)[:_MAC_BYTES]
            if not hmac.compare_digest(mac, expected):
                raise AuthenticationError("a frame was altered, dropped or repeated in transit")
            self._received += 1
            bodies.append(body)
            start = end
        del self._buffer[:start]
        return bodies
