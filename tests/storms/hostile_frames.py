"""Hostile bytes for the driver's port, and a stranger that sends them and waits until the driver has judged them.

Each attempt is one connection that the driver has to close: what comes before its last frame is valid, so that the
hostile frame is met in every state of the connection.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import random
import selectors
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from spark_elastic.errors import AuthenticationError
from spark_elastic.membership.topology import Place, StateVersion
from spark_elastic.wire import messages as wire
from spark_elastic.wire.encoding import decode, encode
from spark_elastic.wire.framing import MAGIC, MAX_FRAME_BYTES, Connection, new_key

PLACE = Place("127.0.0.1", "stranger", 0)
EXAMPLES: tuple[wire.Message, ...] = (
    wire.AgentHello(PLACE, 3, {"eth0": ("10.0.0.1", "fd00::1")}, 4711, ""),
    wire.AgentHeartbeat(1),
    wire.WorkerExited(1, -9, "Traceback\n", 1, "1 process was killed for memory"),
    wire.OutputLines(1, "stdout", ("a", "b")),
    wire.ResultStored(1, True, 1),
    wire.WorkerHello(1),
    wire.WorkerHeartbeat(StateVersion(1, 12, 0), 0.5, False, 1),
    wire.Ready(1, StateVersion(1, 12, 0), False, 1),
    wire.Raised("ValueError", "no", "Traceback\n", None),
    wire.LiveProgress(0, 2, "train", 10, 100, {"loss": 0.5}),
    wire.EpochRow(0, True, b'{"epoch": 0}'),
    wire.KvSet(1, "key", b"value"),
    wire.KvGet(1, "key"),
    wire.LoopResult(1, "", b"sealed"),
)
"""Messages of agents and workers, which the mutations start from."""
_JUNK: tuple[object, ...] = (
    *(None, True, -1, 2**31, 2**63, 10**400, 1e308, float("nan"), float("inf"), "", "x", "\ud800", "a\0b", "../../x"),
    *([], {}, [[]], [None] * 100, {"": None}, {"type": "Pong"}, "é" * 5000),
)


# --- bodies: what stands in a frame whose MAC is right ------------------------------------------------


def rubbish(rng: random.Random) -> bytes:
    """Return a body that must change nothing, from random bytes to a message with one wrong field.

    It is never a valid hello of an agent: who sends that with the job's key is an agent.
    """
    while True:
        body = rng.choice(_BODIES)(rng)
        try:
            if not isinstance(decode(body), wire.AgentHello):
                return body
        except Exception:  # whatever it is, the driver has to meet it
            return body


def _altered_message(rng: random.Random) -> bytes:
    """Change bytes of a valid message."""
    body = bytearray(encode(rng.choice(EXAMPLES)))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body))
        what = rng.randrange(3)
        if what == 0:
            body[at] = rng.randrange(256)
        elif what == 1:
            del body[at : at + rng.randint(1, 8)]
        else:
            body[at:at] = rng.randbytes(rng.randint(1, 8))
        body = body or bytearray(b"{")
    return bytes(body)


def _wrong_field(rng: random.Random) -> bytes:
    return wrong_field(encode(rng.choice(EXAMPLES)), rng)


def wrong_field(body: bytes, rng: random.Random) -> bytes:
    """Replace, drop or add a field of a message, at any depth; return anything else as it is."""
    head, separator, payload = body.partition(b"\n")
    try:
        document = json.loads(head)
    except (ValueError, RecursionError):
        return body
    if not isinstance(document, dict) or not document:
        return body
    place = document
    while inner := [each for each in place.values() if isinstance(each, dict) and each]:
        if rng.random() < 0.5:
            break
        place = rng.choice(inner)
    what = rng.randrange(3)
    if what == 0:
        place[rng.choice(list(place))] = rng.choice(_JUNK)
    elif what == 1:
        del place[rng.choice(list(place))]
    else:
        place[rng.choice(("payload", "more", "", "\0"))] = rng.choice(_JUNK)
    return json.dumps(document).encode() + separator + payload


def _deep(rng: random.Random) -> bytes:
    """Nest lists or objects, about as deep as Python can or much deeper."""
    depth = rng.choice((10, 900, 960, 980, 1000, 5000, 100_000))
    inner = rng.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth, b"[" * depth))
    return b'{"type":"AgentHeartbeat","running":' + inner + b"}\n"


def _compressed(rng: random.Random) -> bytes:
    """Compress something that is no message, is cut off, or is much larger than the frame."""
    what = rng.randrange(4)
    if what == 0:
        return zlib.compress(rng.randbytes(rng.randint(0, 200)))
    if what == 1:
        return zlib.compress(encode(rng.choice(EXAMPLES)))[: rng.randint(1, 60)]
    if what == 2:
        return b"\x78" + rng.randbytes(rng.randint(0, 100))
    return zlib.compress(b"[" * rng.randint(1, 1 << 20))


def _number(rng: random.Random) -> bytes:
    """Write numbers that Python cannot hold, or does not want to read."""
    digits = rng.choice((20, 308, 309, 400, 4299, 5000, 100_000))
    text = rng.choice((b"9" * digits, b"-" + b"9" * digits, b"1e" + b"9" * digits, b"NaN", b"Infinity", b"-0"))
    head = rng.choice(
        (
            b'{"type":"LiveProgress","epoch":0,"epochs":1,"phase":"","rows":1,"total":2,"values":{"a":%s}}',
            b'{"type":"WorkerHeartbeat","version":null,"blocked_s":%s,"after_loop":false,"begun":0}',
            b'{"type":"WorkerHello","worker":%s,"pid":1}',
        )
    )
    return head % text + b"\n"


_BODIES: tuple[Callable[[random.Random], bytes], ...] = (
    lambda rng: rng.randbytes(rng.randint(0, 300)),
    lambda rng: rng.randbytes(rng.randint(0, 30)) + b"\n" + rng.randbytes(rng.randint(0, 30)),
    lambda rng: json.dumps(rng.choice(_JUNK)).encode() + b"\n",
    lambda rng: encode(dataclasses.replace(wire.WorkerHello(1), worker=rng.choice((-1, 0, 10**6, 2**70)))),
    lambda rng: encode(rng.choice(EXAMPLES)),
    _altered_message,
    _wrong_field,
    _wrong_field,
    _deep,
    _compressed,
    _number,
)


# --- attempts -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Attempt:
    """A connection of a stranger, which sends `first` at once, and the rest that `then` makes from the server's
    greeting. With `end` it then ends its side, because the server has to wait for more otherwise.
    """

    kind: str
    first: bytes
    then: Callable[[bytes], bytes] | None = None
    end: bool = False
    sock: socket.socket | None = field(default=None, repr=False)
    received: bytes = b""


GREETING_BYTES = len(MAGIC) + 32 + 32


def _authenticated(kind: str, key: bytes, frames: Callable[[Connection], bytes], end: bool = False) -> Attempt:
    """Return an attempt that holds the job's key, and sends these bytes behind its proof."""
    client = Connection(key, server=False)

    def then(greeting: bytes) -> bytes:
        _, proof = client.receive(greeting)
        client.authenticated = True  # without the server's empty frame: what follows goes out with the proof
        return proof + frames(client)

    return Attempt(kind, client.start(), then, end)


