"""The bytes of a channel, without I/O: mutual authentication, then frames with a MAC and a sequence number.

The caller owns the socket: it passes received bytes to `receive` and sends the bytes that `start`, `send` and `receive`
return.

Handshake, with the job's random key K, which travels only in Spark's own task serialisation or through a pipe::

    client -> server   magic, nonce_c
    server -> client   magic, nonce_s, HMAC(K, "server" nonce_c nonce_s)
    client -> server   HMAC(K, "client" nonce_c nonce_s)
    server -> client   an empty frame

Both sides derive one key for each direction. A frame is its length (4 bytes), 16 bytes of HMAC-SHA256 over the sequence
number and the body, and the body. The empty frame says that the server has checked the client's proof: a busy server
may drop a connection whose handshake takes long, and the client must not take that for a loss.

With `encrypt`, the nonces are fresh X25519 public keys, and what the two sides make of them is a part of each
direction's key. A frame's body is then encrypted by ChaCha20-Poly1305 with the sequence number as nonce, and its tag
takes the place of the HMAC. A recorded connection cannot be read with the job's key alone. The magic is another
one, so that a peer with the other setting is refused at once.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from typing import Any

from spark_elastic.errors import AuthenticationError, FrameTooLargeError, MissingExtraError, ProtocolError

KEY_BYTES = 32
MAGIC = b"SPEL2"
MAGIC_ENCRYPTED = b"SPEX2"
MAX_FRAME_BYTES = 32 * 2**20  # enough for any message; results and functions travel through Spark instead

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_MAC_BYTES = 16
_LENGTH = struct.Struct(">I")
_HEADER_BYTES = _LENGTH.size + _MAC_BYTES
_SEQUENCE = struct.Struct(">Q")
_ALTERED = "a frame was altered, dropped or repeated in transit"


def new_key() -> bytes:
    """Return a random key for one job."""
    return os.urandom(KEY_BYTES)


def _hmac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), hashlib.sha256)


def require_encryption() -> None:
    """Raise `MissingExtraError` if this process cannot encrypt."""
    try:
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
    except ImportError:
        raise MissingExtraError(what="encrypt=True", package="cryptography", extra="encryption") from None


class _Authenticated:
    """Protects the frames of one direction by HMAC-SHA256; bodies can be read on the way."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def protect(self, number: int, body: bytes) -> tuple[bytes, bytes]:
        """Return the MAC or tag of a frame, and its body as it is sent."""
        return _hmac(self._key, _SEQUENCE.pack(number), body)[:_MAC_BYTES], body

    def check(self, number: int, mac: bytes, body: bytes) -> bytes:
        """Return the body of a frame that has arrived. Raises `AuthenticationError` if it is not what was sent."""
        if not hmac.compare_digest(mac, self.protect(number, body)[0]):
            raise AuthenticationError(_ALTERED)
        return body


