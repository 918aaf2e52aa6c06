"""RendezvousServer: the driver's end of the connections to agents and workers, and the key-value store under Gloo.

It authenticates peers, identifies them by their first message, and passes further messages to its listener, `Peers`. It
runs on the driver's event loop; every method must be called there.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from spark_elastic.errors import ProtocolError
from spark_elastic.membership.topology import AgentId, WorkerId
from spark_elastic.settings import ElasticSettings
from spark_elastic.wire import messages as wire
from spark_elastic.wire.admission import MAX_UNAUTHENTICATED, Admission
from spark_elastic.wire.channel import MessageStream
from spark_elastic.wire.encoding import encode

if TYPE_CHECKING:
    from spark_elastic.driver.peers import Peers

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 60.0  # agents and workers send their hello as soon as they are authenticated
MAX_ROUND_BYTES = 64 * 2**20  # of broken workers: the members of a group send about 100 bytes each


class RoundKeyValues:
    """The key-value store of Gloo's rendezvous, for the newest round. Requests wait until their key is set."""

    def __init__(self) -> None:
        self._round = 0
        self._bytes = 0
        self._values: dict[str, bytes] = {}
        #: The functions that answer the requests for a key, by key.
        self._waiting: dict[str, list[Callable[[bytes], None]]] = {}
        #: Of the groups of which not all members have sent their values, by name: the size, and by rank the values so
        #: far, each with the function that answers its sender.
        self._gatherings: dict[str, tuple[int, dict[int, tuple[str, Callable[[bytes], None]]]]] = {}

    def start_round(self, round: int) -> None:
        """Drop the values and the waiting requests of the previous round."""
        self._round = round
        self._bytes = 0
        self._values.clear()
        self._waiting.clear()
        self._gatherings.clear()

    def set(self, round: int, key: str, value: bytes) -> None:
        """Store a value, and answer the requests that waited for it."""
        if round != self._round:
            return  # a late message of a round that is over
        replaced = len(key) + len(self._values[key]) if key in self._values else 0
        self._count(len(key) + len(value) - replaced)
        self._values[key] = value
        for answer in self._waiting.pop(key, ()):
            answer(value)

    def get(self, round: int, key: str, answer: Callable[[bytes], None]) -> None:
        """Call `answer` with the value as soon as it is set; never if the round ends before."""
        if round != self._round:
            return
        if key in self._values:
            answer(self._values[key])
        else:
            self._waiting.setdefault(key, []).append(answer)

    def gather(self, sent: wire.KvGather, answer: Callable[[bytes], None]) -> None:
        """Add a member's value. Once all members have sent one, answer each with the message, encoded once, that has
        them all.

        Raises:
            ProtocolError: The members disagree about the size of their group, or send too much, as with `set`.
        """
        if sent.round != self._round:
            return  # a late message of a round that is over
        size, members = self._gatherings.get(sent.name, (sent.size, {}))
        if size != sent.size:
            raise ProtocolError(f"a member of {sent.name!r:.80} says that it has {sent.size} members, not {size}")
        replaced = len(sent.name) + len(members[sent.rank][0]) if sent.rank in members else 0
        self._count(len(sent.name) + len(sent.value) - replaced)
        self._gatherings[sent.name] = size, members
        members[sent.rank] = sent.value, answer
        if len(members) == size:
            del self._gatherings[sent.name]
            values = tuple(members[rank][0] for rank in range(size))
            body = encode(wire.KvGathered(sent.round, sent.name, values))
            self._bytes -= sum(len(sent.name) + len(value) for value in values)
            for _, each in members.values():
                each(body)

    def _count(self, nbytes: int) -> None:
        """Count the bytes of a value that is to be stored; raise ProtocolError if the round has too many then."""
        if self._bytes + nbytes > MAX_ROUND_BYTES:
            raise ProtocolError(f"round {self._round} stored more than {MAX_ROUND_BYTES} bytes of rendezvous data")
        self._bytes += nbytes