def _recorded(key: bytes) -> bytes:
    """Return what a worker has sent in a connection that has been."""
    client, server = Connection(key, server=False), Connection(key, server=True)
    first = client.start()
    _, proof = client.receive(server.receive(first)[1])
    client.receive(server.receive(proof)[1])
    return first + proof + client.send(encode(wire.WorkerHello(1)))


def _unlike(rng: random.Random, frame: bytes) -> bytes:
    """Change one byte of a frame, behind its length."""
    at = rng.randrange(4, len(frame))
    return frame[:at] + bytes([frame[at] ^ rng.randint(1, 255)]) + frame[at + 1 :]


def attempts(key: bytes, seed: int) -> Iterator[Attempt]:
    """Yield attempts without end; the same for the same seed, except for nonces."""
    rng, other_key, recorded = random.Random(seed), new_key(), _recorded(key)
    nonce = rng.randbytes(32)

    def pong(client: Connection) -> bytes:
        return client.send(encode(wire.Pong()))

    def reordered(client: Connection) -> bytes:
        frames = [pong(client) for _ in range(3)]
        return frames[1] + frames[0] + frames[2]

    def truncated(client: Connection) -> bytes:
        return client.send(rng.randbytes(99))[: rng.randint(1, 118)]

    def oversized(client: Connection) -> bytes:
        return rng.randint(MAX_FRAME_BYTES + 1, 2**32 - 1).to_bytes(4, "big") + rng.randbytes(rng.randint(16, 5000))

    def wrong_key(greeting: bytes) -> bytes:
        nonces = nonce + greeting[len(MAGIC) : len(MAGIC) + 32]
        return hmac.digest(other_key, b"client" + nonces, hashlib.sha256)

    makers: tuple[Callable[[], Attempt], ...] = (
        lambda: Attempt("malformed greeting", rng.randbytes(rng.randint(5, 400)), end=True),
        lambda: Attempt("malformed greeting", b"GET / HTTP/1.1\r\nHost: driver\r\n\r\n", end=True),
        lambda: Attempt("truncated greeting", (MAGIC + rng.randbytes(32))[: rng.randint(0, 36)], end=True),
        lambda: Attempt("wrong key", MAGIC + nonce, wrong_key),
        lambda: Attempt("wrong key", MAGIC + rng.randbytes(32), lambda _: rng.randbytes(rng.randint(32, 3000))),
        lambda: Attempt("truncated proof", MAGIC + nonce, lambda _: rng.randbytes(rng.randint(1, 31)), end=True),
        lambda: Attempt("replayed handshake", recorded),
        lambda: Attempt("reflected proof", MAGIC + rng.randbytes(32), lambda greeting: greeting[-32:]),
        lambda: _authenticated("altered frame", key, lambda client: _unlike(rng, pong(client))),
        lambda: _authenticated("replayed frame", key, lambda client: pong(client) * 2),
        lambda: _authenticated("reordered frames", key, reordered),
        lambda: _authenticated("dropped frame", key, lambda client: [pong(client), pong(client)][1]),
        lambda: _authenticated("truncated frame", key, truncated, end=True),
        lambda: _authenticated("oversized frame", key, oversized),
        *[lambda: _authenticated("right key, rubbish", key, lambda client: client.send(rubbish(rng)))] * 6,
    )
    while True:
        yield rng.choice(makers)()


