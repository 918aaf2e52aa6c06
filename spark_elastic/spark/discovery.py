"""Discovery: wait for the task slots of a cluster, and place tasks together once to see where they are."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from spark_elastic import clock
from spark_elastic.errors import JobCancelledError, NotEnoughSlotsError, SessionLostError
from spark_elastic.membership.reasons import Wait, WaitKind, loss_in_words
from spark_elastic.membership.topology import Reach, SlotReport
from spark_elastic.settings import ElasticSettings
from spark_elastic.spark.cluster import Cluster
from spark_elastic.spark.connect_session import was_interrupted, why_session_is_gone
from spark_elastic.spark.executor_process import look_at_slot
from spark_elastic.spark.executor_python import python_error_of, refuse_python, report_python
from spark_elastic.spark.failures import loss_of_error
from spark_elastic.spark.reachability import answering
from spark_elastic.wire.messages import LaunchSpec

log = logging.getLogger(__name__)

_REFUSED = "SPARK-24942"
"""Spark's error condition for barrier mode under dynamic allocation."""
_LOOK_S = 0.05
_POLL_S = 0.2
"""Seconds between two counts of the slots, while there are too few."""
_CANCEL_S = 4.0
"""Time for the probe's tasks to end after they were cancelled."""
_REPORT_AFTER_S = 2.0
"""Shorter waits for free slots are not reported."""

Seen = tuple[SlotReport, Reach]
Look = Callable[[], Seen]
"""Describes the slot of the task that calls it. Pickled by reference."""


@dataclass(frozen=True, slots=True)
class SlotWait:
    """How a wait for slots is ended and shown."""

    stop: threading.Event = field(default_factory=threading.Event)
    """Ends the wait when it is set."""
    show: Callable[[Wait, float | None], None] = lambda wait, until: None
    """Called when the reason of the wait changes, with the wait and its deadline on this process's monotonic clock."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The outcome of a probe."""

    seen: tuple[Seen, ...]
    """One for each task; empty if Spark refused barrier mode."""
    why: str = ""
    """The reason if Spark refused."""


_probed: dict[str, tuple[frozenset[str], Probe]] = {}
"""By application: the executors at its last probe, and what that has found. `probe` uses it again."""


def place_workers(
    cluster: Cluster, spec: LaunchSpec, settings: ElasticSettings, listening: socket.socket, waiting: SlotWait
) -> tuple[SlotReport, ...]:
    """Wait until workers can be placed together: num_proc of them shortly, or else min_num_proc.

    Called on the job's thread, before the driver runs and serves `listening`. Returns what tasks have seen of each
    slot; nothing if Spark cannot place tasks together.

    Raises:
        NotEnoughSlotsError: There was no room for min_num_proc workers within start_timeout.
        DriverUnreachableError: Too few tasks reach this program.
    """
    look: Look = look_at_slot
    with contextlib.ExitStack() as undo:
        undo.callback(cluster.leave_thread)
        if cluster.remote:
            undo.enter_context(answering(listening, spec.key))
            look = functools.partial(look_at_slot, spec.driver_addresses, spec.key)
        found: Probe | None = None
        if settings.num_proc > settings.min_num_proc:
            with contextlib.suppress(NotEnoughSlotsError):
                grace_s = min(settings.start_grace_s, settings.start_timeout_s)
                found = probe(cluster, look, settings.num_proc, grace_s, waiting)
        if found is None:
            found = probe(cluster, look, settings.min_num_proc, settings.start_timeout_s, waiting)
    if not found.seen:
        waiting.show(Wait(WaitKind.REPORTED, detail=found.why), None)
    cluster.take_reaches(spec, settings.min_num_proc, [reach for _, reach in found.seen])
    return tuple(report for report, _ in found.seen)


def wait_for_slots(cluster: Cluster, need: int, timeout_s: float, waiting: SlotWait) -> None:
    """Wait until `need` slots exist, busy or not.

    Returns at once under dynamic allocation: executors come only when jobs ask for them.

    Raises:
        NotEnoughSlotsError: After `timeout_s`; at once if the cluster can never have that many slots.
        JobCancelledError: The wait was ended.
    """
    start = clock.monotonic()
    too_few = functools.partial(NotEnoughSlotsError, need=need, setting="start_timeout")
    said: Wait | None = None
    most = cluster.fixed_slots()
    while True:
        count, waited = cluster.count_slots(), clock.monotonic() - start
        if most is not None and most < need:
            raise too_few(have=most, waited_s=0.0, fixed=f"master {cluster.master}")
        if count.now is None or count.now >= need:
            return
        if cluster.allocates_dynamically():
            if count.most is not None and count.most < need:
                limit = "spark.dynamicAllocation.maxExecutors allows no more"
                raise too_few(have=count.most, waited_s=waited, detail=limit)
            return
        if waited >= timeout_s:
            raise too_few(have=count.now, waited_s=waited, detail=count.where)
        wait = Wait(WaitKind.SLOTS, have=count.now, need=need, left_s=timeout_s)
        if wait != said:
            said = wait
            waiting.show(wait, start + timeout_s)
        if waiting.stop.wait(min(_POLL_S, timeout_s - waited)):
            raise JobCancelledError("cancelled while waiting for slots")


