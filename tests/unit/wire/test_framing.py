import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.errors import AuthenticationError, FrameTooLargeError, ProtocolError
from spark_elastic.wire.framing import Connection, new_key


def connected(key=None, **limits):
    key = key or new_key()
    client, server = Connection(key, server=False, **limits), Connection(key, server=True, **limits)
    _, answer = server.receive(client.start())
    _, proof = client.receive(answer)
    _, accepted = server.receive(proof)
    client.receive(accepted)
    return client, server


def test_both_ends_are_authenticated_after_two_round_trips():
    client, server = connected()
    assert client.authenticated
    assert server.authenticated


def test_client_is_not_authenticated_before_the_server_has_checked_its_proof():
    key = new_key()
    client, server = Connection(key, server=False), Connection(key, server=True)
    _, answer = server.receive(client.start())
    client.receive(answer)
    assert not client.authenticated


def test_messages_that_arrive_together_with_the_acceptance_are_kept():
    key = new_key()
    client, server = Connection(key, server=False), Connection(key, server=True)
    _, answer = server.receive(client.start())
    _, proof = client.receive(answer)
    _, accepted = server.receive(proof)
    bodies, _ = client.receive(accepted + server.send(b"welcome"))
    assert bodies == [b"welcome"]


def test_bodies_arrive_in_order_in_both_directions():
    client, server = connected()
    assert server.receive(client.send(b"one") + client.send(b""))[0] == [b"one", b""]
    assert client.receive(server.send(b"two"))[0] == [b"two"]


@given(bodies=st.lists(st.binary(max_size=300), max_size=8), cuts=st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_bodies_do_not_depend_on_how_the_byte_stream_is_cut(bodies, cuts):
    client, server = connected()
    stream = b"".join(client.send(body) for body in bodies)
    got, start = [], 0
    while start < len(stream):
        step = cuts[start % len(cuts)]
        got += server.receive(stream[start : start + step])[0]
        start += step
    assert got == bodies


def test_client_without_the_key_is_refused():
    client, server = Connection(new_key(), server=False), Connection(new_key(), server=True)
    _, answer = server.receive(client.start())
    with pytest.raises(AuthenticationError, match="does not hold this job's key"):
        client.receive(answer)
    with pytest.raises(AuthenticationError, match="does not hold this job's key"):
        server.receive(bytes(32))
    assert not server.authenticated


def test_server_that_echoes_the_greeting_is_refused():
    client = Connection(new_key(), server=False)
    greeting = client.start()
    with pytest.raises(AuthenticationError):
        client.receive(greeting + bytes(32))


def test_first_bytes_of_another_protocol_are_refused():
    server = Connection(new_key(), server=True)
    with pytest.raises(AuthenticationError, match="does not speak this protocol"):
        server.receive(b"GET / HTTP/1.1\r\n")


def test_altered_frame_is_refused():
    client, server = connected()
    frame = bytearray(client.send(b"pay 1"))
    frame[-1] ^= 1
    with pytest.raises(AuthenticationError, match="altered"):
        server.receive(bytes(frame))


def test_repeated_frame_is_refused():
    client, server = connected()
    frame = client.send(b"once")
    server.receive(frame)
    with pytest.raises(AuthenticationError, match="repeated"):
        server.receive(frame)


def test_dropped_frame_is_noticed_at_the_next_one():
    client, server = connected()
    client.send(b"lost")
    with pytest.raises(AuthenticationError, match="dropped"):
        server.receive(client.send(b"next"))


def test_frame_reflected_to_its_sender_is_refused():
    client, _ = connected()
    with pytest.raises(AuthenticationError):
        client.receive(client.send(b"mirror"))


def test_length_over_the_limit_is_refused_before_the_body_arrives():
    _, server = connected(max_frame_bytes=100)
    with pytest.raises(FrameTooLargeError, match="a frame of 1073741824 bytes was announced; the limit is 100"):
        server.receive((1 << 30).to_bytes(4, "big") + bytes(16))


def test_sending_more_than_the_limit_fails_at_the_sender():
    client, _ = connected(max_frame_bytes=100)
    with pytest.raises(FrameTooLargeError):
        client.send(bytes(101))


def test_sending_before_the_handshake_fails():
    with pytest.raises(ProtocolError, match="before the handshake"):
        Connection(new_key(), server=False).send(b"early")


@given(st.binary(max_size=200))
def test_random_bytes_never_authenticate(data):
    server = Connection(new_key(), server=True)
    try:
        bodies, _ = server.receive(data)
    except ProtocolError:
        return
    assert bodies == []
    assert not server.authenticated
