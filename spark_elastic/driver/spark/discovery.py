"""SparkHostDiscovery: the slots of a SparkContext. Waits for them, and places tasks together once to see where."""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle

from spark_elastic import clock
from spark_elastic.data.spark_connect import setting_of
from spark_elastic.data.spark_python import python_error_of, refuse_python, report_python
from spark_elastic.driver.spark import cluster
from spark_elastic.errors import JobCancelledError, NotEnoughSlotsError
from spark_elastic.membership.reasons import Wait, WaitKind, counted, wait_in_words
from spark_elastic.membership.topology import SlotReport

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)

_REFUSED = "SPARK-24942"
"""Spark's error condition for barrier mode under dynamic allocation."""
_POLL_S = 0.1
_CANCEL_S = 4.0
"""Time for the probe's job to end after it was cancelled."""
_REPORT_AFTER_S = 2.0
"""Shorter waits for free slots are not reported."""

OnWait = Callable[[Wait, float], None]
"""Called with a wait and its deadline on this process's monotonic clock."""


def _log_wait(wait: Wait, _until: float) -> None:
    log.info("%s", wait_in_words(wait))


@dataclass(frozen=True, slots=True)
class SlotProbe:
    """The outcome of the barrier probe."""

    reports: tuple[SlotReport, ...]
    """One for each task; empty if Spark refused barrier mode."""
    why: str = ""
    """The reason if Spark refused."""

    @property
    def refused(self) -> bool:
        return not self.reports


_probed: dict[str, tuple[frozenset[str], SlotProbe]] = {}
"""By application: the executors at its last probe, and what that has found. `probe` uses it again."""


