from __future__ import annotations

import io
import threading

import pytest

from spark_elastic.task import worker


class Exited(Exception):
    pass


@pytest.fixture(autouse=True)
def exits(monkeypatch):
    def exit_now(code, *said):
        raise Exited(code)

    monkeypatch.setattr(worker, "exit_now", exit_now)


def test_a_lifeline_that_closes_before_the_function_has_returned_ends_the_process():
    released = threading.Event()
    with pytest.raises(Exited, match=str(worker.EXIT_ORPHANED)):
        worker._hold(io.BytesIO(), threading.Event(), released)
    assert not released.is_set()


def test_a_lifeline_that_closes_while_the_result_is_handed_over_lets_the_process_end_in_order():
    returned, released = threading.Event(), threading.Event()
    returned.set()
    worker._hold(io.BytesIO(), returned, released)
    assert released.is_set()
