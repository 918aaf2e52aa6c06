"""Strangers flood the driver's port: its process keeps its descriptors, its log stays short, and agents get in."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from spark_elastic.membership.topology import Place
from spark_elastic.wire import messages as wire
from spark_elastic.wire.channel import connect

pytestmark = pytest.mark.nightly

SERVER = """
import asyncio, logging, os, resource, socket, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
from spark_elastic.driver.rendezvous_server import RendezvousServer
from spark_elastic.settings import ElasticSettings
logging.basicConfig(stream=sys.stderr, format="%(name)s %(message)s")

class Listener:
    def __getattr__(self, name):
        return lambda *args: None

async def serve():
    sock = socket.create_server(("127.0.0.1", 0))
    server = RendezvousServer(bytes.fromhex(sys.argv[2]), Listener(), ElasticSettings(1, 1, 1))
    await server.start(sock)
    print(sock.getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await server.close()

asyncio.run(serve())
"""

FLOODER = """
import errno, resource, select, socket, sys, time
HELD = 700
port, rubbish, until = int(sys.argv[1]), sys.argv[2] == "rubbish", time.monotonic() + 60
poller, held, lost, told = select.epoll(), {}, 0, False
while time.monotonic() < until:
    while len(held) < HELD:
        stranger = socket.socket()
        stranger.setblocking(False)
        if stranger.connect_ex(("127.0.0.1", port)) not in (0, errno.EINPROGRESS):
            stranger.close()
            break
        held[stranger.fileno()] = stranger
        poller.register(stranger, select.EPOLLIN | (select.EPOLLOUT if rubbish else 0))
    for number, event in poller.poll(0.05):
        stranger = held[number]
        try:
            if event & select.EPOLLIN or event & select.EPOLLHUP:
                raise OSError
            stranger.send(b"GET / HTTP/1.1")
            poller.modify(number, select.EPOLLIN)
        except OSError:  # the server has closed it
            poller.unregister(number)
            held.pop(number).close()
            lost += 1
    if lost > 300 and not told:
        told = print("flooded", flush=True) is None
"""
JOIN_S = 15.0
"""Much longer than it takes, and less than the waits of agents."""


@pytest.mark.parametrize(("kind", "limit"), [("silent", 256), ("rubbish", 1024)])
def test_agents_get_in_during_a_flood_and_descriptors_and_log_stay_bounded(kind, limit):
    key = os.urandom(32)
    server = started(SERVER, str(limit), key.hex())
    flooder = None
    try:
        port = int(server.stdout.readline())
        quiet = descriptors(server.pid)
        flooder = started(FLOODER, str(port), kind)
        most = [quiet]
        over = threading.Event()
        watcher = threading.Thread(target=watch, args=(server.pid, most, over))
        watcher.start()
        try:
            assert flooder.stdout.readline() == "flooded\n"
            waited = [join(port, key) for _ in range(3)]
        finally:
            over.set()
            watcher.join()
        assert flooder.poll() is None, "the flood was over"
        print(f"{kind}, limit {limit}: joined after {waited} s, {most[0]} descriptors, {quiet} before")
        assert max(waited) < JOIN_S
        assert limit - most[0] >= 50, "too few descriptors left for the rest of the process"
    finally:
        if flooder is not None:
            flooder.kill()
            flooder.communicate()
        _, said = server.communicate("\n", timeout=60)
    lines = said.splitlines()
    assert any("refused" in line for line in lines)
    assert len(lines) <= 3, said[:2000]


def started(program, *args):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", program, *args], text=True, **pipes)


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def watch(pid, most, over):
    while not over.wait(0.01):
        most[0] = max(most[0], descriptors(pid))


def join(port, key):
    """Returns: how long it took to be welcomed."""
    begin = time.monotonic()
    welcomed = threading.Event()
    channel = connect([("127.0.0.1", port)], key, timeout_s=60.0)
    channel.start(lambda *_: welcomed.set(), lambda *_: None)
    channel.send(wire.AgentHello(Place("127.0.0.1", "1", 0), 1, {"lo": ("127.0.0.1",)}, 0, ""))
    assert welcomed.wait(60.0)
    took = time.monotonic() - begin
    channel.close()
    return round(took, 2)
