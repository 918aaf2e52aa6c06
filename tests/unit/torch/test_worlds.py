"""Many worlds in one process, and what is left of them."""

from __future__ import annotations

import os
import time

import psutil
import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.collective.process import process
from spark_elastic.elastic.frontend import frontend
from tests.leftovers import threads_settle
from tests.unit.worlds import together


def belongings() -> tuple[int, int, int, int]:
    me = psutil.Process()
    maps = sum("memfd:spark-elastic" in entry.path for entry in me.memory_maps(grouped=False))
    return me.num_fds(), me.num_threads(), me.memory_info().rss, maps


def rejoin_often(times: int, settled: int):
    hvd.init()
    before = (0, 0, 0, 0)
    durations = []
    for number in range(times):
        start = time.perf_counter()
        frontend.rejoin(number)
        durations.append(time.perf_counter() - start)
        hvd.allreduce(torch.ones(1000), op=hvd.Sum)
        if number % 10 == 0:
            hvd.allreduce(torch.ones(10), process_set=hvd.local_process_set)
        if number == settled:
            before = belongings()
    threads_settle(before[1] + 2)
    return before, belongings(), sorted(durations)[times // 2]


def grows_by_nothing(times: int, settled: int) -> None:
    names = set(os.listdir("/dev/shm"))
    results = together(rejoin_often, times, settled)
    for (fds, threads, rss, maps), (fds_after, threads_after, rss_after, maps_after), _ in results:
        assert fds_after <= fds + 2
        assert threads_after <= threads + 2
        assert rss_after - rss < 20e6
        assert maps_after <= maps
    assert not {name for name in set(os.listdir("/dev/shm")) - names if "elastic" in name}
    print(f"median rejoin: {results[0][2] * 1e3:.1f} ms")


@pytest.mark.nightly
def test_a_hundred_worlds_leave_no_descriptors_threads_or_memory_behind():
    grows_by_nothing(130, 30)


def forks():
    hvd.init()
    child = os.fork()
    if child == 0:
        try:
            hvd.allreduce(torch.ones(1))
        except hvd.HorovodInternalError:
            os._exit(11)
        os._exit(12)
    _, status = os.waitpid(child, 0)
    after = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    return os.waitstatus_to_exitcode(status), after


def test_a_forked_child_does_not_hold_its_parents_connections():
    assert together(forks) == [(11, 2.0)] * 2


def connections_of_each_world(times: int):
    hvd.init()
    counts = []
    for number in range(times):
        frontend.rejoin(number + 1)
        hvd.allreduce(torch.ones(100_000), op=hvd.Sum)
        counts.append(len(process.group().gloo.sockets.descriptors))
    return counts


def test_all_connections_of_a_world_can_be_cut_and_no_others():
    assert together(connections_of_each_world, 12, count=3) == [[2] * 12] * 3
