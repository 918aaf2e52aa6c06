"""Thousands of jobs with random failures, and planted bugs that they must reveal."""

from __future__ import annotations

import pytest

from spark_elastic.membership.machine import Membership
from tests.nightly import by_night
from tests.simulation.planted_bugs import BUGS, Bug, machine_with
from tests.simulation.seeds import simulate

CHUNK, LARGE_CHUNK = 250, 5
SEEDS_FOR_A_BUG = 1000


@pytest.mark.parametrize("first", by_night(range(0, 2000, CHUNK), but=[0]))
def test_every_invariant_holds_after_every_event(first: int) -> None:
    for seed in range(first, first + CHUNK):
        try:
            simulate(seed, Membership)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("first", by_night(range(0, 60, LARGE_CHUNK), but=[0]))
def test_every_invariant_holds_with_many_workers(first: int) -> None:
    for seed in range(first, first + LARGE_CHUNK):
        try:
            simulate(seed, Membership, large=True)
        except Exception as error:
            raise AssertionError(f"large seed {seed}: {type(error).__name__}: {error}") from error


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2])
def test_every_invariant_holds_with_a_thousand_workers(seed: int) -> None:
    job = simulate(seed, Membership, huge=True)
    assert max(len(world.members) for world in job.worlds.values()) > 900


def test_the_same_seed_is_the_same_job() -> None:
    for seed in range(40):
        one, two = simulate(seed, Membership), simulate(seed, Membership)
        assert (one.now, one.events, str(one.outcome)) == (two.now, two.events, str(two.outcome))


def test_a_rebuilt_machine_without_a_bug_passes() -> None:
    rebuilt = machine_with(None)
    for seed in range(50):
        simulate(seed, rebuilt)


@pytest.mark.parametrize("bug", by_night(BUGS, but=BUGS[::3]), ids=lambda bug: bug.what)
def test_the_simulation_notices(bug: Bug) -> None:
    assert caught_at(bug) is not None, f"{SEEDS_FOR_A_BUG} seeds passed although {bug.what}"


def caught_at(bug: Bug) -> int | None:
    """Return the first seed that fails with the bug; None: all pass."""
    machine = machine_with(bug)
    for seed in range(SEEDS_FOR_A_BUG):
        try:
            simulate(seed, machine)
        except Exception:
            return seed
    return None
