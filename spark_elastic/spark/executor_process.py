"""Facts about the Spark task that this process runs: its executor, host, cores, GPUs and ways to the driver.

PySpark's TaskContext knows neither the executor's id nor its address. Both are in the command line of the executor's
JVM, an ancestor of this process: `... CoarseGrainedExecutorBackend --executor-id 3 --hostname 10.0.0.7 ...`, on
standalone, YARN and Kubernetes alike.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spark_elastic.membership.topology import Reach, SlotReport
from spark_elastic.wire.interfaces import THIS_MACHINE, address_of, interface_addresses

REACH_TIMEOUT_S = 2.0
"""Time for a connection to one address of the driver; a task tries all of them at once."""
LOCAL_EXECUTOR = "driver"
_LOG_URL = re.compile(r"[?&]executorId=([^&]+)")


def slot_report() -> SlotReport:
    """Describe the slot that this process occupies: executor, host, interfaces, cores and GPUs.

    The host is the machine's address if its name can be resolved; 127.0.0.1 in local mode.
    """
    _, command = nearest_jvm()
    executor = executor_id_of(command, os.environ)
    name = _option(command or (), "--hostname") or socket.gethostname()
    return SlotReport(
        host=THIS_MACHINE if executor == LOCAL_EXECUTOR else address_of(name),
        executor=executor,
        addresses=interface_addresses(),
        cores=cores_in_task(),
        accelerators=accelerators_in_task(),
    )


def look_at_slot(addresses: Sequence[tuple[str, int]] = (), key: bytes = b"") -> tuple[SlotReport, Reach]:
    """Describe this slot, and at which addresses of the driver it has reached the driver itself.

    Tries all addresses at the same time, for `REACH_TIMEOUT_S`.
    """
    report = slot_report()
    reached: list[str] = []
    failed: dict[str, str] = {}

    def attempt(host: str, port: int) -> None:
        from spark_elastic.wire.channel import connect

        try:
            connect([(host, port)], key, timeout_s=REACH_TIMEOUT_S).close()
            reached.append(host)
        except Exception as error:
            failed[host] = str(error).partition(f"{host}:{port}: ")[2] or str(error)

    threads = [
        threading.Thread(target=attempt, args=address, name="spark_elastic reach", daemon=True) for address in addresses
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * REACH_TIMEOUT_S)
    return report, Reach(report.host, tuple(reached), failed)


def cores_in_task() -> int:
    """Return the number of cores that Spark set aside for the task; 1 outside of a task."""
    context = _task_context()
    return max(int(context.cpus()), 1) if context is not None else 1


def accelerators_in_task() -> tuple[str, ...]:
    """Return the addresses of the task's GPUs; empty without `spark.task.resource.gpu.amount`."""
    context = _task_context()
    gpus = context.resources().get("gpu") if context is not None else None
    return tuple(str(address) for address in gpus.addresses) if gpus is not None else ()


def executor_id_of(jvm_command: Sequence[str] | None, environment: Mapping[str, str]) -> str:
    """Return the executor id in the command line of a task's JVM; "driver" in local mode and outside of tasks.

    Without a command line (None: it could not be read) the environment may have it: Kubernetes sets the id itself,
    standalone clusters the address of the executor's log page.
    """
    if jvm_command is not None:
        return _option(jvm_command, "--executor-id") or LOCAL_EXECUTOR
    if given := environment.get("SPARK_EXECUTOR_ID"):
        return given
    url = _LOG_URL.search(environment.get("SPARK_LOG_URL_STDOUT", ""))
    return url.group(1) if url else LOCAL_EXECUTOR


def _task_context() -> Any:
    try:
        from pyspark import TaskContext
    except ImportError:
        return None
    return TaskContext.get()


def _option(command: Sequence[str], name: str) -> str | None:
    return next((value for word, value in itertools.pairwise(command) if word == name), None)


def nearest_jvm() -> tuple[int, list[str]] | tuple[None, None]:
    """Return process id and command line of the executor's JVM (in local mode the driver's); None if it is not visible.

    It is the nearest one above this process.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # another system than Linux, or another user's process
            break
        if Path(command[0]).name == "java":
            return pid, command[:-1]
        pid = int(stat.rpartition(")")[2].split()[1])
    return None, None
