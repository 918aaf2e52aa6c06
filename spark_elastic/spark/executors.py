"""ExecutorWatch: reports executors that Spark loses or decommissions.

Spark's listener bus announces losses. No event announces a decommission, so the scheduler is asked for those.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spark_elastic import clock
from spark_elastic.membership.events import ExecutorDecommissioned, ExecutorLost
from spark_elastic.membership.reasons import LossCause, LossKind
from spark_elastic.spark.bus import EVENT, BusListener
from spark_elastic.spark.failures import loss_of_executor, refused_call
from spark_elastic.spark.jvm import (
    close_connection,
    executor_ids,
    is_local_master,
    jvm_context,
    slots_now,
)

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)

_INTERVAL_S = 0.2
_PAUSE_PER_EXECUTOR_S = 0.02
"""Asking about one executor takes 0.2-2 ms. A pause that grows with their number keeps this below a tenth of a core,
also where executors come and go all the time."""


class ExecutorWatch:
    """A thread that reports each lost or decommissioned executor once, and asks the scheduler every `_INTERVAL_S`.

    It asks for the slots of all active executors at once. Only when their number has changed, or an executor has come
    or gone, does it ask about each executor. In local mode there is nothing to watch.
    """

    def __init__(self, sc: SparkContext) -> None:
        self._sc = sc
        self._post: Callable[[ExecutorDecommissioned | ExecutorLost], None]
        self._stopping = threading.Event()
        self._known: set[str] = set()
        self._leaving: set[str] = set()
        self._asks = True
        """False once the scheduler is known not to answer."""
        self._slots: int | None = None
        """The slots when each executor was last asked about; None if that has to be done again."""
        self._inactive: set[str] = set()
        """Executors that Spark does not use any more, for a reason that it has not said yet."""
        self._pause_s = _INTERVAL_S
        self._removed: set[str] = set()
        """Executors whose removal was reported. Spark may post it twice."""
        self._listener: BusListener | None = None
        self._thread: threading.Thread | None = None

    def start(self, post: Callable[[ExecutorDecommissioned | ExecutorLost], None]) -> None:
        """Call `post` from the watch's own thread for each event from now on, until `close`."""
        self._post = post
        if is_local_master(self._sc.master):
            return
        jvm: Any = self._sc._jvm
        try:
            self._events = jvm.java.util.concurrent.LinkedBlockingQueue()
            self._milliseconds = jvm.java.util.concurrent.TimeUnit.MILLISECONDS
            wanted = dict.fromkeys(("onExecutorAdded", "onExecutorRemoved"), (self._events, EVENT))
            self._listener = BusListener(self._sc, wanted)
        except Exception as error:  # the watch works without it, whatever the JVM lacks
            log.warning("no executor listener (%s); lost executors are seen by asking every %.1f s", error, _INTERVAL_S)
        known = executor_ids(self._sc)  # after the listener, so that no executor is missed in between
        if known is None and self._listener is None:
            log.warning("executors are no longer watched: Spark may not be asked for them here")
            return
        self._known = set(known or ())
        self._thread = threading.Thread(target=self._run, name="spark_elastic executors", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float = 5.0) -> None:
        """Stop, and wait for the thread. Closes the calling thread's connection to the JVM. May be called again."""
        self._stopping.set()
        try:
            if self._listener is not None:
                self._events.add("wake")  # ends a poll that waits in the thread
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
        until = clock.monotonic() + self._pause_s
        if self._listener is None:
            self._stopping.wait(until - clock.monotonic())
            self._compare()
        else:
            while (left := until - clock.monotonic()) > 0 and not self._stopping.is_set():
                event = self._events.poll(int(left * 1000), self._milliseconds)
                if event is None or isinstance(event, str):
                    continue
                self._slots, executor = None, str(event.executorId())
                if event.getClass().getSimpleName() == "SparkListenerExecutorAdded":
                    self._known.add(executor)
                    self._removed.discard(executor)
                elif executor not in self._removed:
                    self._known.discard(executor)
                    self._removed.add(executor)
                    self._post(ExecutorLost(executor, loss_of_executor(str(event.reason()))))
        if not self._stopping.is_set() and self._asks:
            try:
                self._ask_for_decommissions()
            except Exception as error:
                if refused_call(error) is None:
                    raise
                self._asks = False
                log.info("%s may not be called here: decommissions are not seen in advance", refused_call(error))

    def _compare(self) -> None:
        """Report the executors that are no longer registered."""
        present = set(executor_ids(self._sc) or ())
        for executor in sorted(self._known - present):
            self._post(ExecutorLost(executor, LossCause(LossKind.EXECUTOR_UNLISTED)))
        if present != self._known:
            self._known, self._slots = present, None

    def _ask_for_decommissions(self) -> None:
        context = jvm_context(self._sc)
        # before the executors are asked about, so that a change meanwhile is seen next time
        slots = slots_now(self._sc)
        if slots is not None and slots == self._slots:
            asked = self._inactive & self._known
        else:
            self._slots, asked = slots, self._known - self._leaving
        self._pause_s = max(_INTERVAL_S, _PAUSE_PER_EXECUTOR_S * len(asked))
        if not asked:
            return
        self._inactive.clear()
        backend, scheduler = context.schedulerBackend(), context.taskScheduler()
        for executor in sorted(asked):
            if backend.isExecutorActive(executor):
                continue
            if scheduler.getExecutorDecommissionState(executor).isDefined():
                self._leaving.add(executor)
                self._post(ExecutorDecommissioned(executor))
            else:  # it is lost, which the listener reports, or its decommission is not complete in Spark's books yet
                self._inactive.add(executor)
