"""ConnectDiscovery: the slots behind a Spark Connect server, and one probe that places tasks together."""

from __future__ import annotations

import functools
import json
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle

from spark_elastic import clock
from spark_elastic.data.spark_connect import Query, setting_of, was_interrupted, why_session_is_gone
from spark_elastic.data.spark_python import (
    NEEDED_ON_CONNECT,
    ON_CONNECT,
    python_error_of,
    refuse_python,
    report_python,
)
from spark_elastic.driver.connect.reachability import Reach
from spark_elastic.driver.spark.cluster import loss_of
from spark_elastic.errors import JobCancelledError, NotEnoughSlotsError, SessionLostError
from spark_elastic.membership.reasons import Wait, WaitKind, loss_in_words, wait_in_words
from spark_elastic.membership.topology import SlotReport

log = logging.getLogger(__name__)

REPORT_SCHEMA = "python string, report string"
_POLL_S = 0.5
_LOOK_S = 0.05
_CANCEL_S = 4.0
"""Time for the probe's query to end after it was cancelled."""
_REPORT_AFTER_S = 2.0
"""Shorter waits for free slots are not reported."""
_RANGE = re.compile(r"Range \(0, \d+, step=1, splits=(\d+)\)")
_LOCAL = re.compile(r"local\[\s*(\d+)\s*(?:,\s*\d+\s*)?\]")

OnWait = Callable[[Wait, float], None]
"""Called with a wait and its deadline on this process's monotonic clock."""


def _log_wait(wait: Wait, _until: float) -> None:
    log.info("%s", wait_in_words(wait))


@dataclass(frozen=True, slots=True)
class ConnectProbe:
    """The outcome of the probe: one entry for each task."""

    reports: tuple[SlotReport, ...]
    reaches: tuple[Reach, ...]


