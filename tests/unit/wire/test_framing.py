import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.errors import AuthenticationError, FrameTooLargeError, MissingExtraError, ProtocolError
from spark_elastic.wire.framing import MAGIC_ENCRYPTED, MAX_FRAME_BYTES, Connection, new_key

either = pytest.mark.parametrize("encrypt", [False, True])


def connected(key=None, **limits):
    key = key or new_key()
    client, server = Connection(key, server=False, **limits), Connection(key, server=True, **limits)
    _, answer = server.receive(client.start())
    _, proof = client.receive(answer)
    _, accepted = server.receive(proof)
    client.receive(accepted)
    return client, server


@either
def test_both_ends_are_authenticated_after_two_round_trips(encrypt):
    client, server = connected(encrypt=encrypt)
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


@either
def test_bodies_arrive_in_order_in_both_directions(encrypt):
    client, server = connected(encrypt=encrypt)
    assert server.receive(client.send(b"one") + client.send(b""))[0] == [b"one", b""]
    assert client.receive(server.send(b"two"))[0] == [b"two"]


@given(
    bodies=st.lists(st.binary(max_size=300), max_size=8),
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    encrypt=st.booleans(),
)
def test_bodies_do_not_depend_on_how_the_byte_stream_is_cut(bodies, cuts, encrypt):
    client, server = connected(encrypt=encrypt)
    stream = b"".join(client.send(body) for body in bodies)
    got, start = [], 0
    while start < len(stream):
        step = cuts[start % len(cuts)]
        got += server.receive(stream[start : start + step])[0]
        start += step
    assert got == bodies


@either
def test_client_without_the_key_is_refused(encrypt):
    client = Connection(new_key(), server=False, encrypt=encrypt)
    server = Connection(new_key(), server=True, encrypt=encrypt)
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


@either
def test_altered_frame_is_refused(encrypt):
    client, server = connected(encrypt=encrypt)
    frame = bytearray(client.send(b"pay 1"))
    frame[-1] ^= 1
    with pytest.raises(AuthenticationError, match="altered"):
        server.receive(bytes(frame))


@either
def test_repeated_frame_is_refused(encrypt):
    client, server = connected(encrypt=encrypt)
    frame = client.send(b"once")
    server.receive(frame)
    with pytest.raises(AuthenticationError, match="repeated"):
        server.receive(frame)


@either
def test_dropped_frame_is_noticed_at_the_next_one(encrypt):
    client, server = connected(encrypt=encrypt)
    client.send(b"lost")
    with pytest.raises(AuthenticationError, match="dropped"):
        server.receive(client.send(b"next"))


@either
def test_frame_reflected_to_its_sender_is_refused(encrypt):
    client, _ = connected(encrypt=encrypt)
    with pytest.raises(AuthenticationError):
        client.receive(client.send(b"mirror"))


def test_length_over_the_limit_is_refused_before_the_body_arrives():
    _, server = connected()
    with pytest.raises(FrameTooLargeError, match=f"1073741824 bytes was announced; the limit is {MAX_FRAME_BYTES}"):
        server.receive((1 << 30).to_bytes(4, "big") + bytes(16))


def test_sending_more_than_the_limit_fails_at_the_sender():
    client, _ = connected()
    with pytest.raises(FrameTooLargeError):
        client.send(bytes(MAX_FRAME_BYTES + 1))


def test_sending_before_the_handshake_fails():
    with pytest.raises(ProtocolError, match="before the handshake"):
        Connection(new_key(), server=False).send(b"early")


@given(data=st.binary(max_size=200), encrypt=st.booleans(), greets=st.booleans())
def test_random_bytes_never_authenticate(data, encrypt, greets):
    server = Connection(new_key(), server=True, encrypt=encrypt)
    try:
        bodies, _ = server.receive((MAGIC_ENCRYPTED if encrypt and greets else b"") + data)
    except ProtocolError:
        return
    assert bodies == []
    assert not server.authenticated


def test_encrypted_body_cannot_be_read_on_the_way():
    client, server = connected(encrypt=True)
    frame = client.send(b"a line that a worker has printed")
    assert b"printed" not in frame
    assert len(frame) == 4 + 16 + 32
    assert server.receive(frame)[0] == [b"a line that a worker has printed"]
    plain, _ = connected()
    assert b"printed" in plain.send(b"a line that a worker has printed")


def test_same_body_is_encrypted_differently_each_time():
    key = new_key()
    (first, answering), (second, _) = connected(key, encrypt=True), connected(key, encrypt=True)
    frames = {first.send(b"x" * 32)[4:], first.send(b"x" * 32)[4:], second.send(b"x" * 32)[4:]}
    frames.add(answering.send(b"x" * 32)[4:])
    assert len(frames) == 4


def test_frame_of_another_connection_with_the_same_key_is_refused():
    key = new_key()
    (first, _), (_, other) = connected(key, encrypt=True), connected(key, encrypt=True)
    with pytest.raises(AuthenticationError, match="altered"):
        other.receive(first.send(b"hello"))


@either
def test_ends_with_different_settings_say_so(encrypt):
    key = new_key()
    server = Connection(key, server=True, encrypt=encrypt)
    with pytest.raises(AuthenticationError, match="another value of `encrypt`"):
        server.receive(Connection(key, server=False, encrypt=not encrypt).start())


@pytest.mark.parametrize("public", [bytes(32), b"\x01" + bytes(31)])
def test_public_key_that_gives_a_known_secret_is_refused(public):
    server = Connection(new_key(), server=True, encrypt=True)
    with pytest.raises(AuthenticationError, match="gives no secret"):
        server.receive(MAGIC_ENCRYPTED + public)


def test_encryption_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(MissingExtraError, match=r"encrypt=True needs cryptography.*extra \[encryption\]"):
        Connection(new_key(), server=True, encrypt=True)
