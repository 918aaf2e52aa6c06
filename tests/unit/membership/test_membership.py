from __future__ import annotations

from typing import Any

from spark_elastic.errors import JobCancelledError, NotEnoughSlotsError, StateLostError, UserFunctionError
from spark_elastic.membership import events
from spark_elastic.membership.commands import Announce, Command, CutPeers, FailJob, FinishJob, StopWorker
from spark_elastic.membership.events import (
    AgentJoined,
    AgentLost,
    CancelRequested,
    Event,
    ExecutorLost,
    JobStarted,
    SlotEnded,
    Tick,
    WorkerAlive,
    WorkerDone,
    WorkerLost,
    WorkerRaised,
    WorkerReady,
)
from spark_elastic.membership.machine import Membership
from spark_elastic.membership.reasons import LossCause, LossKind, reported
from spark_elastic.membership.states import Phase
from spark_elastic.membership.timeline import CooldownStarted
from spark_elastic.membership.topology import Place
from spark_elastic.settings import ElasticSettings
from tests.unit.membership.script import exited, step_at


def at(slot: int, host: str = "host") -> Place:
    return Place(host, f"exec{slot}", slot)


def training(size: int, step: int | None = 10, **settings: object) -> Membership:
    """Return a machine whose workers 1..size train in round 1 at second 0, on agents with the same numbers."""
    values: dict[str, object] = {"num_proc": size, "min_num_proc": 1, "max_num_proc": size + 1} | settings
    machine = Membership(ElasticSettings(**values))  # type: ignore[arg-type]
    machine.handle(JobStarted(), 0.0)
    for i in range(1, size + 1):
        machine.handle(AgentJoined(i, at(i - 1)), 0.0)
    for i in range(1, size + 1):
        machine.handle(WorkerReady(i, 0, None, at_init=True), 0.0)
    for i in range(1, size + 1):
        machine.handle(WorkerAlive(i, None if step is None else step_at(step)), 0.0)
    assert machine.phase is Phase.RUNNING
    return machine


