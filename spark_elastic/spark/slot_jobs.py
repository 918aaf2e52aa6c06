"""SlotJobs: Spark jobs of one task each that need no thread. One caller submits them all and hears of all their ends.

PySpark's own actions block until their job is over. Here a job is submitted with `collectAsync` of Spark's Java API,
and its end is noticed by a listener in the JVM (docs/decisions/03-slot-jobs.md).
"""

from __future__ import annotations

import io
import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from spark_elastic.membership.reasons import LossCause
from spark_elastic.spark.bus import EVENT, BusListener
from spark_elastic.spark.failures import loss_of
from spark_elastic.spark.jvm import if_allowed, jvm_context

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)

_END_S = 5
"""Spark announces the end of a job some milliseconds before its result can be read. It is waited for this long."""


@dataclass(eq=False, slots=True)
class SlotJob:
    """A submitted job. Made by `SlotJobs.submit`."""

    id: int
    """Spark's number of the job."""
    future: Any
    """The job's `JavaFutureAction`."""
    deserializer: Any
    """PySpark's, for the rows of the result."""
    stage: int | None = None
    """Spark's number of the job's only stage; None until its start was heard of."""


@dataclass(slots=True)
class JobNews:
    """Events of the bus since the last `hear`. Those of other jobs of the application are in it too."""

    ended: list[int] = field(default_factory=list)
    """Jobs that are over."""
    stages_of: dict[int, int] = field(default_factory=dict)
    """Job → its first stage, of the jobs that have started."""
    tasks_ended_in: set[int] = field(default_factory=set)
    """Stages in which tasks have ended or failed."""


class SlotJobs:
    """Jobs of one task each in a SparkContext. The number of calls to the JVM does not depend on how many run.

    Must be created in the thread whose local properties the jobs inherit, such as its scheduler pool. One other thread
    calls everything else: `open` first, `close` last.
    """

    def __init__(self, sc: SparkContext, profile: Any = None) -> None:
        self._sc = sc
        self._profile = profile
        """PySpark's, of what a task gets; None: what the session's settings say."""
        self._context: Any = jvm_context(sc)  # PySpark drops it when the context is stopped; the ends come later
        self._properties: Any = self._context.getLocalProperties().clone()
        self._listener: BusListener | None = None

    def open(self, source_context: SparkContext) -> bool:
        """Begin to listen. Returns False if the JVM cannot: then only `is_over` tells that a job has ended.

        The tasks take their environment variables from `source_context`.
        """
        jvm: Any = self._sc._jvm
        self._source: Any = self._sc.parallelize([0], 1)
        """The RDD of one row that the tasks are functions of; one for all jobs."""
        if self._profile is not None:
            self._source.withResources(self._profile)
        self._source.ctx = source_context
        self._seconds: Any = if_allowed(lambda: jvm.java.util.concurrent.TimeUnit.SECONDS, None)
        # No interruptOnCancel: an interrupt does not reach the Python process any sooner. With or without it the
        # executor kills the process 2-4 s after the cancellation (spark.python.task.killTimeout), so agents are asked
        # to end before that.
        self._properties.setProperty("spark.job.interruptOnCancel", "false")
        try:
            # Tasks are many, in other jobs of the application: only the numbers of their stages are kept, each once.
            self._events: Any = jvm.java.util.concurrent.LinkedBlockingQueue()
            self._stages: Any = jvm.java.util.concurrent.ConcurrentSkipListSet()
            wanted = {
                "onJobStart": (self._events, EVENT),
                "onJobEnd": (self._events, "jobId"),
                "onTaskEnd": (self._stages, "stageId"),
            }
            self._listener = BusListener(self._sc, wanted)
        except Exception as error:  # jobs run without it, whatever the JVM lacks
            log.warning("no job listener (%s); the ends of slots are seen by asking for them, some each second", error)
        return self._listener is not None

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()

    def submit(self, task: Callable[[Any], Any], group: str, description: str) -> SlotJob:
        """Start the job that collects the rows of a task; returns at once.

        `group` is Spark's job group, `description` the name of the job and its stage in Spark's UI.
        """
        rdd = self._source.mapPartitions(task)
        java = rdd._jrdd
        properties = {
            "spark.jobGroup.id": group,
            "spark.job.description": description,
            "callSite.short": description,  # or else the stage would be called "collectAsync at ..."
        }
        for name, value in properties.items():
            self._properties.setProperty(name, value)
        # They belong to the JVM thread behind this thread's connection, and each job gets a copy of them.
        self._context.setLocalProperties(self._properties)
        future = java.collectAsync()
        return SlotJob(int(future.jobIds().get(0)), future, rdd._jrdd_deserializer)

    def cancel(self, job: SlotJob) -> None:
        """End a job. It is over when `hear` or `is_over` says so."""
        self._context.cancelJob(job.id)

    def hear(self) -> JobNews:
        """Return what has happened since the last call, without waiting: two calls to the JVM, and some an event."""
        news = JobNews()
        if self._listener is None:
            return news
        while (event := self._events.poll()) is not None:
            if isinstance(event, int):
                news.ended.append(event)
            elif (stages := event.stageIds()).size() > 0:
                news.stages_of[int(event.jobId())] = int(stages.apply(0))
        while (stage := self._stages.pollFirst()) is not None:
            news.tasks_ended_in.add(stage)
        return news

    def is_over(self, job: SlotJob) -> bool:
        return bool(job.future.isDone())

    def result(self, job: SlotJob) -> list[Any]:
        """Return the rows of a job that has ended.

        Raises:
            Exception: The reason why the job failed or was cancelled.
            py4j.protocol.Py4JJavaError: Also if the job has not ended after all.
        """
        parts = job.future.get() if self._seconds is None else job.future.get(_END_S, self._seconds)
        rows: list[Any] = []
        for index in range(parts.size()):
            part = cast(bytes, parts.get(index))
            rows += job.deserializer.load_stream(io.BytesIO(struct.pack("!i", len(part)) + part))
        return rows

    def failure(self, job: SlotJob) -> LossCause | None:
        """Return the cause of the first failed task of a job; None if none is known to have failed."""
        return if_allowed(lambda: self._failure(job), None)

    def _failure(self, job: SlotJob) -> LossCause | None:
        stage = job.stage
        if stage is None:
            known = self._context.statusTracker().getJobInfo(job.id)
            stages = list(known.get().stageIds()) if known.isDefined() else []
            if not stages:
                return None
            stage = job.stage = int(stages[0])
        tasks = self._context.statusStore().taskList(stage, 0, 10)
        messages = (tasks.apply(index).errorMessage() for index in range(tasks.size()))
        message = next((message for message in messages if message.isDefined()), None)
        return None if message is None else loss_of(str(message.get()))
