"""The port on which agents test whether they can reach each other."""

import asyncio
import os
import socket

from spark_elastic.task.agent import ProbePort
from spark_elastic.wire.ports import Ports

WAIT_S = 20.0


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, WAIT_S))


async def is_answered(address, port):
    try:
        reader, writer = await asyncio.open_connection(address, port)
    except OSError:
        return False
    assert await reader.read() == b"", "it is closed at once"
    writer.close()
    return True


def test_listens_on_the_same_port_of_the_given_addresses_only():
    async def live():
        probe = ProbePort(["127.0.0.2", "127.0.0.3", "203.0.113.1"])  # the last is not an address of this host
        answers = [await is_answered(f"127.0.0.{last}", probe.port) for last in (1, 2, 3)]
        port = probe.port
        probe.close()
        return [*answers, await is_answered("127.0.0.2", port)]

    assert run(live()) == [False, True, True, False]


def test_both_protocols_are_answered_on_one_port_of_the_range():
    async def live():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            first = taken.getsockname()[1]
            probe = ProbePort(["127.0.0.1", "::1"], Ports(first, first + 20))
            answers = [await is_answered(address, probe.port) for address in ("127.0.0.1", "::1")]
            port = probe.port
            probe.close()
            return [*answers, first < port <= first + 20]

    assert run(live()) == [True, True, True]


def test_exhausted_range_is_noticed():
    async def live():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            probe = ProbePort(["127.0.0.1"], Ports(port, port))
            probe.close()
            return probe.ports_taken, probe.port

    assert run(live()) == (True, 0)


def test_connections_held_open_by_peers_cost_no_descriptor():
    async def live():
        probe = ProbePort(["127.0.0.1"])
        strangers = [socket.create_connection(("127.0.0.1", probe.port)) for _ in range(60)]
        before = len(os.listdir("/proc/self/fd"))
        assert await is_answered("127.0.0.1", probe.port)
        most = len(os.listdir("/proc/self/fd")) - before
        probe.close()
        for stranger in strangers:
            stranger.close()
        return most

    assert run(live()) <= 1
