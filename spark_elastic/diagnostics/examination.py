"""One checkup: what is looked at, in which order, within one deadline. What goes wrong in a check is a finding too."""

from __future__ import annotations

import inspect
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spark_elastic import clock
from spark_elastic.data.store import Store
from spark_elastic.diagnostics import cluster, line, machine, network, probe, sharing
from spark_elastic.diagnostics.conversation import Conversation, Probe
from spark_elastic.diagnostics.findings import OK, PROBLEM, WARNING, Finding, Report
from spark_elastic.diagnostics.probe import look_around
from spark_elastic.driver.preflight import check_spark, java_major_version
from spark_elastic.driver.spark.cluster import (
    close_connection,
    count_slots,
    dynamic_allocation,
    executor_ids,
    is_local,
    jvm_context,
    reason_of_error,
)
from spark_elastic.task import executor_process
from spark_elastic.wire import interfaces
from spark_elastic.wire.framing import new_key
from spark_elastic.wire.interfaces import interface_addresses, is_address, is_loopback

if TYPE_CHECKING:
    from pyspark import SparkContext

# The probes as a Spark job: one task for each slot, all of them up at the same time.

_CANCEL_POLL_S = 0.1


class Gang:
    """Starts the job on a thread of its own.

    order: for `probe.serve`.
    """

    def __init__(self, sc: SparkContext, count: int, order: dict[str, Any], package: str) -> None:
        self._sc = sc
        self._count = count
        self._order = order
        self._package = package
        self._group = f"spark_elastic-doctor-{uuid.uuid4().hex[:12]}"
        self._cancelled = False
        self.reports: list[dict[str, Any]] = []
        """What the tasks returned; empty as long as any of them runs."""
        self.error: str | None = None
        self.over = threading.Event()
        threading.Thread(target=self._run, name="spark_elastic-doctor", daemon=True).start()

    def end(self, timeout_s: float) -> None:
        """Wait for the tasks, which have been let go; cancel them if they do not end. Returns in any case."""
        if self.over.wait(timeout_s):
            return
        self._cancelled = True
        canceller = threading.Thread(target=self._cancel, name="spark_elastic-doctor", daemon=True)
        canceller.start()
        canceller.join(2.0)

    def _cancel(self) -> None:
        try:
            jvm_context(self._sc).cancelJobGroup(self._group)
            self.over.wait(1.0)
        except Exception:
            return  # Spark is gone, and the job with it
        finally:
            close_connection(self._sc)

    def _run(self) -> None:
        sc = self._sc
        try:
            sc.setJobGroup(self._group, "spark_elastic doctor")
            task = _task(self._order, self._package)
            self.reports = sc.parallelize(range(self._count), self._count).mapPartitions(task).collect()
        except Exception as error:
            if not self._cancelled:
                self.error = reason_of_error(error)
        finally:
            close_connection(sc)
            self.over.set()


def _task(order: dict[str, Any], package: str) -> Callable[[Any], Any]:
    """The function that Spark runs. It is pickled by value and brings its modules along as text: the executors may not
    have the package."""
    sources = {module.__name__.rpartition(".")[2]: inspect.getsource(module) for module in _MODULES}

    def task(rows: Any) -> Any:
        import types

        modules = {}
        for name, source in sources.items():
            modules[name] = types.ModuleType(f"spark_elastic_doctor_{name}")
            exec(compile(source, f"<spark_elastic {name}>", "exec"), modules[name].__dict__)
        number = next(iter(rows))
        process: Any = modules["executor_process"]
        look = modules["probe"].look_around(
            number,
            addresses=modules["interfaces"].interface_addresses(),
            executor=process.executor_id_in_task(),
            host=process.host_name_in_task(),
            package=package,
        )
        return [modules["probe"].serve(order, look, modules["line"].Line)]

    return task


_MODULES = (line, probe, executor_process, interfaces)


MOST_PROBES = 256
"""Tasks that look around; on a larger cluster, not all slots are tried."""
PACKAGE = "spark_elastic"
_FAREWELL_S = 3.0

Findings = Finding | Sequence[Finding] | None


