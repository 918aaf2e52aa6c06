"""The worker registry: what it counts, and who reads it."""

from __future__ import annotations

from spark_elastic.membership.events import Event, WorkerAbandoned, WorkerDone, WorkerLost
from spark_elastic.membership.machine import Membership
from spark_elastic.membership.reasons import reported
from spark_elastic.membership.registry import AT_INIT, DONE, READY, TRAINING, WorkerRegistry
from tests.unit.membership.script import exited
from tests.unit.membership.test_membership import training


def machine_after(*events: Event, step: int | None = 10, reset_limit: int = 5) -> Membership:
    """Three workers that train; then the events."""
    machine = training(3, step, reset_limit=reset_limit)
    for event in events:
        machine.handle(event, 1.0)
    return machine


def counts(registry: WorkerRegistry) -> tuple[int, int, int]:
    return registry.count(AT_INIT, READY, TRAINING), registry.count(DONE), registry.failed


def test_worker_that_failed_is_counted_once() -> None:
    registry = machine_after(WorkerLost(2, reported("channel closed")), WorkerLost(2, exited(-9))).registry
    assert counts(registry) == (2, 0, 1)


def test_function_that_returned_is_a_success_even_if_its_process_ends() -> None:
    registry = machine_after(*(WorkerDone(i, has_loop=True) for i in (1, 2, 3)), WorkerLost(1, exited(0))).registry
    assert counts(registry) == (0, 3, 0)


def test_worker_that_starts_over_has_not_failed() -> None:
    registry = machine_after(WorkerAbandoned(2, "a collective failed"), step=None).registry
    assert counts(registry) == (2, 0, 0)
