"""The doctor's probes as processes on separate hosts with a firewall in between, without Spark."""

import base64
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spark_elastic.diagnostics import between_machines
from spark_elastic.diagnostics.clusters import ClassicCluster
from spark_elastic.diagnostics.findings import OK, PROBLEM, WARNING
from spark_elastic.diagnostics.probe_server import ProbeServer
from spark_elastic.wire.framing import new_key
from spark_elastic.wire.ports import ANY, Ports, ephemeral_ports
from tests.integration.network import _IP, Network, why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

ROOT = Path(__file__).resolve().parents[3]
PROBE = """
import base64, json, sys
from spark_elastic.diagnostics import probe
order = json.loads(sys.argv[1])
order["key"] = base64.b64decode(order["key"])
report = probe.collect_facts(order["number"], package="json")
report["executor"] = str(order["number"])
report["host"] = report["hostname"] = order["host"]  # the hosts are one machine, which has one name
probe.serve(order, report)
"""
UNREACHABLE = "198.51.100.7"
AGENT_PORTS = Ports(42200, 42215)


@pytest.fixture(scope="module")
def hosts():
    made = Network()
    try:
        addresses = [made.add_host(), made.add_host()]
        # an interface that is up and has an address to which there is no route
        on_second = [_IP, "-n", made._names(addresses[1])[0]]
        subprocess.run([*on_second, "link", "add", "private0", "type", "bridge"], check=True)
        subprocess.run([*on_second, "addr", "add", f"{UNREACHABLE}/32", "dev", "private0"], check=True)
        subprocess.run([*on_second, "link", "set", "private0", "up"], check=True)
        yield made, addresses
    finally:
        made.close()


@pytest.fixture
def probes(hosts):
    made, addresses = hosts
    key = new_key()
    server = ProbeServer("0.0.0.0", key)
    running = []

    def start(first_address=None):
        for number, address in enumerate(addresses):
            ways = [[way, server.port] for way in (first_address, made.gateway) if way is not None]
            order = {"number": number, "host": address, "addresses": ways, "seconds": 60, "connect_s": 1.0}
            order["agent_ports"] = AGENT_PORTS
            order["key"] = base64.b64encode(key).decode()
            words = [*made.command_on(address), sys.executable, "-c", PROBE, json.dumps(order)]
            running.append(subprocess.Popen(words, cwd=ROOT))
        assert server.wait_for(2, 60, threading.Event()) == 2
        return server, server.probes

    yield start
    server.close()
    for process in running:
        process.wait(30)


def test_filtered_interface_is_named_with_the_one_that_works(probes):
    server, both = probes()
    findings = between_machines.check_executors(server, both, 1.0)
    assert [finding.level for finding in findings] == [WARNING]
    works = both[1].report["host"]
    assert f"({works}), but not on private0 ({UNREACHABLE})" in findings[0].says
    ports = between_machines.judge_ports([probe.report for probe in both], ANY, AGENT_PORTS)
    between = f"executors ↔ executors: ports {ephemeral_ports()} (Gloo) and 42200-42215 (agents)"
    assert (ports.level, ports.says) == (OK, f"executors → driver: any port; {between}")
    assert all(AGENT_PORTS.first <= probe.report["agent_port"] <= AGENT_PORTS.last for probe in both)


def test_hosts_cut_off_from_each_other_are_a_problem_in_both_directions(probes, hosts):
    made, _ = hosts
    server, both = probes()
    # A firewall between the two, and not between them and the driver: each has a wrong hardware address of the other.
    for mine, other in ((both[0], both[1]), (both[1], both[0])):
        namespace, _, inner = made._names(mine.report["host"])
        words = [_IP, "-n", namespace, "neigh", "replace", other.report["host"], "lladdr", "02:00:00:00:00:99"]
        subprocess.run([*words, "dev", inner], check=True)
    try:
        findings = between_machines.check_executors(server, both, 1.0)
        assert [finding.level for finding in findings] == [PROBLEM, PROBLEM, WARNING]
        assert all("on no interface" in finding.says for finding in findings[:2])
        assert all(f"open TCP ports {ephemeral_ports()}" in finding.fix for finding in findings[:2])
        assert "agent_ports (and 1 more pair)" in findings[2].says
        assert between_machines.check_from_driver(both, False, 1.0).level == OK
    finally:
        for mine, other in ((both[0], both[1]), (both[1], both[0])):
            namespace, _, inner = made._names(mine.report["host"])
            subprocess.run([_IP, "-n", namespace, "neigh", "del", other.report["host"], "dev", inner], check=True)


def test_working_driver_address_is_suggested_in_place_of_a_filtered_one(probes, hosts):
    made, _ = hosts
    _, both = probes(first_address="198.51.100.1")
    (found,) = between_machines.judge_executors_to_driver([probe.report for probe in both], ClassicCluster)
    assert (found.level, found.fix) == (PROBLEM, f"set spark.driver.host={made.gateway}")
