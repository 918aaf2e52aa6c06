"""Closing several things at once."""

import asyncio
import threading

from spark_elastic.driver.elastic_driver import close_side_by_side


def test_closings_run_beside_one_another():
    together = threading.Barrier(2, timeout=10)
    asyncio.run(close_side_by_side([together.wait, together.wait]))  # in turns, the first would wait for ever
    assert not together.broken


def test_closing_that_raises_does_not_prevent_the_others(caplog):
    closed = threading.Event()

    def broken():
        raise OSError("it is stuck")

    asyncio.run(close_side_by_side([broken, closed.set]))
    assert closed.is_set()
    assert "it is stuck" in caplog.text
