"""Collectives that Gloo never ends: what a peer's death at the wrong moment leaves behind."""

import threading
import time

import pytest

from spark_elastic.collective.gloo import shutdown
from spark_elastic.collective.group import Group
from spark_elastic.collective.operators import Sum
from spark_elastic.errors import HorovodInternalError


class Link:
    """As much of a link as a group needs while nobody joins."""

    def __init__(self):
        self.blocked_calls = []

    def blocked(self, waiting):
        self.blocked_calls.append(waiting)

    def check_cut(self, round):
        pass

    def kv_get(self, round, key, timeout_s):
        raise HorovodInternalError(f"round {round} has ended")


class Work:
    """A collective that ends when it is told to."""

    def __init__(self, error=None):
        self.error = error
        self.over = threading.Event()
        self.waits = 0

    def is_completed(self):
        return self.over.is_set()

    def wait(self, within=None):
        self.waits += 1
        assert within is not None or self.over.is_set(), "nobody may wait for it without a limit"
        if not self.over.wait(within.total_seconds() if within is not None else 0):
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise self.error


class ProcessGroup:
    def __init__(self, work):
        self.work = work

    def allreduce(self, tensors, options):
        return self.work


def group_with(work):
    import torch

    group = Group(Link(), 1, "global", 0, [0, 1])
    group.gloo.pg = ProcessGroup(work)
    assert group.allreduce(torch.zeros(1, dtype=torch.int8), Sum.gloo) is work  # a type that only Gloo reduces
    return group


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    shutdown._left_behind.clear()


def test_after_a_cut_a_collective_that_does_not_end_is_not_waited_for():
    group = group_with(work := Work())
    group.cut("rank 1 is gone")
    with pytest.raises(HorovodInternalError, match="rank 1 is gone"):
        group.wait(work)
    assert group._link.blocked_calls == [True, False]


def test_a_cut_from_another_thread_reaches_a_wait_that_has_begun():
    group = group_with(work := Work())
    cutter = threading.Timer(0.0, lambda: (wait_for_waits(work, 3), group.cut("rank 1 is gone")))
    cutter.start()
    with pytest.raises(HorovodInternalError, match="rank 1 is gone"):
        group.wait(work)
    cutter.join()


def wait_for_waits(work, count):
    while work.waits < count:
        time.sleep(0.001)


def test_a_group_with_a_stuck_collective_is_kept_until_that_has_ended():
    group = group_with(work := Work())
    process_group = group.gloo.pg
    group.cut("rank 1 is gone")
    group.close()
    assert [kept for kept, _ in shutdown._left_behind] == [process_group]
    work.over.set()
    shutdown.free_ended_groups()
    assert shutdown._left_behind == []


def test_a_group_whose_collectives_have_ended_or_failed_is_freed_at_once():
    group = group_with(work := Work(error=RuntimeError("Connection closed by peer")))
    work.over.set()
    group.close()
    assert shutdown._left_behind == []


def test_a_collective_that_ends_as_its_wait_times_out_has_ended():
    class Late(Work):
        def wait(self, within=None):
            if self.waits == 0:
                self.waits += 1
                self.over.set()
                raise RuntimeError("Operation timed out!")
            super().wait(within)

    group = group_with(work := Late())
    group.wait(work)
    group = group_with(work := Late(error=RuntimeError("Connection closed by peer")))
    with pytest.raises(HorovodInternalError, match="Connection closed"):
        group.wait(work)
