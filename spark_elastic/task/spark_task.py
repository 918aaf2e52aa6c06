"""Where a Spark task runs and what it may use: asked inside the task's own Python process."""

from __future__ import annotations

import socket
import sys

from spark_elastic.core.slot_report import SlotReport
from spark_elastic.task.executor_process import LOCAL_EXECUTOR, executor_id_in_task, host_name_in_task
from spark_elastic.wire.interfaces import address_of, interface_addresses


def slot_report() -> SlotReport:
    """The executor, host, interfaces, cores and accelerators of the task that this process runs."""
    return SlotReport(
        host=host_in_task(),
        executor=executor_id_in_task(),
        addresses=interface_addresses(),
        cores=cores_in_task(),
        accelerators=accelerators_in_task(),
        python=sys.version.split()[0],
    )


def host_in_task() -> str:
    """The machine, as an IPv4 address where its name can be resolved; 127.0.0.1 in local mode."""
    if executor_id_in_task() == LOCAL_EXECUTOR:
        return "127.0.0.1"
    return address_of(host_name_in_task() or socket.gethostname())


def cores_in_task() -> int:
    """Cores that Spark set aside for the task; 1 outside of a task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return max(int(context.cpus()), 1) if context is not None else 1


def accelerators_in_task() -> tuple[str, ...]:
    """Addresses of the GPUs that Spark gave to the task; empty without `spark.task.resource.gpu.amount`."""
    from pyspark import TaskContext

    context = TaskContext.get()
    gpus = context.resources().get("gpu") if context is not None else None
    return tuple(str(address) for address in gpus.addresses) if gpus is not None else ()
