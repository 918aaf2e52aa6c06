"""Keeps the picture of the executors current: lost ones from the listener, decommissioned ones by asking."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_elastic.driver.spark.cluster import (
    close_connection,
    executor_ids,
    is_local,
    jvm_context,
    loss_of_executor,
)
from spark_elastic.membership.events import ExecutorDecommissioned, ExecutorLost
from spark_elastic.membership.reasons import LossCause, LossKind

if TYPE_CHECKING:
    from pyspark import SparkContext

# What Spark's listener bus tells of executors, as Python values.
#
# No Python code runs in Spark's listener: a Python callback would need Py4J's callback server and leave a thread and
# a
# socket behind in both processes each time it is removed, and every event of every job would cross into Python.
# Instead the JDK's own `java.beans.EventHandler` implements the listener inside the JVM and puts the few events that
# matter on a JVM queue, which is read from here (docs/decisions/executor-listener.md).

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


OnExecutorEvent = Callable[[ExecutorDecommissioned | ExecutorLost], None]
# Asking after one executor takes 0.2-2 ms, so the pause grows with their number: at most a tenth of one thread.
_PAUSE_PER_EXECUTOR_S = 0.02


class ExecutorWatch:
    """A thread that reports, once each, executors that are decommissioned or lost. In local mode there are none.

    Args:
        on_event: called from the watch's own thread.
        on_fact: the listener's facts as they come, for whoever wants executors that were added or excluded too.
        interval_s: how often the scheduler is asked; no event announces a decommission.
    """

    def __init__(
        self,
        sc: SparkContext,
        on_event: OnExecutorEvent,
        *,
        on_fact: Callable[[ExecutorFact], None] | None = None,
        interval_s: float = 0.2,
    ) -> None:
        self._sc = sc
        self._on_event = on_event
        self._on_fact = on_fact
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._known: set[str] = set()
        self._leaving: set[str] = set()
        self._listener: ExecutorListener | None = None
        self._thread: threading.Thread | None = None
        if is_local(sc):
            return
        try:
            self._listener = ExecutorListener(sc)
        except Exception as error:
            log.warning("no executor listener (%s); lost executors are seen by asking every %.1f s", error, interval_s)
        self._known = set(executor_ids(sc))  # after the listener: none can slip in between
        self._thread = threading.Thread(target=self._run, name="spark_elastic executors", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float = 5.0) -> None:
        """Stop and wait for the thread. Repeats are harmless."""
        self._stopping.set()
        if self._listener is not None:
            try:
                self._listener.wake()
            except Exception as error:  # the JVM is gone; so is the thread's wait for it
                log.debug("could not wake the executor watch: %s", error)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(deadline_s)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._step()
        except Exception as error:
            if not self._stopping.is_set():
                log.warning("executors are no longer watched: %s", error)
        finally:
            if self._listener is not None:
                self._listener.close()
            close_connection(self._sc)

    def _step(self) -> None:
        """Facts until the next time to ask, then ask."""
        until = time.monotonic() + max(self._interval_s, _PAUSE_PER_EXECUTOR_S * len(self._known))
        if self._listener is None:
            self._stopping.wait(until - time.monotonic())
            self._compare()
        else:
            while (left := until - time.monotonic()) > 0 and not self._stopping.is_set():
                fact = self._listener.poll(left)
                if fact is not None:
                    self._take(fact)
        if not self._stopping.is_set():
            self._ask_for_decommissions()

    def _take(self, fact: ExecutorFact) -> None:
        if isinstance(fact, ExecutorAdded):
            self._known.add(fact.executor)
        elif isinstance(fact, ExecutorRemoved):
            self._known.discard(fact.executor)
            self._on_event(ExecutorLost(fact.executor, loss_of_executor(fact.why)))
        if self._on_fact is not None:
            self._on_fact(fact)

    def _compare(self) -> None:
        present = set(executor_ids(self._sc))
        for executor in sorted(self._known - present):
            self._on_event(ExecutorLost(executor, LossCause(LossKind.EXECUTOR_UNLISTED)))
        self._known = present

    def _ask_for_decommissions(self) -> None:
        context = jvm_context(self._sc)
        backend, scheduler = context.schedulerBackend(), context.taskScheduler()
        for executor in sorted(self._known - self._leaving):
            # Inactive: decommissioning, or lost already, which the listener will say.
            if not backend.isExecutorActive(executor) and scheduler.getExecutorDecommissionState(executor).isDefined():
                self._leaving.add(executor)
                self._on_event(ExecutorDecommissioned(executor))
