"""The worker's end of a channel: a blocking socket, one reader thread, `send` from any thread."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence

from spark_elastic.clock import monotonic
from spark_elastic.errors import ChannelClosedError, ProtocolError
from spark_elastic.wire.framing import Connection
from spark_elastic.wire.messages import Message, decode, encode

logger = logging.getLogger(__name__)

Address = tuple[str, int]
RETRY_S = 0.2
_READ_BYTES = 256 * 1024


def retry_pause_s() -> float:
    """Return a random pause before the next attempt: the driver may be busy, or too many connect at once."""
    return random.uniform(0.5, 1.5) * RETRY_S


def connect(addresses: Sequence[Address], key: bytes, *, timeout_s: float) -> Channel:
    """Connect to the first of `addresses` that answers and authenticate both sides; retry until the timeout.

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
                return _connect(address, key, share)
            except (OSError, ChannelClosedError) as error:
                failures[address] = f"{address[0]}:{address[1]}: {error or 'no answer'}"
        if monotonic() >= deadline:
            raise ChannelClosedError("cannot reach the driver: " + "; ".join(failures.values()))
        time.sleep(min(retry_pause_s(), max(deadline - monotonic(), 0.0)))


def _connect(address: Address, key: bytes, timeout_s: float) -> Channel:
    sock = socket.create_connection(address, timeout=timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Channel(sock, _authenticate(sock, key))
    except BaseException:
        sock.close()
        raise


def _authenticate(sock: socket.socket, key: bytes) -> Connection:
    connection = Connection(key, server=False)
    sock.sendall(connection.start())
    while not connection.authenticated:
        data = sock.recv(_READ_BYTES)
        if not data:
            raise ChannelClosedError("the driver closed the connection during the handshake")
        bodies, reply = connection.receive(data)
        assert not bodies, "the server sends no message before the client's hello"
        if reply:
            sock.sendall(reply)
    return connection


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

    @property
    def local_address(self) -> str:
        """This machine's address in the connection."""
        return str(self._socket.getsockname()[0])

    def set_silence_limit(self, timeout_s: float) -> None:
        """Treat the driver as gone after this time without a byte from it, or with data that it does not accept."""
        self._socket.settimeout(timeout_s)
        set_unacknowledged_timeout(self._socket, timeout_s)

    def start(
        self, on_message: Callable[[Message], None], on_closed: Callable[[str], None], *, name: str = "channel"
    ) -> None:
        """Start the reader thread, which calls `on_message` for each message and `on_closed(why)` at the end."""
        self._reader = threading.Thread(
            target=self._read, args=(on_message, on_closed), name=f"spark_elastic-{name}", daemon=True
        )
        self._reader.start()

    def send(self, message: Message) -> None:
        """Send a message, from any thread.

        Raises:
            ChannelClosedError: the connection is gone.
        """
        body = encode(message)
        with self._send_lock:
            try:
                self._socket.sendall(self._connection.send(body))
            except OSError as error:
                raise ChannelClosedError(f"the connection to the driver is gone: {error}") from None

    def close(self) -> None:
        """Close the connection without calling `on_closed`."""
        self._closing = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side has closed it already
        self._socket.close()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(timeout=5.0)

    def _read(self, on_message: Callable[[Message], None], on_closed: Callable[[str], None]) -> None:
        try:
            why = self._read_until_closed(on_message)
        except Exception as error:  # without a reader, no message of the driver would arrive
            logger.exception("the channel's reader failed")
            why = f"internal error in the channel's reader: {error!r}"
        if not self._closing:
            on_closed(why)

    def _read_until_closed(self, on_message: Callable[[Message], None]) -> str:
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
                if not data:
                    return "the driver closed the connection"
                bodies, _ = self._connection.receive(data)
                messages = [decode(body) for body in bodies]
            except TimeoutError:
                return f"the driver was silent for {self._socket.gettimeout():.0f} s, longer than elastic_timeout"
            except OSError as error:
                return f"the connection to the driver broke: {error}"
            except ProtocolError as error:
                return f"the driver broke the protocol: {error}"
            for message in messages:
                on_message(message)
