"""Questions and answers between the doctor and its probes."""

import contextlib
import socket
import threading

import pytest

from spark_elastic.diagnostics.conversation import Conversation
from spark_elastic.diagnostics.line import Line, LineError

KEY = b"k" * 32


def both_ends(key=KEY, other_key=KEY):
    one, other = socket.socketpair()
    made = []
    thread = threading.Thread(target=lambda: made.append(Line(one, key, server=True, timeout_s=5)))
    thread.start()
    client = Line(other, other_key, server=False, timeout_s=5)
    thread.join()
    return made[0], client


def test_what_one_end_sends_the_other_receives_in_order():
    server, client = both_ends()
    client.send({"a": 1}, 5)
    client.send([2, "ü"], 5)
    assert server.receive(5) == {"a": 1}
    assert server.receive(5) == [2, "ü"]


def test_a_message_of_somebody_who_does_not_know_the_key_is_not_read():
    server, client = both_ends(other_key=b"guessed" * 5)
    client.send("pay", 5)
    with pytest.raises(LineError, match="not written by this checkup"):
        server.receive(5)


def test_a_message_that_is_played_again_is_not_read():
    server, client = both_ends()
    raw = bytearray()
    client._connection = type("Tap", (), {"sendall": staticmethod(raw.extend), "settimeout": lambda *_: None})
    real = server._connection
    client.send("once", 5)
    sent = bytes(raw)
    feed, end = socket.socketpair()
    server._connection = end
    feed.sendall(sent + sent)
    assert server.receive(5) == "once"
    with pytest.raises(LineError):
        server.receive(5)
    real.close()


def test_silence_ends_with_the_time_given():
    server, _ = both_ends()
    with pytest.raises(TimeoutError):
        server.receive(0.05)


def test_a_stranger_at_the_doctors_port_is_no_probe():
    conversation = Conversation("127.0.0.1", KEY)
    try:
        stranger = socket.create_connection(("127.0.0.1", conversation.port))
        with stranger, contextlib.suppress(OSError):  # it may be shut out before it has said all that
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
        assert conversation.probes == []
    finally:
        conversation.close()
