"""Members of a world exchange their addresses and connect; then they find those that can share memory."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spark_elastic.torch as hvd
from spark_elastic.collective.gloo import process_group, rendezvous
from spark_elastic.collective.gloo.shutdown import open_sockets
from spark_elastic.collective.process import process
from spark_elastic.collective.reduce import LARGE_CHUNK_BYTES
from spark_elastic.collective.shared_memory.segments import FUTEX_AVAILABLE
from spark_elastic.elastic.frontend import frontend
from tests.unit.torch.test_collectives import together
from tests.unit.world_link import die, link, tell
from tests.unit.worlds import WorldDriver

ONE_HOST, TWO_HOSTS = ("127.0.0.1",), ("127.0.0.1", "127.0.0.2")
DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.int8, torch.bool)
COUNTS = (0, 1, 4095, 70_001, LARGE_CHUNK_BYTES + 3)
PLACES = pytest.mark.parametrize(
    ("count", "hosts"),
    [(3, ONE_HOST), (5, TWO_HOSTS)],
    ids=["3", "3 and 2 on two hosts"],
)

needs_shared_memory = pytest.mark.skipif(not FUTEX_AVAILABLE, reason="words cannot be shared here")


@given(st.binary(max_size=400))
def test_address_is_the_same_after_it_was_made_compact(address):
    assert rendezvous.restore(rendezvous.compact(address)) == address


def looks_at_its_rendezvous():
    sent = []
    gather, kv_set = link().gather, link().kv_set
    link().gather = lambda *args: sent.append(args[1]) or gather(*args)
    hvd.init()
    link().kv_set = lambda *args: sent.append(args[1]) or kv_set(*args)
    link().gather = gather
    # A member may be connected before another one is, whose connections break if the first leaves at once: that one
    # would join the next world in `init`, and leave it again in `rejoin`.
    hvd.allreduce(torch.ones(1))
    connecting, sent = sent, []
    frontend.rejoin(1)
    total = hvd.allreduce(torch.ones(70_000), op=hvd.Sum)
    assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == list(range(hvd.size()))
    return connecting, total[-1].item(), process.group().shared_memory is not None, process.group().notes


@needs_shared_memory
@pytest.mark.parametrize(
    ("hosts", "count", "shares"),
    [
        (("127.0.0.1",), 3, True),
        (("127.0.0.1", "127.0.0.2"), 4, False),
        (("::1",), 3, True),
    ],
)
def test_members_of_a_world_send_one_address_each_and_share_memory(hosts, count, shares):
    for connecting, *found in together(looks_at_its_rendezvous, count, hosts=hosts):
        assert connecting == ["global"]
        assert found == [float(count), shares, [""] * count]


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
    return wrong


@PLACES
def test_broadcasts_of_every_type_and_size_reach_all_members(count, hosts):
    assert together(broadcasts_everything, count, hosts=hosts) == [[]] * count


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


def listens_at() -> int:
    """Return the number of ports at which this process listens."""
    tables = "".join(Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6"))
    rows = [line.split() for line in tables.splitlines() if "local_address" not in line]
    listening = {int(row[9]) for row in rows if row[3] == "0A"}
    return len(listening & set(open_sockets().values()))


def counts_its_ports():
    hvd.init()
    for ranks in ([0, 1], [0, 1, 2]):
        chosen = hvd.add_process_set(ranks)
        if chosen.included():
            hvd.allgather(torch.ones(1), process_set=chosen)
    hvd.allgather(torch.ones(1))
    return listens_at()


def test_a_worker_listens_at_one_port():
    assert together(counts_its_ports, 3) == [1] * 3


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
    try:
        hvd.allreduce(torch.ones(1))
        group.wait(group.allgather(gathered, torch.ones(1, dtype=torch.uint8)))
    except hvd.HorovodInternalError:
        return time.perf_counter() - start


@pytest.mark.parametrize(("how", "hosts"), [("killed", ONE_HOST), ("stopped", TWO_HOSTS)])
def test_a_lost_member_ends_the_collectives_of_the_others(how, hosts):
    with WorldDriver(hosts=hosts, start_with=4) as driver:
        driver.start(is_lost, how, count=4)
        driver.wait(lambda: driver.told("gone"))
        if how == "stopped":
            driver.evict(3)
        assert max(driver.results(3)) < 15  # milliseconds on an idle machine; less than the time limit for a connection


def stops_before_it_has_met_the_others():
    from spark_elastic.collective import world

    def stopped(*_):
        tell("stopped")
        os.kill(os.getpid(), signal.SIGSTOP)

    if link().worker == 2:
        world.find_peers = stopped
    hvd.init()
    return hvd.size()


@needs_shared_memory
def test_a_member_that_hangs_while_the_others_look_for_its_memory_does_not_delay_them():
    with WorldDriver(start_with=4) as driver:
        driver.start(stops_before_it_has_met_the_others, count=4)
        driver.wait(lambda: driver.told("stopped"))
        start = time.perf_counter()
        driver.evict(2)
        assert driver.results(3) == [3] * 3
        assert time.perf_counter() - start < 15  # less than the time limit for a connection


def dies_while_it_connects():
    def dies(address):
        tell("connects")
        die()

    if link().worker == 2:
        process_group._options = dies
    hvd.init()
    return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def test_a_member_that_dies_while_it_connects_does_not_keep_the_others_from_it():
    with WorldDriver(start_with=3) as driver:
        driver.start(dies_while_it_connects, count=3)
        driver.wait(lambda: driver.told("connects"))
        start = time.perf_counter()
        assert driver.results(2) == [2.0] * 2
        assert time.perf_counter() - start < 15  # less than the time limit for a connection


def launches_before_another_member_does_other_work():
    """Launch what only Gloo has; rank 1 comes to it only after a collective of another group."""
    hvd.init()
    group = process.group()
    gathered = torch.empty(hvd.size(), dtype=torch.uint8)
    mine = torch.tensor([hvd.rank()], dtype=torch.uint8)
    if hvd.rank() == 1:
        hvd.allreduce(torch.ones(1), process_set=hvd.local_process_set)
    work = group.allgather(gathered, mine)
    if hvd.rank() != 1:
        hvd.allreduce(torch.ones(1), process_set=hvd.local_process_set)
    group.wait(work)
    return gathered.tolist(), work.is_completed()


@PLACES
def test_a_launch_does_not_wait_for_the_other_members(count, hosts):
    assert (
        together(launches_before_another_member_does_other_work, count, hosts=hosts)
        == [(list(range(count)), True)] * count
    )
