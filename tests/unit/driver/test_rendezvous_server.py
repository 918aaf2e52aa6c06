import asyncio
import ctypes
import socket
import threading
import time

import pytest

from spark_elastic.driver.rendezvous_server import RendezvousServer
from spark_elastic.membership.topology import Member, Place, World
from spark_elastic.settings import ElasticSettings
from spark_elastic.wire import messages as wire
from spark_elastic.wire.admission import MAX_UNAUTHENTICATED
from spark_elastic.wire.channel import connect
from spark_elastic.wire.framing import new_key

LIMIT = MAX_UNAUTHENTICATED
WAIT_S = 60.0
PLACE = Place("127.0.0.1", "1", 0)
HELLO = wire.AgentHello(PLACE, 1, {"lo": ("127.0.0.1",)}, 0, "")


class Recorder:
    """A listener that notes what it is told and lets tests wait for it."""

    def __init__(self):
        self.told = []
        self.expected = set()
        self.changed = threading.Condition()

    def __getattr__(self, name):
        def note(*args):
            with self.changed:
                self.told.append((name, *args))
                self.changed.notify_all()

        return note

    def worker_expected(self, worker):
        return worker in self.expected

    def wait_for(self, *prefix):
        def found():
            return any(told[: len(prefix)] == prefix for told in self.told)

        with self.changed:
            assert self.changed.wait_for(found, timeout=WAIT_S), f"{prefix} not in {self.told}"


class Served:
    """A server on a loop of its own thread."""

    def __init__(self, silence_limit_s=5.0, **more):
        self.key, self.listener = new_key(), Recorder()
        sock = socket.create_server(("127.0.0.1", 0))
        self.address = sock.getsockname()
        settings = ElasticSettings(
            2, 1, 2, elastic_timeout_s=silence_limit_s, heartbeat_timeout_s=silence_limit_s, stall_timeout_s=60.0
        )
        self.server = RendezvousServer(self.key, self.listener, settings, **more)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.run(self.server.start(sock))
        self.channels = []

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT_S)

    def call(self, function, *args):
        async def inside():
            return function(*args)

        return self.run(inside())

    def client(self, hello):
        channel = connect([self.address], self.key, timeout_s=WAIT_S)
        self.channels.append(channel)
        inbox = Recorder()
        channel.start(inbox.message, inbox.closed)
        channel.send(hello)
        return channel, inbox

    def close(self):
        for channel in self.channels:
            channel.close()
        self.run(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT_S)
        self.loop.close()


@pytest.fixture
def served():
    served = Served()
    yield served
    served.close()


def test_an_agent_is_welcomed_and_reported_with_its_address(served):
    _, inbox = served.client(HELLO)
    inbox.wait_for("message", wire.Welcome(1.0, 6.0, 60.0))
    served.listener.wait_for("agent_joined", 1, HELLO, "127.0.0.1")


def test_a_closed_connection_is_reported_at_once(served):
    channel, inbox = served.client(HELLO)
    inbox.wait_for("message")
    channel.close()
    served.listener.wait_for("agent_gone", 1)


def test_a_worker_that_nobody_started_is_turned_away(served):
    _, inbox = served.client(wire.WorkerHello(5))
    inbox.wait_for("message", wire.Goodbye("worker 5 is not expected (any more)"))
    inbox.wait_for("closed")


def test_a_second_connection_of_the_same_worker_is_turned_away(served):
    served.listener.expected.add(5)
    _, first = served.client(wire.WorkerHello(5))
    first.wait_for("message", wire.Welcome(1.0, 6.0, 60.0))
    _, second = served.client(wire.WorkerHello(5))
    second.wait_for("closed")
    assert not any(told[0] == "closed" for told in first.told)


def test_the_key_value_space_joins_two_workers_of_a_round(served):
    served.listener.expected |= {1, 2}
    one, _ = served.client(wire.WorkerHello(1))
    two, inbox = served.client(wire.WorkerHello(2))
    served.listener.wait_for("worker_said", 1)
    served.listener.wait_for("worker_said", 2)
    world = World(1, (Member(1, PLACE, 0, 0, 2, 0, 1), Member(2, PLACE, 1, 1, 2, 0, 1)), 0, None, True)
    served.call(served.server.publish, wire.WorldAssigned(world, ("127.0.0.1", "127.0.0.1")))
    two.send(wire.KvGet(1, "a"))
    one.send(wire.KvSet(1, "a", b"x"))
    inbox.wait_for("message", wire.KvValue("a", b"x"))


