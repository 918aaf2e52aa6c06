"""One check-up: the order of the checks within one deadline. An error in a check becomes a finding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from spark_elastic import clock
from spark_elastic.data.store import Store
from spark_elastic.diagnostics import between_machines, findings
from spark_elastic.diagnostics.clusters import Cluster, ProbeJob, cluster_of
from spark_elastic.diagnostics.findings import PROBLEM, WARNING, Finding, Report
from spark_elastic.diagnostics.probe import ProbeReport, collect_facts, start_thread
from spark_elastic.diagnostics.probe_server import ConnectedProbe, ProbeServer, probe_task
from spark_elastic.driver.preflight import check_spark, session_ports
from spark_elastic.errors import PortsTakenError
from spark_elastic.wire.framing import new_key
from spark_elastic.wire.ports import Ports

MOST_PROBES = 256
"""On a cluster with more slots, only this many are examined."""
_PACKAGE = "spark_elastic"
_FAREWELL_S = 3.0
"""The part of the time limit that is reserved for ending the probes' job."""


@dataclass(eq=False)
class Examination:
    """One check-up of a driver and its cluster."""

    timeout_s: float
    """The time limit for all checks together."""
    _: KW_ONLY
    num_proc: int | None = None
    """Workers that are to train."""
    store: Any = None
    """Where estimators are to keep their data."""
    storage_options: Mapping[str, Any] | None = None
    wall: Callable[[], float] = clock.wall
    """Reads the driver's clock, in seconds since the epoch."""
    driver_port: Ports | None = None
    """Ports of the driver that jobs are to use; None: those of the session. The doctor listens there too."""
    agent_ports: Ports | None = None
    """Ports of the agents, likewise."""
    with_torch: bool = True
    """True to import torch on executors, which takes seconds."""

    def __post_init__(self) -> None:
        self._began = clock.monotonic()
        self._until = self._began + self.timeout_s
        self._findings: list[Finding] = []
        self._driver: dict[str, Any] = {}
        """The driver's own facts, as a probe reports them."""
        self._probes_wanted = 0

    def report(self) -> Report:
        return Report(tuple(self._findings), clock.monotonic() - self._began)

    def add(self, finding: Finding) -> None:
        self._findings.append(finding)

    def _check(self, name: str, check: Callable[..., Finding | Sequence[Finding] | None], *args: Any) -> None:
        """Add the findings of `check(*args)`; an exception becomes a warning and does not stop the other checks."""
        try:
            found = check(*args)
        except Exception as error:
            says = f"this could not be looked at: {type(error).__name__}: {error}"
            found = Finding(name, WARNING, says, "see to the other findings first, then run the doctor again")
        self._findings += [found] if isinstance(found, Finding) else found or []

    def _left(self, most_s: float) -> float:
        """Return the seconds that a step may take before the deadline, at most `most_s`."""
        return max(min(most_s, self._until - _FAREWELL_S - clock.monotonic()), 0.1)

    # --- this machine -----------------------------------------------------------------------------

    def check_driver(self) -> None:
        """Check the driver's Python, without Spark."""
        self._driver = collect_facts(-1, _PACKAGE)
        self._check("packages", findings.judge_driver_packages, self._driver)

    def check_without_spark(self, problem: str, fix: str) -> None:
        """Run the checks that need no session, and report the problem for which there is no session."""
        self._check("java", findings.judge_java_here)
        self.add(Finding("Spark", PROBLEM, problem, fix))
        self._check_limits([], self.num_proc or 1)
        if self.store is not None:
            self._check("storage", self._check_storage, None, [])

    def _check_limits(self, probes: Sequence[ConnectedProbe], slots: int) -> None:
        reports = {between_machines.DRIVER: self._driver, **{probe.name: probe.report for probe in probes}}
        self._check("limits", findings.judge_limits, reports, slots)

    # --- the cluster ------------------------------------------------------------------------------

    def check_cluster(self, spark: Any) -> None:
        """Check a session, and the executors that it has or gets."""
        try:
            cluster = cluster_of(check_spark(spark))
        except Exception as error:
            self.check_without_spark(str(error), "change the session as the line above says")
            return
        try:
            self._check("java", cluster.java)
            self._check("Spark", cluster.spark)
            self._check("task slots", self._check_slots, cluster)
            if self._probes_wanted > 0:
                self._run_probes(cluster, self._probes_wanted)
            else:
                self._check_limits([], self.num_proc or 1)
        finally:
            cluster.close()

    def _check_slots(self, cluster: Cluster) -> Finding:
        found, wanted = cluster.slots(self.num_proc, MOST_PROBES)
        self._probes_wanted = min(wanted, MOST_PROBES)
        return found

    def _run_probes(self, cluster: Cluster, wanted: int) -> None:
        bind, addresses = cluster.listen_at()
        key = new_key()
        driver_port = self.driver_port or session_ports(cluster.context, "driver_port")
        agent_ports = self.agent_ports or session_ports(cluster.context, "agent_ports")
        try:
            listening = ProbeServer(bind, key, driver_port)
        except (OSError, PortsTakenError) as error:
            fix = "jobs of this driver would fail in the same way; end the job that runs, or change driver_port"
            self.add(Finding("ports", PROBLEM, f"the driver cannot listen: {error}", fix))
            self._check_limits([], wanted)
            return
        with contextlib.closing(listening) as server:
            order = {
                "addresses": [(address, server.port) for address in addresses],
                "key": key,
                "seconds": self.timeout_s,
                "connect_s": min(5.0, self.timeout_s / 6),
                "agent_ports": tuple(agent_ports),
            }
            job = cluster.run_probes(wanted, probe_task(order, _PACKAGE))
            try:
                self._check_probes(cluster, server, job, wanted)
                reports = [probe.report for probe in server.probes]
                if reports:
                    self._check("ports", between_machines.judge_ports, reports, driver_port, agent_ports)
            finally:
                server.close()
                if not job.over.wait(max(min(_FAREWELL_S, self._until - clock.monotonic()), 0.1)):
                    start_thread(job.cancel, 1.0).join(2.0)  # on a thread: a hanging JVM does not answer
                connected = {probe.number for probe in server.probes}
                unconnected = [report for report in job.reports() if report["number"] not in connected]
                self._findings += between_machines.judge_executors_to_driver(unconnected, cluster)

    def _check_probes(self, cluster: Cluster, server: ProbeServer, job: ProbeJob, wanted: int) -> None:
        began = clock.monotonic()
        server.wait_for(wanted, self._left(self.timeout_s / 2), job.over)
        waited = clock.monotonic() - began
        probes = server.probes
        reports = [probe.report for probe in probes]
        first = {probe.report["executor"]: probe for probe in reversed(probes)}
        one_each = list(first.values())[::-1]
        """The first probe of each executor."""
        expected = cluster.executors()
        error = job.why_failed()
        ran_unconnected = job.over.is_set() and error is None and not probes
        if not ran_unconnected:  # the finding "executors → driver" names the probes that ran and did not connect
            self._check("executors", findings.judge_executors, reports, expected, wanted, waited, error)
        if not probes:
            self._check_limits([], wanted)
            return
        of_executors = [probe.report for probe in one_each]
        self._check("package on executors", findings.judge_executor_packages, self._driver, of_executors)
        self._check("executors → driver", between_machines.judge_executors_to_driver, reports, cluster)
        same_host = {report["hostname"] for report in of_executors} == {self._driver["hostname"]}
        self._check("driver → executors", between_machines.check_from_driver, one_each, same_host, self._left(5.0))
        self._check("executors ↔ executors", between_machines.check_executors, server, one_each, self._left(5.0))
        self._check("storage", self._check_storage, server, one_each)
        self._check("clocks", between_machines.check_clocks, one_each, self.wall, self._left(5.0))
        self._check("shared memory", between_machines.check_shared_memory, probes, self._left(5.0))
        self._check_limits(one_each, wanted)
        self._check_torch(cluster, server, one_each, reports)  # last, because it takes longest

    def _check_torch(
        self,
        cluster: Cluster,
        server: ProbeServer,
        one_each: Sequence[ConnectedProbe],
        reports: Sequence[ProbeReport],
    ) -> None:
        wait_s = self._left(60.0)
        questions = {
            probe: ("torch", {"gpus": probe.report["gpus"], "timeout_s": max(wait_s - 1.0, 0.1)})
            for probe in one_each
            if self.with_torch and "torch" in probe.report["packages"]
        }
        answers = {probe.name: answer for probe, answer in server.ask(questions, wait_s).items()}
        if answers:
            self._check("torch on executors", findings.judge_torch, answers)
        amount = cluster.setting("spark.task.resource.gpu.amount")
        self._check("GPUs", findings.judge_gpus, amount, reports, answers)

    def _check_storage(
        self, server: ProbeServer | None, probes: Sequence[ConnectedProbe]
    ) -> Finding | Sequence[Finding]:
        store = Store.create(self.store, self.storage_options)
        machines = {probe.machine for probe in probes}
        if self.store is None and len(machines) > 1:
            says = f"no store was named, and {len(machines)} machines do not share their temporary folders"
            fix = "name one here and in estimators, store=...: a mounted folder, s3://, gs://, abfss://, hdfs://, dbfs:"
            return Finding("storage", WARNING, says, fix)
        url = str(store.local_path()) if store.is_local else store.address
        return between_machines.check_storage(server, probes, url, self.storage_options, self._left(20.0))
