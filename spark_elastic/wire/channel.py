"""Channels: `Channel` is the worker's blocking end, `MessageStream` an asyncio end, of the driver or of an agent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence

from spark_elastic.clock import monotonic
from spark_elastic.errors import ChannelClosedError, ProtocolError
from spark_elastic.wire.encoding import decode, encode
from spark_elastic.wire.framing import Connection
from spark_elastic.wire.interfaces import plain_address
from spark_elastic.wire.messages import Message
from spark_elastic.wire.ports import with_port

logger = logging.getLogger(__name__)

Address = tuple[str, int]
RETRY_S = 0.2
_READ_BYTES = 256 * 1024
_HELD_UP = 1 / 3
"""The share of the silence limit after which a process that has sent nothing was held up itself. Heartbeats come at
least twice as often, and a shorter delay leaves time for an answer."""
HANDSHAKE_TIMEOUT_S = 5.0  # a peer that has not authenticated by then is dropped; a real one needs two round trips
MAX_UNSENT_BYTES = 64 * 2**20  # a peer with more unsent data does not read: it is stopped, or its link is down


def retry_pause_s() -> float:
    """Return a random pause before the next attempt: the driver may be busy, or too many connect at once."""
    return random.uniform(0.5, 1.5) * RETRY_S


# --- the blocking end -------------------------------------------------------------------------------


def connect(addresses: Sequence[Address], key: bytes, *, timeout_s: float, encrypt: bool = False) -> Channel:
    """Connect to the first of `addresses` that answers and authenticate both sides; retry until the timeout.

    `encrypt` has to be as at the driver.

    Raises:
        ChannelClosedError: none answered within `timeout_s`; the message has the last error of each address.
        AuthenticationError: one answered but does not hold the key.
    """
    deadline = monotonic() + timeout_s
    failures: dict[Address, str] = {}
    while True:
        for number, address in enumerate(addresses):
            share = max((deadline - monotonic()) / (len(addresses) - number), 0.1)
            try:
                return _connect(address, key, share, encrypt)
            except (OSError, ChannelClosedError) as error:
                failures[address] = f"{with_port(*address)}: {error or 'no answer'}"
        if monotonic() >= deadline:
            raise ChannelClosedError("cannot reach the driver: " + "; ".join(failures.values()))
        time.sleep(min(retry_pause_s(), max(deadline - monotonic(), 0.0)))


def _connect(address: Address, key: bytes, timeout_s: float, encrypt: bool) -> Channel:
    sock = socket.create_connection(address, timeout=timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(key, server=False, encrypt=encrypt)
        sock.sendall(connection.start())
        while not connection.authenticated:
            data = sock.recv(_READ_BYTES)
            if not data:
                raise ChannelClosedError("the driver closed the connection during the handshake")
            bodies, reply = connection.receive(data)
            assert not bodies, "the server sends no message before the client's hello"
            sock.sendall(reply)
        return Channel(sock, connection)
    except BaseException:
        sock.close()
        raise


def set_unacknowledged_timeout(sock: socket.socket, seconds: float) -> None:
    """Have the kernel drop the connection after this time without acknowledgement; its default is about 15 min."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(seconds * 1000), 2**31 - 1))


class Channel:
    """An authenticated connection to the driver."""

    def __init__(self, sock: socket.socket, connection: Connection) -> None:
        self._socket = sock
        self._connection = connection
        self._send_lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._closing = False
        self._silence_limit_s = float("inf")
        self._sent_at = monotonic()  # when a message was to be sent last
        self._held_up_until = float("-inf")  # when this process last sent something after it had been held up

    def set_silence_limit(self, timeout_s: float) -> None:
        """Treat the driver as gone after this time without a byte from it, or with data that it does not accept.

        From now on this side has to send something several times within the limit. If it does not, the process was held
        up (a call held the interpreter's lock, or the process was stopped), and the driver had nothing to answer: it
        gets the time once more.
        """
        self._silence_limit_s, self._sent_at = timeout_s, monotonic()
        self._socket.settimeout(timeout_s)
        set_unacknowledged_timeout(self._socket, timeout_s)

    def start(self, on_message: Callable[[Message], None], on_closed: Callable[[str], None]) -> None:
        """Start the reader thread, which calls `on_message` for each message and `on_closed(why)` at the end."""
        arguments = on_message, on_closed
        self._reader = threading.Thread(target=self._read, args=arguments, name="spark_elastic-link", daemon=True)
        self._reader.start()

    def send(self, message: Message) -> None:
        """Send a message, from any thread. Raise ChannelClosedError if the connection is gone."""
        body = encode(message)
        now = monotonic()
        if self._is_held_up(now):
            self._held_up_until = now
        self._sent_at = now
        with self._send_lock:
            try:
                self._socket.sendall(self._connection.send(body))
            except OSError as error:
                raise ChannelClosedError(f"the connection to the driver is gone: {error}") from None

    def _is_held_up(self, now: float) -> bool:
        return now - self._sent_at > self._silence_limit_s * _HELD_UP

    def _was_held_up(self) -> bool:
        """Return True if this process itself could not send for long within the time of the silence limit."""
        now = monotonic()
        return self._is_held_up(now) or now - self._held_up_until < self._silence_limit_s

    def close(self) -> None:
        """Close the connection without calling `on_closed`."""
        self._closing = True
        with contextlib.suppress(OSError):  # the other side has closed it already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(timeout=5.0)

    def _read(self, on_message: Callable[[Message], None], on_closed: Callable[[str], None]) -> None:
        try:
            why = self._read_until_closed(on_message)
        except ProtocolError as error:  # also if a message contradicts an earlier one
            why = f"the driver broke the protocol: {error}"
        except Exception as error:  # without a reader, no message of the driver would arrive
            logger.exception("the channel's reader failed")
            why = f"internal error in the channel's reader: {error!r}"
        if not self._closing:
            on_closed(why)

    def _read_until_closed(self, on_message: Callable[[Message], None]) -> str:
        excused = False  # once for each silence, should this process send nothing any more
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
                excused = False
                if not data:
                    return "the driver closed the connection"
            except TimeoutError:
                if not excused and self._was_held_up():
                    excused = True
                    continue
                return f"the driver was silent for {self._socket.gettimeout():.0f} s, longer than elastic_timeout"
            except OSError as error:
                return f"the connection to the driver broke: {error}"
            bodies, _ = self._connection.receive(data)
            for message in [decode(body) for body in bodies]:
                on_message(message)


