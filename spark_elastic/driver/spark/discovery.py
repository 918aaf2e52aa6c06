"""SparkHostDiscovery: the slots of a SparkContext. Waits for them, and places tasks together once to see where."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_elastic import clock
from spark_elastic.driver.spark.cluster import (
    SlotCount,
    close_connection,
    count_slots,
    dynamic_allocation,
    hosts_and_slots,
    jvm_context,
    most_slots,
    reason_of_error,
)
from spark_elastic.errors import JobCancelledError, NotEnoughSlotsError
from spark_elastic.membership.reasons import Wait, WaitKind, wait_in_words
from spark_elastic.membership.topology import SlotReport

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)

_REFUSED = "SPARK-24942"
"""Spark's error condition for barrier mode under dynamic allocation."""
_POLL_S = 0.1
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
    why: str
    """The outcome in words; the reason if Spark refused."""

    @property
    def refused(self) -> bool:
        return not self.reports


class SparkHostDiscovery:
    """A `HostDiscovery` of a SparkContext's executors.

    Args:
        sc: The SparkContext.
        report_slot: Function that runs in each task of the probe. It must be picklable by reference.
    """

    def __init__(self, sc: SparkContext, report_slot: Callable[[], SlotReport]) -> None:
        self._sc = sc
        self._report_slot = report_slot

    def slots(self) -> SlotCount:
        return count_slots(self._sc)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return hosts_and_slots(self._sc)

    def most_slots(self) -> int | None:
        """Return the number of slots that can never be exceeded, or None if it is not known."""
        return most_slots(self._sc)

    def slots_free(self) -> int:
        """Return the number of this application's slots in which no task runs now."""
        infos = jvm_context(self._sc).statusTracker().getExecutorInfos()
        return max(0, self.slots().now - sum(int(info.numRunningTasks()) for info in infos))

    def wait_for_slots(
        self,
        need: int,
        timeout_s: float,
        *,
        setting: str = "start_timeout",
        stop: threading.Event | None = None,
        on_wait: OnWait = _log_wait,
    ) -> SlotCount:
        """Wait until `need` slots exist, busy or not.

        Returns at once under dynamic allocation: executors come only when jobs ask for them.

        Args:
            need: The number of slots.
            timeout_s: The longest wait.
            setting: The setting that `timeout_s` comes from, for the error.
            stop: Ends the wait when it is set.
            on_wait: Called when the reason of the wait changes.

        Raises:
            NotEnoughSlotsError: After `timeout_s`; at once if the cluster can never have that many slots.
            JobCancelledError: `stop` was set.
        """
        start = clock.monotonic()
        said: Wait | None = None
        most = self.most_slots()
        while True:
            count = self.slots()
            waited = clock.monotonic() - start
            if count.now >= need:
                return count
            if most is not None and most < need:
                raise NotEnoughSlotsError(
                    have=most, need=need, waited_s=0.0, setting=setting, fixed=f"master {self._sc.master}"
                )
            if dynamic_allocation(self._sc):
                if count.most is not None and count.most < need:
                    detail = "spark.dynamicAllocation.maxExecutors allows no more"
                    raise NotEnoughSlotsError(
                        have=count.most, need=need, waited_s=waited, setting=setting, detail=detail
                    )
                return count
            if waited >= timeout_s:
                raise NotEnoughSlotsError(
                    have=count.now, need=need, waited_s=waited, setting=setting, detail=self._shape(count)
                )
            wait = Wait(WaitKind.SLOTS, have=count.now, need=need, left_s=timeout_s)
            if wait != said:
                said = wait
                on_wait(wait, start + timeout_s)
            if (stop or threading.Event()).wait(min(_POLL_S, timeout_s - waited)):
                raise JobCancelledError("cancelled while waiting for slots")

    def probe(
        self,
        num_proc: int,
        timeout_s: float,
        *,
        stop: threading.Event | None = None,
        on_wait: OnWait = _log_wait,
    ) -> SlotProbe:
        """Run `num_proc` tasks at the same time (a barrier job) and return the report of each.

        First waits until `num_proc` slots exist, because Spark says nothing for ten minutes about a barrier job that
        is too wide for the cluster; then until they are free at the same time.

        Args:
            num_proc: The number of tasks.
            timeout_s: The longest wait.
            stop: Ends the wait when it is set.
            on_wait: Called with the reason of the wait.

        Raises:
            NotEnoughSlotsError: After `timeout_s`.
            JobCancelledError: `stop` was set.
        """
        if dynamic_allocation(self._sc):
            return SlotProbe((), f"barrier mode is refused under dynamic allocation ([{_REFUSED}])")
        start = clock.monotonic()
        self.wait_for_slots(num_proc, timeout_s, stop=stop, on_wait=on_wait)
        job = _BarrierJob(self._sc, self._report_slot, num_proc, f"spark_elastic: discovery of {num_proc} slots")
        job.thread.start()
        said = False
        while not job.over.wait(_POLL_S):
            waited = clock.monotonic() - start
            if waited >= _REPORT_AFTER_S and not said:
                said = True
                on_wait(Wait(WaitKind.FREE_SLOTS, need=num_proc, left_s=timeout_s), start + timeout_s)
            cancelled = stop is not None and stop.is_set()
            if cancelled or waited > timeout_s:
                job.cancel()
                if cancelled:
                    raise JobCancelledError("cancelled while looking for slots")
                raise NotEnoughSlotsError(
                    have=0,
                    need=num_proc,
                    waited_s=waited,
                    setting="start_timeout",
                    detail=f"{self._shape(self.slots())}, but never {num_proc} free at the same time",
                )
        if job.error is None:
            return SlotProbe(tuple(job.reports), f"{num_proc} slots were placed together")
        reason = reason_of_error(job.error)
        if _REFUSED in str(job.error):
            return SlotProbe((), f"barrier mode is refused: {reason}")
        waited = clock.monotonic() - start
        raise NotEnoughSlotsError(have=0, need=num_proc, waited_s=waited, setting="start_timeout", detail=reason)

    def _shape(self, count: SlotCount) -> str:
        cpus = self._sc.getConf().get("spark.task.cpus", "1")
        noun = "executor" if count.executors == 1 else "executors"
        return f"{count.executors} {noun} with {count.now} slots in all (spark.task.cpus={cpus})"


