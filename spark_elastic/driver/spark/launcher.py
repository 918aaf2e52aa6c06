"""Starts agents in Spark: one ordinary job with one task per slot, so that a lost executor takes one slot with it."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from spark_elastic.driver.launcher import OnEnded
from spark_elastic.driver.spark.cluster import (
    close_connection,
    is_drivers_own,
    jvm_context,
    loss_of,
    loss_of_error,
    why_gone,
)
from spark_elastic.membership.reasons import LossCause, reported
from spark_elastic.membership.states import AgentOutcome
from spark_elastic.membership.topology import LaunchId, SlotId

if TYPE_CHECKING:
    from pyspark import SparkContext

AgentEntry = Callable[..., AgentOutcome]

log = logging.getLogger(__name__)

_FIRST_RUN_LOST = reported("the slot's task was lost")


@dataclass(slots=True, eq=False)
class _Launch:
    """One job of one slot, from `launch` to `on_ended`. Guarded by the launcher's lock."""

    slot: SlotId
    id: LaunchId
    group: str
    """Spark's job group; a new one for each launch, because Spark can remember a cancelled group."""
    stop_cause: LossCause | None = None
    """Set once the job has to end. A thread may not have submitted its job yet, so this is looked at before, and the
    watcher repeats the cancellation until the thread has ended."""


