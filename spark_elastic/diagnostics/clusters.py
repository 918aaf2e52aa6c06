"""The cluster as the doctor sees it: through the JVM of a classic session, or through a Spark Connect server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from spark_elastic.data import spark_connect
from spark_elastic.data.spark_connect import Query, setting_of
from spark_elastic.data.spark_console import close_connection
from spark_elastic.data.spark_python import ON_CONNECT, python_error_of
from spark_elastic.diagnostics import findings
from spark_elastic.diagnostics.findings import OK, Finding
from spark_elastic.driver.connect.discovery import ConnectDiscovery
from spark_elastic.driver.connect.reachability import candidate_addresses
from spark_elastic.driver.spark import cluster
from spark_elastic.membership.reasons import loss_in_words
from spark_elastic.wire.interfaces import every_address, is_address, is_loopback, own_addresses, plain_address
from spark_elastic.wire.ports import with_port

if TYPE_CHECKING:
    from pyspark import SparkContext

ProbeTask = Callable[[Any], list[dict[str, Any]]]
_LOOPBACK = "127.0.0.1"


class ProbeJob(Protocol):
    """The Spark job of the probes."""

    over: threading.Event

    def reports(self) -> list[Any]:
        """Return the reports of all tasks; empty until all have ended."""
        ...

    def why_failed(self) -> str | None: ...

    def cancel(self, timeout_s: float) -> None: ...


class ClassicCluster:
    """The cluster of a SparkContext."""

    advice_on_address = (
        "set spark.driver.host to an address of the driver that executors reach, or open the driver's ports"
    )
    advice_on_one = "set spark.driver.host={}"
    tries_every_address = False
    """True if jobs use any of the driver's addresses that executors reach; False if they use the first one."""

    def __init__(self, context: SparkContext) -> None:
        self.context = context
        self._host = plain_address(self.setting("spark.driver.host") or _LOOPBACK)

    def setting(self, name: str) -> str | None:
        return setting_of(self.context, name)

    def java(self) -> Finding:
        jvm: Any = self.context._jvm
        version, home = (str(jvm.java.lang.System.getProperty(name)) for name in ("java.version", "java.home"))
        return findings.java_found(home, version)

    def spark(self) -> Finding:
        sc = self.context
        facts = {"version": sc.version, "master": sc.master, "application": sc.applicationId}
        return Finding("Spark", OK, f"Spark {sc.version} on {sc.master}, application {sc.applicationId}", facts=facts)

    def slots(self, num_proc: int | None, most_probes: int) -> tuple[Finding, int]:
        """Return the finding on the slots, and the number of tasks that fit into them."""
        slots = cluster.count_slots(self.context)
        dynamic = cluster.dynamic_allocation(self.context)
        wanted = slots.now
        if dynamic:  # executors come once tasks ask for them
            wanted = max(wanted, min(num_proc or 2, slots.most or most_probes))
        task_cpus = self.setting("spark.task.cpus") or "1"
        busy = self._busy()
        return findings.judge_slots(slots, num_proc, busy=busy, dynamic=dynamic, task_cpus=task_cpus), wanted

    def listen_at(self) -> tuple[str, list[str]]:
        """Return the address to bind to, and those at which probes try to reach it: first that of jobs."""
        on_this_machine = is_address(self._host) and is_loopback(self._host)
        other = [] if on_this_machine else [a for a in own_addresses() if not is_loopback(a)]
        return self._host if on_this_machine else every_address(), list(dict.fromkeys([self._host, *other]))

    def run_probes(self, width: int, task: ProbeTask) -> ProbeJob:
        return _ClassicProbes(self.context, width, task)

    def executors(self) -> list[str]:
        """Return the executors that are registered now; none if they are not known."""
        return [] if cluster.is_local(self.context) else cluster.executor_ids(self.context)

    def close(self) -> None:
        close_connection(self.context)

    def _busy(self) -> int:
        """Count the tasks that run now."""
        tracker = self.context.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        return sum(stage.numActiveTasks for stage in stages if stage is not None)