class RendezvousServer:
    """Accepts agents and workers, which must prove to have the job's key, and sends messages to them by their ids.

    Peers take this side for lost when they were without a message for `settings.driver_silence_s` and a heartbeat
    interval. Channels are encrypted if both ends have `encrypt`. A peer that has authenticated, and not sent its hello
    within `hello_timeout_s`, is dropped.
    """

    def __init__(
        self,
        key: bytes,
        listener: Peers,
        settings: ElasticSettings,
        *,
        encrypt: bool = False,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        self._key = key
        self._encrypt = encrypt
        self._listener = listener
        self._admission = Admission(self._new_stream, max(MAX_UNAUTHENTICATED, 2 * settings.max_num_proc))
        # the last answer before a pause of this side may be an interval old
        limit_s = settings.driver_silence_s + settings.heartbeat_interval_s
        self._welcome = wire.Welcome(settings.heartbeat_interval_s, limit_s, settings.stall_timeout_s)
        self._key_values = RoundKeyValues()
        self._hello_timeout_s = hello_timeout_s
        #: Authenticated connections without a hello, with the timers that close them.
        self._unnamed: dict[MessageStream, asyncio.TimerHandle] = {}
        self._agents: dict[AgentId, MessageStream] = {}
        self._workers: dict[WorkerId, MessageStream] = {}
        self._agent_by_stream: dict[MessageStream, AgentId] = {}
        self._worker_by_stream: dict[MessageStream, WorkerId] = {}
        self._next_agent: AgentId = 1

    async def start(self, sock: socket.socket) -> None:
        """Serve on a bound socket."""
        self._admission.start(sock)

    async def close(self) -> None:
        """Stop listening and close every connection. The listener is not called."""
        streams = [*self._admission.close(), *self._unnamed, *self._agent_by_stream, *self._worker_by_stream]
        self._agent_by_stream.clear()
        self._worker_by_stream.clear()
        for stream in streams:
            stream.close()
        await asyncio.sleep(0)  # lets the transports write what they have buffered
        for stream in streams:
            stream.abort("the job is over")

    def to_agent(self, agent: AgentId, message: wire.Message) -> None:
        """Send a message. Does nothing if the agent is gone, which `agent_gone` has reported."""
        if agent in self._agents:
            self._agents[agent].send(message)

    def to_worker(self, worker: WorkerId, message: wire.Message) -> None:
        """Send a message. Does nothing if the worker is gone, which `worker_gone` has reported."""
        if worker in self._workers:
            self._workers[worker].send(message)

    def to_workers(self, workers: Iterable[WorkerId], message: wire.Message) -> None:
        """Send a message to several workers; it is encoded once."""
        body = encode(message)
        for worker in workers:
            if worker in self._workers:
                self._workers[worker].send_encoded(body)

    def publish(self, assigned: wire.WorldAssigned) -> None:
        """Send a world to its members, encoded once for all of them, and start its key-value space."""
        self._key_values.start_round(assigned.world.round)
        self.to_workers(assigned.world.workers, assigned)

    def drop_agent(self, agent: AgentId, why: str) -> None:
        """Close an agent's connection without a message to it. `agent_gone` is called."""
        if agent in self._agents:
            self._agents[agent].abort(why)

    def drop_worker(self, worker: WorkerId, why: str) -> None:
        """Send a goodbye to a worker and close its connection. `worker_gone` is not called."""
        stream = self._workers.pop(worker, None)
        if stream is not None:
            del self._worker_by_stream[stream]
            stream.send(wire.Goodbye(why))
            stream.close()

    def _new_stream(self) -> MessageStream:
        return MessageStream(
            self._key,
            server=True,
            encrypt=self._encrypt,
            on_open=self._opened,
            on_message=self._received,
            on_closed=self._closed,
            on_unauthenticated=lambda stream: self._admission.settle(stream, stream.refusal),
        )

    def _opened(self, stream: MessageStream) -> None:
        self._admission.settle(stream)
        self._unnamed[stream] = asyncio.get_running_loop().call_later(
            self._hello_timeout_s, stream.abort, "the peer did not send its hello in time"
        )

    def _received(self, stream: MessageStream, message: wire.Message) -> None:
        if stream in self._worker_by_stream:
            self._from_worker(stream, self._worker_by_stream[stream], message)
        elif stream in self._agent_by_stream:
            self._listener.agent_said(self._agent_by_stream[stream], message)
        elif stream in self._unnamed:
            self._unnamed.pop(stream).cancel()
            self._named(stream, message)

    def _named(self, stream: MessageStream, message: wire.Message) -> None:
        if isinstance(message, wire.AgentHello):
            agent = self._next_agent
            self._next_agent += 1
            self._agents[agent] = stream
            self._agent_by_stream[stream] = agent
            stream.send(self._welcome)
            self._listener.agent_joined(agent, message, stream.peer_address)
        elif isinstance(message, wire.WorkerHello):
            if message.worker in self._workers or not self._listener.worker_expected(message.worker):
                stream.send(wire.Goodbye(f"worker {message.worker} is not expected (any more)"))
                stream.close()
                return
            self._workers[message.worker] = stream
            self._worker_by_stream[stream] = message.worker
            stream.send(self._welcome)
            self._listener.worker_said(message.worker, message)
        else:
            stream.abort(f"{type(message).__name__} before a hello")

    def _from_worker(self, stream: MessageStream, worker: WorkerId, message: wire.Message) -> None:
        try:
            match message:
                case wire.KvSet(round, key, value):
                    self._key_values.set(round, key, value)
                case wire.KvGather():
                    self._key_values.gather(message, stream.send_encoded)
                case wire.KvGet(round, key):
                    self._key_values.get(round, key, lambda value: stream.send(wire.KvValue(key, value)))
                case _:
                    self._listener.worker_said(worker, message)
        except ProtocolError as error:
            stream.abort(str(error))

    def _closed(self, stream: MessageStream, why: str) -> None:
        if stream in self._unnamed:
            self._unnamed.pop(stream).cancel()
        elif stream in self._agent_by_stream:
            agent = self._agent_by_stream.pop(stream)
            del self._agents[agent]
            self._listener.agent_gone(agent, why)
        elif stream in self._worker_by_stream:
            worker = self._worker_by_stream.pop(stream)
            del self._workers[worker]
            self._listener.worker_gone(worker, why)