class SparkLauncher:
    """A `Launcher` whose agents run in Spark tasks.

    Build it in the thread that called `run`: the jobs inherit that thread's local properties (its scheduler pool).

    Args:
        agent_entry: runs in the task as `agent_entry(slot, launch, payload)`. Pickled by reference, so its module must
            be importable on the executors.
        payload_for_slot: what the slot's agent is given, called at each launch. It travels in Spark's own task
            serialisation, and has to be small: from 1 MiB on PySpark would put it into a file.
        shared: the same for every slot and perhaps large: a broadcast variable, which is a file on the driver and in
            the executors' block managers. Given as the fourth argument of `agent_entry`, unless it is None.
        on_ended: see `launcher.OnEnded`.
        description: what people see in Spark's UI, before ": slot 3".
        apart: agents get Python workers of their own, each for one task; None: where Spark may kill reused ones.
        watch_interval_s: how often running jobs are looked at for a task that failed and that Spark would run again.
    """

    def __init__(
        self,
        sc: SparkContext,
        agent_entry: AgentEntry,
        payload_for_slot: Callable[[SlotId], bytes],
        on_ended: OnEnded,
        *,
        shared: bytes | None = None,
        description: str = "spark_elastic",
        apart: bool | None = None,
        watch_interval_s: float = 1.0,
    ) -> None:
        self._sc = sc
        self._agent_entry = agent_entry
        self._payload_for_slot = payload_for_slot
        self._on_ended = on_ended
        self._shared = shared
        self._broadcast: Any = None
        self._broadcasting = threading.Lock()
        self._description = description
        self._apart = kills_reused_workers(sc.version) if apart is None else apart
        self._watch_interval_s = watch_interval_s
        self._group_prefix = f"spark_elastic-{uuid.uuid4().hex[:12]}"
        self._properties: Any = jvm_context(sc).getLocalProperties().clone()
        self._changed = threading.Condition()
        self._running: dict[SlotId, _Launch] = {}
        self._threads: set[threading.Thread] = set()
        """Of slots; a thread outlives its launch by the call of `on_ended`."""
        self._not_submitted: set[SlotId] = set()
        """Whose last job could not be handed to Spark."""
        self._launches = 0
        self._closed = False
        self._watcher: threading.Thread | None = None

    def launch(self, slot: SlotId) -> None:
        with self._changed:
            if slot in self._running:
                raise ValueError(f"slot {slot} is still running; wait for its end before the next launch")
            self._launches += 1
            launch = _Launch(slot, self._launches, f"{self._group_prefix}-{slot}-{self._launches}")
            if self._closed:
                launch.stop_cause = reported("the launcher is closed")
            self._running[slot] = launch
            thread = threading.Thread(target=self._run, args=(launch,), name=f"spark_elastic slot {slot}", daemon=True)
            self._threads.add(thread)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="spark_elastic launcher", daemon=True)
                self._watcher.start()
            thread.start()

    def withdraw(self, slot: SlotId, cause: LossCause) -> None:
        with self._changed:
            launch = self._running.get(slot)
            if launch is not None and launch.stop_cause is None:
                launch.stop_cause = cause
                self._changed.notify_all()

    def admit(self, slot: SlotId, launch: LaunchId) -> bool:
        # Spark reports a job's end when it is cancelled, not when its task has ended: that goes on, or only begins, and
        # has 2-4 s until the executor kills its process. By then the slot may be launched again.
        with self._changed:
            running = self._running.get(slot)
            return running is not None and running.id == launch and running.stop_cause is None

    def agents_joined(self, slots: frozenset[SlotId]) -> None:
        pass  # `slot_arbiter.AdmittedLauncher` makes something of it

    def gone(self) -> str | None:
        # asked from a thread of its own: a JVM that hangs must not hold up the driver, nor keep a connection to it
        answer: list[str | None] = []

        def ask() -> None:
            answer.append(why_gone(self._sc))
            close_connection(self._sc)

        thread = threading.Thread(target=ask, name="spark_elastic is Spark there", daemon=True)
        thread.start()
        thread.join(1.0)
        return answer[0] if answer else None

    def could_not_submit(self, slot: SlotId) -> bool:
        with self._changed:
            return slot in self._not_submitted

    def close(self, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        with self._changed:
            self._closed = True
            for launch in self._running.values():
                launch.stop_cause = launch.stop_cause or reported("the job is over")
            threads = list(self._threads)
            if self._watcher is not None:
                threads.append(self._watcher)
            self._changed.notify_all()
        for thread in threads:
            if thread is not threading.current_thread():  # on_ended may close
                thread.join(max(until - time.monotonic(), 0.0))
        left = [thread.name for thread in threads if thread.is_alive() and thread is not threading.current_thread()]
        if left:
            log.warning("still running %.0f s after they were told to end: %s", deadline_s, ", ".join(left))

    # --- the slot's own thread ------------------------------------------------------------------

    def _run(self, launch: _Launch) -> None:
        try:
            cause, outcome = self._outcome(launch)
            with self._changed:
                del self._running[launch.slot]
                self._changed.notify_all()
            self._on_ended(launch.slot, cause, outcome)
        finally:
            close_connection(self._sc)
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _outcome(self, launch: _Launch) -> tuple[LossCause, AgentOutcome | None]:
        if (told := self._stop_cause(launch)) is not None:
            return told, None
        with self._changed:
            self._not_submitted.discard(launch.slot)
        try:
            outcome = self._submit(launch)
            cause = outcome.cause if outcome is not None else self._why_lost(launch)
        except Exception as error:
            outcome, cause = None, loss_of_error(error)
            if is_drivers_own(error):
                with self._changed:
                    self._not_submitted.add(launch.slot)
        if outcome is None or outcome.result is None:
            # What it was told to stop for; "cancelled" is only how it was done.
            told = self._stop_cause(launch)
            return (cause, outcome) if told is None else (told, None)
        return cause, outcome

    def _stop_cause(self, launch: _Launch) -> LossCause | None:
        with self._changed:
            return launch.stop_cause

    def _why_lost(self, launch: _Launch) -> LossCause:
        try:
            return _first_failure(self._sc, launch.group) or _FIRST_RUN_LOST
        except Exception:  # Spark forgets old jobs
            return _FIRST_RUN_LOST

    def _submit(self, launch: _Launch) -> AgentOutcome | None:
        """Run the slot's job to its end. None: its task was lost, and Spark ran it again."""
        sc = self._sc
        payload = self._payload_for_slot(launch.slot)
        # Local properties belong to the JVM thread that pinned mode gives this thread; a fresh one has none.
        jvm_context(sc).setLocalProperties(self._properties.clone())
        # Not interruptOnCancel: an interrupt does not reach the Python process any sooner. Either way the executor
        # kills it 2-4 s after the cancellation (spark.python.task.killTimeout), so agents are told to end first.
        name = f"{self._description}: worker slot {launch.slot}"
        sc.setJobGroup(launch.group, name)
        sc.setLocalProperty("callSite.short", name)  # which `collect` would replace, and `runJob` does not
        task = _task_of(self._agent_entry, launch.slot, launch.id, payload, self._shared_by_all(), self._apart)
        rdd = sc.parallelize([0], 1)
        if self._apart:
            rdd.ctx = cast("SparkContext", _OwnWorkers(sc))
        rows = sc.runJob(rdd, task)
        return AgentOutcome(*rows[0]) if rows[0] is not None else None

    def _shared_by_all(self) -> Any:
        """The broadcast variable, made by the first slot that needs it; None if nothing is shared."""
        with self._broadcasting:
            if self._broadcast is None and self._shared is not None:
                self._broadcast = self._sc.broadcast(self._shared)
            return self._broadcast

    def _destroy_broadcast(self) -> None:
        with self._broadcasting, contextlib.suppress(Exception):  # with the context it is gone anyway
            broadcast, self._broadcast = self._broadcast, None
            if broadcast is not None:
                broadcast.destroy()

    # --- the watcher's thread -------------------------------------------------------------------

    def _watch(self) -> None:
        """Cancels what has to stop until it has stopped, and stops what Spark would silently run again."""
        try:
            self._watch_until_closed()
            self._destroy_broadcast()
        finally:
            close_connection(self._sc)

    def _watch_until_closed(self) -> None:
        next_look = time.monotonic() + self._watch_interval_s
        while True:
            with self._changed:
                stopping = any(launch.stop_cause is not None for launch in self._running.values())
                if self._closed and not self._running:
                    return
                self._changed.wait(0.05 if stopping else max(next_look - time.monotonic(), 0.0))
                launches = list(self._running.values())
            try:
                for launch in launches:
                    if launch.stop_cause is not None:
                        jvm_context(self._sc).cancelJobGroup(launch.group)
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + self._watch_interval_s
                    for launch in launches:
                        self._stop_if_failed(launch)
            except Exception as error:  # the context is stopping, or its JVM is gone: the jobs end by that
                log.debug("could not look at the slots' jobs: %s", error)

    def _stop_if_failed(self, launch: _Launch) -> None:
        """Spark runs a failed task again, up to spark.task.maxFailures times, perhaps only when a slot is free.

        A second run would be an agent that nobody asked for, so the first failure ends the job.
        """
        if launch.stop_cause is not None:
            return
        cause = _first_failure(self._sc, launch.group)
        if cause is not None:
            self.withdraw(launch.slot, cause)


class _OwnWorkers:
    """A SparkContext whose Python functions run in worker processes that no other functions use.

    Spark keeps its Python workers by the environment that a function asks for.
    """

    def __init__(self, sc: SparkContext) -> None:
        self._sc = sc
        self.environment = {**sc.environment, "SPARK_ELASTIC_AGENTS": "1"}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sc, name)


