"""ExecutorWatch: reports executors that Spark loses or decommissions.

Spark's listener bus announces losses. No event announces a decommission, so the scheduler is asked for those.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_elastic import clock
from spark_elastic.data.spark_console import close_connection
from spark_elastic.driver.spark.cluster import executor_ids, is_local, jvm_context, loss_of_executor
from spark_elastic.membership.events import ExecutorDecommissioned, ExecutorLost
from spark_elastic.membership.reasons import LossCause, LossKind

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)

_INTERFACE = "org.apache.spark.scheduler.SparkListenerInterface"
_METHODS = ("onExecutorAdded", "onExecutorRemoved")
_BUS_QUEUE = "spark_elastic"
"""A bus queue for this listener alone, so that it and other listeners do not wait for each other."""
_PAUSE_PER_EXECUTOR_S = 0.02
"""Asking about one executor takes 0.2-2 ms. A pause that grows with their number keeps this below a tenth of a core."""


@dataclass(frozen=True, slots=True)
class ExecutorAdded:
    """An executor has registered."""

    executor: str
    host: str
    cores: int


@dataclass(frozen=True, slots=True)
class ExecutorRemoved:
    """An executor is lost."""

    executor: str
    why: str


class ExecutorListener:
    """The executor events of Spark's listener bus, as Python values.

    No Python code runs in Spark's listener. A Python callback would need Py4J's callback server, would leave a thread
    and a socket behind in both processes each time it is removed, and every event of every job would cross into
    Python. Instead the JDK's own `java.beans.EventHandler` implements the listener inside the JVM and puts the few
    events that matter on a JVM queue, which is read from here (docs/decisions/executor-listener.md).

    Registered from its construction until `close`. One thread polls; any thread may close.

    Raises:
        py4j.protocol.Py4JError: The JVM has no java.beans (a JRE cut down by jlink).
    """

    def __init__(self, sc: SparkContext) -> None:
        jvm: Any = sc._jvm
        self._bus = jvm_context(sc).listenerBus()
        self._events = jvm.java.util.concurrent.LinkedBlockingQueue()
        self._milliseconds = jvm.java.util.concurrent.TimeUnit.MILLISECONDS
        interface = jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass(_INTERFACE)
        # Calls "add" on the queue; with "" as property, the argument is the event itself.
        create = jvm.java.beans.EventHandler.create
        self._listeners = [create(interface, self._events, "add", "", method) for method in _METHODS]
        self._removed: set[str] = set()
        for listener in self._listeners:
            self._bus.addToQueue(listener, _BUS_QUEUE)

    def poll(self, timeout_s: float) -> ExecutorAdded | ExecutorRemoved | None:
        """Return the next event, waiting up to `timeout_s` for it; None if there was none, or after `wake`."""
        event = self._events.poll(int(timeout_s * 1000), self._milliseconds)
        if event is None or isinstance(event, str):
            return None
        kind = event.getClass().getSimpleName()
        executor = str(event.executorId())
        if kind == "SparkListenerExecutorAdded":
            self._removed.discard(executor)
            return ExecutorAdded(executor, str(event.executorInfo().executorHost()), event.executorInfo().totalCores())
        if kind == "SparkListenerExecutorRemoved" and executor not in self._removed:  # Spark may post it twice
            self._removed.add(executor)
            return ExecutorRemoved(executor, str(event.reason()))
        return None

    def wake(self) -> None:
        """Make a `poll` that waits in another thread return at once."""
        self._events.add("wake")

    def close(self) -> None:
        """Leave the bus, which ends its queue and thread in the JVM. May be called again."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            try:
                self._bus.removeListener(listener)
            except Exception as error:  # the context and its bus are stopped, which Spark reports in several ways
                log.debug("the executor listener ended with its SparkContext: %s", error)


class ExecutorWatch:
    """A thread that reports each lost or decommissioned executor once, and asks the scheduler every `interval_s`.

    In local mode there is nothing to watch.
    """

    def __init__(self, sc: SparkContext, *, interval_s: float = 0.2) -> None:
        self._sc = sc
        self._interval_s = interval_s
        self._post: Callable[[ExecutorDecommissioned | ExecutorLost], None]
        self._stopping = threading.Event()
        self._known: set[str] = set()
        self._leaving: set[str] = set()
        self._listener: ExecutorListener | None = None
        self._thread: threading.Thread | None = None

    def start(self, post: Callable[[ExecutorDecommissioned | ExecutorLost], None]) -> None:
        """Call `post` from the watch's own thread for each event from now on, until `close`."""
        self._post = post
        if is_local(self._sc):
            return
        try:
            self._listener = ExecutorListener(self._sc)
        except Exception as error:  # the watch works without it, whatever the JVM lacks
            log.warning(
                "no executor listener (%s); lost executors are seen by asking every %.1f s", error, self._interval_s
            )
        self._known = set(executor_ids(self._sc))  # after the listener, so that no executor is missed in between
        self._thread = threading.Thread(target=self._run, name="spark_elastic executors", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float = 5.0) -> None:
        """Stop, and wait for the thread. Closes the calling thread's connection to the JVM. May be called again."""
        self._stopping.set()
        try:
            if self._listener is not None:
                self._listener.wake()
        except Exception as error:  # the JVM is gone, which ends the thread's wait for it as well
            log.debug("could not wake the executor watch: %s", error)
        finally:
            close_connection(self._sc)
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
        """Read the listener's events until it is time to ask the scheduler, then ask."""
        until = clock.monotonic() + max(self._interval_s, _PAUSE_PER_EXECUTOR_S * len(self._known))
        if self._listener is None:
            self._stopping.wait(until - clock.monotonic())
            self._compare()
        else:
            while (left := until - clock.monotonic()) > 0 and not self._stopping.is_set():
                event = self._listener.poll(left)
                if isinstance(event, ExecutorAdded):
                    self._known.add(event.executor)
                elif event is not None:
                    self._known.discard(event.executor)
                    self._post(ExecutorLost(event.executor, loss_of_executor(event.why)))
        if not self._stopping.is_set():
            self._ask_for_decommissions()

    def _compare(self) -> None:
        """Report the executors that are no longer registered."""
        present = set(executor_ids(self._sc))
        for executor in sorted(self._known - present):
            self._post(ExecutorLost(executor, LossCause(LossKind.EXECUTOR_UNLISTED)))
        self._known = present

    def _ask_for_decommissions(self) -> None:
        context = jvm_context(self._sc)
        backend, scheduler = context.schedulerBackend(), context.taskScheduler()
        for executor in sorted(self._known - self._leaving):
            # An inactive executor is being decommissioned, or is lost, which the listener reports.
            if not backend.isExecutorActive(executor) and scheduler.getExecutorDecommissionState(executor).isDefined():
                self._leaving.add(executor)
                self._post(ExecutorDecommissioned(executor))
