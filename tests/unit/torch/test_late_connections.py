"""Members that share memory are connected through Gloo only when a collective needs it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.collective import gloo, shared_memory
from spark_elastic.collective.gloo_shutdown import open_sockets
from spark_elastic.collective.process import process
from spark_elastic.elastic.loop import frontend
from tests.integration.processes import wait_until
from tests.unit.world_link import die, link, tell
from tests.unit.worlds import WorldDriver

ONE_HOST = ("127.0.0.1",)
DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.int8, torch.bool)
COUNTS = (0, 1, 4095, 70_001, shared_memory.LARGE_BYTES + 3)
PLACES = pytest.mark.parametrize(
    ("count", "hosts"),
    [(3, ONE_HOST), (5, ONE_HOST)],
    ids=["3", "5"],
)

pytestmark = pytest.mark.skipif(not shared_memory.FUTEX_AVAILABLE, reason="words cannot be shared here")


def together(function, count, *args, hosts=ONE_HOST, introduces=True):
    with WorldDriver(hosts=hosts, start_with=count, introduces=introduces) as driver:
        driver.start(function, *args, count=count)
        return driver.results(count)


def is_connected() -> bool:
    return process.group().pg is not None


def recovers_and_gathers():
    hvd.init()
    found = []
    for number in range(3):
        frontend.rejoin(number)
        root = hvd.size() - 1
        value = hvd.broadcast_object({"step": hvd.rank()}, root_rank=root)
        total = hvd.allreduce(torch.ones(1000), op=hvd.Sum)[7].item()
        hvd.barrier()
        before = is_connected()
        gathered = hvd.allgather(torch.tensor([hvd.rank()])).tolist()
        again = hvd.allreduce(torch.ones(1000), op=hvd.Sum)[7].item()
        found.append((value == {"step": root}, total, before, gathered, is_connected(), again))
    return found


@PLACES
def test_a_new_world_needs_no_connection_before_a_collective_that_only_gloo_has(count, hosts):
    expected = (True, float(count), False, list(range(count)), True, float(count))
    assert together(recovers_and_gathers, count, hosts=hosts) == [[expected] * 3] * count


def test_members_that_do_not_know_of_one_another_are_connected_at_once():
    expected = (True, 3.0, True, [0, 1, 2], True, 3.0)
    assert together(recovers_and_gathers, 3, introduces=False) == [[expected] * 3] * 3


def broadcasts_everything():
    hvd.init()
    wrong = []
    for dtype in DTYPES:
        for count in COUNTS:
            for root in {0, 1, hvd.size() - 1}:
                expected = (torch.arange(count) % 97 + root).to(dtype)
                mine = expected.clone() if hvd.rank() == root else torch.zeros(count, dtype=dtype)
                if not torch.equal(hvd.broadcast(mine, root_rank=root), expected):
                    wrong.append((dtype, count, root))
    return wrong, is_connected()


@PLACES
def test_broadcasts_of_every_type_and_size_reach_all_members(count, hosts):
    assert together(broadcasts_everything, count, hosts=hosts) == [([], False)] * count


def overlaps():
    """Launch collectives of three ways, and wait for them in an order that differs between ranks."""
    hvd.init()
    r, n = hvd.rank(), hvd.size()
    handles = [
        hvd.allreduce_async(torch.full((9,), 1.0), op=hvd.Sum),
        hvd.broadcast_async(torch.full((70_000,), float(r)), root_rank=1),
        hvd.allgather_async(torch.tensor([r])),
        hvd.broadcast_async(torch.full((3,), float(r)), root_rank=0),
        hvd.allreduce_async(torch.full((3,), 2.0), op=hvd.Sum, process_set=hvd.local_process_set),
    ]
    order = list(range(len(handles)))
    order = order[r % n :] + order[: r % n]
    got = {number: hvd.synchronize(handles[number]).unique().tolist() for number in order}
    return [got[number] for number in range(4)] == [[float(n)], [1.0], list(range(n)), [0.0]]


@PLACES
def test_collectives_of_all_ways_can_be_waited_for_in_any_order(count, hosts):
    assert together(overlaps, count, hosts=hosts) == [True] * count


def uses_a_set_first():
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    inside = hvd.allgather(torch.tensor([hvd.rank()]), process_set=pair).tolist() if pair.included() else [0, 1]
    return inside, hvd.allgather(torch.tensor([hvd.rank()])).tolist()


def test_groups_of_sets_that_were_connected_before_do_not_disturb_a_late_connection():
    assert together(uses_a_set_first, 3) == [([0, 1], [0, 1, 2])] * 3


def listens_at() -> int:
    """Return the number of ports at which this process listens."""
    tables = "".join(Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6"))
    rows = [line.split() for line in tables.splitlines() if "local_address" not in line]
    listening = {int(row[9]) for row in rows if row[3] == "0A"}
    return len(listening & set(open_sockets().values()))


def counts_its_ports():
    hvd.init()
    found = [listens_at()]
    for ranks in ([0, 1], [0, 1, 2]):
        chosen = hvd.add_process_set(ranks)
        if chosen.included():
            hvd.allgather(torch.ones(1), process_set=chosen)
    found.append(listens_at())
    hvd.allgather(torch.ones(1))
    found.append(listens_at())
    return found


def test_a_worker_listens_at_one_port_and_at_a_second_one_for_late_connections():
    assert together(counts_its_ports, 3) == [[1, 1, 2]] * 3


def is_lost(how: str):
    hvd.init()
    group = process.group()
    if hvd.rank() == 1:
        hvd.allreduce(torch.ones(1))
        tell("gone")
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        die()
    start = time.perf_counter()
    gathered = torch.empty(hvd.size(), dtype=torch.uint8)
    was_connected = group.pg is not None
    try:
        hvd.allreduce(torch.ones(1))
        group.wait(group.allgather(gathered, torch.ones(1, dtype=torch.uint8)))
    except hvd.HorovodInternalError:
        return was_connected, time.perf_counter() - start


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_member_lost_before_a_late_connection_ends_it(how):
    with WorldDriver(start_with=4) as driver:
        driver.start(is_lost, how, count=4)
        driver.wait(lambda: driver.told("gone"))
        if how == "stopped":
            driver.evict(2)
        for was_connected, seconds in driver.results(3):
            assert not was_connected
            assert seconds < 15  # milliseconds on an idle machine; less than the time limit for a connection


def stops_before_it_has_met_the_others():
    from spark_elastic.collective import group

    def stopped(*_):
        tell("stopped")
        os.kill(os.getpid(), signal.SIGSTOP)

    if link().worker == 2:
        group.agree_on_host = stopped
    hvd.init()
    return hvd.size()


def test_a_member_that_hangs_while_the_others_meet_it_does_not_delay_them():
    with WorldDriver(start_with=4) as driver:
        driver.start(stops_before_it_has_met_the_others, count=4)
        driver.wait(lambda: driver.told("stopped"))
        start = time.perf_counter()
        driver.evict(2)
        assert driver.results(3) == [3] * 3
        assert time.perf_counter() - start < 15  # less than the time limit for members to meet


def launches_before_another_member_does_other_work():
    """Launch what only Gloo has; rank 1 comes to it only after a collective of another group."""
    hvd.init()
    group = process.group()
    gathered = torch.empty(hvd.size(), dtype=torch.uint8)
    mine = torch.tensor([hvd.rank()], dtype=torch.uint8)
    if hvd.rank() == 1:
        hvd.allreduce(torch.ones(1), process_set=hvd.local_process_set)
    work = group.allgather(gathered, mine)
    done_early = work.is_completed()
    if hvd.rank() != 1:
        hvd.allreduce(torch.ones(1), process_set=hvd.local_process_set)
    group.wait(work)
    return gathered.tolist(), work.is_completed(), done_early and hvd.rank() != 1


@PLACES
def test_a_launch_does_not_wait_for_the_connection(count, hosts):
    assert (
        together(launches_before_another_member_does_other_work, count, hosts=hosts)
        == [(list(range(count)), True, False)] * count
    )


def ends_while_it_connects(how: str):
    hvd.init()
    group = process.group()

    def ends(late: bool):
        assert late
        tell("connects")
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "killed":
            die()
        raise RuntimeError("no sockets are left")

    if hvd.rank() == 1:
        group._exchanged = ends
    start = time.perf_counter()
    with pytest.raises(hvd.HorovodInternalError) as raised:
        hvd.allgather(torch.ones(1))
    seconds = time.perf_counter() - start
    if how == "fails" and hvd.rank() == 1:
        process.leave()
    return seconds, str(raised.value)


@pytest.mark.parametrize("how", ["killed", "stopped", "fails"])
def test_a_member_lost_during_a_late_connection_ends_it(how):
    with WorldDriver(start_with=4) as driver:
        driver.start(ends_while_it_connects, how, count=4)
        driver.wait(lambda: driver.told("connects"))
        if how == "stopped":
            driver.evict(2)
        results = driver.results(4 if how == "fails" else 3)
        for seconds, _ in results:
            assert seconds < 15  # milliseconds on an idle machine; less than the time limit for a connection
        if how == "fails":
            assert "no sockets are left" in results[1][1]
            assert all("has left the round" in results[rank][1] for rank in (0, 2, 3))


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def belongings() -> tuple[int, int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(gloo._devices)


def connects_in_many_worlds(worlds: int):
    """Return True if the second half of them has added nothing."""
    hvd.init()
    half = belongings()
    for number in range(worlds):
        frontend.rejoin(number)
        assert not is_connected()
        assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == list(range(hvd.size()))
        if number == worlds // 2:
            wait_until(lambda: "spark-elastic-gloo-ends" not in thread_names(), 30.0, "the end of the old groups")
            half = belongings()
            hvd.barrier()  # whoever leaves the world ends the connections of the others
    # Python's list of threads does not have those that are about to end, so this waits for their end
    wait_until(lambda: all(now <= then for now, then in zip(belongings(), half, strict=True)), 30.0, "what was added")
    hvd.barrier()
    return True


def test_late_connections_leave_neither_descriptors_nor_threads():
    assert together(connects_in_many_worlds, 3, 20) == [True] * 3


def connects_for_longer_than_its_world(ended: str):
    """Hold the thread that connects while the next world connects late, too, and let it go on then."""
    held, released = threading.Event(), threading.Event()

    class Held(gloo.GroupSockets):
        def __init__(self, *args: Any) -> None:
            if not held.is_set():
                held.set()
                released.wait()
            super().__init__(*args)

    gloo.GroupSockets = Held
    hvd.init()
    group = process.group()
    work = group.allgather(torch.empty(hvd.size(), dtype=torch.uint8), torch.ones(1, dtype=torch.uint8))
    assert held.wait(60.0)
    before = list(gloo._devices.values())
    hvd.allreduce(torch.ones(1))  # all are held
    if ended == "cut":
        group.cut("the driver has ended it")
    frontend.rejoin(1)
    with pytest.raises(hvd.HorovodInternalError):
        group.wait(work)
    hvd.allgather(torch.tensor([hvd.rank()]))
    kept = sum(device in before for device in gloo._devices.values())
    before.clear()
    hvd.allreduce(torch.ones(1))
    released.set()
    wait_until(lambda: "spark-elastic-connect-late" not in thread_names(), 60.0, "the end of the old connection")
    hvd.allreduce(torch.ones(1))
    again = hvd.allgather(torch.tensor([hvd.rank()])).tolist()
    wait_until(lambda: listens_at() == 2, 60.0, "the end of the listener that was given up")
    found = again, kept
    hvd.allreduce(torch.ones(1))  # whoever leaves the world ends the connections of the others
    return found


@pytest.mark.parametrize("ended", ["cut", "closed"])
def test_a_late_connection_that_outlives_its_world_leaves_the_next_ones_connections_alone(ended):
    # the device that all groups use at once is kept, the other one is replaced
    assert together(connects_for_longer_than_its_world, 3, ended) == [([0, 1, 2], 1)] * 3


def lacks_the_memory_of_others():
    def refused(*_):
        raise OSError("another user")

    if link().worker == 2:
        shared_memory._open_peers = refused
    hvd.init()
    return process.group()._shared is not None, hvd.allreduce(torch.ones(70_000), op=hvd.Sum)[0].item()


@PLACES
def test_all_use_gloo_if_a_member_cannot_open_the_memory_of_another(count, hosts):
    assert together(lacks_the_memory_of_others, count, hosts=hosts) == [(False, float(count))] * count


def test_a_member_that_gives_up_tells_those_that_wait_for_its_answer():
    own = shared_memory.OwnSegment()
    seen = shared_memory.Mapping(own.descriptor, writable=False)
    assert not seen.counters[shared_memory.LEFT]
    shared_memory.HostPeers(own, 0, []).close()
    assert seen.counters[shared_memory.LEFT]
    seen.unmap()
