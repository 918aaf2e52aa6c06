"""The probes as a Spark job: one task for each slot, all of them up at the same time."""

from __future__ import annotations

import inspect
import threading
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spark_elastic.checkup import line, probe
from spark_elastic.driver.jvm import close_connection, jvm_context, reason_of_error
from spark_elastic.task import executor_process
from spark_elastic.wire import interfaces

if TYPE_CHECKING:
    from pyspark import SparkContext

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
