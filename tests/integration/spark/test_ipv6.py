"""A cluster whose hosts have IPv6 alone and few local ports: training, a kill, a new executor, the doctor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import network
from tests.integration.spark.ipv6_program import AGENT_PORTS, DRIVER_PORTS, LOCAL_PORTS

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 400

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.cluster,
    pytest.mark.skipif(network.why_unavailable() is not None, reason=str(network.why_unavailable())),
]


def within(port: int, ports: str) -> bool:
    first, _, last = ports.partition("-")
    return int(first) <= port <= int(last)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what `ipv6_program` has seen."""
    environment = {
        **os.environ,
        "SPARK_PREFER_IPV6": "true",
        "SPARK_SUBMIT_OPTS": "-Djava.net.preferIPv6Addresses=true",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.spark.ipv6_program", str(tmp_path_factory.mktemp("ipv6"))],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_world_recovers_from_a_killed_executor(found):
    assert found["hosts"] == found["worker_hosts"]
    assert all(":" in host for host in found["hosts"])
    assert found["results"] == 2
    assert found["rounds"][1] > found["rounds"][0]


def test_every_port_is_in_its_range(found):
    assert within(found["driver_port"], DRIVER_PORTS)
    assert found["agents"]
    assert all(within(port, AGENT_PORTS) for port in found["agents"])
    assert len(found["gloo"]) == 2
    assert all(LOCAL_PORTS[0] <= port <= LOCAL_PORTS[1] for port in found["gloo"])


def test_doctor_finds_no_problem(found):
    levels = {check: level for check, level, _ in found["doctor"]}
    assert levels["workers"] == "ok"
    assert "problem" not in levels.values(), found["doctor"]
