"""SparkLauncher: agents in Spark tasks. Each slot is a job with one task, so a lost executor ends only its slots."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import uuid
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, cast

from spark_elastic import clock
from spark_elastic.data.spark_console import close_connection
from spark_elastic.driver.launcher import LaunchEnd, OnEnded
from spark_elastic.driver.spark import cluster
from spark_elastic.membership.reasons import LossCause, reported
from spark_elastic.membership.states import AgentOutcome
from spark_elastic.membership.topology import LaunchId, SlotId

if TYPE_CHECKING:
    from pyspark import SparkContext

AgentEntry = Callable[..., AgentOutcome]

log = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 1.0
"""Seconds between two checks for failed tasks, which Spark would run again."""
_TASK_LOST = reported("the slot's task was lost")


@dataclass(slots=True, eq=False)
class _Launch:
    """One Spark job of one slot, from `launch` to `on_ended`. Changed only under the launcher's lock."""

    slot: SlotId
    id: LaunchId
    group: str
    """Spark's job group. New for each launch, because Spark may remember a cancelled group."""
    stop_cause: LossCause | None = None
    """Set once, when the job has to end. The slot's thread may not have submitted its job yet, so it checks this first,
    and the watcher repeats the cancellation until the thread has ended."""


@dataclass(eq=False)
class SparkLauncher:
    """A `Launcher` whose agents run in Spark tasks.

    Must be created in the thread that called `run`: the jobs inherit that thread's local properties, such as its
    scheduler pool.
    """

    sc: SparkContext
    agent_entry: AgentEntry
    """Runs in the task, called with `(slot, launch, payload)`. It is pickled by reference, so its module must be
    importable on the executors."""
    payload_for_slot: Callable[[SlotId], bytes]
    """Returns the payload of a slot; called at each launch. The payload travels in Spark's own task serialisation and
    must be small: from 1 MiB on PySpark would write it to a file."""
    on_ended: OnEnded
    _: KW_ONLY
    shared: bytes | None = None
    """Data for all slots, which may be large. Sent as a broadcast variable, which is a file on the driver and in the
    executors' block managers, and passed to `agent_entry` as the fourth argument."""
    description: str
    """Text in Spark's UI before ": worker slot 3"."""
    apart: bool | None = None
    """True: agents run in Python workers that no other task uses. Default: True where Spark may kill a Python worker
    that it has reused."""

    def __post_init__(self) -> None:
        self._apart = kills_reused_workers(self.sc.version) if self.apart is None else self.apart
        self._broadcast: Any = None
        self._broadcasting = threading.Lock()
        self._group_prefix = f"spark_elastic-{uuid.uuid4().hex[:12]}"
        self._properties: Any = cluster.jvm_context(self.sc).getLocalProperties().clone()
        self._changed = threading.Condition()
        self._running: dict[SlotId, _Launch] = {}
        self._threads: set[threading.Thread] = set()
        """One for each launch; it ends after `on_ended` has returned."""
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
        # Spark reports the end of a cancelled job before its task has ended. The task may still run, or even start,
        # until the executor kills its process 2-4 s later. By then the slot may have been launched again.
        with self._changed:
            running = self._running.get(slot)
            return running is not None and running.id == launch and running.stop_cause is None

    def agent_present(self, slot: SlotId, present: bool) -> None:
        pass  # only `QueuedLauncher` needs it

    def gone(self) -> str | None:
        # A JVM that hangs must not block the driver: ask in another thread and wait for it a second at most.
        answer: list[str | None] = []

        def ask() -> None:
            answer.append(cluster.why_gone(self.sc))
            close_connection(self.sc)

        thread = threading.Thread(target=ask, name="spark_elastic context check", daemon=True)
        thread.start()
        thread.join(1.0)
        return answer[0] if answer else None

    def close(self, deadline_s: float) -> None:
        until = clock.monotonic() + deadline_s
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
                thread.join(max(until - clock.monotonic(), 0.0))
        left = [thread.name for thread in threads if thread.is_alive() and thread is not threading.current_thread()]
        if left:
            log.warning("still running %.0f s after they were told to end: %s", deadline_s, ", ".join(left))

    # --- the slot's own thread ------------------------------------------------------------------

    def _run(self, launch: _Launch) -> None:
        try:
            end = self._run_job(launch)
            with self._changed:
                del self._running[launch.slot]
                self._changed.notify_all()
            self.on_ended(end)
        finally:
            close_connection(self.sc)
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _run_job(self, launch: _Launch) -> LaunchEnd:
        slot = launch.slot
        if (stop_cause := launch.stop_cause) is not None:
            return LaunchEnd(slot, stop_cause)
        try:
            outcome = self._submit(launch)
            end = LaunchEnd(slot, self._why_lost(launch) if outcome is None else outcome.cause, outcome)
        except Exception as error:
            end = LaunchEnd(slot, cluster.loss_of_error(error), submitted=not cluster.failed_in_driver(error))
        delivered = end.outcome is not None and end.outcome.result is not None
        stop_cause = launch.stop_cause
        if delivered or stop_cause is None:
            return end
        return LaunchEnd(slot, stop_cause, submitted=end.submitted)  # Spark only knows that it was cancelled

    def _why_lost(self, launch: _Launch) -> LossCause:
        try:
            return _first_failure(self.sc, launch.group) or _TASK_LOST
        except Exception as error:  # Spark has forgotten the job or its stage; which error that gives depends on Spark
            log.debug("no failure of %s is known: %s", launch.group, error)
            return _TASK_LOST

    def _submit(self, launch: _Launch) -> AgentOutcome | None:
        """Run the slot's job to its end. Returns None if its task was lost and Spark ran it again."""
        sc = self.sc
        payload = self.payload_for_slot(launch.slot)
        # Local properties belong to a JVM thread. In pinned mode this Python thread has a new one, without any.
        cluster.jvm_context(sc).setLocalProperties(self._properties.clone())
        # No interruptOnCancel: an interrupt does not reach the Python process any sooner. With or without it the
        # executor kills the process 2-4 s after the cancellation (spark.python.task.killTimeout), so agents are asked
        # to end before that.
        name = f"{self.description}: worker slot {launch.slot}"
        sc.setJobGroup(launch.group, name)
        sc.setLocalProperty("callSite.short", name)  # `runJob` keeps it; `collect` would replace it
        task = _task_of(self.agent_entry, launch.slot, launch.id, payload, self._shared_variable(), self._apart)
        rdd = sc.parallelize([0], 1)
        if self._apart:
            rdd.ctx = cast("SparkContext", _SeparateWorkers(sc))
        rows = sc.runJob(rdd, task)
        return AgentOutcome(*rows[0]) if rows[0] is not None else None

    def _shared_variable(self) -> Any:
        """Return the broadcast variable, created by the first slot that needs it; None if nothing is shared."""
        with self._broadcasting:
            if self._broadcast is None and self.shared is not None:
                self._broadcast = self.sc.broadcast(self.shared)
            return self._broadcast

    # --- the watcher's thread -------------------------------------------------------------------

    def _watch(self) -> None:
        """Cancel jobs that have to stop until they have, and stop jobs whose task Spark would run again."""
        try:
            self._watch_until_closed()
            if self._broadcast is not None:
                with contextlib.suppress(Exception):  # a stopped context has destroyed it, and raises various errors
                    self._broadcast.destroy()
        finally:
            close_connection(self.sc)

    def _watch_until_closed(self) -> None:
        next_look = clock.monotonic() + _WATCH_INTERVAL_S
        while True:
            with self._changed:
                stopping = any(launch.stop_cause is not None for launch in self._running.values())
                if self._closed and not self._running:
                    return
                self._changed.wait(0.05 if stopping else max(next_look - clock.monotonic(), 0.0))
                launches = list(self._running.values())
            try:
                for launch in launches:
                    if launch.stop_cause is not None:
                        cluster.jvm_context(self.sc).cancelJobGroup(launch.group)
                if clock.monotonic() >= next_look:
                    next_look = clock.monotonic() + _WATCH_INTERVAL_S
                    for launch in launches:
                        # Spark would run the task again, up to spark.task.maxFailures times and whenever a slot is
                        # free: an agent that the driver did not ask for.
                        if launch.stop_cause is None and (cause := _first_failure(self.sc, launch.group)):
                            self.withdraw(launch.slot, cause)
            except Exception as error:  # the context is being stopped or its JVM is gone, which ends the jobs as well
                log.debug("could not check the slots' jobs: %s", error)


