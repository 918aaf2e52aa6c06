"""Backends: the place that a job runs in (Spark, Spark Connect, this machine). Each makes its own parts of the driver.

`SparkBackend` says what each method is for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from spark_elastic.data import spark_connect
from spark_elastic.data.spark_connect import setting_of
from spark_elastic.data.spark_console import bar_hidden, close_connection, quiet_log
from spark_elastic.driver import preflight
from spark_elastic.driver.addresses import check_interfaces
from spark_elastic.driver.elastic_driver import ElasticDriver, EventSource
from spark_elastic.driver.launcher import Launcher, LocalLauncher, OnEnded
from spark_elastic.errors import (
    DriverUnreachableError,
    InvalidSettingsError,
    NotEnoughSlotsError,
    UnknownInterfaceError,
)
from spark_elastic.jobs.settings import RunSettings
from spark_elastic.membership.reasons import Wait, WaitKind, counted
from spark_elastic.membership.topology import SlotReport
from spark_elastic.settings import ElasticSettings
from spark_elastic.wire.interfaces import (
    address_of,
    every_address,
    is_address,
    is_loopback,
    own_addresses,
    plain_address,
)
from spark_elastic.wire.messages import LaunchSpec
from spark_elastic.wire.ports import Ports

if TYPE_CHECKING:
    from pyspark import SparkContext

    from spark_elastic.driver.spark.discovery import SlotProbe

_Probe = TypeVar("_Probe")

LARGE_FUNCTION_BYTES = 128 * 1024
"""Functions from this size on are sent in one broadcast for all slots."""
LOOPBACK_IPV6 = "::1"
THIS_MACHINE = "127.0.0.1"
"""The host that agents report if all of them run on the driver's machine."""


