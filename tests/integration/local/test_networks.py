"""Jobs over IPv6, and on ports that are given: fixed ones, ranges, and what is said when none is free."""

from __future__ import annotations

import contextlib
import os
import signal
import socket

import pytest

import spark_elastic.torch as hvd
from spark_elastic.errors import PortsTakenError
from spark_elastic.membership.timeline import WorldStarted
from tests.integration.local import loops
from tests.integration.local.test_jobs import pid_of
from tests.integration.processes import wait_until

WAIT_S = 60


@contextlib.contextmanager
def held_ports(count: int):
    """Occupy ports that follow one another on 127.0.0.1 and yield their sockets."""
    for _ in range(100):
        with contextlib.ExitStack() as undo:
            held = [undo.enter_context(socket.create_server(("127.0.0.1", 0)))]
            first = held[0].getsockname()[1]
            try:
                held += [
                    undo.enter_context(socket.create_server(("127.0.0.1", port)))
                    for port in range(first + 1, first + count)
                ]
            except (OSError, OverflowError):
                continue
            yield held
            return
    raise AssertionError("no free ports in a row")


def port_of(job) -> int:
    return job._driver._peers.spec.driver_addresses[0][1]


def addresses_in_use():
    from spark_elastic.collective.process import process

    hvd.init()
    return process.group()._addresses


def test_all_connections_of_a_job_can_be_ipv6(start_job):
    job = start_job(addresses_in_use, hosts=("::1",))
    assert job.result(WAIT_S) == [["::1", "::1"]] * 2
    assert job._driver._peers.spec.driver_addresses[0][0] == "::1"


def test_kill_over_ipv6_is_survived_and_the_world_grows_again(start_job, tmp_path):
    job = start_job(loops.steps, (str(tmp_path), 100_000), hosts=("::1",), num_proc=3, min_num_proc=1, verbose=0)
    os.kill(pid_of(tmp_path, 1, 1), signal.SIGKILL)

    def sizes():
        return [record.size for record in job.events() if isinstance(record, WorldStarted)]

    wait_until(lambda: sizes()[:3] == [3, 2, 3], WAIT_S, "the world shrinks and grows")
    job.cancel()


def test_driver_listens_at_the_given_port_one_job_after_the_other(start_job):
    with held_ports(1) as held:
        port = held[0].getsockname()[1]
    for _ in range(2):
        job = start_job(loops.rank_and_size, num_proc=1, driver_port=port)
        assert port_of(job) == port
        assert job.result(WAIT_S) == [(0, 1)]


def test_jobs_at_the_same_time_need_a_range_and_are_told_so(start_job, tmp_path):
    with held_ports(2) as held:
        first = held[0].getsockname()[1]
    job = start_job(loops.steps, (str(tmp_path), 100_000), num_proc=1, driver_port=first, verbose=0)
    with pytest.raises(PortsTakenError, match=f"port {first} of driver_port is taken at 127.0.0.1; give a range"):
        start_job(loops.rank_and_size, num_proc=1, driver_port=first)
    ports = f"{first}-{first + 1}"
    second = start_job(loops.rank_and_size, num_proc=1, driver_port=ports)
    assert port_of(second) == first + 1
    with pytest.raises(PortsTakenError, match=f"all 2 ports of driver_port='{ports}' are taken"):
        start_job(loops.rank_and_size, num_proc=1, driver_port=ports)
    assert second.result(WAIT_S) == [(0, 1)]
    job.cancel()


def test_agents_without_a_free_port_end_the_job_with_the_numbers(start_job):
    with held_ports(2) as held:
        first = held[0].getsockname()[1]
        job = start_job(loops.rank_and_size, num_proc=2, agent_ports=f"{first}-{first + 1}", nics=["lo"])
        with pytest.raises(PortsTakenError, match=r"all 2 ports of agent_ports=.* are taken on host 127\.0\.0\.1"):
            job.result(WAIT_S)


def test_agents_share_a_range(start_job):
    with held_ports(8) as held:
        first = held[0].getsockname()[1]
    job = start_job(loops.rank_and_size, num_proc=3, agent_ports=f"{first}-{first + 7}")
    assert job.result(WAIT_S) == [(rank, 3) for rank in range(3)]
