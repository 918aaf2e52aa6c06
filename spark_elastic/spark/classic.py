"""ClassicCluster: the cluster behind a SparkContext, whose scheduler is in a JVM of this machine."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from spark_elastic.errors import InvalidSettingsError, NoSparkContextError
from spark_elastic.membership.launcher import Launcher, OnEnded
from spark_elastic.membership.reasons import counted
from spark_elastic.redaction import first_line
from spark_elastic.spark import jvm
from spark_elastic.spark.agent_task import AgentEntry
from spark_elastic.spark.cluster import Cluster, SlotCount, TaskRun
from spark_elastic.spark.console import bar_hidden, quiet_log, shown
from spark_elastic.spark.executor_python import NEEDED, NEEDED_FOR_ROWS
from spark_elastic.spark.executors import ExecutorWatch
from spark_elastic.spark.failures import not_allowed, refused_call
from spark_elastic.spark.launcher import SparkLauncher
from spark_elastic.wire.interfaces import plain_address
from spark_elastic.wire.messages import LaunchSpec

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)

LARGE_FUNCTION_BYTES = 128 * 1024
"""Functions from this size on are sent in one broadcast for all slots."""
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]")
_IN_PLACES = ("Sort [", "InMemoryTableScan")
"""Parts of plans after which partitions have an order and a place."""
_PLACES_ASKED = 16


class ClassicCluster(Cluster):
    """The cluster of a SparkContext."""

    remote = False
    needed = NEEDED_FOR_ROWS
    needed_by_workers = NEEDED

    context: SparkContext
    _profile: Any = None

    # --- the session ------------------------------------------------------------------------------

    def check(self) -> None:
        from py4j.clientserver import ClientServer

        if self.context._jsc is None:
            raise NoSparkContextError("the SparkContext was stopped; create a new one")
        # Without pinned threads a job group that is set in one thread may apply to another thread's job: stopping one
        # slot would stop another one, or none.
        if not isinstance(self.context._gateway, ClientServer):
            raise InvalidSettingsError(
                "PYSPARK_PIN_THREAD=false is not supported; unset it and start the session again"
            )
        self._check_calls()
        self.check_speculation()
        if self.is_local:
            self.check_executors(self.needed_by_workers)

    def _check_calls(self) -> None:
        """Raise NoSparkContextError where Python may not call what no job can do without."""
        try:
            context = jvm.jvm_context(self.context)
            context.setLocalProperties(context.getLocalProperties())
        except Exception as error:
            if (method := refused_call(error)) is None:
                raise
            raise NoSparkContextError(not_allowed(method)) from None

    def setting(self, name: str, default: str | None = None) -> str | None:
        return jvm.setting_of(self.context, name, default)

    @property
    def application(self) -> str:
        return str(self.context.applicationId)

    id = application

    @property
    def master(self) -> str:
        return str(self.context.master)

    @property
    def is_local(self) -> bool:
        return jvm.is_local_master(self.master)

    @property
    def python(self) -> str:
        return str(self.context.pythonExec)

    def java(self) -> tuple[str, str] | None:
        system: Any = self.context._jvm
        version, home = (str(system.java.lang.System.getProperty(name)) for name in ("java.version", "java.home"))
        return version, home

    def leave_thread(self) -> None:
        jvm.close_connection(self.context)

    # --- data -------------------------------------------------------------------------------------

    def send(self, data: bytes) -> Any:
        return self.context.broadcast(data)

    def partitions(self, df: Any) -> tuple[int, int] | None:
        # Spark joins partitions that are near one another, and so those whose place it knows in another order than
        # their own: sorted rows and cached ones keep their partitions.
        try:
            query = df._jdf.queryExecution()
            plan = query.executedPlan()
            if plan.getClass().getSimpleName() == "AdaptiveSparkPlanExec":  # to ask for its RDD would run its shuffles
                plan = plan.initialPlan()
                partitions = int(plan.outputPartitioning().numPartitions())
                placed = any(node in str(plan.toString()) for node in _IN_PLACES)
            else:
                rdd = query.toRdd()
                partitions = int(rdd.getNumPartitions())
                some = range(0, partitions, max(1, partitions // _PLACES_ASKED))
                context = jvm.jvm_context(self.context)
                placed = any(context.getPreferredLocs(rdd, each).nonEmpty() for each in some)
            return None if placed else (partitions, int(self.context.defaultParallelism))
        except Exception as error:  # of py4j: the plan is no public interface
            log.debug("the partitions of the query could not be counted: %s", error)
            return None

    # --- tasks ------------------------------------------------------------------------------------

    def _rows_of_tasks(self, task: Callable[[Any], Any], width: int | None, barrier: bool) -> list[Any]:
        count = int(self.context.defaultParallelism) if width is None else width
        rows: Any = self.context.parallelize(range(count), count)
        if width is not None and self._profile is not None:  # they look at what a worker gets
            rows.withResources(self._profile)
        found: list[Any] = (rows.barrier() if barrier else rows).mapPartitions(task).collect()
        return found

    def tagging(self, tag: str, name: str) -> Callable[[], None]:
        java = jvm.jvm_context(self.context)
        properties = java.getLocalProperties().clone()

        def tag_thread() -> None:
            java.setLocalProperties(properties)
            self.context.addJobTag(tag)
            for about in ("spark.job.description", "callSite.short"):  # of the job and its stages in Spark's UI
                self.context.setLocalProperty(about, name)

        return tag_thread

    def cancel_tagged(self, tag: str) -> None:
        self.context.cancelJobsWithTag(tag)

    # --- slots ------------------------------------------------------------------------------------

    def take_resources(self, given: Mapping[str, float] | None, gpu_each: bool) -> None:
        self._profile, self.resources = None, {}
        shared = int(float(self.setting("spark.task.resource.gpu.amount", "0") or 0)) if gpu_each else 0
        wanted = dict(given or {"gpu": 1, "cpus": max(self._task_cpus // max(shared, 1), 1)})
        if given is None and (shared < 2 or self.is_local):
            return
        if self.is_local:
            raise InvalidSettingsError(
                f"resources={wanted}: a local master gives tasks no resources; leave it out, and set spark.task.cpus"
            )
        try:
            self._profile = jvm.task_profile(self.context, wanted, self.allocates_dynamically())
        except Exception as error:  # Spark's, in Java
            method, java = refused_call(error), getattr(error, "java_exception", None)
            why = not_allowed(method) if method else first_line((java and java.getMessage()) or error)
            if given is not None:
                raise InvalidSettingsError(f"resources={wanted}: {why}") from None
            log.info("workers get the session's %d GPUs each: %s", shared, why)
            return
        self.resources = wanted

    @property
    def _task_cpus(self) -> int:
        return int(self.resources.get("cpus") or self.setting("spark.task.cpus", "1") or 1)

    def count_slots(self) -> SlotCount:
        """Asks the scheduler, which takes milliseconds."""
        context = jvm.jvm_context(self.context)
        now = jvm.slots_now(self.context, self._profile)
        known = None if self.is_local else jvm.executor_ids(self.context)
        executors = "executors" if known is None else counted(len(known), "executor")
        slots = "an unknown number of" if now is None else now
        a_task = f"resources={self.resources}" if self.resources else f"spark.task.cpus={self._task_cpus}"
        where = f"{'1 executor' if self.is_local else executors} with {slots} slots in all ({a_task})"
        if not self.allocates_dynamically():
            return SlotCount(now, now, where)
        most_executors = self.setting("spark.dynamicAllocation.maxExecutors")
        if most_executors is None:
            return SlotCount(now, None, where)
        per_executor = jvm.if_allowed(lambda: self._slots_per_executor(context), None)
        if per_executor is None:
            return SlotCount(now, None, where)
        return SlotCount(now, max(int(most_executors) * per_executor, now or 0), where)

    def _slots_per_executor(self, context: Any) -> int | None:
        """Return the slots of a new executor; None if it has all the cores of its machine."""
        profile = jvm.java_profile(context, self._profile)
        slots = int(profile.maxTasksPerExecutor(context.conf()))
        return slots if profile.isCoresLimitKnown() else None

    def fixed_slots(self) -> int | None:
        now = jvm.slots_now(self.context, self._profile)
        if self.is_local or now is None:
            return now
        sizes = _LOCAL_CLUSTER.fullmatch(self.master)
        if sizes is None or self.allocates_dynamically():
            return None
        return max(int(sizes[1]) * (int(sizes[2]) // self._task_cpus), now)

    def slots_free(self) -> int | None:
        scheduler = jvm.jvm_context(self.context).taskScheduler
        running = jvm.if_allowed(lambda: str(scheduler().runningTasksByExecutors().values().mkString(" ")), None)
        now = jvm.slots_now(self.context, self._profile)
        return None if running is None or now is None else max(0, now - sum(map(int, running.split())))

    def executors(self) -> frozenset[str] | None:
        ids = [] if self.is_local else jvm.executor_ids(self.context)
        return None if ids is None else frozenset(ids)

    # --- a job ------------------------------------------------------------------------------------

    def listen_at(self) -> tuple[str, tuple[str, ...]]:
        """Both are those of Spark's own driver endpoint, which executors reach in any case."""
        host = self.setting("spark.driver.host") or "127.0.0.1"
        return plain_address(self.setting("spark.driver.bindAddress") or host), (plain_address(host),)

    def _launchers(self, spec: LaunchSpec, agent: AgentEntry) -> Callable[[OnEnded], Launcher]:
        # PySpark writes a task of more than 1 MiB to a file, where the key must not be. So the function is sent apart.
        function = spec.function if len(spec.function) > LARGE_FUNCTION_BYTES else None
        payload = pickle.dumps(spec if function is None else dataclasses.replace(spec, function=b""))
        return lambda ended: SparkLauncher(
            self.context,
            agent,
            lambda slot: payload,
            ended,
            shared=function,
            description=f"spark_elastic job {spec.job}",
            profile=self._profile,
        )

    def sources(self) -> list[ExecutorWatch]:
        return [ExecutorWatch(self.context)]

    def console(self, verbose: int, run: TaskRun | None = None, title: str = "") -> AbstractContextManager[None]:
        if not verbose:
            return nullcontext()
        quiet_log(self.context)
        return bar_hidden(self.context) if run is None else shown(self.context, run, title)
