from __future__ import annotations

import pytest

from spark_elastic.membership.deadlines import Silence, Timers
from spark_elastic.membership.topology import HostSet


@pytest.mark.parametrize(
    ("observed", "after"),
    [
        ({"b": 1, "a": 2}, (("a", 2), ("b", 1))),
        ({"c": 1, "a": 3}, (("a", 3), ("c", 1))),
        ({"a": 2, "b": 0}, (("a", 2),)),
        ({}, ()),
    ],
)
def test_known_hosts_keep_their_order_when_they_are_observed_again(observed, after) -> None:
    assert HostSet((("a", 2), ("b", 1))).updated(observed) == HostSet(after)


def test_a_host_that_comes_back_goes_to_the_end() -> None:
    hosts = HostSet((("a", 1), ("b", 1))).updated({"b": 1})
    hosts = hosts.updated({"a": 1, "b": 1})
    assert hosts.slots == (("b", 1), ("a", 1))
    assert (hosts.slots_of("a"), hosts.slots_of("x")) == (1, 0)


def test_a_timer_set_again_fires_once_at_its_new_time() -> None:
    timers: Timers[str] = Timers()
    timers.set("x", 5.0)
    timers.set("x", 3.0)
    timers.set("x", 7.0)
    assert timers.next() == 7.0
    assert timers.pop(6.9) is None
    assert (timers.pop(7.0), timers.pop(7.0), timers.next()) == ("x", None, None)


def test_a_cancelled_timer_does_not_fire() -> None:
    timers: Timers[str] = Timers()
    timers.set("x", 1.0)
    timers.set("y", 2.0)
    timers.cancel("x")
    assert timers.pop(5.0) == "y"


def test_key_that_was_heard_is_not_silent() -> None:
    silence: Silence[str] = Silence(timeout_s=10.0, interval_s=2.0)
    silence.heard("a", 0.0)
    silence.heard("b", 1.0)
    silence.heard("a", 5.0)
    assert silence.next() == 11.0
    assert silence.expired(11.0) == ["b"]
    assert silence.next() == 15.0


def test_late_check_for_silence_gives_everybody_one_more_interval() -> None:
    silence: Silence[str] = Silence(timeout_s=10.0, interval_s=2.0)
    silence.heard("a", 0.0)
    assert silence.expired(13.0) == []
    assert silence.next() == 15.0
    assert silence.expired(15.5) == ["a"]