def probe(cluster: Cluster, look: Look, num_proc: int, timeout_s: float, waiting: SlotWait) -> Probe:
    """Run `num_proc` tasks at the same time (in barrier mode) and return what each of them has seen.

    First waits until `num_proc` slots exist, because Spark says nothing for ten minutes about a barrier job that is too
    wide for the cluster; then until they are free at the same time. What an earlier probe of this application has seen
    is used again if the executors are the same and as many slots are free at this moment.

    Raises:
        NotEnoughSlotsError: After `timeout_s`.
        ExecutorPythonError: The executors run a Python in which workers cannot run.
        SessionLostError: The Spark Connect server has closed the session.
        JobCancelledError: The wait was ended.
    """
    start = clock.monotonic()
    too_few = functools.partial(NotEnoughSlotsError, have=0, need=num_proc, setting="start_timeout")
    width = num_proc
    if cluster.allocates_dynamically():
        if not cluster.remote:
            return Probe((), f"barrier mode is refused under dynamic allocation ([{_REFUSED}])")
        width = 1  # which says at least how the driver is reached
    else:
        wait_for_slots(cluster, num_proc, timeout_s, waiting)
    executors = cluster.executors()
    if executors is not None:
        known, found = _probed.get(cluster.application, (None, Probe(())))
        if executors == known and len(found.seen) >= num_proc and (cluster.slots_free() or 0) >= num_proc:
            return Probe(found.seen[:num_proc])
    task, name = _looking_task(look, cluster.needed_by_workers), f"spark_elastic: discovery of {num_proc} slots"
    run, said = cluster.start_tasks(task, width, name, barrier=width > 1), False
    while True:
        if run.over.wait(_LOOK_S):
            if not (cluster.remote and run.error is not None and was_interrupted(run.error)):
                break
            log.info("the probe's tasks were cancelled on the server; they are started again")
            run = cluster.start_tasks(task, width, name, barrier=width > 1)
            waiting.stop.wait(_POLL_S)
        waited = clock.monotonic() - start
        if waited >= _REPORT_AFTER_S and not said:
            said = True
            waiting.show(Wait(WaitKind.FREE_SLOTS, need=num_proc, left_s=timeout_s), start + timeout_s)
        if waiting.stop.is_set():
            run.cancel(_CANCEL_S)
            raise JobCancelledError("cancelled while looking for slots")
        if waited > timeout_s:
            run.cancel(_CANCEL_S)
            detail = f"{cluster.count_slots().where}, but never {num_proc} free at the same time"
            raise too_few(waited_s=waited, detail=detail)
    if run.error is None:
        for python, _ in run.rows:
            refuse_python(python, on_connect=cluster.remote)
        found = Probe(tuple(seen for _, seen in run.rows))
        if executors is not None:
            _probed[cluster.application] = executors, found
        return found
    if cluster.remote and (lost := why_session_is_gone(run.error)):
        raise SessionLostError(reason=lost, progress=None)
    if (wrong_python := python_error_of(run.error, cluster.python, on_connect=cluster.remote)) is not None:
        raise wrong_python
    reason = loss_in_words(loss_of_error(run.error))
    if _REFUSED in str(run.error):
        return Probe((), f"barrier mode is refused: {reason}")
    raise too_few(waited_s=clock.monotonic() - start, detail=reason) from run.error


def _looking_task(look: Look, needed: Any) -> Callable[[Any], list[Any]]:
    """Return the function of the probe's tasks, which is pickled by value.

    A task returns `executor_python.report_python`'s answer, and what `look` has seen unless packages are missing.
    """
    look_at_python, pickled = report_python(needed), cloudpickle.dumps(look)

    # No barrier() and no allGather(): each would take a second. No getTaskInfos(): its addresses are those that the
    # driver's sockets saw, and on local-cluster executors listen on others.
    def task(rows: Any) -> list[Any]:
        import pickle

        (python,) = look_at_python(rows)
        return [(python, None if python[2] else pickle.loads(pickled)())]

    return task