class Examination:
    """Args: wall: the driver's clock, in seconds since the epoch. package: what is to be importable on executors.
    with_torch: whether executors import torch, which takes seconds.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        num_proc: int | None = None,
        store: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        wall: Callable[[], float] = clock.wall,
        package: str = PACKAGE,
        with_torch: bool = True,
    ) -> None:
        self._began = clock.monotonic()
        self._until = self._began + timeout_s
        self._with_torch = with_torch
        self._timeout_s = timeout_s
        self._num_proc = num_proc
        self._store = store
        self._storage_options = storage_options
        self._wall = wall
        self._package = package
        self._findings: list[Finding] = []
        self._here: dict[str, Any] = {}

    def report(self) -> Report:
        return Report(tuple(self._findings), clock.monotonic() - self._began)

    def add(self, finding: Finding) -> None:
        self._findings.append(finding)

    def _check(self, name: str, look: Callable[[], Findings]) -> None:
        """A broken check must not stop the others."""
        try:
            found = look()
        except Exception as error:
            says = f"this could not be looked at: {type(error).__name__}: {error}"
            found = Finding(name, WARNING, says, "see to the other findings first, then run the doctor again")
        self._findings += [found] if isinstance(found, Finding) else found or []

    def _left(self, most_s: float) -> float:
        """Seconds that a step may take: the deadline leaves some for the farewell."""
        return max(min(most_s, self._until - _FAREWELL_S - clock.monotonic()), 0.1)

    # --- this machine -----------------------------------------------------------------------------

    def look_here(self) -> None:
        """The driver's Python, without Spark."""
        addresses = interface_addresses()
        self._here = look_around(-1, addresses=addresses, executor="driver", host=None, package=self._package)
        self._check("packages", lambda: machine.packages_here(self._here))

    def look_without_spark(self, why: str, fix: str) -> None:
        """What can be said where no session could be had."""
        self._check("java", machine.java_of_this_machine)
        self.add(Finding("Spark", PROBLEM, why, fix))
        self._check("limits", lambda: machine.limits({"the driver": self._here}, self._num_proc or 1))
        if self._store is not None:
            self._check("storage", lambda: self._storage(None, []))

    # --- the cluster ------------------------------------------------------------------------------

    def look_at(self, spark: Any) -> None:
        """A session, and the executors that it has or gets."""
        try:
            sc = check_spark(spark)
        except Exception as error:
            self.look_without_spark(str(error), "change the session as the line above says")
            return
        try:
            self._look_at_context(sc)
        finally:
            close_connection(sc)

    def _look_at_context(self, sc: SparkContext) -> None:
        self._check("java", lambda: _java_of(sc))
        self._check("Spark", lambda: _spark_of(sc))
        slots: list[cluster.Slots] = []
        self._check("task slots", lambda: self._slots(sc, slots))
        wanted = self._probes_for(sc, slots[0] if slots else None)
        if wanted < 1:
            self._check("limits", lambda: machine.limits({"the driver": self._here}, self._num_proc or 1))
            return
        conf = sc.getConf()
        host = conf.get("spark.driver.host", "127.0.0.1") or "127.0.0.1"
        on_this_machine = is_address(host) and is_loopback(host)
        key = new_key()
        conversation = Conversation("127.0.0.1" if host == "127.0.0.1" else "0.0.0.0", key)
        other = [] if on_this_machine else [a for a in interface_addresses().values() if not is_loopback(a)]
        addresses = [(address, conversation.port) for address in dict.fromkeys([host, *other])]
        order = {
            "addresses": addresses,
            "key": key,
            "seconds": self._timeout_s,
            "connect_s": min(5.0, self._timeout_s / 6),
        }
        gang: Gang | None = None
        try:
            gang = Gang(sc, wanted, order, self._package)
            self._converse(sc, conversation, gang, wanted)
        finally:
            conversation.close()
            if gang is not None:
                gang.end(max(min(_FAREWELL_S, self._until - clock.monotonic()), 0.1))
                lost = self._without_line(conversation, gang)
                if lost:
                    self._findings += network.reached_driver(lost)

    def _converse(self, sc: SparkContext, conversation: Conversation, gang: Gang, wanted: int) -> None:
        began = clock.monotonic()
        conversation.wait_for(wanted, self._left(self._timeout_s / 2), gang.over)
        waited = clock.monotonic() - began
        probes = conversation.probes
        one_each = list({probe.report["executor"]: probe for probe in reversed(probes)}.values())[::-1]
        looks = [probe.report for probe in one_each]
        expected = [] if is_local(sc) else executor_ids(sc)
        if not (gang.over.is_set() and gang.error is None and not probes):  # else they ran and could not reach us
            came = [probe.report for probe in probes]
            self._check("executors", lambda: cluster.who_came(came, expected, wanted, waited, gang.error))
        if not probes:
            self._check("limits", lambda: machine.limits({"the driver": self._here}, wanted))
            return
        self._check("package on executors", lambda: machine.packages_there(self._here, looks))
        self._check("executors → driver", lambda: network.reached_driver([probe.report for probe in probes]))
        local = {probe.report["hostname"] for probe in one_each} == {self._here["hostname"]}
        self._check(
            "driver → executors",
            lambda: network.reached_from_driver(network.try_from_driver(one_each, local, self._left(5.0))),
        )
        self._check(
            "executors ↔ executors",
            lambda: network.reached_each_other(network.try_between(conversation, one_each, self._left(5.0))),
        )
        self._check("storage", lambda: self._storage(conversation, one_each))
        self._check("clocks", lambda: sharing.clocks(one_each, self._wall, self._left(5.0)))
        self._check("shared memory", lambda: sharing.memory(conversation, probes, self._left(5.0)))
        places = {"the driver": self._here, **{probe.name: probe.report for probe in one_each}}
        self._check("limits", lambda: machine.limits(places, wanted))
        self._torch(sc, conversation, one_each, probes)

    def _torch(
        self, sc: SparkContext, conversation: Conversation, one_each: Sequence[Probe], probes: Sequence[Probe]
    ) -> None:
        """Last: it takes longest."""
        wait_s = self._left(60.0)
        asked = {
            probe: ("torch", {"gpus": probe.report["gpus"], "timeout_s": max(wait_s - 1.0, 0.1)})
            for probe in one_each
            if self._with_torch and "torch" in probe.report["packages"]
        }
        answers = {probe.name: answer for probe, answer in conversation.ask(asked, wait_s).items()}
        if answers:
            self._check("torch on executors", lambda: machine.torch_of(answers))
        amount = sc.getConf().get("spark.task.resource.gpu.amount")
        self._check("GPUs", lambda: cluster.gpus_of(amount, [probe.report for probe in probes], answers))

    def _slots(self, sc: SparkContext, into: list[cluster.Slots]) -> Finding:
        count = count_slots(sc)
        dynamic = dynamic_allocation(sc)
        cpus = sc.getConf().get("spark.task.cpus", "1") or "1"
        into.append(cluster.Slots(count.now, count.most, _busy(sc), count.executors, dynamic, cpus))
        return cluster.slots_for(into[0], self._num_proc)

    def _probes_for(self, sc: SparkContext, slots: cluster.Slots | None) -> int:
        if slots is None:
            return 0
        wanted = slots.now
        if slots.dynamic:  # executors come once tasks ask for them
            wanted = max(wanted, min(self._num_proc or 2, slots.most or MOST_PROBES))
        return min(wanted, MOST_PROBES)

    def _storage(self, conversation: Conversation | None, probes: Sequence[Probe]) -> Findings:
        store = Store.create(self._store, self._storage_options)
        machines = {(probe.report["hostname"], probe.report["host"]) for probe in probes}
        if self._store is None and len(machines) > 1:
            says = f"no store was named, and {len(machines)} machines do not share their temporary folders"
            fix = "name one here and in estimators, store=...: a mounted folder, s3://, gs://, abfss://, hdfs://, dbfs:"
            return Finding("storage", WARNING, says, fix)
        talk = conversation or Conversation("127.0.0.1", new_key())
        try:
            url = str(store.local_path()) if store.is_local else store.url
            return sharing.storage(talk, probes, url, self._storage_options, self._left(20.0))
        finally:
            if conversation is None:
                talk.close()

    @staticmethod
    def _without_line(conversation: Conversation, gang: Gang) -> list[dict[str, Any]]:
        """Reports of those that ran but could not reach the driver."""
        heard = {probe.number for probe in conversation.probes}
        return [report for report in gang.reports if report["number"] not in heard]


def _java_of(sc: SparkContext) -> Finding:
    jvm: Any = sc._jvm
    version, home = (str(jvm.java.lang.System.getProperty(name)) for name in ("java.version", "java.home"))
    return machine.java_found(home, version, os.environ.get("JAVA_HOME"), java_major_version(f'version "{version}"'))


def _spark_of(sc: SparkContext) -> Finding:
    facts = {"version": sc.version, "master": sc.master, "application": sc.applicationId}
    return Finding("Spark", OK, f"Spark {sc.version} on {sc.master}, application {sc.applicationId}", facts=facts)


def _busy(sc: SparkContext) -> int:
    """Tasks that run now."""
    tracker = sc.statusTracker()
    stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    return sum(stage.numActiveTasks for stage in stages if stage is not None)


def within(timeout_s: float, what: Callable[[], None]) -> bool:
    """Call it on a thread of its own. Returns: whether it returned in time; a thread that hangs is left behind."""
    thread = threading.Thread(target=what, name="spark_elastic-doctor", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()
