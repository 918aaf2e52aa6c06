from __future__ import annotations

import pytest

from spark_elastic.driver.registry import RecordedState, WorkerStateRegistry
from spark_elastic.membership.events import Event, WorkerAbandoned, WorkerDone, WorkerLost, WorkerReady
from spark_elastic.membership.reasons import reported
from tests.unit.membership.script import exited, step_at
from tests.unit.membership.test_membership import training

READY, SUCCESS, FAILURE = RecordedState.READY, RecordedState.SUCCESS, RecordedState.FAILURE


def registry_after(*events: Event, size: int = 3, step: int | None = 10) -> WorkerStateRegistry:
    machine = training(size, step, reset_limit=5)
    registry = WorkerStateRegistry(reset_limit=5)
    assert machine.world is not None
    registry._published(machine.world)
    for event in events:
        registry.observe(event, machine.handle(event, 1.0))
    return registry


def counts(registry: WorkerStateRegistry, round: int | None = None) -> tuple[int, int, int]:
    return registry.count(READY, round), registry.count(SUCCESS, round), registry.count(FAILURE, round)


def test_members_of_a_new_world_are_ready() -> None:
    assert counts(registry_after()) == (3, 0, 0)


def test_a_process_that_exits_0_without_finishing_the_function_is_a_failure() -> None:
    registry = registry_after(WorkerLost(2, exited(0)), WorkerLost(2, reported("channel closed")))
    assert registry.state(2) is FAILURE
    assert counts(registry) == (2, 0, 1)


def test_a_worker_that_failed_is_not_counted_twice() -> None:
    registry = registry_after(WorkerLost(2, reported("channel closed")), WorkerLost(2, exited(-9)))
    assert counts(registry) == (2, 0, 1)


def test_a_round_is_kept_as_it_was_when_the_next_begins() -> None:
    registry = registry_after(
        WorkerLost(2, reported("channel closed")), WorkerReady(1, 1, step_at(11)), WorkerReady(3, 1, step_at(11))
    )
    assert (registry.round, registry.resets, registry.resets_left) == (2, 1, 4)
    assert counts(registry) == (2, 0, 0)
    assert counts(registry, round=1) == (2, 0, 1)


def test_a_function_that_returned_is_a_success_even_if_its_process_goes() -> None:
    registry = registry_after(*(WorkerDone(i, in_loop=True) for i in (1, 2, 3)), WorkerLost(1, exited(0)))
    assert counts(registry) == (0, 3, 0)
    assert registry.results_from == (1, 2, 3)


def test_a_process_that_starts_over_is_neither_success_nor_failure() -> None:
    registry = registry_after(WorkerAbandoned(2, "a collective failed"), step=None)
    assert registry.state(2) is None
    assert counts(registry) == (2, 0, 0)


def test_unknown_round_raises_key_error() -> None:
    with pytest.raises(KeyError):
        registry_after().record(7)
