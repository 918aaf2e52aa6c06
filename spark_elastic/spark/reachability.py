"""Prove to tasks on executors that the address they reached is the one of this driver.

An open port alone proves nothing: 127.0.0.1 and the addresses of container bridges exist on every machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

from spark_elastic.wire.admission import Admission
from spark_elastic.wire.channel import MessageStream
from spark_elastic.wire.interfaces import address_of, address_toward, is_address, is_loopback, own_addresses

_CLOSE_S = 2.0


@contextlib.contextmanager
def answering(listening: socket.socket, key: bytes) -> Iterator[None]:
    """Authenticate the peers that connect to a job's socket while the block runs: they must have the job's key.

    The socket stays open, for the driver.
    """
    loop, streams = asyncio.new_event_loop(), set[MessageStream]()
    over: asyncio.Future[None] = loop.create_future()
    sock = listening.dup()

    def new_stream() -> MessageStream:
        return MessageStream(
            key,
            server=True,
            on_open=opened,
            on_message=lambda stream, message: stream.abort("a probe sends no message"),
            on_closed=lambda stream, why: streams.discard(stream),
            on_unauthenticated=lambda stream: admission.settle(stream, stream.refusal),
        )

    def opened(stream: MessageStream) -> None:
        streams.add(stream)
        admission.settle(stream)

    async def serve() -> None:
        admission.start(sock)
        await over
        for stream in [*admission.close(), *streams]:
            stream.abort("the probe is over")
        await asyncio.sleep(0)

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            loop.close()

    admission = Admission(new_stream)
    thread = threading.Thread(target=run, name="spark_elastic reachability", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(over.set_result, None)
        thread.join(_CLOSE_S)


def candidate_addresses(server_host: str) -> tuple[str, ...]:
    """Return this machine's addresses in the order in which executors should try them.

    First the one from which the machine speaks to the Connect server, because executors are near the server.
    """
    server = address_of(server_host)
    toward = address_toward(server) if is_address(server) else None
    return tuple(dict.fromkeys([*([toward] if toward else []), *sorted(own_addresses(), key=is_loopback)]))
