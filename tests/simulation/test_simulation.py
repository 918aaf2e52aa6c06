"""Thousands of jobs with random failures, and planted bugs that they must reveal."""

from __future__ import annotations

import pytest

from spark_elastic.membership.machine import Membership
from tests.nightly import by_night
from tests.simulation.planted_bugs import BUGS, Bug, machine_with
from tests.simulation.seeds import simulate

CHUNK, LARGE_CHUNK = 250, 5
SEEDS_FOR_A_BUG = 1000


CHUNKS = [
    *((first, first + CHUNK, False) for first in range(0, 2000, CHUNK)),
    *((first, first + LARGE_CHUNK, True) for first in range(0, 60, LARGE_CHUNK)),
]


@pytest.mark.parametrize(("first", "end", "large"), by_night(CHUNKS, but=[(0, CHUNK, False), (0, LARGE_CHUNK, True)]))
def test_every_invariant_holds_after_every_event_also_with_many_workers(first: int, end: int, large: bool) -> None:
    for seed in range(first, end):
        try:
            simulate(seed, Membership, large=large)
        except Exception as error:
            raise AssertionError(f"seed {seed}, large: {large}: {type(error).__name__}: {error}") from error


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