class _SeparateWorkers:
    """A SparkContext whose Python functions run in worker processes that no other function uses.

    Spark keeps its idle Python workers by the environment variables that a function asks for, so one variable more is
    enough.
    """

    def __init__(self, sc: SparkContext) -> None:
        self._sc = sc
        self.environment = {**sc.environment, "SPARK_ELASTIC_AGENTS": "1"}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sc, name)


def kills_reused_workers(pyspark_version: str) -> bool:
    """Return True if the monitor of a cancelled task may kill a Python worker that runs another task (SPARK-54217)."""
    numbers = re.findall(r"\d+", pyspark_version)[:2]
    return tuple(map(int, numbers)) < (4, 3)


def _task_of(
    agent_entry: AgentEntry, slot: SlotId, launch: LaunchId, payload: bytes, shared: Any, once: bool
) -> Callable[[Any], Any]:
    """Return the function that Spark runs. It is pickled by value, so it must not use names of this module."""

    def task(_rows: Any) -> Any:
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is not None and context.attemptNumber() > 0:
            # Spark's own second attempt. The driver starts the slot again itself, so return, which ends the job.
            return [None]
        if once:
            # The last number that a Python worker writes after a task lets Spark keep it for another one. With this
            # other number Spark closes it.
            from pyspark import worker

            write_int, lengths = worker.write_int, worker.SpecialLengths

            def write(value: int, stream: Any) -> None:
                write_int(lengths.END_OF_DATA_SECTION if value == lengths.END_OF_STREAM else value, stream)

            worker.write_int = write
        outcome = agent_entry(slot, launch, payload, *([] if shared is None else [shared.value]))
        return [(outcome.worker, outcome.result, outcome.why, outcome.disconnected)]

    return task


def _first_failure(sc: SparkContext, group: str) -> LossCause | None:
    """Return the cause of the first failed task in the jobs of a group; None if no task has failed."""
    tracker = sc.statusTracker()
    for job_id in tracker.getJobIdsForGroup(group):
        job = tracker.getJobInfo(job_id)
        for stage_id in job.stageIds if job is not None else ():
            stage = tracker.getStageInfo(stage_id)
            if stage is None or stage.numFailedTasks == 0:
                continue
            tasks = cluster.jvm_context(sc).statusStore().taskList(stage_id, 0, 10)
            messages = (tasks.apply(index).errorMessage() for index in range(tasks.size()))
            message = next((message for message in messages if message.isDefined()), None)
            return reported("the slot's task failed") if message is None else cluster.loss_of(str(message.get()))
    return None
