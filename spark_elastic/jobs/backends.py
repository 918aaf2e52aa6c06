"""Where a job's slots come from: a Spark cluster, or this machine. Each puts its own parts of the driver together."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from spark_elastic.driver import preflight
from spark_elastic.driver.addresses import check_interfaces
from spark_elastic.driver.elastic_driver import ElasticDriver, EventSource, PostEvent
from spark_elastic.driver.hosts import HostAddresses, HostDiscovery, HostManager
from spark_elastic.driver.launcher import Launcher, OnEnded
from spark_elastic.driver.local_launcher import LocalLauncher
from spark_elastic.errors import InvalidSettingsError, NotEnoughSlotsError, UnknownInterfaceError
from spark_elastic.membership.events import HostsObserved
from spark_elastic.membership.reasons import Wait, WaitKind
from spark_elastic.settings import ElasticSettings
from spark_elastic.wire.interfaces import address_of, interface_addresses, is_address, is_loopback
from spark_elastic.wire.launch_spec import AgentOrder

LARGE_FUNCTION_BYTES = 128 * 1024
"""From here on one broadcast for all slots is worth its own trip."""
THIS_MACHINE = "127.0.0.1"
"""What agents report as their host where all of them run on the driver's machine."""

if TYPE_CHECKING:
    from pyspark import SparkContext

    from spark_elastic.driver.spark.discovery import SparkHostDiscovery
    from spark_elastic.driver.spark.executors import ExecutorWatch


class Backend(Protocol):
    """What `run_async` needs of a place to run in."""

    def slots(self) -> int:
        """The number of workers if the caller names none."""
        ...

    def most_slots(self) -> tuple[int, str] | None:
        """How many slots there can ever be, and of what, where that is fixed; None: not known."""
        ...

    def listen_at(self) -> tuple[str, str]:
        """The address to bind the rendezvous server to, and the one that agents reach it at."""
        ...

    def host_of(self, name: str) -> str:
        """What an agent reports as its host that runs where `name`, as people write it, stands for."""
        ...

    def make_launcher(self, order: AgentOrder, settings: ElasticSettings, on_ended: OnEnded) -> Launcher: ...

    def sources(self) -> list[EventSource]: ...

    def around(self, pending: int) -> str:
        """What is known of a wait beside its reason, in words; "" if nothing is. pending: tasks that have not begun."""
        ...

    def gather(self, order: AgentOrder, settings: ElasticSettings, driver: ElasticDriver) -> None:
        """Hold the job back until it can be placed. Called on the job's thread, before the driver runs."""
        ...


class LocalBackend:
    """Plain processes of this machine."""

    def __init__(self, launcher: LocalLauncher) -> None:
        self._launcher = launcher

    def slots(self) -> int:
        raise InvalidSettingsError("the local launcher has no slots to count; give num_proc")

    def most_slots(self) -> tuple[int, str] | None:
        return None

    def listen_at(self) -> tuple[str, str]:
        return THIS_MACHINE, THIS_MACHINE

    def host_of(self, name: str) -> str:
        address = address_of(name)
        return address if address in self._launcher.hosts else _on_this_machine(address)

    def make_launcher(self, order: AgentOrder, settings: ElasticSettings, on_ended: OnEnded) -> Launcher:
        return self._launcher.bind(order, on_ended)

    def sources(self) -> list[EventSource]:
        return []

    def around(self, pending: int) -> str:
        return ""

    def gather(self, order: AgentOrder, settings: ElasticSettings, driver: ElasticDriver) -> None:
        pass


