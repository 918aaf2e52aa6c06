"""ReachabilityListener: proves to tasks on executors that the address they reached is the one of this driver.

An open port alone proves nothing: 127.0.0.1 and the addresses of container bridges exist on every machine.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from types import TracebackType

from spark_elastic.membership.topology import Reach
from spark_elastic.wire.admission import Admission
from spark_elastic.wire.channel import MessageStream
from spark_elastic.wire.interfaces import address_of, address_toward, is_address, is_loopback, own_addresses

_CLOSE_S = 2.0


class ReachabilityListener:
    """Authenticates the peers that connect to a job's socket, until the driver itself serves it.

    A context manager, which leaves the socket open. Peers must prove to have the job's key.
    """

    def __init__(self, listening: socket.socket, key: bytes) -> None:
        self._socket = listening.dup()
        self._key = key
        self._loop = asyncio.new_event_loop()
        self._streams: set[MessageStream] = set()
        self._thread = threading.Thread(target=self._serve, name="spark_elastic reachability", daemon=True)

    def __enter__(self) -> ReachabilityListener:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._admission: Admission | None = None
        self._loop.call_soon(self._start)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._close())
        finally:
            self._loop.close()

    def _start(self) -> None:
        self._admission = Admission(self._new_stream)
        self._admission.start(self._socket)

    async def _close(self) -> None:
        assert self._admission is not None
        for stream in [*self._admission.close(), *self._streams]:
            stream.abort("the probe is over")
        await asyncio.sleep(0)

    def _new_stream(self) -> MessageStream:
        return MessageStream(
            self._key,
            server=True,
            on_open=self._opened,
            on_message=lambda stream, message: stream.abort("a probe sends no message"),
            on_closed=lambda stream, why: self._streams.discard(stream),
            on_unauthenticated=self._refused,
        )

    def _opened(self, stream: MessageStream) -> None:
        self._streams.add(stream)
        assert self._admission is not None
        self._admission.settle(stream)

    def _refused(self, stream: MessageStream) -> None:
        if self._admission is not None:
            self._admission.settle(stream, stream.refusal)


def in_order(candidates: Sequence[str], reaches: Sequence[Reach]) -> tuple[str, ...]:
    """Return the candidates, those first that most tasks have reached."""
    count = {address: sum(address in reach.reached for reach in reaches) for address in candidates}
    return tuple(sorted(candidates, key=lambda address: -count[address]))


def unreached_in_words(reach: Reach) -> str:
    tried = "; ".join(f"{address}: {why}" for address, why in reach.failed.items())
    return f"from host {reach.host}: {tried}"


def candidate_addresses(server_host: str) -> tuple[str, ...]:
    """Return this machine's addresses in the order in which executors should try them.

    First the one from which the machine speaks to the Connect server, because executors are near the server.
    """
    server = address_of(server_host)
    toward = address_toward(server) if is_address(server) else None
    addresses = own_addresses()
    outward = [address for address in addresses if not is_loopback(address)]
    loopback = [address for address in addresses if is_loopback(address)]
    return tuple(dict.fromkeys([*([toward] if toward else []), *outward, *loopback]))
