"""Jobs over IPv6, on ports that are given, and on interfaces that vanish; what is said when there is none to use."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess

import pytest

import spark_elastic.torch as hvd
from spark_elastic.membership.timeline import WorldBroken
from tests.integration.processes import wait_until
from tests.integration.spark.diary import Diary
from tests.integration.spark.training import train

WAIT_S = 60


def addresses_in_use():
    from spark_elastic.collective.process import process

    hvd.init()
    return list(process.assignment.addresses)


def test_all_connections_of_a_job_can_be_ipv6(start_job):
    job = start_job(addresses_in_use, hosts=("::1",))
    assert job.result(WAIT_S) == [["::1", "::1"]] * 2
    assert job._driver._peers.spec.driver_addresses[0][0] == "::1"


@contextlib.contextmanager
def interface(name: str, address: str):
    """A network interface of this machine, as a tunnel is one. Yields a function that makes it vanish."""
    ip = shutil.which("ip") or "/usr/sbin/ip"

    def remove() -> None:
        subprocess.run([ip, "link", "del", name], capture_output=True)

    made = None
    if os.path.exists(ip):
        made = subprocess.run([ip, "link", "add", name, "type", "bridge"], capture_output=True, text=True)
    if made is None or made.returncode:
        pytest.skip(f"no interface can be made here: {made.stderr if made else 'there is no `ip` command'}")
    try:
        subprocess.run([ip, "addr", "add", f"{address}/32", "dev", name], check=True)
        subprocess.run([ip, "link", "set", name, "up"], check=True)
        yield remove
    finally:
        remove()


def test_interface_that_vanishes_is_replaced_by_another_one(start_job, tmp_path):
    name, address, hosts = f"sev{os.getpid() % 100000}", "10.254.77.1", ("127.0.0.1", "127.0.0.2")
    diary = Diary(tmp_path)
    with interface(name, address) as vanish:
        job = start_job(train, (str(tmp_path),), hosts=hosts, nics=[name, "lo"], preimport=("torch",), verbose=0)
        world = diary.wait_for_world(2)

        def in_use() -> set[str]:
            return set(job._driver._peers._listens.values())

        assert in_use() == {address}
        vanish()
        after = diary.wait_for_world(2, after=world[0]["round"])
        assert in_use() == {"127.0.0.1"}
    assert {entry["pid"] for entry in after.values()} == {entry["pid"] for entry in world.values()}, "nobody was lost"
    broken = [str(record) for record in job.timeline() if isinstance(record, WorldBroken)]
    assert "the network interface of rank " in broken[0]
    (tmp_path / "finish").touch()
    diary.check(job, job.result(WAIT_S))


@pytest.mark.nightly
def test_only_interface_that_may_be_used_vanishes_and_comes_back(start_job, tmp_path, caplog):
    name, address, hosts = f"sev{os.getpid() % 100000}", "10.254.77.1", ("127.0.0.1", "127.0.0.2")
    diary = Diary(tmp_path)
    settings = {"hosts": hosts, "nics": [name], "min_num_proc": 2, "preimport": ("torch",), "verbose": 0}
    with interface(name, address) as vanish:
        job = start_job(train, (str(tmp_path),), elastic_timeout=60, **settings)
        world = diary.wait_for_world(2)
        vanish()
        wait_until(lambda: "is waited for" in caplog.text, WAIT_S, "the driver has noticed")
    with interface(name, address):
        steps = diary.newest()[0]["step"]
        wait_until(lambda: min(e["step"] for e in diary.newest().values()) > steps + 50, WAIT_S, "it trains on")
        pids = {entry["pid"] for entry in diary.newest().values()}
        assert pids == {entry["pid"] for entry in world.values()}, "nobody was lost"
        (tmp_path / "finish").touch()
        diary.check(job, job.result(WAIT_S))


@pytest.mark.nightly
def test_host_that_loses_the_only_interface_that_may_be_used_is_left_behind(start_job, tmp_path, caplog):
    """The interface belongs to both hosts here, so both lose it, and one of them is kept: it holds the state."""
    name, address, hosts = f"sev{os.getpid() % 100000}", "10.254.77.1", ("127.0.0.1", "127.0.0.2")
    diary = Diary(tmp_path)
    with interface(name, address) as vanish:
        settings = {"hosts": hosts, "nics": [name], "min_num_proc": 1, "preimport": ("torch",), "verbose": 0}
        job = start_job(train, (str(tmp_path),), **settings)
        world = diary.wait_for_world(2)
        vanish()
        alone = diary.wait_for_world(1, after=world[0]["round"])
        assert alone[0]["pid"] in {entry["pid"] for entry in world.values()}
        wait_until(lambda: "is sent away: host 127.0.0." in caplog.text, WAIT_S, "it is said")
    (tmp_path / "finish").touch()
    diary.check(job, job.result(WAIT_S))
