"""The machine's time stands still while the driver does."""

from __future__ import annotations

from spark_elastic.membership.deadlines import MachineClock


def test_time_advances_while_the_clock_is_read_regularly() -> None:
    clock = MachineClock(read_every_s=2.0)
    assert clock.read(100.0, 5000.0) == (100.0, 0.0)
    assert clock.read(102.0, 5002.0) == (102.0, 0.0)
    assert clock.read(105.9, 5005.9) == (105.9, 0.0)


def test_pause_is_left_out_and_reported_once() -> None:
    clock = MachineClock(read_every_s=2.0)
    clock.read(100.0, 5000.0)
    assert clock.read(160.0, 5060.0) == (102.0, 58.0)
    assert clock.read(160.1, 5060.1) == (102.1, 0.0)
    assert clock.read(190.1, 5090.1) == (104.1, 28.0)
    assert clock.paused_s == 86.0


def test_a_machine_that_slept_is_seen_by_the_wall_clock() -> None:
    clock = MachineClock(read_every_s=2.0)
    clock.read(100.0, 5000.0)
    assert clock.read(101.0, 8601.0) == (101.0, 3600.0)


def test_a_wall_clock_that_is_set_is_no_pause() -> None:
    clock = MachineClock(read_every_s=2.0)
    clock.read(100.0, 5000.0)
    assert clock.read(101.0, 5004.0) == (101.0, 0.0)
    assert clock.read(102.0, 1000.0) == (102.0, 0.0)