class _Encrypted:
    """The same by ChaCha20-Poly1305. A key serves one direction of one connection, so that no nonce is used twice."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        self._cipher = ChaCha20Poly1305(key)

    def protect(self, number: int, body: bytes) -> tuple[bytes, bytes]:
        sealed = self._cipher.encrypt(number.to_bytes(12, "big"), body, None)
        return sealed[-_MAC_BYTES:], sealed[:-_MAC_BYTES]

    def check(self, number: int, mac: bytes, body: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(number.to_bytes(12, "big"), body + mac, None)
        except InvalidTag:
            raise AuthenticationError(_ALTERED) from None


class Connection:
    """One end of a channel. Not thread-safe: `send` and `receive` each need one caller at a time.

    After any `ProtocolError` the caller has to close the connection. `server` is the end that accepted it; both ends
    need the same `encrypt`.

    Raises:
        MissingExtraError: `encrypt` is set, and the package cryptography is not installed.
    """

    def __init__(self, key: bytes, *, server: bool, encrypt: bool = False) -> None:
        self._private: Any = None  # X25519's private key, whose public key is the nonce
        self._nonce = os.urandom(_NONCE_BYTES)
        if encrypt:
            require_encryption()
            from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

            self._private = X25519PrivateKey.generate()
            self._nonce = self._private.public_key().public_bytes_raw()
        self._key = key
        self._server = server
        self._buffer = bytearray()
        self._magic = MAGIC_ENCRYPTED if encrypt else MAGIC
        self._sending: _Authenticated | _Encrypted = _Authenticated(b"")
        self._receiving: _Authenticated | _Encrypted = _Authenticated(b"")
        self._expected_proof = b""
        self._sent = 0
        self._received = 0
        self._proved = False  # a client has checked the server's proof and waits for the empty frame
        self.authenticated = False  # both sides hold the key; at a client, once the server has said so

    def start(self) -> bytes:
        """Return the first bytes to send: a client's greeting, nothing for a server."""
        return b"" if self._server else self._magic + self._nonce

    def send(self, body: bytes) -> bytes:
        """Return the frame that carries `body`. Raise FrameTooLargeError if it is larger than the peer accepts."""
        if not self.authenticated:
            raise ProtocolError("a frame cannot be sent before the handshake is complete")
        if len(body) > MAX_FRAME_BYTES:
            raise FrameTooLargeError(size=len(body), limit=MAX_FRAME_BYTES)
        mac, protected = self._sending.protect(self._sent, body)
        self._sent += 1
        return _LENGTH.pack(len(body)) + mac + protected

    def receive(self, data: bytes) -> tuple[list[bytes], bytes]:
        """Process bytes from the peer; return the bodies that are complete now, and what to send back in the handshake.

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
            theirs = greeting[len(MAGIC) :]
            nonces = theirs + self._nonce
            self._expected_proof = _hmac(self._key, b"client", nonces)
            self._derive(nonces, theirs)
            reply = self._magic + self._nonce + _hmac(self._key, b"server", nonces)
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
            theirs = answer[len(MAGIC) : len(MAGIC) + _NONCE_BYTES]
            nonces = self._nonce + theirs
            self._check(answer[len(MAGIC) + _NONCE_BYTES :], _hmac(self._key, b"server", nonces))
            self._derive(nonces, theirs)
            self._proved = True
            reply = _hmac(self._key, b"client", nonces)
        accepted = self._bodies(most=1)
        if accepted:
            if accepted[0]:
                raise ProtocolError("the peer sent a message before it accepted the connection")
            self.authenticated = True
        return reply

    def _take(self, size: int) -> bytes | None:
        """Return the next `size` bytes of the handshake, None if incomplete; wrong first bytes are refused at once."""
        if not (self._server and self._expected_proof):
            start = bytes(self._buffer[: len(MAGIC)])
            if start in (MAGIC, MAGIC_ENCRYPTED) and start != self._magic:
                raise AuthenticationError("the peer has another value of `encrypt`")
            if start != self._magic[: len(start)]:
                raise AuthenticationError("the peer does not speak this protocol")
        if len(self._buffer) < size:
            return None
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def _check(self, proof: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(proof, expected):
            raise AuthenticationError("the peer does not hold this job's key")

    def _derive(self, nonces: bytes, theirs: bytes) -> None:
        secret, kind = b"", _Authenticated if self._private is None else _Encrypted
        if self._private is not None:
            from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

            try:
                secret = self._private.exchange(X25519PublicKey.from_public_bytes(theirs))
            except ValueError:
                raise AuthenticationError("the peer sent a public key that gives no secret") from None
        up = kind(_hmac(self._key, b"client to server", nonces, secret))
        down = kind(_hmac(self._key, b"server to client", nonces, secret))
        self._sending, self._receiving = (down, up) if self._server else (up, down)

    def _bodies(self, most: int | None = None) -> list[bytes]:
        """Return the bodies of the complete frames in the buffer, at most that many."""
        bodies: list[bytes] = []
        start, length = 0, len(self._buffer)
        while length - start >= _HEADER_BYTES and (most is None or len(bodies) < most):
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > MAX_FRAME_BYTES:
                raise FrameTooLargeError(size=size, limit=MAX_FRAME_BYTES)
            at = start + _HEADER_BYTES
            if length < at + size:
                break
            mac, body = bytes(self._buffer[start + _LENGTH.size : at]), bytes(self._buffer[at : at + size])
            bodies.append(self._receiving.check(self._received, mac, body))
            self._received += 1
            start = at + size
        del self._buffer[:start]
        return bodies
