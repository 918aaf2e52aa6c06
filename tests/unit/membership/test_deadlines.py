"""Timers of the membership machine."""

from __future__ import annotations

from spark_elastic.membership.deadlines import Timer


def test_a_timer_set_again_rings_once_at_its_new_time() -> None:
    rung: list[tuple[str, float]] = []
    timer = Timer([], lambda key, now: rung.append((key, now)), 7.0)
    timer.set("x", 5.0)
    timer.set("x", 3.0)
    timer.start("x", 0.0)
    assert timer.next() == timer.due("x") == 7.0
    timer.ring(7.5)
    assert timer.next() == float("inf")
    assert rung == [("x", 7.5)]


def test_the_earliest_deadline_comes_first_and_cancelled_ones_never() -> None:
    timer = Timer[str]([], print)
    for key, due in (("late", 3.0), ("early", 1.0), ("between", 2.0)):
        timer.set(key, due)
    timer.cancel("early")
    assert timer.next() == 2.0


def test_key_that_was_heard_is_not_silent() -> None:
    silent: list[str] = []
    silence = Timer([], lambda key, now: silent.append(key), 10.0)
    silence.start("a", 0.0)
    silence.start("b", 1.0)
    silence.start("a", 5.0)
    assert silence.next() == 11.0
    silence.ring(11.0)
    assert silent == ["b"]
    assert silence.next() == 15.0


def test_postponed_deadlines_and_those_started_later_do_not_come_before() -> None:
    silence = Timer[str]([], print, 10.0)
    silence.start("a", 0.0)
    silence.start("b", 4.0)
    silence.postpone(12.0)
    silence.start("c", 1.0)
    assert [silence.due(key) for key in "abc"] == [12.0, 14.0, 12.0]
    assert silence.next() == 12.0