class _ClassicProbes(cluster.BackgroundJob):
    def __init__(self, context: SparkContext, width: int, task: ProbeTask) -> None:
        super().__init__(context, width, task, "spark_elastic doctor")

    def reports(self) -> list[Any]:
        return self.rows

    def why_failed(self) -> str | None:
        return None if self.error is None else cluster.reason_of_error(self.error)


class ConnectCluster:
    """The cluster behind a Spark Connect session. There is no JVM here, so less of it can be seen."""

    advice_on_address = (
        "let executors reach this machine (firewall, VPN), name an address that they reach (driver_host=), or run the "
        "program near the cluster; or open the driver's ports"
    )
    advice_on_one = "set driver_host={}"
    tries_every_address = True

    def __init__(self, session: Any) -> None:
        self.context = session
        self._discovery = ConnectDiscovery(session)

    def setting(self, name: str) -> str | None:
        return setting_of(self.context, name)

    def java(self) -> Finding:
        return Finding("java", OK, "the JVM is the Spark Connect server's; it is not seen from here")

    def spark(self) -> Finding:
        session, master = self.context, self._discovery.master
        server = with_port(*spark_connect.server_of(session))
        application = spark_connect.application_of(session)
        facts = {"version": session.version, "master": master, "application": application, "server": server}
        says = f"Spark {session.version} on {master} through Spark Connect at {server}, application {application}"
        unseen = "which slots are busy, and executors that run no task of the doctor, are not seen from here"
        return Finding("Spark", OK, f"{says}; {unseen}", facts=facts)

    def slots(self, num_proc: int | None, most_probes: int) -> tuple[Finding, int]:
        now, dynamic = self._discovery.slots(), self._discovery.allocates_dynamically()
        task_cpus = self.setting("spark.task.cpus") or "1"
        wanted = max(now or 0, num_proc or 2) if dynamic or now is None else now
        return findings.judge_slots_on_connect(now, num_proc, dynamic=dynamic, task_cpus=task_cpus), wanted

    def listen_at(self) -> tuple[str, list[str]]:
        if spark_connect.runs_locally(self.context):
            return _LOOPBACK, [_LOOPBACK]
        return every_address(), list(candidate_addresses(spark_connect.server_of(self.context)[0]))

    def run_probes(self, width: int, task: ProbeTask) -> ProbeJob:
        return _ConnectProbes(self.context, width, task)

    def executors(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


class _ConnectProbes:
    def __init__(self, session: Any, width: int, task: ProbeTask) -> None:
        body = _arrow_task(task)
        self._query = Query(
            session,
            lambda spark: list(spark.range(0, width, 1, width).mapInArrow(body, "report string").collect()),
            name="spark_elastic doctor",
        )
        self.over = self._query.over

    def reports(self) -> list[Any]:
        return [json.loads(row.report) for row in self._query.rows]

    def why_failed(self) -> str | None:
        error = self._query.error
        if error is None:
            return None
        wrong_python = python_error_of(error, ON_CONNECT, on_connect=True)
        return str(wrong_python) if wrong_python else loss_in_words(cluster.loss_of(str(error)))

    def cancel(self, timeout_s: float) -> None:
        self._query.cancel(timeout_s)


def _arrow_task(task: ProbeTask) -> Callable[[Any], Any]:
    """Return `task` for `mapInArrow`; pickled by value, because executors may lack this package."""

    def run(batches: Any) -> Any:
        import json

        import pyarrow as pa

        numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
        reports = [json.dumps(report) for report in task(iter(numbers))]
        yield pa.RecordBatch.from_pydict({"report": reports})

    return run


Cluster = ClassicCluster | ConnectCluster


def cluster_of(context: Any) -> Cluster:
    """Return the cluster of a SparkContext or of a session of Spark Connect."""
    return ConnectCluster(context) if spark_connect.is_connect(context) else ClassicCluster(context)
