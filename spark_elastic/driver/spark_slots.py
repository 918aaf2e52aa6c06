"""How many tasks Spark can run at once, and where."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_elastic.driver.jvm import jvm_context

if TYPE_CHECKING:
    from pyspark import SparkContext

_UNBOUNDED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SlotCount:
    """Task slots of an application."""

    now: int
    """With the executors registered at this moment, busy or not; cores, spark.task.cpus and GPUs considered."""
    most: int | None
    """What dynamic allocation may grow to; the same as `now` without it; None: no bound is set."""
    executors: int
    """Executors registered now; 1 in local mode."""


def count_slots(sc: SparkContext) -> SlotCount:
    """Some milliseconds; nothing is run."""
    context = jvm_context(sc)
    profile = context.resourceProfileManager().defaultResourceProfile()
    now = int(context.maxNumConcurrentTasks(profile))
    executors = len(executor_ids(sc)) if not is_local(sc) else 1
    if not dynamic_allocation(sc):
        return SlotCount(now, now, executors)
    most_executors = int(sc.getConf().get("spark.dynamicAllocation.maxExecutors", str(_UNBOUNDED)) or _UNBOUNDED)
    if most_executors >= _UNBOUNDED:
        return SlotCount(now, None, executors)
    per_executor = int(profile.maxTasksPerExecutor(context.conf()))
    return SlotCount(now, max(most_executors * per_executor, now), executors)


def most_slots(sc: SparkContext) -> int | None:
    """How many slots there can ever be where that is fixed: in local mode and on `local-cluster`. None: not known."""
    context = jvm_context(sc)
    if is_local(sc):
        return count_slots(sc).now
    cluster = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", sc.master)
    if cluster is None or dynamic_allocation(sc):
        return None
    cores = int(cluster[2]) // int(context.conf().get("spark.task.cpus", "1"))
    return max(int(cluster[1]) * cores, count_slots(sc).now)


def hosts_and_slots(sc: SparkContext) -> dict[str, int]:
    """Slots by host, in Spark's order, without executors that are excluded or on their way out."""
    context = jvm_context(sc)
    if is_local(sc):
        return {"127.0.0.1": count_slots(sc).now}
    per_executor = int(context.resourceProfileManager().defaultResourceProfile().maxTasksPerExecutor(context.conf()))
    backend = context.schedulerBackend()
    summaries = context.statusStore().executorList(True)
    found: dict[str, int] = {}
    for index in range(summaries.size()):
        summary = summaries.apply(index)
        executor = str(summary.id())
        if executor == "driver" or summary.isExcluded() or not backend.isExecutorActive(executor):
            continue
        host = str(summary.hostPort() or "").rpartition(":")[0]
        if not host:  # registered this moment; its block manager, which brings the address, has not
            continue
        # maxTasks knows the cores that the executor really has; the profile knows its GPUs.
        found[host] = found.get(host, 0) + min(int(summary.maxTasks()), max(per_executor, 1))
    return found


def executor_ids(sc: SparkContext) -> list[str]:
    """Registered executors. Not for local mode, where Spark would log a warning at each call."""
    ids = jvm_context(sc).getExecutorIds()
    return [str(ids.apply(index)) for index in range(ids.size())]


def is_local(sc: SparkContext) -> bool:
    """Whether tasks run inside the driver's own JVM (`local[N]`, not `local-cluster`)."""
    return bool(jvm_context(sc).isLocal())


def dynamic_allocation(sc: SparkContext) -> bool:
    return sc.getConf().get("spark.dynamicAllocation.enabled", "false") == "true" and not is_local(sc)
