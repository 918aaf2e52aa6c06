"""Finds out what Spark can run: waits for slots, and places a gang of tasks once to see where they land."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from spark_elastic.driver.spark.executors import ExecutorWatch, OnExecutorEvent
from spark_elastic.errors import JobCancelledError, NotEnoughSlotsError
from spark_elastic.membership.reasons import Wait, WaitKind
from spark_elastic.membership.topology import SlotReport
from spark_elastic.membership.wording import wait_in_words

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)

_REFUSED = "SPARK-24942"  # barrier mode with dynamic allocation
_POLL_S = 0.1
_WORTH_A_WORD_S = 2.0

OnWait = Callable[[Wait, float], None]
"""Told what is waited for, and until when on this process's monotonic clock."""


def _log_wait(wait: Wait, _until: float) -> None:
    log.info("%s", wait_in_words(wait))


@dataclass(frozen=True, slots=True)
class Probe:
    """The barrier probe's outcome. `reports` is empty when Spark refuses barrier mode; `why` then says so."""

    reports: tuple[SlotReport, ...]
    took_s: float
    why: str

    @property
    def refused(self) -> bool:
        return not self.reports


class SparkHostDiscovery:
    """A `HostDiscovery` of a SparkContext's executors.

    Args:
        report_slot: picklable by reference; runs in each task of the probe.
    """

    def __init__(
        self, sc: SparkContext, report_slot: Callable[[], SlotReport], *, description: str = "spark_elastic"
    ) -> None:
        self._sc = sc
        self._report_slot = report_slot
        self._description = description

    def slots(self) -> SlotCount:
        return count_slots(self._sc)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return hosts_and_slots(self._sc)

    def most_slots(self) -> int | None:
        """How many there can ever be, where that is fixed; None: not known."""
        return most_slots(self._sc)

    def slots_free(self) -> int:
        """Slots in which no task runs now, of this application."""
        infos = jvm_context(self._sc).statusTracker().getExecutorInfos()
        return max(0, self.slots().now - sum(int(info.numRunningTasks()) for info in infos))

    def watch(self, on_event: OnExecutorEvent) -> ExecutorWatch:
        """Have executors that are decommissioned or lost reported from now on, until the watch is closed."""
        return ExecutorWatch(self._sc, on_event)

    def wait_for_slots(
        self,
        need: int,
        timeout_s: float,
        *,
        setting: str = "start_timeout",
        stop: threading.Event | None = None,
        on_wait: OnWait = _log_wait,
    ) -> SlotCount:
        """Block until `need` slots exist (they may be busy); says what it waits for when that changes.

        With dynamic allocation there is nothing to wait for: executors come once jobs ask for them.

        Raises:
            NotEnoughSlotsError: after `timeout_s`; at once if the cluster can never have so many.
            JobCancelledError: `stop` was set.
        """
        start = time.monotonic()
        said: Wait | None = None
        most = self.most_slots()
        while True:
            count = self.slots()
            waited = time.monotonic() - start
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
    ) -> Probe:
        """Place `num_proc` tasks together, or none, and let each report where it is.

        Needs `num_proc` slots that are free at the same time; first waits until they exist, because Spark is silent
        for ten minutes about a barrier job that is too wide for the cluster.

        Raises:
            NotEnoughSlotsError: not within `timeout_s`, with what there was.
            JobCancelledError: `stop` was set.
        """
        if dynamic_allocation(self._sc):
            return Probe((), 0.0, f"barrier mode is refused under dynamic allocation ([{_REFUSED}])")
        start = time.monotonic()
        self.wait_for_slots(num_proc, timeout_s, stop=stop, on_wait=on_wait)
        attempt = _Attempt(self._sc, self._report_slot, num_proc, f"{self._description}: discovery of {num_proc} slots")
        attempt.thread.start()
        said = False
        while not attempt.over.wait(_POLL_S):
            waited = time.monotonic() - start
            if waited >= _WORTH_A_WORD_S and not said:
                said = True
                on_wait(Wait(WaitKind.FREE_SLOTS, need=num_proc, left_s=timeout_s), start + timeout_s)
            cancelled = stop is not None and stop.is_set()
            if cancelled or waited > timeout_s:
                attempt.cancel()
                if cancelled:
                    raise JobCancelledError("cancelled while looking for slots")
                raise NotEnoughSlotsError(
                    have=0,
                    need=num_proc,
                    waited_s=waited,
                    setting="start_timeout",
                    detail=f"{self._shape(self.slots())}, but never {num_proc} free at the same time",
                )
        took = time.monotonic() - start
        if attempt.error is None:
            return Probe(tuple(attempt.reports), took, f"{num_proc} slots were placed together")
        reason = reason_of_error(attempt.error)
        if _REFUSED in str(attempt.error):
            return Probe((), took, f"barrier mode is refused: {reason}")
        raise NotEnoughSlotsError(have=0, need=num_proc, waited_s=took, setting="start_timeout", detail=reason)

    def _shape(self, count: SlotCount) -> str:
        cpus = self._sc.getConf().get("spark.task.cpus", "1")
        noun = "executor" if count.executors == 1 else "executors"
        return f"{count.executors} {noun} with {count.now} slots in all (spark.task.cpus={cpus})"


class _Attempt:
    """The barrier job, in its own thread and job group."""

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
        """End the job, also one that is only about to be submitted; waits for the thread, but not for ever."""
        self._cancelled = True
        until = time.monotonic() + 4.0
        while not self.over.is_set() and time.monotonic() < until:
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

        # Pickled by value. No barrier() or allGather(), each of which would cost a second, and no getTaskInfos(): its
        # addresses are what the driver's sockets saw, which on local-cluster is not what the executors listen on.
        def task(_rows: Any) -> Any:
            return [report_slot()]

        return task
