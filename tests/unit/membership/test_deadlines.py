from __future__ import annotations

from spark_elastic.membership.deadlines import Silence, Timer, Timers


def test_a_timer_set_again_fires_once_at_its_new_time() -> None:
    timers, fired = Timers(), []
    timer = Timer(timers, lambda key, now: fired.append((key, now)), 7.0)
    timer.set("x", 5.0)
    timer.set("x", 3.0)
    timer.start("x", 0.0)
    assert timers.next() == timer.due("x") == 7.0
    assert not timers.call_next(6.9)
    assert (timers.call_next(7.5), timers.call_next(7.5), timers.next()) == (True, False, None)
    assert fired == [("x", 7.5)]


def test_a_cancelled_timer_does_not_fire() -> None:
    timers, fired = Timers(), []
    one, other = (Timer(timers, lambda key, now, of=of: fired.append((of, key))) for of in ("one", "other"))
    one.set("x", 1.0)
    other.set("x", 2.0)
    one.cancel("x")
    while timers.call_next(5.0):
        pass
    assert fired == [("other", "x")]


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