def only(kind: type, commands: list[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


def failures(commands: list[Command]) -> list[str]:
    return [c.record.kind for c in commands if isinstance(c, Announce) and isinstance(c.record, CooldownStarted)]


def test_nothing_happens_before_the_job_starts() -> None:
    machine = Membership(ElasticSettings(1, 1, 1))
    assert machine.handle(AgentJoined(1, at(0)), 0.0) == []
    assert machine.handle(Tick(), 1.0) == []
    assert machine.next_deadline() is None


def test_a_job_can_be_cancelled_before_it_starts() -> None:
    machine = Membership(ElasticSettings(1, 1, 1))
    (fail,) = only(FailJob, machine.handle(CancelRequested("Ctrl-C"), 0.0))
    assert isinstance(fail, FailJob)
    assert isinstance(fail.error, JobCancelledError)
    assert machine.handle(JobStarted(), 1.0) == []


def test_worker_agent_slot_and_executor_of_one_death_are_one_failure_in_any_order() -> None:
    signs: list[Event] = [
        WorkerLost(1, reported("channel closed")),
        AgentLost(1, reported("channel closed")),
        SlotEnded(0, reported("task failed")),
        ExecutorLost("exec0", reported("killed")),
    ]
    for first in range(4):
        machine = training(2)
        order = signs[first:] + signs[:first]
        seen = [kind for event in order for kind in failures(machine.handle(event, 1.0))]
        assert seen == ["slot"], order


def test_a_bug_is_reported_even_if_the_exit_of_its_process_is_heard_first() -> None:
    machine = training(2)
    machine.handle(WorkerLost(2, exited(1)), 1.0)
    (fail,) = only(FailJob, machine.handle(WorkerRaised(2, "ValueError", "bad", "Traceback"), 1.01))
    assert isinstance(fail, FailJob)
    assert isinstance(fail.error, UserFunctionError)
    assert (fail.error.rank, fail.error.host) == (1, "host")  # type: ignore[attr-defined]


def test_exit_with_0_that_is_heard_before_the_done_is_no_loss() -> None:
    machine = training(1)
    assert machine.handle(WorkerLost(1, exited(0)), 1.0) == []
    assert only(FinishJob, machine.handle(WorkerDone(1, has_loop=True), 1.01)) == [FinishJob((1,))]


def test_an_exit_with_0_without_a_done_is_a_loss() -> None:
    for later in (WorkerLost(1, reported("channel closed")), Tick()):
        machine = training(2)
        assert machine.handle(WorkerLost(1, exited(0)), 1.0) == []
        assert only(CutPeers, machine.handle(later, 3.0)) != [], later


# --- workers that are alive and hold up the others ------------------------------------------------


def test_worker_that_the_others_wait_for_too_long_in_a_collective_is_removed() -> None:
    machine = training(3, stall_timeout_s=60.0)
    machine.handle(WorkerAlive(2, step_at(10), blocked_s=None), 70.0)
    machine.handle(WorkerAlive(3, step_at(10), blocked_s=59.0), 70.0)
    assert machine.phase is Phase.RUNNING
    commands = machine.handle(WorkerAlive(1, step_at(10), blocked_s=60.0), 71.0)
    assert [command.worker for command in commands if isinstance(command, StopWorker)] == [2]
    (cut,) = [command for command in commands if isinstance(command, CutPeers)]
    assert set(cut.workers) == {1, 3}
    assert cut.change.cause == LossCause(LossKind.BLOCKED_OTHERS, seconds=60.0)


def test_when_all_wait_for_each_other_no_worker_is_removed_but_all_are_cut() -> None:
    machine = training(2, stall_timeout_s=60.0)
    machine.handle(WorkerAlive(1, step_at(10), blocked_s=58.0), 70.0)
    commands = machine.handle(WorkerAlive(2, step_at(10), blocked_s=61.0), 71.0)
    assert not any(isinstance(command, StopWorker) for command in commands)
    (cut,) = [command for command in commands if isinstance(command, CutPeers)]
    assert set(cut.workers) == {1, 2}


def failure_of(machine: Membership, *told: tuple[float, Event]) -> Any:
    """Tell a machine events, and return the error with which it fails the job."""
    for now, event in told:
        for command in machine.handle(event, now):
            if isinstance(command, FailJob):
                return command.error
    return None


def test_a_job_whose_spark_jobs_were_cancelled_is_not_told_to_spread_its_workers():
    machine = Membership(ElasticSettings(num_proc=1, min_num_proc=1, max_num_proc=1))
    cancelled = SlotEnded(0, LossCause(LossKind.CANCELLED, detail="the slot's job was cancelled"))
    error = failure_of(
        machine,
        (0.0, JobStarted()),
        (1.0, AgentJoined(1, Place("h", "0", 0))),
        (2.0, WorkerReady(1, 0, None, at_init=True)),
        (3.0, WorkerAlive(1, step_at(10))),
        (4.0, cancelled),
    )
    assert (type(error), error.cancelled) == (StateLostError, True)
    assert "spread" not in str(error)
    assert "cancelAllJobs" in str(error)


def test_executors_that_cannot_connect_are_not_told_to_be_more():
    machine = Membership(ElasticSettings(num_proc=1, min_num_proc=1, max_num_proc=1))
    ended = SlotEnded(0, LossCause(LossKind.UNREACHABLE, detail="cannot reach the driver from h: no route"))
    error = failure_of(machine, (0.0, JobStarted()), (1.0, ended), (10_000.0, Tick()))
    assert (type(error), error.unreachable) == (NotEnoughSlotsError, True)
    assert "add executors" not in str(error)
    assert "spark.driver.host" in str(error)
    assert "no route" in str(error)


def test_every_event_but_the_first_has_an_answer() -> None:
    known = {kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, events.Event)}
    assert set(training(1)._answers) == known - {events.Event, events.JobStarted}
