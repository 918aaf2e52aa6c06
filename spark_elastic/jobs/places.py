"""Where a job runs: in a `Cluster` of Spark, or as plain processes of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from spark_elastic.driver.elastic_driver import EventSource
from spark_elastic.driver.launcher import LocalLauncher
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.jobs.settings import RunSettings
from spark_elastic.membership.launcher import Launcher, OnEnded
from spark_elastic.settings import ElasticSettings
from spark_elastic.spark.cluster import Cluster
from spark_elastic.spark.session import checked_cluster
from spark_elastic.wire.interfaces import THIS_MACHINE, address_of, on_this_machine
from spark_elastic.wire.messages import LaunchSpec
from spark_elastic.wire.ports import Ports

LOOPBACK_IPV6 = "::1"


class ThisMachine:
    """Runs workers as plain processes of this machine. Has those members of `Cluster` that a job needs."""

    is_local = True
    master = "local"

    def __init__(self, launcher: LocalLauncher) -> None:
        self._launcher = launcher

    def slots(self) -> int:
        raise InvalidSettingsError("a LocalLauncher has no slots to count; set num_proc")

    def fixed_slots(self) -> int | None:
        return None

    def listen_at(self) -> tuple[str, tuple[str, ...]]:
        host = LOOPBACK_IPV6 if LOOPBACK_IPV6 in self._launcher.hosts else THIS_MACHINE
        return host, (host,)

    def ports(self, setting: str, given: int | str | None) -> Ports:
        return Ports.parse(given or 0)

    def host_of(self, name: str) -> str:
        address = address_of(name)
        return address if address in self._launcher.hosts else on_this_machine(address)

    def make_launcher(
        self, spec: LaunchSpec, settings: ElasticSettings, on_ended: OnEnded, agent: Callable[..., Any]
    ) -> Launcher:
        return self._launcher.bind(spec, on_ended)

    def sources(self) -> list[EventSource]:
        return []

    def console(self, verbose: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


Place = Cluster | ThisMachine


def place_of(call: RunSettings) -> Place:
    """Return the place in which a call of `run` has its workers.

    Raises:
        UsageError: There is no session to run in: see `checked_cluster`.
    """
    if call.launcher is not None:
        return ThisMachine(call.launcher)
    cluster = checked_cluster(call.spark)
    if cluster is call.spark:  # of a fit, whose session may have ended since
        cluster.check()
    cluster.apply(call.driver_host, call.ship_package)
    return cluster