class _BarrierJob:
    """The job of the probe, in its own thread and job group."""

    def __init__(self, sc: SparkContext, report_slot: Callable[[], SlotReport], width: int, description: str) -> None:
        self._sc = sc
        self._report_slot = report_slot
        self._width = width
        self._description = description
        self._group = f"spark_elastic-probe-{uuid.uuid4().hex[:12]}"
        self._properties: Any = jvm_context(sc).getLocalProperties().clone()
        self._cancelled = False
        self.reports: list[SlotReport] = []
        self.error: Exception | None = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="spark_elastic discovery", daemon=True)

    def cancel(self) -> None:
        """End the job, also if it is not submitted yet, and wait up to 4 s for its thread."""
        self._cancelled = True
        until = clock.monotonic() + 4.0
        while not self.over.is_set() and clock.monotonic() < until:
            jvm_context(self._sc).cancelJobGroup(self._group)
            self.over.wait(_POLL_S)

    def _run(self) -> None:
        try:
            jvm_context(self._sc).setLocalProperties(self._properties.clone())
            self._sc.setJobGroup(self._group, self._description)
            rows = self._sc.parallelize(range(self._width), self._width).barrier().mapPartitions(self._task())
            if not self._cancelled:
                self.reports = rows.collect()
        except Exception as error:
            self.error = error
        finally:
            close_connection(self._sc)
            self.over.set()

    def _task(self) -> Callable[[Any], Any]:
        report_slot = self._report_slot

        # Pickled by value. No barrier() and no allGather(): each would take a second. No getTaskInfos(): its addresses
        # are those that the driver's sockets saw, and on local-cluster executors listen on others.
        def task(_rows: Any) -> Any:
            return [report_slot()]

        return task
