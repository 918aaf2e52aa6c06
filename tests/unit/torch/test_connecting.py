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
from tests.unit.world_link import die, link, tell
from tests.unit.worlds import WorldDriver, together

ONE_HOST, TWO_HOSTS = ("127.0.0.1",), ("127.0.0.1", "127.0.0.2")
DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.int8, torch.bool)
COUNTS = (0, 1, 4095, 70_001, LARGE_CHUNK_BYTES + 3)
PLACES = pytest.mark.parametrize(("count", "hosts"), [(3, ONE_HOST), (5, TWO_HOSTS)], ids=["3", "3 and 2 on two hosts"])

needs_shared_memory = pytest.mark.skipif(not FUTEX_AVAILABLE, reason="words cannot be shared here")


@given(st.binary(max_size=400))
def test_address_is_the_same_after_it_was_made_compact(address):
    assert rendezvous.restore(rendezvous.compact(address)) == address


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
    assert together(broadcasts_everything, count=count, hosts=hosts) == [[]] * count


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
    assert together(counts_its_ports, count=3) == [1] * 3


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
        together(launches_before_another_member_does_other_work, count=count, hosts=hosts)
        == [(list(range(count)), True)] * count
    )
