"""SparkLauncher: agents in Spark tasks. Each slot is a job with one task, so a lost executor ends only its slots."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, cast

from spark_elastic import clock
from spark_elastic.membership.launcher import LaunchEnd, OnEnded
from spark_elastic.membership.reasons import LossCause, loss_in_words, reported
from spark_elastic.membership.topology import LaunchId, SlotId
from spark_elastic.spark.agent_task import AgentEntry, agent_task, outcome_of
from spark_elastic.spark.failures import failed_in_driver, loss_of_error
from spark_elastic.spark.jvm import close_connection, why_gone
from spark_elastic.spark.slot_jobs import SlotJob, SlotJobs

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)

_LISTEN_INTERVAL_S = 0.1
"""Seconds between two looks at the events that the listener in the JVM has collected."""
_ASK_INTERVAL_S = 1.0
"""Seconds between two checks of some jobs, in case that the listener missed an event."""
_ASKED_EACH_TIME = 20
_SUBMITTED_AT_A_TIME = 16
"""Jobs that are submitted before the ends of others are looked at again; each takes some milliseconds."""
_FAILURE_KNOWN_S = 5.0
"""Spark's status store knows a failed task's error a moment after the event. It is asked for at most this long."""


@dataclass(slots=True, eq=False)
class _Launch:
    """One Spark job of one slot, from `launch` to `on_ended`."""

    slot: SlotId
    id: LaunchId
    stop_cause: LossCause | None = None
    """Set once, under the launcher's lock, when the job has to end. It may not be submitted yet."""
    job: SlotJob | None = None
    """Set once by the launcher's thread, when the job is submitted."""
    suspect_until: float = 0.0
    """A task of the job has ended: until then its failure is looked for in the status store."""


