"""The driver's alarm: when it looks at deadlines and lines that are due."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from spark_elastic.driver.elastic_driver import ElasticDriver


class Loop:
    """Keeps the calls that are due."""

    def __init__(self) -> None:
        self.due: list[float] = []

    def call_at(self, at: float, call: Any) -> SimpleNamespace:
        self.due.append(at)
        return SimpleNamespace(when=lambda: at, cancel=lambda: self.due.remove(at))


def alarms_after(*times: float | None) -> list[float]:
    """Return when a driver is to be called that has asked for these times."""
    driver: Any = SimpleNamespace(_loop=Loop(), _alarm=None, _wake=print)
    for due in times:
        ElasticDriver._wake_at(driver, due)
    return driver._loop.due


def test_a_later_time_leaves_the_call_where_it_is() -> None:
    assert alarms_after(5.0, 6.0, None, 7.0) == [5.0]


def test_an_earlier_time_moves_the_call() -> None:
    assert alarms_after(5.0, 3.0, 4.0) == [3.0]
