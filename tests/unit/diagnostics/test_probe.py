"""The probe's connection to the doctor, and its source on an executor that lacks the package."""

import ast
import contextlib
import inspect
import json
import os
import socket
import subprocess
import sys
import threading

import cloudpickle
import pytest

from spark_elastic.diagnostics.probe import JsonConnection
from spark_elastic.diagnostics.probe_server import MAX_HANDSHAKES, SHIPPED, ProbeServer, probe_task
from spark_elastic.errors import AuthenticationError, ProtocolError

KEY = b"k" * 32


def both_ends():
    one, other = socket.socketpair()
    made = []
    thread = threading.Thread(target=lambda: made.append(JsonConnection(one, KEY, server=True, timeout_s=5)))
    thread.start()
    client = JsonConnection(other, KEY, server=False, timeout_s=5)
    thread.join()
    return made[0], client


def test_messages_arrive_in_order():
    server, client = both_ends()
    client.send({"a": 1}, 5)
    client.send([2, "ü"], 5)
    assert server.receive(5) == {"a": 1}
    assert server.receive(5) == [2, "ü"]


def test_client_without_the_key_is_refused():
    one, other = socket.socketpair()

    def serve():
        with contextlib.suppress(ProtocolError):  # the client leaves
            JsonConnection(one, KEY, server=True, timeout_s=5)

    server = threading.Thread(target=serve)
    server.start()
    with other, pytest.raises(AuthenticationError, match="does not hold this job's key"):
        JsonConnection(other, b"guessed" * 5, server=False, timeout_s=5)
    server.join()


def test_server_refuses_a_client_without_the_key():
    one, other = socket.socketpair()
    other.sendall(b"SPEL2" + bytes(64))  # a greeting and a wrong proof
    with pytest.raises(AuthenticationError, match="does not hold this job's key"):
        JsonConnection(one, KEY, server=True, timeout_s=5)


def test_replayed_message_is_refused():
    server, client = both_ends()
    raw = bytearray()
    client._socket = type("Tap", (), {"sendall": staticmethod(raw.extend), "settimeout": lambda *_: None})
    real = server._socket
    client.send("once", 5)
    sent = bytes(raw)
    feed, server._socket = socket.socketpair()
    feed.sendall(sent)
    assert server.receive(5) == "once"
    feed.sendall(sent)
    with pytest.raises(ProtocolError):
        server.receive(5)
    real.close()


def test_silence_ends_with_a_timeout():
    server, _ = both_ends()
    with pytest.raises(TimeoutError):
        server.receive(0.05)


def test_stranger_at_the_doctors_port_is_not_taken_for_a_probe():
    server = ProbeServer("127.0.0.1", KEY)
    try:
        stranger = socket.create_connection(("127.0.0.1", server.port))
        with stranger, contextlib.suppress(OSError):  # it may be shut out before it has sent everything
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
        assert server.probes == []
    finally:
        server.close()


def test_idle_strangers_at_the_doctors_port_cost_few_threads_and_probes_get_in():
    threads = threading.active_count()
    server = ProbeServer("127.0.0.1", KEY)
    held = []
    try:
        for _ in range(200):
            held.append(socket.create_connection(("127.0.0.1", server.port), timeout=20))
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as mine:
            probe = JsonConnection(mine, KEY, server=False, timeout_s=20)
            probe.send({"number": 3}, 5)
            assert server.wait_for(1, 20, threading.Event()) == 1
            assert threading.active_count() - threads <= MAX_HANDSHAKES + 4
    finally:
        for each in held:
            each.close()
        server.close()


@pytest.mark.parametrize("module", SHIPPED, ids=lambda module: module.__name__)
def test_shipped_sources_import_only_the_standard_library_and_each_other(module):
    shipped = {each.__name__ for each in SHIPPED}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert all(name in shipped or name.partition(".")[0] in sys.stdlib_module_names for name in names), names


ON_AN_EXECUTOR = """
import sys
sys.modules["spark_elastic"] = None  # importing it fails
import json, pickle
(report,) = pickle.load(sys.stdin.buffer)(iter([3]))
print(json.dumps({"report": report, "imported": [name for name in sys.modules if "spark_elastic." in name]}))
"""


def test_probe_connects_and_answers_without_the_package(tmp_path):
    server = ProbeServer("127.0.0.1", KEY)
    order = {"addresses": [("127.0.0.1", server.port)], "key": KEY, "seconds": 30.0, "connect_s": 5.0}
    command = [sys.executable, "-c", ON_AN_EXECUTOR]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    executor = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, **pipes)
    try:
        executor.stdin.write(cloudpickle.dumps(probe_task(order, "spark_elastic")))
        executor.stdin.close()
        assert server.wait_for(1, 30, threading.Event()) == 1
        (probe,) = server.probes
        assert probe.report["package"] is None
        assert probe.ask("write", {"url": str(tmp_path), "options": None, "name": "a/b", "text": "x"}, 5)["free"] > 0
        assert (tmp_path / "a" / "b").read_text() == "x"
    finally:
        server.close()
        printed = json.loads(executor.stdout.read())
        executor.wait(30)
    assert printed["report"]["number"] == 3
    assert "ms" in printed["report"]["attempts"][0]
    assert printed["imported"] == []
