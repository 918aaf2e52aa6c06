"""Collectives in two threads at the same time are refused; one after the other they work."""

import _thread
import threading

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.collective.one_thread import OneThread, one_thread
from spark_elastic.errors import UsageError
from tests.integration.processes import wait_until
from tests.nightly import by_night
from tests.unit.world_link import link
from tests.unit.worlds import together


def second_thread_calls(call):
    """Rank 0's second thread calls a collective while its main thread waits for rank 1, which comes after that."""
    hvd.init()
    refused, handle = [], hvd.allreduce_async(torch.ones(2), op=hvd.Sum)

    def call_meanwhile():
        wait_until(lambda: one_thread.inside is threading.main_thread(), 60, "the main thread waits for rank 1")
        try:
            {"allreduce": lambda: hvd.allreduce(torch.ones(1)), "wait": handle.wait, "poll": lambda: hvd.poll(handle)}[
                call
            ]()
        except UsageError as error:
            refused.append(str(error))
        finally:
            link().kv_set(1, "called", b"")

    second = threading.Thread(target=call_meanwhile, name="feeder")
    if hvd.rank() == 0:
        second.start()
    else:
        link().kv_get(1, "called", 60.0)
    total = hvd.allgather(torch.ones(1)).tolist(), handle.wait().tolist()
    if hvd.rank() == 0:
        second.join()
    later = []
    third = threading.Thread(target=lambda: later.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item()))
    third.start()
    third.join()
    return total, refused, later


@pytest.mark.parametrize("call", by_night(["allreduce", "wait", "poll"], but=["allreduce"]))
def test_collectives_of_two_threads_at_the_same_time_are_refused(call):
    first, second = together(second_thread_calls, call)
    assert first[0] == second[0] == ([1.0, 1.0], [2.0, 2.0])
    assert first[2] == second[2] == [2.0]
    (words,) = first[1]
    assert "two threads at the same time (feeder and MainThread)" in words
    assert second[1] == []


@pytest.mark.parametrize("foreign_first", [True, False])
def test_threads_of_a_framework_are_let_in(foreign_first):
    guard, entered, left = OneThread(), threading.Event(), threading.Event()

    def enter():
        with guard, guard:
            entered.set()
            left.wait(60.0)

    if foreign_first:
        _thread.start_new_thread(enter, ())
        assert entered.wait(60.0)
        with guard:
            pass
        left.set()
    else:
        left.set()
        with guard:
            _thread.start_new_thread(enter, ())
            assert entered.wait(60.0)
            assert guard.inside is threading.current_thread()
    wait_until(lambda: guard.inside is None, 60, "the other thread has left")
    with guard:
        assert guard.inside is threading.current_thread()
