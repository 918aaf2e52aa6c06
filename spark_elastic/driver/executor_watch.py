"""Keeps the picture of the executors current: lost ones from the listener, decommissioned ones by asking."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from spark_elastic.core.events import ExecutorDecommissioned, ExecutorLost
from spark_elastic.driver.executor_listener import ExecutorAdded, ExecutorFact, ExecutorListener, ExecutorRemoved
from spark_elastic.driver.jvm import close_connection, jvm_context
from spark_elastic.driver.spark_slots import executor_ids, is_local

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)

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
            self._on_event(ExecutorLost(fact.executor, fact.why))
        if self._on_fact is not None:
            self._on_fact(fact)

    def _compare(self) -> None:
        present = set(executor_ids(self._sc))
        for executor in sorted(self._known - present):
            self._on_event(ExecutorLost(executor, "Spark no longer lists it"))
        self._known = present

    def _ask_for_decommissions(self) -> None:
        context = jvm_context(self._sc)
        backend, scheduler = context.schedulerBackend(), context.taskScheduler()
        for executor in sorted(self._known - self._leaving):
            # Inactive: decommissioning, or lost already, which the listener will say.
            if not backend.isExecutorActive(executor) and scheduler.getExecutorDecommissionState(executor).isDefined():
                self._leaving.add(executor)
                self._on_event(ExecutorDecommissioned(executor))