@dataclass(eq=False)
class SparkLauncher:
    """A `Launcher` whose agents run in Spark tasks.

    Must be created in the thread that called `run`: the jobs inherit that thread's local properties, such as its
    scheduler pool.
    """

    sc: SparkContext
    agent_entry: AgentEntry
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
    profile: Any = None
    """PySpark's, of what a slot's task gets; None: what the session's settings say."""

    def __post_init__(self) -> None:
        # The monitor of a cancelled task may kill a Python worker that has been reused by then (SPARK-54217).
        self._apart = tuple(map(int, re.findall(r"\d+", self.sc.version)[:2])) < (4, 3)
        """True: agents run in Python workers that no other task uses."""
        self._broadcast: Any = None
        self._group_prefix = f"spark_elastic-{uuid.uuid4().hex[:12]}"
        self._jobs = SlotJobs(self.sc, self.profile)
        self._changed = threading.Condition()
        # --- under its lock ---
        self._running: dict[SlotId, _Launch] = {}
        """Launches that are not over."""
        self._to_submit: deque[_Launch] = deque()
        self._to_cancel: deque[_Launch] = deque()
        self._launches = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        """The only thread, for all slots, which alone talks to Spark and calls `on_ended`. It ends once the launcher is
        closed and nothing runs."""
        # --- of that thread alone ---
        self._by_job: dict[int, _Launch] = {}
        self._by_stage: dict[int, _Launch] = {}
        self._suspects: set[_Launch] = set()
        self._next_ask = 0.0

    def launch(self, slot: SlotId) -> None:
        with self._changed:
            self._launches += 1
            launch = self._running[slot] = _Launch(slot, self._launches)
            self._to_submit.append(launch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="spark_elastic launcher", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def withdraw(self, slot: SlotId, cause: LossCause) -> None:
        with self._changed:
            launch = self._running.get(slot)
            if launch is not None:
                self._stop(launch, cause)

    def _stop(self, launch: _Launch, cause: LossCause) -> None:
        """Have a launch end, unless it has to already. Called with the lock."""
        if launch.stop_cause is None:
            launch.stop_cause = cause
            self._to_cancel.append(launch)
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
        if threading.current_thread() is self._thread:  # it talks to the JVM anyway, on a connection of its own
            return loss_in_words(cause) if (cause := why_gone(self.sc)) else None
        # A JVM that hangs must not block the driver: ask in another thread and wait for it a second at most.
        answer: list[LossCause | None] = []

        def ask() -> None:
            answer.append(why_gone(self.sc))
            close_connection(self.sc)

        thread = threading.Thread(target=ask, name="spark_elastic context check", daemon=True)
        thread.start()
        thread.join(1.0)
        return loss_in_words(answer[0]) if answer and answer[0] else None

    def close(self, deadline_s: float) -> None:
        with self._changed:
            self._closed = True
            for launch in self._running.values():
                self._stop(launch, reported("the job is over"))
            thread = self._thread
            self._changed.notify_all()
        if thread is None or thread is threading.current_thread():  # on_ended may close
            return
        thread.join(deadline_s)
        if thread.is_alive():
            with self._changed:
                left = ", ".join(map(str, sorted(self._running)))
            log.warning("still running %.0f s after they were told to end: slots %s", deadline_s, left or "(none)")

    # --- the launcher's thread ------------------------------------------------------------------

    def _work(self) -> None:
        listening = False
        try:
            try:
                listening = self._jobs.open(cast("SparkContext", _SeparateWorkers(self.sc)) if self._apart else self.sc)
            except Exception as error:  # the jobs say why, if they cannot run either
                log.debug("could not prepare the slots' jobs: %s", error)
            while self._turn(listening):
                pass
            self._jobs.close()
            if self._broadcast is not None:
                with contextlib.suppress(Exception):  # a stopped context has destroyed it, and raises various errors
                    self._broadcast.destroy()
        finally:
            close_connection(self.sc)

    def _turn(self, listening: bool) -> bool:
        """Submit and cancel what there is to, then look at what has happened. Returns False at the end."""
        with self._changed:
            if not self._to_submit and not self._to_cancel and (self._running or not self._closed):
                self._changed.wait(_LISTEN_INTERVAL_S)
            if self._closed and not self._running:
                return False
            cancelled = list(self._to_cancel)
            self._to_cancel.clear()
            submitted = [self._to_submit.popleft() for _ in range(min(len(self._to_submit), _SUBMITTED_AT_A_TIME))]
        for launch in cancelled:
            if launch.job is not None:  # or else it is not submitted any more
                with contextlib.suppress(Exception):  # `_ask` cancels it again
                    self._jobs.cancel(launch.job)
        for launch in submitted:
            self._start(launch)
        try:
            self._hear()
            if clock.monotonic() >= self._next_ask:
                self._next_ask = clock.monotonic() + _ASK_INTERVAL_S
                self._ask(listening)
        except Exception as error:  # the context is being stopped, or its JVM is gone
            log.debug("could not check the slots' jobs: %s", error)
            self._end_all_if_gone()
        return True

    def _start(self, launch: _Launch) -> None:
        if launch.stop_cause is not None:
            self._over(launch, LaunchEnd(launch.slot, launch.stop_cause))
            return
        slot = launch.slot
        try:
            if self._broadcast is None and self.shared is not None:
                self._broadcast = self.sc.broadcast(self.shared)
            work = self.agent_entry, slot, launch.id, self.payload_for_slot(slot)
            task = agent_task(*work, shared=self._broadcast, once=self._apart)
            group = f"{self._group_prefix}-{slot}-{launch.id}"  # a new one: Spark may remember one that was cancelled
            launch.job = self._jobs.submit(task, group, f"{self.description}: worker slot {slot}")
        except Exception as error:
            gone = self._why_gone()  # which the error of a stopped context rarely says
            cause = launch.stop_cause or gone or loss_of_error(error)
            self._over(launch, LaunchEnd(slot, cause, submitted=not failed_in_driver(error)))
            return
        self._by_job[launch.job.id] = launch

    def _hear(self) -> None:
        """Handle the events of the bus."""
        news, now = self._jobs.hear(), clock.monotonic()
        for job, stage in news.stages_of.items():
            if (launch := self._by_job.get(job)) is not None and launch.job is not None:
                launch.job.stage = stage
                self._by_stage[stage] = launch
        for job in news.ended:
            if (launch := self._by_job.get(job)) is not None:
                self._finish(launch)
        for stage in news.tasks_ended_in:
            if (launch := self._by_stage.get(stage)) is not None:
                launch.suspect_until = now + _FAILURE_KNOWN_S
                self._suspects.add(launch)
        for launch in list(self._suspects):
            try:
                self._look_for_failure(launch)
            finally:
                if launch.stop_cause is not None or now >= launch.suspect_until:
                    self._suspects.discard(launch)

    def _look_for_failure(self, launch: _Launch) -> None:
        # Spark would run a failed task again, up to spark.task.maxFailures times and whenever a slot is free: an agent
        # that the driver did not ask for.
        if launch.job is not None and launch.stop_cause is None and (cause := self._jobs.failure(launch.job)):
            with self._changed:
                self._stop(launch, cause)

    def _ask(self, listening: bool) -> None:
        """Ask about some jobs, those first that were not asked about for the longest time.

        Spark may drop events when it is overloaded, and announces no end of a job that it refuses at its start.
        """
        if self._end_all_if_gone():
            return
        for job, launch in list(self._by_job.items())[:_ASKED_EACH_TIME]:
            self._by_job[job] = self._by_job.pop(job)  # the last to be asked about again
            assert launch.job is not None
            if self._jobs.is_over(launch.job):
                self._finish(launch)
            elif launch.stop_cause is not None:
                self._jobs.cancel(launch.job)
            elif not listening:
                self._look_for_failure(launch)

    def _end_all_if_gone(self) -> bool:
        """End all launches if the context was stopped, or its JVM is gone. Spark forgets some jobs as it stops."""
        gone = self._why_gone()
        if gone is None:
            return False
        with self._changed:
            launches = list(self._running.values())
            self._to_submit.clear()
        for launch in launches:
            self._over(launch, LaunchEnd(launch.slot, launch.stop_cause or gone))
        return True

    def _why_gone(self) -> LossCause | None:
        try:
            return why_gone(self.sc)
        except Exception as error:  # a context that is being stopped; the thread must outlive that
            log.debug("could not ask whether Spark still runs: %s", error)
            return None

    def _finish(self, launch: _Launch) -> None:
        """End the launch of a job that is over."""
        slot, job = launch.slot, launch.job
        assert job is not None
        try:
            outcome = outcome_of(self._jobs.result(job))
            cause = outcome.cause if outcome is not None else None
            if cause is None:
                with contextlib.suppress(Exception):  # Spark has forgotten the job or its stage, and says so variously
                    cause = self._jobs.failure(job)
            end = LaunchEnd(slot, cause or reported("the slot's task was lost"), outcome)
        except Exception as error:
            end = LaunchEnd(slot, loss_of_error(error), submitted=not failed_in_driver(error))
        delivered = end.outcome is not None and end.outcome.result is not None
        if launch.stop_cause is not None and not delivered:  # Spark only knows that it was cancelled
            end = LaunchEnd(slot, launch.stop_cause, submitted=end.submitted)
        self._over(launch, end)

    def _over(self, launch: _Launch, end: LaunchEnd) -> None:
        if launch.job is not None:
            self._by_job.pop(launch.job.id, None)
            self._by_stage.pop(-1 if launch.job.stage is None else launch.job.stage, None)
        self._suspects.discard(launch)
        with self._changed:
            del self._running[launch.slot]
        try:
            self.on_ended(end)
        except Exception:  # the other slots' ends must not be lost with it
            log.exception("the end of slot %d could not be reported", launch.slot)


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