class LocalBackend:
    """Runs workers as plain processes of this machine. Has the members of `SparkBackend`."""

    is_local = True

    def __init__(self, launcher: LocalLauncher) -> None:
        self._launcher = launcher

    def slots(self) -> int:
        raise InvalidSettingsError("a LocalLauncher has no slots to count; set num_proc")

    def most_slots(self) -> tuple[int, str] | None:
        return None

    def listen_at(self) -> tuple[str, tuple[str, ...]]:
        host = LOOPBACK_IPV6 if LOOPBACK_IPV6 in self._launcher.hosts else THIS_MACHINE
        return host, (host,)

    def ports(self, setting: str, given: int | str | None) -> Ports:
        return Ports.parse(given or 0)

    def host_of(self, name: str) -> str:
        address = address_of(name)
        return address if address in self._launcher.hosts else _on_this_machine(address)

    def make_launcher(self, spec: LaunchSpec, settings: ElasticSettings, on_ended: OnEnded) -> Launcher:
        return self._launcher.bind(spec, on_ended)

    def prepare_workers(self, spec: LaunchSpec, most: int | None) -> None:
        pass  # a job starts at once here

    def sources(self) -> list[EventSource]:
        return []

    def console(self, verbose: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def load(self, pending: int) -> str:
        return ""

    def gather(
        self, spec: LaunchSpec, settings: ElasticSettings, driver: ElasticDriver, listening: socket.socket
    ) -> None:
        pass


class SparkBackend:
    """Runs workers in the task slots of the SparkContext that `preflight.check_spark` found."""

    def __init__(self, context: SparkContext) -> None:
        self._context = context
        self.is_local = spark_connect.is_local_master(self._context.master)
        """True if all workers run on the driver's machine."""

        from spark_elastic.driver.spark.discovery import SparkHostDiscovery
        from spark_elastic.task.spark_agent import slot_report

        self._discovery = SparkHostDiscovery(self._context, slot_report)

    def slots(self) -> int:
        """Return the number of workers to start if the user gives none."""
        now = self._discovery.slots().now
        if now < 1:
            raise InvalidSettingsError("the cluster has no task slot at the moment; give num_proc to wait for some")
        return now

    def most_slots(self) -> tuple[int, str] | None:
        """Return the number of slots that can never be exceeded and what limits it; None if it is not known."""
        most = self._discovery.most_slots()
        return None if most is None else (most, f"master {self._context.master}")

    def listen_at(self) -> tuple[str, tuple[str, ...]]:
        """Return the address to bind the rendezvous server to, and those at which agents try to reach it.

        Both are those of Spark's own driver endpoint, which executors reach in any case.
        """
        host = setting_of(self._context, "spark.driver.host") or "127.0.0.1"
        bound = setting_of(self._context, "spark.driver.bindAddress") or host
        return plain_address(bound), (plain_address(host),)

    def ports(self, setting: str, given: int | str | None) -> Ports:
        """Return the ports of a setting: those given to `run`, or else those of the session."""
        return Ports.parse(given) if given is not None else preflight.session_ports(self._context, setting)

    def host_of(self, name: str) -> str:
        """Return the host that agents report on a machine which a user calls `name`."""
        address = address_of(name)
        return _on_this_machine(address) if self.is_local else address

    def make_launcher(self, spec: LaunchSpec, settings: ElasticSettings, on_ended: OnEnded) -> Launcher:
        from spark_elastic.driver.spark.launcher import SparkLauncher
        from spark_elastic.driver.spark.slot_queue import QueuedLauncher, queue_of
        from spark_elastic.task.spark_agent import run_in_task

        # PySpark writes a task of more than 1 MiB to a file, where the key must not be. So the function is sent apart.
        function = spec.function if len(spec.function) > LARGE_FUNCTION_BYTES else None
        payload = pickle.dumps(spec if function is None else dataclasses.replace(spec, function=b""))

        def build(ended: OnEnded) -> Launcher:
            description = f"spark_elastic job {spec.job}"
            return SparkLauncher(
                self._context, run_in_task, lambda slot: payload, ended, shared=function, description=description
            )

        return QueuedLauncher(
            queue_of(str(self._context.applicationId)), spec.job, settings.min_num_proc, build, on_ended
        )

    def prepare_workers(self, spec: LaunchSpec, most: int | None) -> None:
        """Have executors import what workers need, in a Spark job of its own, which takes some 0.1 s of their slots.

        The order is that of a job without its key, function and addresses; `most` the number of slots that a job can
        use.
        """
        from spark_elastic.driver.spark.cluster import BackgroundJob
        from spark_elastic.task.spark_agent import prepare_workers

        payload = pickle.dumps(spec)

        def task(_rows: Any) -> list[Any]:
            prepare_workers(payload)
            return []

        slots = self._discovery.slots().now
        width = slots if most is None else min(most, slots)
        if width > 0:
            BackgroundJob(self._context, width, task, "spark_elastic: imports of workers")

    def sources(self) -> list[EventSource]:
        from spark_elastic.driver.spark.executors import ExecutorWatch

        return [ExecutorWatch(self._context)]

    def console(self, verbose: int) -> contextlib.AbstractContextManager[None]:
        """Keep what Spark prints apart from our lines and our bar while a job runs; with verbose=0 there are none."""
        quiet_log(self._context, verbose)
        return bar_hidden(self._context) if verbose else contextlib.nullcontext()

    def load(self, pending: int) -> str:
        """Return how busy the cluster is, in words, to be shown with a wait; empty if no task of the job is pending."""
        if not pending:
            return ""
        try:
            free = self._discovery.slots_free()
        finally:
            close_connection(self._context)
        return f"{counted(pending, 'task')} pending, cluster has {counted(free, 'slot')} free"

    def gather(
        self, spec: LaunchSpec, settings: ElasticSettings, driver: ElasticDriver, listening: socket.socket
    ) -> None:
        """Wait until workers can be placed together: num_proc of them shortly, or else min_num_proc.

        Called on the job's thread, before the driver runs and serves `listening`.

        Raises:
            NotEnoughSlotsError: There was no room for min_num_proc workers within start_timeout.
            UnknownInterfaceError: Too many hosts have none of the interfaces in `nics`.
        """
        if spec.keep_workers_s > 0:  # what the executors import from now on need not be waited for later
            from spark_elastic.task.spark_agent import prepare_and_report

            without_secrets = dataclasses.replace(spec, key=b"", function=b"", driver_addresses=())
            self._discovery.report_slot = functools.partial(prepare_and_report, pickle.dumps(without_secrets))
        try:
            probe = self._probe(settings, driver)
        finally:
            close_connection(self._context)
        if probe.refused:
            driver.note_waiting(Wait(WaitKind.REPORTED, detail=probe.why))
        _check_interfaces(probe.reports, spec, settings)

    def _probe(self, settings: ElasticSettings, driver: ElasticDriver) -> SlotProbe:
        place = functools.partial(self._discovery.probe, stop=driver.stop_requested, on_wait=driver.note_waiting)
        return _place_together(place, settings)


class ConnectBackend:
    """Runs workers in the task slots behind a Spark Connect server. Has the methods of `SparkBackend`.

    `driver_host` and `ship_package` are the settings.
    """

    def __init__(self, session: Any, driver_host: str | None = None, ship_package: bool = False) -> None:
        from spark_elastic.driver.connect.discovery import ConnectDiscovery

        self._session = session
        self._driver_host = driver_host
        self._discovery = ConnectDiscovery(session)
        self._addresses: tuple[tuple[str, int], ...] | None = None
        """The driver's addresses, best first, once the probe has tried them."""
        if ship_package:
            from spark_elastic.driver.connect import package

            package.ship_package(session)

    @property
    def is_local(self) -> bool:
        return spark_connect.runs_locally(self._session)

    def slots(self) -> int:
        now = self._discovery.slots()
        if now is None:
            raise InvalidSettingsError("the Spark Connect server does not show its task slots; give num_proc")
        if now < 1:
            raise InvalidSettingsError("the cluster has no task slot at the moment; give num_proc to wait for some")
        return now

    def most_slots(self) -> tuple[int, str] | None:
        most = self._discovery.most_slots()
        return None if most is None else (most, f"master {self._discovery.master}")

    def listen_at(self) -> tuple[str, tuple[str, ...]]:
        """Return the address to bind the rendezvous server to, and those at which agents try to reach it.

        Executors may be on other machines than the server, so without `driver_host` all addresses are tried.
        """
        if self._driver_host is not None:
            return every_address(), (self._driver_host,)
        if self.is_local:
            return THIS_MACHINE, (THIS_MACHINE,)
        from spark_elastic.driver.connect.reachability import candidate_addresses

        return every_address(), candidate_addresses(spark_connect.server_of(self._session)[0])

    def ports(self, setting: str, given: int | str | None) -> Ports:
        return Ports.parse(given) if given is not None else preflight.session_ports(self._session, setting)

    def host_of(self, name: str) -> str:
        address = address_of(name)
        return _on_this_machine(address) if self.is_local else address

    def make_launcher(self, spec: LaunchSpec, settings: ElasticSettings, on_ended: OnEnded) -> Launcher:
        from spark_elastic.driver.connect.launcher import ConnectLauncher
        from spark_elastic.driver.spark.slot_queue import QueuedLauncher, queue_of
        from spark_elastic.task.spark_agent import run_in_task

        def payload(slot: int) -> bytes:
            # The server limits a query to 128 MiB, and each slot's would hold the function again: agents fetch it.
            addresses = self._addresses or spec.driver_addresses
            small = dataclasses.replace(
                spec, function=b"", fetched_bytes=len(spec.function), driver_addresses=addresses
            )
            return pickle.dumps(small)

        def build(ended: OnEnded) -> Launcher:
            return ConnectLauncher(self._session, run_in_task, payload, ended)

        application = spark_connect.application_of(self._session)
        return QueuedLauncher(queue_of(application), spec.job, settings.min_num_proc, build, on_ended)

    def prepare_workers(self, spec: LaunchSpec, most: int | None) -> None:
        pass  # a query costs more than it would gain

    def sources(self) -> list[EventSource]:
        return []  # there is no listener on this side: losses are seen on the connections to agents and workers

    def console(self, verbose: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # Spark's log and its bar are the server's

    def load(self, pending: int) -> str:
        return f"{counted(pending, 'task')} pending" if pending else ""

    def gather(
        self, spec: LaunchSpec, settings: ElasticSettings, driver: ElasticDriver, listening: socket.socket
    ) -> None:
        """Wait until workers can be placed together, and find out at which addresses executors reach this program.

        Raises:
            NotEnoughSlotsError: There was no room for min_num_proc workers within start_timeout.
            DriverUnreachableError: Too few tasks reach this program.
            UnknownInterfaceError: Too many hosts have none of the interfaces in `nics`.
        """
        from spark_elastic.driver.connect.reachability import ReachabilityListener, in_order, unreached_in_words
        from spark_elastic.task.spark_agent import slot_and_reach

        place = functools.partial(
            self._discovery.probe,
            report=functools.partial(slot_and_reach, spec.driver_addresses, spec.key),
            stop=driver.stop_requested,
            on_wait=driver.note_waiting,
        )
        with ReachabilityListener(listening, spec.key):
            probe = _place_together(place, settings)
        without = [reach for reach in probe.reaches if not reach.reached]
        if without and len(probe.reaches) - len(without) < min(settings.min_num_proc, len(probe.reaches)):
            hosts = tuple(host for host, _ in spec.driver_addresses)
            port = spec.driver_addresses[0][1]
            raise DriverUnreachableError(addresses=hosts, port=port, tried=unreached_in_words(without[0]))
        port = spec.driver_addresses[0][1]
        self._addresses = tuple(
            (host, port) for host in in_order([host for host, _ in spec.driver_addresses], probe.reaches)
        )
        _check_interfaces(probe.reports, spec, settings)


Backend = LocalBackend | SparkBackend | ConnectBackend


def backend_of(call: RunSettings) -> Backend:
    """Return the place in which a call of `run` has its workers.

    Raises:
        UsageError: There is no session to run in: see `preflight.check_spark`.
    """
    if call.launcher is not None:
        return LocalBackend(call.launcher)
    spark = preflight.check_spark(call.spark)
    if spark_connect.is_connect(spark):
        return ConnectBackend(spark, call.driver_host, call.ship_package)
    if call.driver_host is not None or call.ship_package:
        given = "driver_host" if call.driver_host is not None else "ship_package"
        raise InvalidSettingsError(
            f"{given} is for Spark Connect; a classic session has spark.driver.host and spark.submit.pyFiles"
        )
    return SparkBackend(spark)


def _place_together(place: Callable[[int, float], _Probe], settings: ElasticSettings) -> _Probe:
    """Return the probe of num_proc slots if they are free shortly, or else of min_num_proc."""
    if settings.num_proc > settings.min_num_proc:
        with contextlib.suppress(NotEnoughSlotsError):
            return place(settings.num_proc, min(settings.start_grace_s, settings.start_timeout_s))
    return place(settings.min_num_proc, settings.start_timeout_s)


def _check_interfaces(reports: Sequence[SlotReport], spec: LaunchSpec, settings: ElasticSettings) -> None:
    """Raise UnknownInterfaceError if too few slots are on hosts with the interfaces in `nics`."""
    unusable: list[UnknownInterfaceError] = []
    for report in reports:
        try:
            check_interfaces(report.host, report.addresses, spec.nics)
        except UnknownInterfaceError as error:
            unusable.append(error)
    if unusable and len(reports) - len(unusable) < settings.min_num_proc:
        raise unusable[0]


def _on_this_machine(address: str) -> str:
    """Return `THIS_MACHINE` for any address of this machine, and others as they are."""
    if address in own_addresses() or (is_address(address) and is_loopback(address)):
        return THIS_MACHINE
    return address
