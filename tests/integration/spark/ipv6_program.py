"""A training and a check-up on hosts that have IPv6 alone, with a narrow range of ports. Run by `test_ipv6.py`.

In a process of its own: whether Java prefers IPv6 is decided when the JVM of the driver starts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import spark_elastic
from tests.integration.clusters import namespaced
from tests.integration.network import Network
from tests.integration.spark.conftest import Jobs, executor_of, finished

DRIVER_PORTS, AGENT_PORTS, LOCAL_PORTS = "42100-42109", "42200-42209", (42300, 42999)


def listening(pid: int) -> list[int]:
    """Return the TCP ports at which a process listens, IPv6 or not, as its network namespace shows them."""
    inodes = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir()}
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports


def main(folder: str) -> None:
    network = Network(ipv6=True, local_ports=LOCAL_PORTS)
    with namespaced(workers=2, cores=1, network=network) as cluster:
        jobs = Jobs(cluster, Path(folder))
        job, diary = jobs.train(2, driver_port=DRIVER_PORTS, agent_ports=AGENT_PORTS)
        world = diary.wait_for_world(2)
        found = {
            "hosts": sorted(member.place.host for member in job._driver._peers.world.members),
            "worker_hosts": sorted(cluster.worker_hosts()),
            "driver_port": job._driver._peers.spec.driver_addresses[0][1],
            "gloo": [port for entry in world.values() for port in listening(entry["pid"])],
            "agents": [port for entry in world.values() for port in listening(entry["agent"])],
        }
        cluster.kill_executor(executor_of(cluster, world[0]["pid"]))
        again = diary.wait_for_world(2, after=world[0]["round"])
        results = finished(job, diary)
        found["rounds"] = [world[0]["round"], again[0]["round"]]
        found["results"] = len(results)
        found["events"] = [str(record) for record in job.timeline()]
        report = spark_elastic.doctor(
            cluster.spark, num_proc=2, driver_port=DRIVER_PORTS, agent_ports=AGENT_PORTS, timeout=90
        )
        found["doctor"] = [[each.check, each.level, each.says] for each in report.findings]
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
