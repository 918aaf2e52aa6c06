from __future__ import annotations

from spark_elastic.membership.failures import Cooldown
from spark_elastic.membership.topology import Place

HERE = Place("host", "exec", 0)


def slot(number: int, executor: str = "exec") -> Place:
    return Place("host", executor, number)


def test_a_host_cools_down_after_six_failures_on_different_executors() -> None:
    cooldown = Cooldown((1.0, 60.0))
    kinds = [[c.kind for c in cooldown.failed(slot(i, f"exec{i}"), now=10.0 * i)] for i in range(6)]
    assert kinds[:5] == [["slot"]] * 5
    assert kinds[5] == ["slot", "host"]
    assert cooldown.ready_at(slot(9, "another")) == 51.0


def test_an_executor_that_dies_with_all_its_workers_has_failed_once() -> None:
    cooldown = Cooldown((1.0, 60.0))
    for i in range(8):
        assert [c.kind for c in cooldown.failed(slot(i), now=0.01 * i)] == ["slot"]


def test_a_place_without_failures_for_the_longest_pause_is_forgiven() -> None:
    cooldown = Cooldown((1.0, 10.0))
    cooldown.failed(HERE, now=0.0)
    cooldown.failed(HERE, now=1.0)  # until 3
    assert cooldown.failed(HERE, now=12.9)[0].failures == 3
    (cooling,) = cooldown.failed(HERE, now=12.9 + 4 + 10)
    assert cooling.failures == 1


def test_without_a_range_nothing_ever_pauses() -> None:
    cooldown = Cooldown(None)
    assert [cooldown.failed(HERE, now) for now in (0.0, 0.0, 1.0)] == [[], [], []]
    assert cooldown.ready_at(HERE) < 0


def test_thousands_of_failures_do_not_overflow_or_pile_up() -> None:
    cooldown = Cooldown((0.001, 0.5))
    for i in range(5000):
        cooldown.failed(Place(f"h{i}", f"e{i}", 0), now=float(i) * 0.4)
    assert len(cooldown._histories) < 20
