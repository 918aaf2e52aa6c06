from __future__ import annotations

import io
import pickle
import queue
import threading

import pytest

from spark_elastic.errors import HorovodInternalError
from spark_elastic.task import main
from spark_elastic.wire.worker_link import Loops


class Exited(Exception):
    pass


@pytest.fixture(autouse=True)
def exits(monkeypatch):
    def exit_now(code, *said):
        raise Exited(code)

    monkeypatch.setattr(main, "exit_now", exit_now)


def test_a_lifeline_that_closes_before_the_function_has_returned_ends_the_process():
    orders = queue.SimpleQueue()
    with pytest.raises(Exited, match=str(main.EXIT_ORPHANED)):
        main._hold(io.BytesIO(), threading.Event(), orders)
    assert orders.empty()


def test_a_lifeline_that_closes_while_the_result_is_handed_over_lets_the_process_end_in_order():
    returned, orders = threading.Event(), queue.SimpleQueue()
    returned.set()
    main._hold(io.BytesIO(), returned, orders)
    assert orders.get_nowait() is None


class Link:
    def __init__(self):
        self.said = []

    def abandoned(self, why):
        self.said.append(why)


@pytest.fixture
def loops(monkeypatch):
    own = Loops()
    monkeypatch.setattr(main, "loops", own)
    return own


def test_a_collective_that_fails_after_a_loop_has_the_function_called_again(loops):
    calls = []

    def function():
        calls.append(loops.enter())
        loops.joined()
        loops.finish(1, "the state", None)
        if len(calls) < 3:
            raise HorovodInternalError("a peer is gone")
        return "the end"

    assert pickle.loads(main._run(Link(), function)) == "the end"
    assert calls == [1, 1, 1]


def test_a_collective_that_fails_before_any_loop_has_ended_starts_the_process_over(loops):
    link = Link()

    def function():
        loops.enter()
        raise HorovodInternalError("a peer is gone")

    with pytest.raises(Exited, match=str(main.EXIT_ABANDONED)):
        main._run(link, function)
    assert link.said


def test_a_function_that_fails_again_without_coming_to_a_world_is_not_called_for_ever(loops):
    calls = []

    def function():
        calls.append(loops.enter())
        if len(calls) == 1:
            loops.finish(1, "the state", None)
        raise HorovodInternalError("this is not about peers")

    with pytest.raises(Exited, match=str(main.EXIT_ABANDONED)):
        main._run(Link(), function)
    assert len(calls) == 2
