"""TaskRun: a call of Spark on a thread of its own, which can be waited for and ended."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spark_elastic import clock

if TYPE_CHECKING:
    from spark_elastic.spark.cluster import Cluster

CANCEL_S = 10.0
"""How long Ctrl-C waits until Spark has ended a call."""
_CANCEL_AGAIN_S = 0.2


class TaskRun:
    """A call whose Spark jobs have a tag, by which they can be ended. Starts at once.

    The jobs inherit the local properties of the thread that makes it, such as its scheduler pool.
    """

    def __init__(self, cluster: Cluster, call: Callable[[], list[Any]], name: str) -> None:
        self.tag = f"spark_elastic-{uuid.uuid4().hex}"
        self.rows: list[Any] = []
        """What the call has returned; empty until it is over."""
        self.error: BaseException | None = None
        """Why the call failed; None if it did not, or was ended by `cancel`."""
        self.over = threading.Event()
        self._cluster = cluster
        self._call = call
        self._tag_thread = cluster.tagging(self.tag, name)
        self._cancelled = False
        threading.Thread(target=self._run, name="spark_elastic job", daemon=True).start()

    def result(self) -> list[Any]:
        """Wait until the call is over, and return its rows. Raises the error that it failed with."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self.rows

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the call is over; return False after `timeout_s`. An exception here, such as Ctrl-C, ends it."""
        # on another thread than the call: an interrupted call to the JVM would leave the job behind
        try:
            return self.over.wait(timeout_s)
        except BaseException:
            self.cancel(CANCEL_S)
            raise

    def cancel(self, timeout_s: float) -> None:
        """End the call, also if Spark does not know its jobs yet, and wait up to `timeout_s` until it is over."""
        self._cancelled = True
        until = clock.monotonic() + timeout_s

        def ask() -> None:
            while not self.over.is_set():
                with contextlib.suppress(Exception):  # Spark is gone, and the jobs with it
                    self._cluster.cancel_tagged(self.tag)
                if self.over.wait(_CANCEL_AGAIN_S) or clock.monotonic() >= until:
                    break
            self._cluster.leave_thread()

        # on a thread: it does not return while Spark does not answer
        asking = threading.Thread(target=ask, name="spark_elastic cancel", daemon=True)
        asking.start()
        self.over.wait(timeout_s)

    def _run(self) -> None:
        try:
            self._tag_thread()
            if not self._cancelled:
                self.rows = list(self._call())
        except BaseException as error:
            if not self._cancelled:
                self.error = error
        finally:
            self._cluster.leave_thread()
            self.over.set()
