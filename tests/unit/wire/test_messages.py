import dataclasses
import json
import zlib

import pytest

from spark_elastic.errors import ProtocolError
from spark_elastic.membership.ranking import ranked
from spark_elastic.membership.topology import Member, Place, StateVersion, World
from spark_elastic.wire import messages as wire
from spark_elastic.wire.encoding import decode, encode

PLACE = Place("127.0.0.2", "3", 5)
WORLD = World(4, (Member(7, PLACE, 0, 0, 1, 0, 1),), 0, None, True)


def a_world(size):
    """Return a message with a world of that many workers, eight on a host."""
    places = [Place(f"10.0.{slot // 2048}.{slot // 8 % 256}", str(slot // 8), slot) for slot in range(size)]
    members = ranked((slot + 1, place) for slot, place in enumerate(places))
    world = World(4, members, size // 2, StateVersion(1, 12, 0), False)
    return wire.WorldAssigned(world, tuple(place.host for place in places))


EXAMPLES = [
    wire.AgentHello(PLACE, 3, {"eth0": ("10.0.0.1", "fd00::1")}, 4711, ""),
    wire.WorkerExited(7, -9, "Traceback é\n", 1, "1 process was killed for memory"),
    wire.OutputLines(7, "stdout", ("a", "", "b")),
    wire.Ready(3, None, False, 0),
    wire.Ready(3, StateVersion(2, 12, 1), True, 2),
    wire.LoopResult(2, "", b"sealed"),
    wire.RunAgain(2, "rank 0 is gone"),
    wire.KvSet(3, "key", b'\x00\n{"binary":1}'),
    wire.KvValue("key", b"abc"),
    wire.WorldAssigned(WORLD, ("10.0.0.1",)),
    wire.Welcome(2.0, 30.0, 60.0),
    wire.Pong(),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_message_survives_encoding_and_decoding(message):
    assert decode(encode(message)) == message


def test_whole_number_is_accepted_as_a_float():
    data = encode(wire.Welcome(2.5, 30.0, 60.0)).replace(b"2.5", b"2")
    assert decode(data) == wire.Welcome(2.0, 30.0, 60.0)


HELLO = encode(EXAMPLES[0]).rstrip(b"\n")
READY = b'{"type":"Ready","at_init":false,"loop":1,'


@pytest.mark.parametrize(
    ("head", "complaint"),
    [
        (b"{}", "unknown message type None"),
        (b"[]", "not an object"),
        (b"{", "not JSON"),
        (b'{"type":"Nope"}', "unknown message type 'Nope'"),
        (b'{"type":"Pong","more":1}', "unknown fields"),
        (b'{"type":"Ready","round":1,"version":null}', "missing fields"),
        (b'{"type":"Ready","round":"1","version":null,"at_init":false,"loop":1}', "expected int, got str"),
        (b'{"type":"Ready","round":true,"version":null,"at_init":false,"loop":1}', "expected int, got bool"),
        (READY + b'"round":1,"version":3}', "expected an object"),
        (READY + b'"round":1,"version":{"loop":1,"steps":-1,"marks":0}}', "steps >= 0"),
        (READY + b'"round":1,"version":{"loop":0,"steps":1,"marks":0}}', "loop >= 1"),
        (b'{"type":"OutputLines","worker":1,"stream":"stdout","lines":"x"}', "expected a list"),
        (b'{"type":"KvSet","round":1,"key":"k","payload":"x"}', "payload in the head"),
        (b"[" * 100_000, "not JSON"),
        (
            b'{"type":"Welcome","heartbeat_interval_s":1,"silence_limit_s":1,"stall_timeout_s":1%s}' % (b"0" * 400),
            "no float",
        ),
        (b'{"type":"PeersReachable","tried":[],"reachable":["10.0.0.1"]}', "'10.0.0.1' is not an address with a port"),
        (HELLO.replace(b"10.0.0.1", b"somewhere"), "'somewhere' does not appear to be an IPv4 or IPv6 address"),
        (HELLO.replace(b'"10.0.0.1","fd00::1"', b""), "the interface 'eth0' has no address"),
        (b'{"type":"%s"}' % (b"x" * 100_000), "unknown message type 'x{79}$"),
    ],
)
def test_invalid_message_is_a_protocol_error_that_says_what_is_wrong(head, complaint):
    with pytest.raises(ProtocolError, match=complaint):
        decode(head + b"\n")


def test_world_of_three_thousand_members_survives_encoding_and_decoding():
    large = a_world(3000)
    assert decode(encode(large)) == large


def test_long_head_is_compressed_and_the_payload_behind_it_is_not():
    result = wire.LoopResult(2, "x" * 10_000, b"")
    head = encode(result)
    assert len(head) < 1000
    payload = bytes(range(256)) * 10
    assert decode(head + payload) == dataclasses.replace(result, payload=payload)
    assert decode(head) == result
    with pytest.raises(ProtocolError, match="incomplete"):
        decode(head[:-1])
    with pytest.raises(ProtocolError, match="without a message head"):
        decode(zlib.compress(json.dumps({"type": "Pong"}).encode()))


def in_the_world(change):
    """Return a message with a world of three members, after `change` of its JSON."""
    fields = json.loads(encode(a_world(3)))
    change(fields)
    return json.dumps(fields).encode() + b"\n"


def members(fields):
    return fields["world"]["members"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda f: members(f)[1].pop("worker"), r"members: missing fields \['worker'\]"),
        (lambda f: members(f)[1].update(more=1), r"members: .*unknown fields \['more'\]"),
        (lambda f: members(f)[1].update(worker="2"), r"members\.worker: expected int, got str"),
        (lambda f: members(f)[1].update(worker=True), r"members\.worker: expected int, got bool"),
        (lambda f: members(f)[1].update(place=[]), r"members\.place: expected an object"),
        (lambda f: f["world"].update(members={}), r"members: expected a list"),
        (lambda f: members(f).reverse(), "not in rank order"),
        (lambda f: members(f)[1].update(worker=members(f)[0]["worker"]), "a worker is a member twice"),
        (lambda f: f["world"].update(root=3), "3 members whose root is rank 3"),
        (lambda f: f["addresses"].pop(), "3 members with 2 addresses"),
    ],
)
def test_malformed_world_is_a_protocol_error_that_says_what_is_wrong(change, complaint):
    assert decode(in_the_world(lambda fields: None)) == a_world(3)
    with pytest.raises(ProtocolError, match=complaint):
        decode(in_the_world(change))


def test_bytes_after_a_message_without_payload_are_refused():
    with pytest.raises(ProtocolError, match="3 bytes behind"):
        decode(encode(wire.Pong()) + b"abc")
