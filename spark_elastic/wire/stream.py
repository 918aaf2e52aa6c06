"""A channel on an asyncio event loop: the driver's end of every connection, and the agent's end of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from spark_elastic.errors import ProtocolError
from spark_elastic.wire.channel import set_unacknowledged_timeout
from spark_elastic.wire.framing import Connection
from spark_elastic.wire.messages import Message, decode, encode

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
"""A peer that has not authenticated by then is dropped; a real one needs two round trips."""
MAX_UNSENT_BYTES = 64 * 2**20
"""A peer with this much unsent data does not read any more: it is stopped, or its network link is down."""


class MessageStream(asyncio.Protocol):
    """A protocol that authenticates the peer, then turns bytes into messages and back.

    All calls, of methods and of callbacks, happen on the loop's thread.

    Args:
        key: the job's key.
        server: True at the end that accepted the connection.
        on_open: called with the stream once the peer is authenticated.
        on_message: called with the stream and each message.
        on_closed: called once with the stream and the reason, if `on_open` was called before.
        on_unauthenticated: called with the stream if the connection ends before `on_open`.
    """

    def __init__(
        self,
        key: bytes,
        *,
        server: bool,
        on_open: Callable[[MessageStream], None],
        on_message: Callable[[MessageStream, Message], None],
        on_closed: Callable[[MessageStream, str], None],
        on_unauthenticated: Callable[[MessageStream], object] | None = None,
    ) -> None:
        self._connection = Connection(key, server=server)
        self._on_open = on_open
        self._on_message = on_message
        self._on_closed = on_closed
        self._on_unauthenticated = on_unauthenticated
        self._transport: asyncio.Transport | None = None
        self._handshake_deadline: asyncio.TimerHandle | None = None
        self._why = "the peer closed the connection"
        self._open = False
        self._aborted = False
        self.refusal = ""
        """Why this side closed an unauthenticated connection; "" if the other side did."""
        self._server = server
        self.peer_address = ""
        self.local_address = ""

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def unsent_bytes(self) -> int:
        """Bytes queued because the peer does not accept them yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def send(self, message: Message) -> None:
        """Queue a message; drop it if the stream is closed, which `on_closed` reports."""
        if not self._open or self._transport is None or self._transport.is_closing():
            return
        self._transport.write(self._connection.send(encode(message)))
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
        self.peer_address = str(transport.get_extra_info("peername")[0])
        self.local_address = str(transport.get_extra_info("sockname")[0])
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
        elif self._on_unauthenticated is not None:
            self._on_unauthenticated(self)
