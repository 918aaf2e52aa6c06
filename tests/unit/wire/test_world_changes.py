import dataclasses
import random

import pytest

from spark_elastic.errors import ProtocolError
from spark_elastic.membership.ranking import assign
from spark_elastic.membership.topology import Place, World
from spark_elastic.wire.encoding import decode, encode
from spark_elastic.wire.messages import Endpoint, MovedMember, WorldAssigned, WorldChanged
from spark_elastic.wire.world_changes import changed, difference


def a_world(round, places, old_ranks=None, first=1):
    """Return the message of a world of workers at these places, each with an endpoint of its own."""
    members = assign(places, old_ranks or {})
    endpoints = tuple(Endpoint(each.place.host, 30000 + each.worker, first, "cpu", "auto", "") for each in members)
    return WorldAssigned(World(round, members, 0, None, False), tuple(each.address for each in endpoints), endpoints)


def ranks_of(assigned):
    return {member.worker: member.rank for member in assigned.world.members}


def on_hosts(count, a_host=8):
    return {worker: Place(f"10.0.0.{worker // a_host}", str(worker // a_host), worker) for worker in range(count)}


def over_the_wire(message):
    return decode(encode(message))


PLACES = on_hosts(20, 4)
BEFORE = a_world(1, PLACES)


def test_change_says_nothing_of_the_members_that_stay():
    large = on_hosts(3000)
    before = a_world(1, large)
    del large[1234]
    after = a_world(2, large, ranks_of(before), first=3002)
    change = difference(before, after)
    assert len(encode(change)) < 400
    assert changed(before, over_the_wire(change)) == after


def test_random_changes_are_applied_as_they_were_found():
    random.seed(5)
    places, assigned, newest = dict(PLACES), BEFORE, len(PLACES)
    for round in range(2, 200):
        for worker in random.sample(sorted(places), random.randint(0, min(len(places) - 1, 3))):
            del places[worker]
        for _ in range(random.randint(0, 3)):
            newest += 1
            places[newest] = Place(f"10.0.0.{random.randint(0, 6)}", "3", newest)
        after = a_world(round, places, ranks_of(assigned), first=round * 7)
        endpoints = [
            dataclasses.replace(each, port=each.port + 500, first=1) if random.random() < 0.1 else each
            for each in after.endpoints
        ]
        after = dataclasses.replace(after, endpoints=tuple(endpoints))
        change = difference(assigned, after)
        assert changed(assigned, over_the_wire(change)) == after
        assigned = after


def test_world_without_endpoints_has_no_difference_from_another():
    without = dataclasses.replace(BEFORE, endpoints=())
    assert difference(without, BEFORE) is None
    assert difference(BEFORE, without) is None


CHANGE = difference(BEFORE, a_world(2, {**PLACES, 20: Place("10.0.0.9", "9", 20)}, ranks_of(BEFORE), first=5))


def test_change_that_the_next_cases_spoil_is_applied():
    assert changed(BEFORE, CHANGE).world.size == 21


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"before": 3}, "a change of round 3 to round 2: the round that is known here is 1"),
        ({"order": (0, 20, -1)}, "are not pairs of a value and a number of members"),
        ({"order": (0, 20, -1, 0)}, "are not pairs of a value and a number of members"),
        ({"order": (0, 20, -1, -1)}, "are not pairs of a value and a number of members"),
        ({"order": (0, 21)}, "21 members from rank 0 on, of 20"),
        ({"order": (-2, 1)}, "1 members from rank -2 on, of 20"),
        ({"order": (0, 20, 3, 1)}, "more than 20 members stay"),
        ({"order": (0, 10, 9, 10, -1, 1)}, "a worker is a member twice"),
        ({"order": (0, 20, -1, 2)}, "1 newcomers, and more in the order"),
        ({"order": (0, 20, -1, 10**20)}, "100000000000000000000 members, of 20 and 1 newcomers"),
        ({"order": (0, 20)}, "values of members that are not in the order"),
        ({"order": ()}, "values of members that are not in the order"),
        ({"advances": (4, 19)}, "members whose next connection has no number"),
        ({"advances": (4, 20, 1, 1)}, "values of members that are not in the order"),
        ({"advances": (4, 10**12)}, "numbers of 1000000000000 members, of 20"),
        ({"moved": (MovedMember(99, BEFORE.endpoints[0]),)}, "values of members that are not in the order"),
        ({"root": 21}, "21 members whose root is rank 21"),
    ],
)
def test_malformed_change_is_a_protocol_error_that_says_what_is_wrong(fields, complaint):
    with pytest.raises(ProtocolError, match=complaint):
        changed(BEFORE, over_the_wire(dataclasses.replace(CHANGE, **fields)))


def test_change_without_a_world_before_is_refused():
    with pytest.raises(ProtocolError, match="the round that is known here is 0"):
        changed(None, CHANGE)
    with pytest.raises(ProtocolError, match="the round that is known here is 1"):
        changed(dataclasses.replace(BEFORE, endpoints=()), CHANGE)


def test_change_that_leaves_nobody_is_refused():
    nobody = WorldChanged(1, 2, 0, None, False, (), (), (), ())
    with pytest.raises(ProtocolError, match="a world of 0 members"):
        changed(BEFORE, nobody)