# --- the asyncio end --------------------------------------------------------------------------------


class MessageStream(asyncio.Protocol):
    """A protocol that authenticates the peer by the job's key, then turns bytes into messages and back.

    All calls, of methods and of callbacks, happen on the loop's thread. Each callback gets the stream: `on_open` is
    called once the peer is authenticated, `on_message` with each message, `on_closed` once with the reason, and
    `on_unauthenticated` in its place if the connection ends before `on_open`. `server` is the end that accepted the
    connection; both ends need the same `encrypt`.
    """

    def __init__(
        self,
        key: bytes,
        *,
        server: bool,
        encrypt: bool = False,
        on_open: Callable[[MessageStream], None],
        on_message: Callable[[MessageStream, Message], None],
        on_closed: Callable[[MessageStream, str], None],
        on_unauthenticated: Callable[[MessageStream], object],
    ) -> None:
        self._connection = Connection(key, server=server, encrypt=encrypt)
        self._server = server
        self._on_open, self._on_message, self._on_closed = on_open, on_message, on_closed
        self._on_unauthenticated = on_unauthenticated
        self._transport: asyncio.Transport | None = None
        self._handshake_deadline: asyncio.TimerHandle | None = None
        self._why = "the peer closed the connection"
        self._open = False
        self._aborted = False
        self.refusal = ""  # why this side closed an unauthenticated connection; "" if the other side did
        self.peer_address = ""

    @property
    def unsent_bytes(self) -> int:
        """Bytes queued because the peer does not accept them yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def send(self, message: Message) -> None:
        """Queue a message; drop it if the stream is closed, which `on_closed` reports."""
        if self._open:
            self.send_encoded(encode(message))

    def send_encoded(self, body: bytes) -> None:
        """Queue a message that is encoded already, because other streams send it too. Otherwise like `send`."""
        if not self._open or self._transport is None or self._transport.is_closing():
            return
        self._transport.write(self._connection.send(body))
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.abort("the peer does not read what is sent to it")

    def set_unacknowledged_timeout(self, seconds: float) -> None:
        """Drop the connection if the peer does not acknowledge data for this time."""
        if self._transport is not None:
            set_unacknowledged_timeout(self._transport.get_extra_info("socket"), seconds)

    def close(self) -> None:
        """Close after the queued data has been sent."""
        if self._transport is not None:
            self._why = "closed here"
            self._transport.close()

    def abort(self, why: str) -> None:
        """Close at once, or as soon as the connection is made."""
        self._why = why
        self._aborted = True
        if self._transport is not None:
            self._transport.abort()

    # --- called by asyncio ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._aborted:
            transport.abort()
            return
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer_address = plain_address(str(transport.get_extra_info("peername")[0]))
        self._handshake_deadline = asyncio.get_running_loop().call_later(
            HANDSHAKE_TIMEOUT_S, self._refuse, "the peer did not authenticate in time"
        )
        if greeting := self._connection.start():
            transport.write(greeting)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            bodies, reply = self._connection.receive(data)
            if reply:
                self._transport.write(reply)
            if self._connection.authenticated and not self._open:
                self._opened()
            messages = [decode(body) for body in bodies]
        except ProtocolError as error:
            if self._open or not self._server:  # a server counts refused strangers, of which there may be many
                logger.warning("closing the connection from %s: %s", self.peer_address, error)
            self._refuse(f"the peer broke the protocol: {error}")
            return
        for message in messages:
            self._on_message(self, message)

    def _refuse(self, why: str) -> None:
        self.refusal = why
        self.abort(why)

    def _opened(self) -> None:
        if self._handshake_deadline is not None:
            self._handshake_deadline.cancel()
        self._open = True
        self._on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._handshake_deadline is not None:
            self._handshake_deadline.cancel()
        if self._open:
            self._open = False
            self._on_closed(self, str(exc) if exc is not None else self._why)
        else:
            self._on_unauthenticated(self)
