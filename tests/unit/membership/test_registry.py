"""The worker registry: what it counts, and who reads it."""

from __future__ import annotations

from spark_elastic.membership.events import Event, WorkerAbandoned, WorkerDone, WorkerLost, WorkerReady
from spark_elastic.membership.machine import Membership
from spark_elastic.membership.reasons import reported
from spark_elastic.membership.registry import WorkerRegistry
from spark_elastic.membership.states import Phase
from tests.unit.membership.script import exited, step_at
from tests.unit.membership.test_membership import training


def machine_after(*events: Event, step: int | None = 10, reset_limit: int = 5) -> Membership:
    """Three workers that train; then the events."""
    machine = training(3, step, reset_limit=reset_limit)
    for event in events:
        machine.handle(event, 1.0)
    return machine


def counts(registry: WorkerRegistry) -> tuple[int, int, int]:
    return registry.ready, registry.succeeded, registry.failed


def test_members_of_a_new_world_are_ready() -> None:
    assert counts(machine_after().registry) == (3, 0, 0)


def test_process_that_exits_with_0_before_its_function_returned_has_failed() -> None:
    registry = machine_after(WorkerLost(2, exited(0)), WorkerLost(2, reported("channel closed"))).registry
    assert counts(registry) == (2, 0, 1)


def test_worker_that_failed_is_counted_once() -> None:
    registry = machine_after(WorkerLost(2, reported("channel closed")), WorkerLost(2, exited(-9))).registry
    assert counts(registry) == (2, 0, 1)


def test_function_that_returned_is_a_success_even_if_its_process_ends() -> None:
    registry = machine_after(*(WorkerDone(i, in_loop=True) for i in (1, 2, 3)), WorkerLost(1, exited(0))).registry
    assert counts(registry) == (0, 3, 0)


def test_worker_that_starts_over_has_not_failed() -> None:
    registry = machine_after(WorkerAbandoned(2, "a collective failed"), step=None).registry
    assert counts(registry) == (2, 0, 0)


def test_resets_are_the_worlds_after_the_first() -> None:
    lost, *back = (
        WorkerLost(2, reported("channel closed")),
        WorkerReady(1, 1, step_at(11)),
        WorkerReady(3, 1, step_at(11)),
    )
    assert machine_after().registry.resets == 0
    registry = machine_after(lost, *back).registry
    assert (registry.round, registry.resets, registry.may_reset()) == (2, 1, True)


def test_reset_limit_is_read_from_the_registry() -> None:
    lost, *back = (
        WorkerLost(2, reported("channel closed")),
        WorkerReady(1, 1, step_at(11)),
        WorkerReady(3, 1, step_at(11)),
    )
    machine = machine_after(lost, *back, reset_limit=0)
    assert not machine.registry.may_reset()
    assert (machine.phase, machine.registry.resets) == (Phase.FAILED, 0)