class Stranger:
    """Makes attempts against an address, at most `rate` a second, and counts those that the server closed."""

    SIDE_BY_SIDE = 48
    """Below the number that the driver admits to their handshake, so that each is judged and none displaced."""
    GIVE_UP_S = 10.0

    def __init__(self, address: tuple[str, int], attempts: Iterator[Attempt], rate: float | None = None) -> None:
        self._address = address
        self._attempts = attempts
        self._rate = rate
        self._selector = selectors.DefaultSelector()
        self._open: dict[Attempt, float] = {}
        self._number = 0
        self.judged: Counter[str] = Counter()
        """Attempts that the server has closed, by kind."""
        self.unanswered: Counter[str] = Counter()
        """Attempts that it had not closed after `GIVE_UP_S`."""

    def attack(self, count: int | None = None, seconds: float = float("inf")) -> float:
        """Make attempts until so many were judged, or for so long. Returns the seconds that it took."""
        begin, target, made = time.monotonic(), None if count is None else self.total + count, 0
        while True:
            now = time.monotonic()
            over = now - begin >= seconds or (target is not None and self.total >= target)
            if over and not self._open:
                return now - begin
            due = self.SIDE_BY_SIDE if self._rate is None else int((now - begin) * self._rate) - made
            for _ in range(0 if over else min(due, self.SIDE_BY_SIDE - len(self._open))):
                self._begin(next(self._attempts))
                made += 1
            for selected, _ in self._selector.select(0.01):
                self._receive(selected.data)
            for attempt in [each for each, since in self._open.items() if now - since > self.GIVE_UP_S]:
                self.unanswered[attempt.kind] += 1
                self._close(attempt)

    @property
    def total(self) -> int:
        return self.judged.total() + self.unanswered.total()

    def _begin(self, attempt: Attempt) -> None:
        self._number += 1
        # another address of this machine each time: one has too few ports for those that the kernel still remembers
        here = (f"127.1.{self._number // 250 % 250}.{1 + self._number % 250}", 0)
        attempt.sock = socket.create_connection(self._address, timeout=self.GIVE_UP_S, source_address=here)
        self._open[attempt] = time.monotonic()
        self._selector.register(attempt.sock, selectors.EVENT_READ, attempt)
        self._send(attempt, attempt.first, last=attempt.then is None)

    def _send(self, attempt: Attempt, data: bytes, last: bool) -> None:
        assert attempt.sock is not None
        try:
            attempt.sock.sendall(data)
            if last and attempt.end:
                attempt.sock.shutdown(socket.SHUT_WR)
        except OSError:  # closed by the server already, which the next read shows
            pass

    def _receive(self, attempt: Attempt) -> None:
        assert attempt.sock is not None
        try:
            data = attempt.sock.recv(65536)
        except OSError:
            data = b""
        if not data:
            self.judged[attempt.kind] += 1
            self._close(attempt)
            return
        attempt.received += data
        if attempt.then is not None and len(attempt.received) >= GREETING_BYTES:
            then, attempt.then = attempt.then, None
            try:
                rest = then(attempt.received[:GREETING_BYTES])
            except AuthenticationError:  # of a server that does not hold the key either
                rest = bytes(100)
            self._send(attempt, rest, last=True)

    def _close(self, attempt: Attempt) -> None:
        assert attempt.sock is not None
        self._selector.unregister(attempt.sock)
        attempt.sock.close()
        del self._open[attempt]
