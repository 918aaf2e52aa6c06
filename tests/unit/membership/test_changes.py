"""The event log: events in, one sentence for each change of the world out."""

from __future__ import annotations

from typing import Any

import pytest

from spark_elastic.membership import events as e
from spark_elastic.membership.commands import Announce
from spark_elastic.membership.machine import Membership
from spark_elastic.membership.reasons import LossCause, LossKind, reported
from spark_elastic.membership.topology import Place
from spark_elastic.reporting.event_log import MOST_NOTICES, EventLog, root_loss_in_words
from spark_elastic.settings import ElasticSettings
from tests.unit.membership.script import exited, step_at

CLOSED = LossCause(LossKind.CONNECTION_CLOSED, detail="reset")


def lost(kind: LossKind, because: LossCause) -> LossCause:
    return LossCause(kind, because=because)


class Job:
    """A membership machine with a log beside it, as in the driver. Workers w1.. on executors 0.. at a step.

    `progress`: the step; None: the function has no elastic loop.
    """

    def __init__(
        self, size: int, minimum: int = 1, executors: str = "spark", progress: int | None = 10, **settings: Any
    ) -> None:
        self.machine = Membership(
            ElasticSettings(num_proc=size, min_num_proc=minimum, max_num_proc=size + 2, **settings)
        )
        self.log = EventLog()
        self.tell(0.0, e.JobStarted())
        for number in range(size):
            name = str(number) if executors == "spark" else executors
            self.tell(1.0, e.AgentJoined(number + 1, Place(f"h{number}", name, number)))
        for number in range(size):
            self.tell(2.0, e.WorkerReady(number + 1, 0, None, at_init=True))
        for number in range(size):
            self.tell(3.0, e.WorkerAlive(number + 1, None if progress is None else step_at(progress)))

    def tell(self, now: float, event: e.Event) -> None:
        commands = self.machine.handle(event, now)
        self.log.observe(event, commands, now)
        for command in commands:
            if isinstance(command, Announce):
                self.log.note(command.record)

    def ready(self, now: float, *workers: int, step: int = 10) -> None:
        for worker in workers:
            self.tell(now, e.WorkerReady(worker, self.machine.world.round, step_at(step)))

    @property
    def said(self) -> list[str]:
        return [str(change) for change in self.log.changes if change.kind != "waiting"]


def test_a_lost_executor_is_one_sentence_with_its_cause_and_cost():
    job = Job(4)
    job.tell(5.0, e.WorkerLost(4, CLOSED))
    job.tell(5.02, e.ExecutorLost("3", exited(137)))
    job.ready(5.08, 1, 2, 3)
    assert job.said == [
        "training starts with 4 workers",
        "executor 3 lost (killed by signal 9): 4 -> 3 workers, 0.08 s, no step lost",
    ]


def test_the_cause_may_come_after_the_next_world_has_begun():
    job = Job(3)
    job.tell(5.0, e.WorkerLost(2, CLOSED))
    job.ready(5.05, 1, 3)
    assert (
        job.said[-1]
        == "rank 1 on executor 1 lost (its connection closed (reset)): 3 -> 2 workers, 0.05 s, no step lost"
    )
    job.tell(5.10, e.WorkerLost(2, exited(-9)))
    assert job.said[-1] == "rank 1 on executor 1 lost (killed by signal 9): 3 -> 2 workers, 0.05 s, no step lost"


def test_late_report_of_spark_does_not_change_an_old_loss():
    job = Job(3)
    job.tell(5.0, e.WorkerLost(2, exited(-11)))
    job.ready(5.05, 1, 3)
    job.tell(100.0, e.ExecutorLost("1", reported("idle for too long")))
    assert job.said[1] == "rank 1 on executor 1 lost (killed by signal 11): 3 -> 2 workers, 0.05 s, no step lost"


def test_steps_that_have_to_be_done_again_are_counted():
    job = Job(2)
    job.tell(4.0, e.WorkerAlive(1, step_at(57)))
    job.tell(5.0, e.WorkerLost(2, exited(-9)))
    job.ready(5.1, 1, step=50)
    assert job.said[-1].endswith("2 -> 1 worker, 0.10 s, 7 steps lost")


@pytest.mark.parametrize("in_loop", [False, True])
def test_function_in_no_loop_is_said_to_start_again(in_loop: bool) -> None:
    job = Job(2, progress=0 if in_loop else None)
    job.tell(5.0, e.WorkerLost(2, exited(-9)))
    job.tell(5.1, e.WorkerLost(1, exited(-9)))
    job.tell(8.0, e.Tick())  # the slots have rested
    job.tell(9.0, e.WorkerReady(3, 0, None, at_init=True))
    job.tell(9.0, e.WorkerReady(4, 0, None, at_init=True))
    change = next(each for each in job.log.changes if each.kind == "lost")
    assert (change.restarted, change.steps_lost) == ((False, 0) if in_loop else (True, None))
    assert str(change).endswith("no step lost" if in_loop else "from its beginning: it was in no elastic loop")