@pytest.mark.parametrize("hello", [HELLO, wire.WorkerHello(5)])
def test_driver_that_stands_still_for_less_than_the_limit_loses_no_peer(hello):
    limit_s, interval_s = 2.0, 0.4
    served = Served(silence_limit_s=limit_s)
    try:
        served.listener.expected.add(5)
        channel, inbox = connect([served.address], served.key, timeout_s=WAIT_S), Recorder()
        served.channels.append(channel)

        def received(message):
            if isinstance(message, wire.Welcome):
                channel.set_silence_limit(message.silence_limit_s)  # here: it is not for a read that has begun
            inbox.message(message)

        channel.start(received, inbox.closed)
        channel.send(hello)
        inbox.wait_for("message")
        served.call(time.sleep, 0.95 * (limit_s + interval_s))
        served.call(served.server.to_agent, 1, wire.Pong())
        served.call(served.server.to_worker, 5, wire.Pong())
        inbox.wait_for("message", wire.Pong())
        assert not any(told[0] == "closed" for told in inbox.told)
    finally:
        served.close()


def test_worker_that_was_held_up_itself_does_not_blame_the_driver_for_the_silence(served):
    served.listener.expected.add(5)
    channel, inbox = connect([served.address], served.key, timeout_s=WAIT_S), Recorder()
    served.channels.append(channel)
    channel.set_silence_limit(0.6)
    channel.start(inbox.message, inbox.closed)
    channel.send(wire.WorkerHello(5))
    inbox.wait_for("message")
    ctypes.PyDLL(None).usleep(2_000_000)  # PyDLL: the interpreter's lock is kept, and no heartbeat can be sent
    began = time.monotonic()
    while not any(told[0] == "closed" for told in inbox.told):  # the listener of this server answers none
        assert time.monotonic() - began < WAIT_S
        channel.send(wire.WorkerHeartbeat(None, None, False, 0))
        time.sleep(0.05)
    assert time.monotonic() - began > 0.5  # the limit counts from here
    (why,) = (told[1] for told in inbox.told if told[0] == "closed")
    assert "the driver was silent" in why


def test_a_message_before_the_hello_ends_the_connection(served):
    _, inbox = served.client(wire.Pong())
    inbox.wait_for("closed")


def test_authenticated_peer_that_sends_no_hello_is_dropped():
    served = Served(hello_timeout_s=0.1)
    try:
        silent = connect([served.address], served.key, timeout_s=WAIT_S)
        served.channels.append(silent)
        inbox = Recorder()
        silent.start(inbox.message, inbox.closed)
        inbox.wait_for("closed")
        assert served.listener.told == []
    finally:
        served.close()


def test_connections_over_the_limit_wait_until_the_oldest_is_closed(served):
    strangers = [socket.create_connection(served.address) for _ in range(LIMIT + 1)]
    strangers[0].settimeout(4)  # less than the handshake's own deadline
    assert is_closed(strangers[0])
    strangers[-1].setblocking(False)
    with pytest.raises(BlockingIOError):
        strangers[-1].recv(1)
    for stranger in strangers:
        stranger.close()


def is_closed(sock):
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.nightly
def test_more_peers_at_once_than_the_limit_all_connect_by_retrying(served):
    inboxes = []

    def join():
        inboxes.append(served.client(HELLO)[1])

    threads = [threading.Thread(target=join) for _ in range(LIMIT + 64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(inboxes) == LIMIT + 64
    for inbox in inboxes:
        inbox.wait_for("message", wire.Welcome(1.0, 6.0, 60.0))


def test_closing_the_server_closes_every_connection(served):
    _, inbox = served.client(HELLO)
    inbox.wait_for("message")
    served.run(served.server.close())
    inbox.wait_for("closed")
