"""SparkLauncher with jobs that are simulated: one thread for all slots, and no end is lost."""

from __future__ import annotations

import queue
import threading

import pytest

pytest.importorskip("pyspark")

from spark_elastic.membership.reasons import loss_in_words, reported
from spark_elastic.spark import launcher as module
from spark_elastic.spark.launcher import SparkLauncher
from spark_elastic.spark.slot_jobs import JobNews, SlotJob
from tests.leftovers import Before
from tests.unit.spark.jvm import Application

WAIT_S = 20.0


class SimulatedJobs:
    """Stands for `SlotJobs`: a test lets jobs fail and end, and says which events Spark drops."""

    def __init__(self, sc, profile):
        self.lock = threading.Lock()
        self.jobs: dict[int, str] = {}
        """Job → its group. Job N has the stage N + 1000."""
        self.over: dict[int, object] = {}
        """Job that is over → its row, or the error that it failed with."""
        self.failures: dict[int, str] = {}
        self.cancelled: list[int] = []
        self.callers: set[str] = set()
        self.news = JobNews()
        self.submitted: queue.Queue[int] = queue.Queue()
        self.is_gone = False

    # --- the interface ---

    def open(self, source_context):
        return True

    def close(self):
        pass

    def submit(self, task, group, description):
        self._called()
        with self.lock:
            number = len(self.jobs)
            self.jobs[number] = group
            self.news.stages_of[number] = number + 1000
        self.submitted.put(number)
        return SlotJob(number, None, None)

    def cancel(self, job):
        self._called()
        self.cancelled.append(job.id)
        self.end(job.id, RuntimeError("cancelled"))

    def hear(self):
        self._called()
        with self.lock:
            news, self.news = self.news, JobNews()
        return news

    def is_over(self, job):
        self._called()
        return job.id in self.over

    def result(self, job):
        row = self.over[job.id]
        if isinstance(row, Exception):
            raise row
        return [row]

    def failure(self, job):
        why = self.failures.get(job.id)
        return None if why is None else reported(why)

    # --- for tests ---

    def _called(self):
        self.callers.add(threading.current_thread().name)
        if self.is_gone:
            raise ConnectionError("refused")

    def end(self, job, row=None, *, event=True):
        with self.lock:
            self.over.setdefault(job, row)
            if event:
                self.news.ended.append(job)

    def fail_task(self, job, why):
        with self.lock:
            self.failures[job] = why
            self.news.tasks_ended_in.add(job + 1000)

    def all_submitted(self, count):
        return [self.submitted.get(timeout=WAIT_S) for _ in range(count)]


class Simulated:
    """A launcher over simulated jobs, and the ends that it reports."""

    def __init__(self, monkeypatch, on_ended=None):
        monkeypatch.setattr(module, "SlotJobs", SimulatedJobs)
        self.application = Application(1)
        self.ends: queue.Queue[tuple[int, str]] = queue.Queue()
        self.on_ended = on_ended
        self.launcher = SparkLauncher(self.application.sc, None, lambda slot: b"", self._ended, description="test")
        self.jobs: SimulatedJobs = self.launcher._jobs

    def _ended(self, end):
        self.ends.put((end.slot, loss_in_words(end.cause)))
        if self.on_ended is not None:
            self.on_ended(self, end)

    def launch(self, count):
        for slot in range(count):
            self.launcher.launch(slot)
        return self.jobs.all_submitted(count)

    def next_ends(self, count=1):
        return sorted(self.ends.get(timeout=WAIT_S) for _ in range(count))


@pytest.fixture
def simulated(monkeypatch):
    before, made = Before(), []

    def build(on_ended=None):
        made.append(Simulated(monkeypatch, on_ended))
        return made[-1]

    yield build
    for each in made:
        each.launcher.close(WAIT_S)
    before.assert_no_threads_left()


DONE = (0, False, "done", "REPORTED")


@pytest.mark.parametrize("slots", [8, 500])
def test_one_thread_serves_all_slots(simulated, slots):
    before, it = Before(), simulated()
    it.launch(slots)
    assert before.threads() == ["spark_elastic launcher"]
    for job in range(slots):
        it.jobs.end(job, DONE)
    assert it.next_ends(slots) == [(slot, "done") for slot in range(slots)]
    assert before.threads() == ["spark_elastic launcher"]
    it.launcher.close(WAIT_S)
    assert before.threads() == []
    assert it.jobs.callers == {"spark_elastic launcher"}


def test_first_failure_of_a_task_ends_its_slot_alone_and_cancels_the_job(simulated):
    it = simulated()
    it.launch(4)
    it.jobs.fail_task(2, "executor 7 is lost")
    assert it.next_ends() == [(2, "executor 7 is lost")]
    assert it.jobs.cancelled == [2]
    assert it.ends.empty()


def test_end_whose_event_spark_dropped_is_noticed_all_the_same(simulated):
    it = simulated()
    it.launch(30)
    it.jobs.end(29, DONE, event=False)
    assert it.next_ends() == [(29, "done")]


def test_jobs_end_with_the_jvm(simulated):
    it = simulated()
    it.launch(3)
    it.jobs.is_gone = True
    it.application.sc._jsc = type("Gone", (), {"sc": lambda self: (_ for _ in ()).throw(ConnectionError("refused"))})()
    assert it.next_ends(3) == [(slot, "the connection to Spark's JVM is gone") for slot in range(3)]


def test_job_that_spark_forgot_when_it_stopped_ends_all_the_same(simulated):
    it = simulated()
    it.launch(2)
    it.application.stopped = True
    assert it.next_ends(2) == [(slot, "the SparkContext was stopped") for slot in range(2)]


def test_slot_withdrawn_as_soon_as_it_is_launched_ends_once(simulated):
    it = simulated()
    for slot in range(50):
        it.launcher.launch(slot)
        it.launcher.withdraw(slot, reported("changed my mind"))
    assert it.next_ends(50) == [(slot, "changed my mind") for slot in range(50)]
    it.launcher.close(WAIT_S)
    assert it.ends.empty()


def test_error_in_a_report_does_not_end_the_others(simulated, caplog):
    def fail(it, end):
        if end.slot == 0:
            raise RuntimeError("no room for the report")

    it = simulated(fail)
    it.launch(2)
    it.jobs.end(0, DONE)
    it.jobs.end(1, DONE)
    assert it.next_ends(2) == [(0, "done"), (1, "done")]
    it.launcher.close(WAIT_S)
    assert "no room for the report" in caplog.text


def test_launcher_can_be_closed_and_asked_from_a_report(simulated):
    answers = []

    def close(it, end):
        answers.append(it.launcher.gone())
        it.launcher.close(WAIT_S)

    it = simulated(close)
    it.launch(2)
    it.jobs.end(0, DONE)
    assert it.next_ends(2) == [(0, "done"), (1, "the job is over")]
    assert answers[0] is None
