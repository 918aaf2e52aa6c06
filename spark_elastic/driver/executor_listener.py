"""What Spark's listener bus tells of executors, as Python values.

No Python code runs in Spark's listener: a Python callback would need Py4J's callback server and leave a thread and a
socket behind in both processes each time it is removed, and every event of every job would cross into Python.
Instead the JDK's own `java.beans.EventHandler` implements the listener inside the JVM and puts the few events that
matter on a JVM queue, which is read from here (docs/decisions/executor-listener.md).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_elastic.driver.jvm import jvm_context

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)

_INTERFACE = "org.apache.spark.scheduler.SparkListenerInterface"
_METHODS = ("onExecutorAdded", "onExecutorRemoved", "onExecutorExcluded", "onExecutorUnexcluded")
# A queue of its own, so that nobody else's listener waits for ours, nor ours for theirs.
_BUS_QUEUE = "spark_elastic"


@dataclass(frozen=True, slots=True)
class ExecutorAdded:
    executor: str
    host: str
    cores: int


@dataclass(frozen=True, slots=True)
class ExecutorRemoved:
    executor: str
    why: str


@dataclass(frozen=True, slots=True)
class ExecutorExcluded:
    """Spark will place no task there for a while (spark.excludeOnFailure.*)."""

    executor: str


@dataclass(frozen=True, slots=True)
class ExecutorUnexcluded:
    executor: str


ExecutorFact = ExecutorAdded | ExecutorRemoved | ExecutorExcluded | ExecutorUnexcluded


class ExecutorListener:
    """Registered from its construction until `close`. One thread polls; any thread closes.

    Raises:
        py4j.protocol.Py4JError: the JVM has no java.beans (a JRE cut down by jlink).
    """

    def __init__(self, sc: SparkContext) -> None:
        jvm: Any = sc._jvm
        self._bus = jvm_context(sc).listenerBus()
        self._events = jvm.java.util.concurrent.LinkedBlockingQueue()
        self._milliseconds = jvm.java.util.concurrent.TimeUnit.MILLISECONDS
        interface = jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass(_INTERFACE)
        # "add" with "" as property: the queue gets the event itself.
        create = jvm.java.beans.EventHandler.create
        self._listeners = [create(interface, self._events, "add", "", method) for method in _METHODS]
        self._removed: set[str] = set()
        for listener in self._listeners:
            self._bus.addToQueue(listener, _BUS_QUEUE)

    def poll(self, timeout_s: float) -> ExecutorFact | None:
        """The next fact, waiting up to `timeout_s` for one; None if there was none. Ends early on `wake`."""
        event = self._events.poll(int(timeout_s * 1000), self._milliseconds)
        return None if event is None or isinstance(event, str) else self._fact(event)

    def wake(self) -> None:
        """Let a `poll` that waits in another thread return at once."""
        self._events.add("wake")

    def close(self) -> None:
        """Off the bus, and with that its queue and thread in the JVM. Repeats are harmless."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            try:
                self._bus.removeListener(listener)
            except Exception as error:  # the context is stopped, and the bus with it
                log.debug("the executor listener went with its SparkContext: %s", error)

    def _fact(self, event: Any) -> ExecutorFact | None:
        kind = event.getClass().getSimpleName()
        executor = str(event.executorId())
        if kind == "SparkListenerExecutorAdded":
            self._removed.discard(executor)
            return ExecutorAdded(executor, str(event.executorInfo().executorHost()), event.executorInfo().totalCores())
        if kind == "SparkListenerExecutorRemoved":
            if executor in self._removed:  # Spark may post it twice
                return None
            self._removed.add(executor)
            return ExecutorRemoved(executor, str(event.reason()))
        if kind == "SparkListenerExecutorExcluded":
            return ExecutorExcluded(executor)
        if kind == "SparkListenerExecutorUnexcluded":
            return ExecutorUnexcluded(executor)
        return None