class SparkBackend:
    """The task slots of a SparkContext.

    Raises:
        NoSparkContextError, SparkConnectNotSupportedError, JavaNotFoundError: there is none to run in.
    """

    def __init__(self, spark: Any) -> None:
        self._context = preflight.check_spark(spark)
        self._is_local = re.fullmatch(r"local(\[.*\])?", self._context.master) is not None

        from spark_elastic.driver.spark.discovery import SparkHostDiscovery
        from spark_elastic.task.spark_agent import slot_report

        self._discovery = SparkHostDiscovery(self._context, slot_report)

    def slots(self) -> int:
        now = self._discovery.slots().now
        if now < 1:
            raise InvalidSettingsError("the cluster has no task slot at the moment; give num_proc to wait for some")
        return now

    def most_slots(self) -> tuple[int, str] | None:
        most = self._discovery.most_slots()
        return None if most is None else (most, f"master {self._context.master}")

    def listen_at(self) -> tuple[str, str]:
        """Spark's own: executors reach the driver there, or Spark itself would not work."""
        conf = self._context.getConf()
        host = conf.get("spark.driver.host", "127.0.0.1")
        assert host is not None
        return conf.get("spark.driver.bindAddress", host) or host, host

    def host_of(self, name: str) -> str:
        address = address_of(name)
        return _on_this_machine(address) if self._is_local else address

    def make_launcher(self, order: AgentOrder, settings: ElasticSettings, on_ended: OnEnded) -> Launcher:
        from spark_elastic.driver.spark.launcher import SparkLauncher
        from spark_elastic.driver.spark.slot_queue import AdmittedLauncher, arbiter_of
        from spark_elastic.task.spark_agent import run_in_task

        # The key must not be in a file, and PySpark puts a task of more than 1 MiB into one: the function goes apart.
        function = order.function if len(order.function) > LARGE_FUNCTION_BYTES else None
        payload = pickle.dumps(order if function is None else dataclasses.replace(order, function=b""))

        def build(ended: OnEnded) -> Launcher:
            description = f"spark_elastic job {order.job}"
            return SparkLauncher(
                self._context, run_in_task, lambda slot: payload, ended, shared=function, description=description
            )

        return AdmittedLauncher(arbiter_of(self._context), order.job, settings.min_num_proc, build, on_ended)

    def sources(self) -> list[EventSource]:
        return [_ExecutorEvents(self._context, self._discovery)]

    def around(self, pending: int) -> str:
        from spark_elastic.driver.spark.cluster import close_connection

        try:
            free = self._discovery.slots_free()
        finally:
            close_connection(self._context)
        tasks = [f"{pending} task{'' if pending == 1 else 's'} pending"] if pending else []
        return ", ".join([*tasks, f"cluster has {free} slot{'' if free == 1 else 's'} free"])

    def gather(self, order: AgentOrder, settings: ElasticSettings, driver: ElasticDriver) -> None:
        """Wait until the workers can be placed together: all of them soon, or the fewest that the job can live with.

        Raises:
            NotEnoughSlotsError: not even those within start_timeout.
            UnknownInterfaceError: too many of their hosts have none of the interfaces asked for.
        """
        from spark_elastic.driver.spark.cluster import close_connection

        try:
            self._gather(order, settings, driver)
        finally:
            close_connection(self._context)

    def _gather(self, order: AgentOrder, settings: ElasticSettings, driver: ElasticDriver) -> None:
        stop = driver.stop_requested
        probe = None
        if settings.num_proc > settings.min_num_proc:
            soon = min(settings.start_grace_s, settings.start_timeout_s)
            with contextlib.suppress(NotEnoughSlotsError):
                probe = self._discovery.probe(settings.num_proc, soon, stop=stop, on_wait=driver.note_waiting)
        if probe is None:
            probe = self._discovery.probe(
                settings.min_num_proc, settings.start_timeout_s, stop=stop, on_wait=driver.note_waiting
            )
        if probe.refused:
            driver.note_waiting(Wait(WaitKind.REPORTED, detail=probe.why))
        unusable: list[UnknownInterfaceError] = []
        for report in probe.reports:
            try:
                check_interfaces(report.host, report.addresses, order.nics)
            except UnknownInterfaceError as error:
                unusable.append(error)
        if unusable and len(probe.reports) - len(unusable) < settings.min_num_proc:
            raise unusable[0]


class _ExecutorEvents:
    """Spark's news of executors as a source of the driver's events."""

    def __init__(self, context: SparkContext, discovery: SparkHostDiscovery) -> None:
        self._context = context
        self._discovery = discovery
        self._watch: ExecutorWatch | None = None

    def start(self, post: PostEvent) -> None:
        self._watch = self._discovery.watch(post)

    def close(self) -> None:
        if self._watch is None:
            return
        from spark_elastic.driver.spark.cluster import close_connection

        try:
            self._watch.close()
        finally:
            close_connection(self._context)


def _on_this_machine(address: str) -> str:
    """`THIS_MACHINE` for any address of this machine; others as they are."""
    if address in interface_addresses().values() or (is_address(address) and is_loopback(address)):
        return THIS_MACHINE
    return address


class HostEvents:
    """A host discovery as a source of the driver's events.

    Raises:
        DiscoveryScriptError: its first answer cannot be had.
        InvalidSettingsError: it is no answer.
    """

    def __init__(self, discovery: HostDiscovery, host_of: Callable[[str], str]) -> None:
        self._addresses = HostAddresses(host_of)
        self._first = HostsObserved(self._addresses(discovery.find_available_hosts_and_slots()))
        self._discovery = discovery
        self._manager: HostManager | None = None

    def start(self, post: PostEvent) -> None:
        post(self._first)
        self._manager = HostManager(self._discovery, post, first=self._first, addresses=self._addresses)

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()
