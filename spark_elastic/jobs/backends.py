"""Backends: the place that a job runs in, a Spark cluster or this machine. Each makes its own parts of the driver.

`SparkBackend` says what each method is for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
import re
from typing import TYPE_CHECKING, Any

from spark_elastic.driver import preflight
from spark_elastic.driver.addresses import check_interfaces
from spark_elastic.driver.elastic_driver import ElasticDriver, EventSource
from spark_elastic.driver.launcher import Launcher, LocalLauncher, OnEnded
from spark_elastic.errors import InvalidSettingsError, NotEnoughSlotsError, UnknownInterfaceError
from spark_elastic.membership.reasons import Wait, WaitKind, counted
from spark_elastic.settings import ElasticSettings
from spark_elastic.wire.interfaces import address_of, interface_addresses, is_address, is_loopback
from spark_elastic.wire.messages import LaunchSpec

if TYPE_CHECKING:
    from spark_elastic.driver.spark.discovery import SlotProbe

LARGE_FUNCTION_BYTES = 128 * 1024
"""Functions from this size on are sent in one broadcast for all slots."""
THIS_MACHINE = "127.0.0.1"
"""The host that agents report if all of them run on the driver's machine."""


class LocalBackend:
    """Runs workers as plain processes of this machine. Has the methods of `SparkBackend`."""

    def __init__(self, launcher: LocalLauncher) -> None:
        self._launcher = launcher

    def slots(self) -> int:
        raise InvalidSettingsError("a LocalLauncher has no slots to count; set num_proc")

    def most_slots(self) -> tuple[int, str] | None:
        return None

    def listen_at(self) -> tuple[str, str]:
        return THIS_MACHINE, THIS_MACHINE

    def host_of(self, name: str) -> str:
        address = address_of(name)
        return address if address in self._launcher.hosts else _on_this_machine(address)

    def make_launcher(self, spec: LaunchSpec, settings: ElasticSettings, on_ended: OnEnded) -> Launcher:
        return self._launcher.bind(spec, on_ended)

    def sources(self) -> list[EventSource]:
        return []

    def load(self, pending: int) -> str:
        return ""

    def gather(self, spec: LaunchSpec, settings: ElasticSettings, driver: ElasticDriver) -> None:
        pass


class SparkBackend:
    """Runs workers in the task slots of a SparkContext.

    Args:
        spark: A SparkSession, a SparkContext, or None for the active one.

    Raises:
        UsageError: There is no SparkContext to run in: see `preflight.check_spark`.
    """

    def __init__(self, spark: Any) -> None:
        self._context = preflight.check_spark(spark)
        self._is_local = re.fullmatch(r"local(\[.*\])?", self._context.master) is not None

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

    def listen_at(self) -> tuple[str, str]:
        """Return the address to bind the rendezvous server to, and the one at which agents reach it.

        Both are those of Spark's own driver endpoint, which executors reach in any case.
        """
        conf = self._context.getConf()
        host = conf.get("spark.driver.host", "127.0.0.1")
        assert host is not None
        return conf.get("spark.driver.bindAddress", host) or host, host

    def host_of(self, name: str) -> str:
        """Return the host that agents report on a machine which a user calls `name`."""
        address = address_of(name)
        return _on_this_machine(address) if self._is_local else address

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

        return QueuedLauncher(queue_of(self._context), spec.job, settings.min_num_proc, build, on_ended)

    def sources(self) -> list[EventSource]:
        from spark_elastic.driver.spark.executors import ExecutorWatch

        return [ExecutorWatch(self._context)]

    def load(self, pending: int) -> str:
        """Return how busy the cluster is, in words, to be shown with a wait; empty if there is nothing to say.

        Args:
            pending: The job's tasks that have not started.
        """
        from spark_elastic.driver.spark.cluster import close_connection

        try:
            free = self._discovery.slots_free()
        finally:
            close_connection(self._context)
        tasks = f"{counted(pending, 'task')} pending, " if pending else ""
        return f"{tasks}cluster has {counted(free, 'slot')} free"

    def gather(self, spec: LaunchSpec, settings: ElasticSettings, driver: ElasticDriver) -> None:
        """Wait until workers can be placed together: num_proc of them shortly, or else min_num_proc.

        Called on the job's thread, before the driver runs.

        Raises:
            NotEnoughSlotsError: There was no room for min_num_proc workers within start_timeout.
            UnknownInterfaceError: Too many hosts have none of the interfaces in `nics`.
        """
        from spark_elastic.driver.spark.cluster import close_connection

        try:
            probe = self._probe(settings, driver)
        finally:
            close_connection(self._context)
        if probe.refused:
            driver.note_waiting(Wait(WaitKind.REPORTED, detail=probe.why))
        unusable: list[UnknownInterfaceError] = []
        for report in probe.reports:
            try:
                check_interfaces(report.host, report.addresses, spec.nics)
            except UnknownInterfaceError as error:
                unusable.append(error)
        if unusable and len(probe.reports) - len(unusable) < settings.min_num_proc:
            raise unusable[0]

    def _probe(self, settings: ElasticSettings, driver: ElasticDriver) -> SlotProbe:
        place = functools.partial(self._discovery.probe, stop=driver.stop_requested, on_wait=driver.note_waiting)
        if settings.num_proc > settings.min_num_proc:
            with contextlib.suppress(NotEnoughSlotsError):
                return place(settings.num_proc, min(settings.start_grace_s, settings.start_timeout_s))
        return place(settings.min_num_proc, settings.start_timeout_s)


Backend = LocalBackend | SparkBackend


def _on_this_machine(address: str) -> str:
    """Return `THIS_MACHINE` for any address of this machine, and others as they are."""
    if address in interface_addresses().values() or (is_address(address) and is_loopback(address)):
        return THIS_MACHINE
    return address