def kills_reused_workers(pyspark_version: str) -> bool:
    """Whether the monitor of a cancelled task may kill a Python worker that runs another one by now (SPARK-54217)."""
    numbers = re.findall(r"\d+", pyspark_version)[:2]
    return tuple(map(int, numbers)) < (4, 3)


def _task_of(
    agent_entry: AgentEntry, slot: SlotId, launch: LaunchId, payload: bytes, shared: Any, once: bool
) -> Callable[[Any], Any]:
    """The function that Spark runs. It is pickled by value, so it may use nothing of this module."""

    def task(_rows: Any) -> Any:
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is not None and context.attemptNumber() > 0:
            # Spark's own second try: the driver starts the slot again itself. Returning ends the job without a third.
            return [None]
        if once:
            # What a worker says at the end of its task lets Spark keep it for another one. Without that it is closed.
            from pyspark import worker

            write_int, lengths = worker.write_int, worker.SpecialLengths

            def write(value: int, stream: Any) -> None:
                write_int(lengths.END_OF_DATA_SECTION if value == lengths.END_OF_STREAM else value, stream)

            worker.write_int = write
        outcome = agent_entry(slot, launch, payload, *([] if shared is None else [shared.value]))
        return [(outcome.worker, outcome.result, outcome.why, outcome.disconnected)]

    return task


def _first_failure(sc: SparkContext, group: str) -> LossCause | None:
    tracker = sc.statusTracker()
    for job_id in tracker.getJobIdsForGroup(group):
        job = tracker.getJobInfo(job_id)
        for stage_id in job.stageIds if job is not None else ():
            stage = tracker.getStageInfo(stage_id)
            if stage is not None and stage.numFailedTasks > 0:
                return _failure_of_stage(sc, stage_id)
    return None


def _failure_of_stage(sc: SparkContext, stage_id: int) -> LossCause:
    tasks = jvm_context(sc).statusStore().taskList(stage_id, 0, 10)
    for index in range(tasks.size()):
        message = tasks.apply(index).errorMessage()
        if message.isDefined():
            return loss_of(str(message.get()))
    return reported("the slot's task failed")