class SparkHostDiscovery:
    """A `HostDiscovery` of a SparkContext's executors.

    `report_slot` runs in each task of the probe. It must be picklable by reference.
    """

    def __init__(self, sc: SparkContext, report_slot: Callable[[], SlotReport]) -> None:
        self._sc = sc
        self.report_slot = report_slot

    def slots(self) -> cluster.SlotCount:
        return cluster.count_slots(self._sc)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the slots of each host, in Spark's order, without executors that are excluded or decommissioned."""
        context = cluster.jvm_context(self._sc)
        if cluster.is_local(self._sc):
            return {"127.0.0.1": self.slots().now}
        profile = context.resourceProfileManager().defaultResourceProfile()
        per_executor = int(profile.maxTasksPerExecutor(context.conf()))
        backend = context.schedulerBackend()
        summaries = context.statusStore().executorList(True)
        found: dict[str, int] = {}
        for index in range(summaries.size()):
            summary = summaries.apply(index)
            executor = str(summary.id())
            if executor == "driver" or summary.isExcluded() or not backend.isExecutorActive(executor):
                continue
            host = str(summary.hostPort() or "").rpartition(":")[0]
            if not host:  # just registered: the address comes later, with its block manager
                continue
            # maxTasks is computed from the executor's actual cores, the profile's number from its GPUs as well.
            found[host] = found.get(host, 0) + min(int(summary.maxTasks()), max(per_executor, 1))
        return found

    def most_slots(self) -> int | None:
        """Return the number of slots that can never be exceeded (local mode, `local-cluster`); None if not known."""
        if cluster.is_local(self._sc):
            return self.slots().now
        sizes = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", self._sc.master)
        if sizes is None or cluster.dynamic_allocation(self._sc):
            return None
        cores = int(sizes[2]) // int(cluster.jvm_context(self._sc).conf().get("spark.task.cpus", "1"))
        return max(int(sizes[1]) * cores, self.slots().now)

    def slots_free(self) -> int:
        """Return the number of this application's slots in which no task runs now."""
        return max(0, self.slots().now - cluster.running_tasks(self._sc))

    def wait_for_slots(
        self, need: int, timeout_s: float, *, stop: threading.Event | None = None, on_wait: OnWait = _log_wait
    ) -> cluster.SlotCount:
        """Wait until `need` slots exist, busy or not. Calls `on_wait` when the reason of the wait changes.

        Returns at once under dynamic allocation: executors come only when jobs ask for them.

        Raises:
            NotEnoughSlotsError: After `timeout_s`; at once if the cluster can never have that many slots.
            JobCancelledError: `stop` was set.
        """
        start = clock.monotonic()
        stop = stop or threading.Event()
        too_few = functools.partial(NotEnoughSlotsError, need=need, setting="start_timeout")
        said: Wait | None = None
        most = self.most_slots()
        while True:
            count = self.slots()
            waited = clock.monotonic() - start
            if count.now >= need:
                return count
            if most is not None and most < need:
                raise too_few(have=most, waited_s=0.0, fixed=f"master {self._sc.master}")
            if cluster.dynamic_allocation(self._sc):
                if count.most is not None and count.most < need:
                    limit = "spark.dynamicAllocation.maxExecutors allows no more"
                    raise too_few(have=count.most, waited_s=waited, detail=limit)
                return count
            if waited >= timeout_s:
                raise too_few(have=count.now, waited_s=waited, detail=self._shape(count))
            wait = Wait(WaitKind.SLOTS, have=count.now, need=need, left_s=timeout_s)
            if wait != said:
                said = wait
                on_wait(wait, start + timeout_s)
            if stop.wait(min(_POLL_S, timeout_s - waited)):
                raise JobCancelledError("cancelled while waiting for slots")

    def probe(
        self, num_proc: int, timeout_s: float, *, stop: threading.Event | None = None, on_wait: OnWait = _log_wait
    ) -> SlotProbe:
        """Run `num_proc` tasks at the same time (a barrier job) and return the report of each.

        First waits until `num_proc` slots exist, because Spark says nothing for ten minutes about a barrier job that
        is too wide for the cluster; then until they are free at the same time. The reports of an earlier probe of this
        application are used again if the executors are the same and as many slots are free at this moment.

        Raises:
            NotEnoughSlotsError: After `timeout_s`.
            ExecutorPythonError: The executors run a Python in which workers cannot run.
            JobCancelledError: `stop` was set.
        """
        if cluster.dynamic_allocation(self._sc):
            return SlotProbe((), f"barrier mode is refused under dynamic allocation ([{_REFUSED}])")
        start = clock.monotonic()
        too_few = functools.partial(NotEnoughSlotsError, have=0, need=num_proc, setting="start_timeout")
        self.wait_for_slots(num_proc, timeout_s, stop=stop, on_wait=on_wait)
        application, executors = str(self._sc.applicationId), self._executors()
        known, found = _probed.get(application, (frozenset[str](), SlotProbe(())))
        if known == executors and len(found.reports) >= num_proc and self.slots_free() >= num_proc:
            return SlotProbe(found.reports[:num_proc])
        description = f"spark_elastic: discovery of {num_proc} slots"
        job = cluster.BackgroundJob(self._sc, num_proc, _reporting_task(self.report_slot), description, barrier=True)
        said = False
        while not job.over.wait(_POLL_S):
            waited = clock.monotonic() - start
            if waited >= _REPORT_AFTER_S and not said:
                said = True
                on_wait(Wait(WaitKind.FREE_SLOTS, need=num_proc, left_s=timeout_s), start + timeout_s)
            if stop is not None and stop.is_set():
                job.cancel(_CANCEL_S)
                raise JobCancelledError("cancelled while looking for slots")
            if waited > timeout_s:
                job.cancel(_CANCEL_S)
                detail = f"{self._shape(self.slots())}, but never {num_proc} free at the same time"
                raise too_few(waited_s=waited, detail=detail)
        if job.error is None:
            for python, _ in job.rows:
                refuse_python(python)
            _probed[application] = executors, SlotProbe(tuple(report for _, report in job.rows))
            return _probed[application][1]
        if (wrong_python := python_error_of(job.error, str(self._sc.pythonExec))) is not None:
            raise wrong_python
        reason = cluster.reason_of_error(job.error)
        if _REFUSED in str(job.error):
            return SlotProbe((), f"barrier mode is refused: {reason}")
        raise too_few(waited_s=clock.monotonic() - start, detail=reason)

    def _executors(self) -> frozenset[str]:
        return frozenset() if cluster.is_local(self._sc) else frozenset(cluster.executor_ids(self._sc))

    def _shape(self, count: cluster.SlotCount) -> str:
        cpus = setting_of(self._sc, "spark.task.cpus", "1")
        return f"{counted(count.executors, 'executor')} with {count.now} slots in all (spark.task.cpus={cpus})"


def _reporting_task(report_slot: Callable[[], SlotReport]) -> Callable[[Any], list[Any]]:
    """Return the function of the probe's tasks, which is pickled by value.

    A task returns `spark_python.report_python`'s answer, and the slot's report unless packages are missing.
    """
    look_at_python, pickled = report_python(), cloudpickle.dumps(report_slot)

    # No barrier() and no allGather(): each would take a second. No getTaskInfos(): its addresses are those that the
    # driver's sockets saw, and on local-cluster executors listen on others.
    def task(_rows: Any) -> list[Any]:
        import pickle

        python = look_at_python()
        return [(python, None if python[2] else pickle.loads(pickled)())]

    return task