class ConnectDiscovery:
    """Counts the task slots behind a Connect session, and places tasks together once."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._task_cpus = max(int(setting_of(session, "spark.task.cpus", "1") or 1), 1)
        self._master = setting_of(session, "spark.master", "") or ""

    @property
    def master(self) -> str:
        return self._master or "the Spark Connect server"

    def slots(self) -> int | None:
        """Return the number of task slots now, busy or not; None if the server does not show it. Runs no job.

        A query without a shuffle is planned with as many tasks as there are cores, and the plan says how many.
        """
        for name in ("spark.default.parallelism", "spark.sql.leafNodeDefaultParallelism"):
            if setting_of(self._session, name) is not None:
                return self.most_slots()
        try:
            plan = str(self._session.range(0, 1 << 20)._explain_string())
        except Exception as error:  # not a public interface
            log.debug("the plan of a query could not be read: %s", error)
            return None
        found = _RANGE.search(plan)
        return None if found is None else int(found[1]) // self._task_cpus

    def most_slots(self) -> int | None:
        """Return the number of slots that can never be exceeded (local mode); None if it is not known."""
        if self._master == "local":
            return 1
        fixed = _LOCAL.fullmatch(self._master)
        return None if fixed is None else int(fixed[1]) // self._task_cpus

    def allocates_dynamically(self) -> bool:
        return setting_of(self._session, "spark.dynamicAllocation.enabled", "false") == "true"

    def probe(
        self,
        num_proc: int,
        timeout_s: float,
        report: Callable[[], str],
        *,
        stop: threading.Event | None = None,
        on_wait: OnWait = _log_wait,
    ) -> ConnectProbe:
        """Run `num_proc` tasks at the same time (a barrier query) and return the report of each.

        Under dynamic allocation, which refuses barrier mode, one task alone.

        Args:
            num_proc: The number of tasks.
            timeout_s: The longest wait for slots.
            report: Runs in each task, and returns its `SlotReport` and `Reach` as JSON. Pickled by reference.
            stop: Ends the wait when it is set.
            on_wait: Called when the reason of the wait changes.

        Raises:
            NotEnoughSlotsError: After `timeout_s`; at once if the server can never have that many slots.
            SessionLostError: The server has closed the session.
            ExecutorPythonError: The executors run a Python in which workers cannot run.
            JobCancelledError: `stop` was set.
        """
        start = clock.monotonic()
        stop = stop or threading.Event()
        width = 1 if self.allocates_dynamically() else num_proc
        if width > 1:
            self._wait_for_slots(num_proc, timeout_s, stop, on_wait)
        too_few = functools.partial(NotEnoughSlotsError, have=0, need=num_proc, setting="start_timeout")
        task = _reporting_task(report)

        def collect(spark: Any) -> list[Any]:
            rows = spark.range(0, width, 1, width).mapInArrow(task, REPORT_SCHEMA, barrier=width > 1)
            return list(rows.collect())

        query = Query(self._session, collect, name="probe")
        said = False
        while True:
            over = query.over.wait(_LOOK_S)
            if over and query.error is not None and was_interrupted(query.error):
                log.info("the probe's query was cancelled on the server; it is sent again")
                query, over = Query(self._session, collect, name="probe"), False
                stop.wait(_POLL_S)
            if over:
                break
            waited = clock.monotonic() - start
            if waited >= _REPORT_AFTER_S and not said:
                said = True
                on_wait(Wait(WaitKind.FREE_SLOTS, need=num_proc, left_s=timeout_s), start + timeout_s)
            if stop.is_set():
                query.cancel(_CANCEL_S)
                raise JobCancelledError("cancelled while looking for slots")
            if waited > timeout_s:
                query.cancel(_CANCEL_S)
                detail = f"{self.master} never had {num_proc} slots free at the same time"
                raise too_few(waited_s=waited, detail=detail)
        if query.error is not None:
            if gone := why_session_is_gone(query.error):
                raise SessionLostError(reason=gone, progress=None)
            if wrong_python := python_error_of(query.error, ON_CONNECT, on_connect=True):
                raise wrong_python
            reason = loss_in_words(loss_of(str(query.error)))
            raise too_few(waited_s=clock.monotonic() - start, detail=reason) from query.error
        for row in query.rows:
            refuse_python(json.loads(row.python), on_connect=True)
        documents = [json.loads(row.report) for row in query.rows]
        return ConnectProbe(
            tuple(_slot_report(document["slot"]) for document in documents),
            tuple(_reach(document["reach"]) for document in documents),
        )

    def _wait_for_slots(self, need: int, timeout_s: float, stop: threading.Event, on_wait: OnWait) -> None:
        """Wait until `need` slots exist: Spark says nothing for ten minutes about a barrier query that is too wide."""
        start = clock.monotonic()
        too_few = functools.partial(NotEnoughSlotsError, need=need, setting="start_timeout")
        said: Wait | None = None
        most = self.most_slots()
        while True:
            if most is not None and most < need:
                raise too_few(have=most, waited_s=0.0, fixed=f"master {self.master}")
            have, waited = self.slots(), clock.monotonic() - start
            if have is None or have >= need:
                return
            if waited >= timeout_s:
                raise too_few(have=have, waited_s=waited, detail=f"master {self.master}")
            wait = Wait(WaitKind.SLOTS, have=have, need=need, left_s=timeout_s)
            if wait != said:
                said = wait
                on_wait(wait, start + timeout_s)
            if stop.wait(min(_POLL_S, timeout_s - waited)):
                raise JobCancelledError("cancelled while waiting for slots")


def _slot_report(document: dict[str, Any]) -> SlotReport:
    addresses = {name: tuple(of) for name, of in document["addresses"].items()}
    return SlotReport(**{**document, "addresses": addresses, "accelerators": tuple(document["accelerators"])})


def _reach(document: dict[str, Any]) -> Reach:
    return Reach(**{**document, "reached": tuple(document["reached"])})


def _reporting_task(report: Callable[[], str]) -> Callable[[Any], Any]:
    """Return the function of the probe's tasks, which is pickled by value.

    A task answers with its Python as `spark_python.report_python` describes it, and with `report` unless packages are
    missing there.
    """
    look_at_python, pickled = report_python(NEEDED_ON_CONNECT), cloudpickle.dumps(report)

    def task(batches: Any) -> Any:
        import json
        import pickle

        import pyarrow as pa

        for _ in batches:
            pass
        python = look_at_python()
        said = "" if python[2] else pickle.loads(pickled)()
        yield pa.RecordBatch.from_pydict({"python": [json.dumps(python)], "report": [said]})

    return task
