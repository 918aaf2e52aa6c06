"""A world that does not change, for processes that a benchmark has started itself."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spark_elastic.collective.process import process
from spark_elastic.membership.topology import Member, Place, StateVersion, World
from spark_elastic.wire import worker_link
from spark_elastic.wire.worker_link import Assignment
from tests.integration.network import Network, why_unavailable


class FixedLink:
    """The least that collectives need of a job: a world, and a key-value store.

    Args:
        addresses: of all members in the order of their ranks; equal ones are on one host, and next to one another.
    """

    restarts_world = False

    def __init__(self, store: dist.Store, rank: int, addresses: Sequence[str]) -> None:
        self.worker = rank + 1
        self._store = store
        hosts = list(dict.fromkeys(addresses))
        locals_ = [list(addresses[:r]).count(address) for r, address in enumerate(addresses)]
        members = tuple(
            Member(
                r + 1,
                Place(address, str(r), r),
                r,
                local_rank=locals_[r],
                local_size=list(addresses).count(address),
                cross_rank=hosts.index(address),
                cross_size=locals_.count(locals_[r]),
            )
            for r, address in enumerate(addresses)
        )
        self._assignment = Assignment(
            World(1, members, root=0, version=None, sync=True),
            self.worker,
            list(addresses),
        )

    def join_at_init(self) -> Assignment:
        return self._assignment

    def join(
        self, round: int, version: StateVersion | None, loop: int = 1, meanwhile: Callable[[], None] | None = None
    ) -> Assignment:
        raise RuntimeError("this world does not change")

    def report_version(self, version: StateVersion) -> None: ...

    def entered_loop(self) -> None: ...

    def left_loop(self) -> None: ...

    def blocked(self, waiting: bool) -> None: ...

    @property
    def stall_timeout_s(self) -> float:
        return 600.0

    def updates_seen(self) -> int:
        return 0

    def check_cut(self, round: int) -> None: ...

    def derive_key(self, purpose: str) -> bytes:
        return hashlib.sha256(purpose.encode()).digest()

    def gather(self, round: int, name: str, rank: int, size: int, value: str, timeout_s: float) -> list[str]:
        self.kv_set(round, f"gather/{name}/{rank}", value.encode())
        return [self.kv_get(round, f"gather/{name}/{each}", timeout_s).decode() for each in range(size)]

    def kv_set(self, round: int, key: str, value: bytes) -> None:
        self._store.set(f"{round}/{key}", value.hex())

    def kv_get(self, round: int, key: str, timeout_s: float) -> bytes:
        if key.startswith("join/"):
            threading.Event().wait()  # no rank calls hvd.join() here
        return bytes.fromhex(self._store.get(f"{round}/{key}").decode())


@contextmanager
def without_shared_memory() -> Iterator[None]:
    """Have this process reduce through Gloo meanwhile; all members do that at the same places."""
    group = process.group()
    assert group is not None
    shared, group.shared_memory = group.shared_memory, None
    try:
        yield
    finally:
        group.shared_memory = shared


def run_in_fixed_world(processes: int, hosts: int, mbit_per_s: int | None = None) -> int:
    """Run this program once for each member, with `--worker RANK MASTER PORT ADDRESSES` after its own arguments.

    Args:
        processes: the number of members.
        hosts: the number of hosts that they are on; more than one are network namespaces.
        mbit_per_s: the bandwidth of each host's link; None: no limit.

    Returns:
        0, or the first exit code that is not 0. The program ends at once if there can be no network namespaces.
    """
    with contextlib.ExitStack() as stack:
        network = None
        places = ["127.0.0.1"]
        if hosts > 1:
            if why := why_unavailable():
                sys.exit(why)
            network = Network()
            stack.callback(network.close)
            places = [network.add_host() for _ in range(hosts)]
            for place in places if mbit_per_s else []:
                network.limit_bandwidth(place, mbit_per_s)
        master = network.gateway if network else places[0]
        addresses = [places[rank * hosts // processes] for rank in range(processes)]
        with contextlib.closing(socket.socket()) as probe:
            probe.bind((master, 0))
            port = probe.getsockname()[1]
        store = dist.TCPStore(master, port, processes + 1, is_master=True, wait_for_workers=False)
        started = []
        for rank in range(processes):
            command = [sys.executable, *sys.argv, "--worker", str(rank), master, str(port), ",".join(addresses)]
            prefix = network.command_on(addresses[rank]) if network else []
            started.append(subprocess.Popen([*prefix, *command]))
        try:
            codes = [each.wait() for each in started]
        finally:
            for each in started:
                each.kill()
        del store
    return next((code for code in codes if code), 0)


def join_fixed_world(given: Sequence[str]) -> int:
    """Take part in the world that `run_in_fixed_world` has made; the values of `--worker`. Returns the rank."""
    rank, master, port, addresses = int(given[0]), given[1], int(given[2]), given[3].split(",")
    store = dist.TCPStore(master, port, len(addresses), is_master=False, timeout=timedelta(seconds=60))
    worker_link.install(FixedLink(store, rank, addresses))
    return rank
