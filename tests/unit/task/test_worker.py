import io
import queue
import threading

import pytest

from spark_elastic.collective.process import Process
from spark_elastic.elastic import finish
from spark_elastic.elastic.finish import LoopHistory
from spark_elastic.errors import HorovodInternalError
from spark_elastic.task import main


class Exited(Exception):
    pass


@pytest.fixture(autouse=True)
def exits(monkeypatch):
    def exit_now(code, *why):
        raise Exited(code)

    monkeypatch.setattr(main, "exit_now", exit_now)


def test_lifeline_closed_before_the_function_returned_ends_the_process():
    next_run = queue.SimpleQueue()
    with pytest.raises(Exited, match=str(main.EXIT_ORPHANED)):
        main._watch_lifeline(io.BytesIO(), threading.Event(), next_run)
    assert next_run.empty()


def test_lifeline_closed_after_the_function_returned_releases_the_process():
    returned, next_run = threading.Event(), queue.SimpleQueue()
    returned.set()
    main._watch_lifeline(io.BytesIO(), returned, next_run)
    assert next_run.get_nowait() is None


class Link:
    def __init__(self):
        self.reasons = []

    def abandoned(self, why):
        self.reasons.append(why)


@pytest.fixture
def loops(monkeypatch):
    own = LoopHistory(Process())
    monkeypatch.setattr(finish, "loops", own)
    return own


def test_collective_failing_before_any_loop_has_ended_restarts_the_process(loops, capsys):
    link = Link()

    def function():
        loops.enter()
        raise HorovodInternalError("a peer is gone")

    with pytest.raises(Exited, match=str(main.EXIT_ABANDONED)):
        main._run(link, function)
    assert link.reasons
    assert capsys.readouterr().err == ""  # a loss is no error of the function: no traceback


def test_function_failing_again_without_joining_a_world_is_not_called_for_ever(loops):
    calls = []

    def function():
        calls.append(loops.enter())
        if len(calls) == 1:
            loops.finish(1, "the state", None)
        raise HorovodInternalError("this is not about peers")

    with pytest.raises(Exited, match=str(main.EXIT_ABANDONED)):
        main._run(Link(), function)
    assert len(calls) == 2
