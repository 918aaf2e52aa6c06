"""Gradients over an encrypted tunnel between hosts, as docs/security.md says; and in the clear without one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import spark_elastic
from tests.integration import network
from tests.integration.clusters import Standalone, namespaced

NUMBER = 0.123456789
PATTERN = struct.pack("<f", NUMBER) * 8
"""What a gradient looks like on the wire."""
ROUNDS = 20
_PROGRAMS = [name for name in ("wireguard-go", "wg") if shutil.which(name) is None]

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(network.why_unavailable() is not None, reason=str(network.why_unavailable())),
    pytest.mark.skipif(bool(_PROGRAMS), reason=f"not installed: {', '.join(_PROGRAMS)}"),
]

# /var/run is that of the machine: each host's daemon and its `wg` need a folder of their own for their socket.
_TUNNEL = """
set -e
mount -t tmpfs none /var/run/wireguard
wireguard-go -f wg0 &
until wg show wg0 >/dev/null 2>&1; do sleep 0.05; done
wg set wg0 private-key "$KEY" listen-port 51820 peer "$PEER" allowed-ips "$PEER_INSIDE/32" endpoint "$PEER_AT:51820"
ip addr add "$INSIDE/24" dev wg0
ip link set wg0 mtu 1420 up
echo up
wait
"""


def reduce_pattern(rounds: int) -> float:
    import torch

    import spark_elastic.torch as hvd

    hvd.init()
    total = 0.0
    for _ in range(rounds):
        total += float(hvd.allreduce(torch.full((50_000,), NUMBER), op=hvd.Sum)[-1])
    return total


@contextlib.contextmanager
def tunnel(cluster: Standalone, folder: Path) -> Iterator[None]:
    """WireGuard between the first two hosts, as interface wg0 of both, with 10.99.0.2 and 10.99.0.3."""
    Path("/var/run/wireguard").mkdir(exist_ok=True)
    hosts = cluster.worker_hosts()
    private = [subprocess.run(["wg", "genkey"], check=True, capture_output=True, text=True).stdout for _ in hosts]
    public = [
        subprocess.run(["wg", "pubkey"], check=True, capture_output=True, text=True, input=one).stdout.strip()
        for one in private
    ]
    daemons = []
    try:
        for here, there in ((0, 1), (1, 0)):
            key = folder / f"key.{here}"
            key.touch(mode=0o600)
            key.write_text(private[here])
            told = {"KEY": str(key), "PEER": public[there], "PEER_AT": hosts[there]}
            told |= {"INSIDE": f"10.99.0.{here + 2}", "PEER_INSIDE": f"10.99.0.{there + 2}"}
            command = [*cluster._network.command_on(hosts[here]), "sh", "-c", _TUNNEL]
            daemon = subprocess.Popen(
                command, env={**os.environ, **told}, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            daemons.append(daemon)
            assert daemon.stdout is not None
            assert daemon.stdout.readline() == "up\n"
        yield
    finally:
        for daemon in daemons:
            os.killpg(daemon.pid, signal.SIGTERM)
            daemon.communicate(timeout=10)


def test_gradients_cannot_be_read_outside_of_the_tunnel(tmp_path: Path) -> None:
    with namespaced(workers=2, cores=1) as cluster:
        link = cluster._network._names(cluster.worker_hosts()[0])[1]
        expected = pytest.approx(2 * NUMBER * ROUNDS)
        with network.Eavesdropper(link, PATTERN) as ear:
            results = spark_elastic.run(reduce_pattern, (ROUNDS,), num_proc=2, spark=cluster.spark, verbose=0)
        assert results == [expected, expected]
        assert ear.read > ROUNDS  # in the clear
        with tunnel(cluster, tmp_path), network.Eavesdropper(link, PATTERN) as ear:
            results = spark_elastic.run(
                reduce_pattern, (ROUNDS,), num_proc=2, spark=cluster.spark, nics=["wg0"], verbose=0
            )
        assert results == [expected, expected]
        assert ear.packets > 2 * ROUNDS
        assert ear.read == 0