def test_a_decommissioned_executor_is_drained():
    job = Job(3)
    job.tell(5.0, e.ExecutorDecommissioned("2"))
    job.ready(5.1, 1, 2, 3)
    assert job.said[-1] == "executor 2 drained (decommissioned): 3 -> 2 workers, 0.00 s, no step lost"


def test_messages_of_workers_are_changes_and_their_number_is_limited():
    job = Job(2)
    job.log.notice(2, "a checkpoint could not be written", 4.0)
    job.log.notice(99, "who is this", 4.0)
    assert job.said[1:] == ["rank 1: a checkpoint could not be written", "a worker: who is this"]
    for _ in range(2 * MOST_NOTICES):
        job.log.notice(1, "again", 5.0)
    assert len(job.said) == 1 + MOST_NOTICES
    assert job.said[-1].startswith("rank 0: again (further")


def test_local_processes_that_are_lost_together_are_one_sentence():
    job = Job(3, executors="driver")
    for place in (2, 1):
        job.tell(4.0, e.AgentLost(place, reported("silent for 30 s")))
    job.ready(5.1, 3)
    assert job.said[-1].startswith("rank 1 on h1, rank 0 on h0 lost (silent for 30 s): 3 -> 1 worker")


def test_the_pause_is_over_with_the_first_step_of_the_new_world():
    job = Job(3)
    job.tell(5.0, e.WorkerLost(2, exited(-9)))
    job.ready(5.05, 1, 3)
    lost = next(change for change in job.log.changes if change.kind == "lost")
    assert (lost.open, round(lost.pause_s, 2)) == (True, 0.05)
    job.tell(5.10, e.WorkerAlive(1, step_at(10)))  # it has only heard of the new world
    job.tell(5.25, e.WorkerAlive(1, step_at(11)))
    assert job.said[-1].endswith("3 -> 2 workers, 0.25 s, no step lost")


def test_a_wait_lasts_until_the_next_world():
    job = Job(2)
    waits = [change for change in job.log.changes if change.kind == "waiting"]
    assert sum(wait.lasted_s for wait in waits) == 2.0
    assert all(wait.lasted_s is not None for wait in waits)


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (exited(-9), "killed by signal 9"),
        (lost(LossKind.AGENT_LOST, lost(LossKind.EXECUTOR_LOST, exited(143))), "killed by signal 15"),
        (exited(3), "exited with code 3"),
        (lost(LossKind.AGENT_LOST, LossCause(LossKind.SILENT, seconds=30)), "silent for 30 s"),
        (lost(LossKind.TASK_ENDED, reported("the agent raised ValueError: exit code 3")), "the agent raised"),
    ],
)
def test_reason_of_a_change_is_the_event_itself_and_not_how_it_was_noticed(cause, words):
    assert root_loss_in_words(cause).startswith(words)
    assert not cause.is_symptom


def test_agent_that_is_killed_is_the_cause_even_if_its_worker_is_missed_first():
    job = Job(3, executors="driver")
    job.tell(5.0, e.WorkerLost(2, CLOSED))
    job.tell(5.01, e.AgentLost(2, CLOSED))
    job.tell(5.02, e.SlotEnded(1, LossCause(LossKind.AGENT_EXITED, code=-9)))
    job.ready(5.1, 1, 3)
    assert job.said[-1].startswith("rank 1 on h1 lost (its agent was killed by signal 9 (SIGKILL)): 3 -> 2 workers")


def test_where_all_start_again_a_loss_and_a_newcomer_are_a_sentence_each():
    job = Job(2, progress=None, restart="world", restart_interval_s=10.0)
    job.tell(5.0, e.WorkerLost(2, exited(-9)))
    job.tell(5.2, e.WorkerReady(3, 0, None, at_init=True))
    job.tell(5.5, e.Tick())
    job.tell(5.75, e.WorkerReady(4, 0, None, at_init=True))
    job.tell(8.0, e.AgentJoined(3, Place("h2", "2", 2)))
    job.tell(9.0, e.WorkerReady(5, 0, None, at_init=True))
    job.tell(15.75, e.Tick())
    job.tell(16.0, e.WorkerLost(3, exited(-15)))
    job.tell(16.5, e.WorkerLost(4, exited(-15)))
    job.tell(17.0, e.WorkerReady(6, 0, None, at_init=True))
    job.tell(17.0, e.WorkerReady(7, 0, None, at_init=True))
    again = "all workers started again, as new processes"
    assert job.said[1:] == [
        f"rank 1 on executor 1 lost (killed by signal 9): 2 -> 1 worker, 0.75 s, {again}",
        "a worker on executor 1 joined: 1 -> 2 workers",
        f"a worker on executor 2 joined: 2 -> 3 workers, 1.00 s, {again}",
    ]
