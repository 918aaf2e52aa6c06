"""Random loops of Keras and TensorFlow on two ranks: replicas stay equal, and each loss returns to a mark or a commit.

A rank leaves the world before or after a collective. In a world of one loop it may die, too, and is replaced: with
several, a newcomer would be in another loop than the others.
"""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import pytest

from tests.simulation import keras_loops
from tests.simulation.user_loops import RATE
from tests.simulation.wide_loops import checks_failing
from tests.unit.torch.test_random_loops import CuttingDriver, Observer, observed
from tests.unit.torch.test_random_loops import compare as compared
from tests.unit.world_link import die, link, tell

RANKS = 2
DEATHS = 0.02
"""Share of the reductions in which a process of the first two dies."""


class ReplacingDriver(CuttingDriver):
    """Starts a worker for each that dies."""

    def _lost(self, peer: Any) -> None:
        if not self._over and peer.worker not in self.done:
            threading.Thread(target=self.start, args=self.args, daemon=True).start()
        super()._lost(peer)


def train(first: int, last: int) -> list[tuple[dict[str, Any], dict[str, int]]]:
    from spark_elastic.collective.fused import FusedReduction

    out = []
    for seed in range(first, last + 1):
        tell("seed", seed)
        drawn = f"{seed} {link().worker}"
        deaths = random.Random(f"deaths {drawn}")
        reduce = FusedReduction.__call__

        def reduce_or_die(self: Any, *args: Any, deaths: Any = deaths, reduce: Any = reduce, **more: Any) -> Any:
            if first == last and link().worker <= RANKS and deaths.random() < DEATHS:
                die()
            return reduce(self, *args, **more)

        observer = Observer(seed, keras_loops.loop_of(seed))
        with pytest.MonkeyPatch.context() as patched:
            observed(patched, observer)
            patched.setattr(FusedReduction, "__call__", reduce_or_die)
            with keras_loops.collectives_failing(drawn, RATE / RANKS), checks_failing(drawn, RATE / RANKS):
                out.append((keras_loops.train(seed, observer), observer.losses))
    return out


def undisturbed(first: int, last: int) -> list[dict[str, Any]]:
    out = []
    for seed in range(first, last + 1):
        tell("seed", seed)
        out.append(keras_loops.train(seed))
    return out


def check(seed: int, outcome: Any, expected: Any) -> None:
    assert keras_loops.same(outcome, expected), (
        f"seed {seed}: {outcome} and not {expected}, {keras_loops.loop_of(seed)}"
    )


def compare(first: int, last: int) -> dict[str, int]:
    return compared(first, last, train, undisturbed, check, RANKS, ReplacingDriver)


def test_each_loss_returns_to_a_mark_or_a_commit():
    losses = compare(1, 3)
    assert losses["mark"] + losses["commit"] > 0


@pytest.mark.nightly
def test_many_random_loops_return_to_a_mark_or_a_commit():
    """FIRST_SEED: the first of 50 seeds."""
    first = int(os.environ.get("FIRST_SEED", "1000"))
    for seed in range(first, first + 50, 10):
        print(seed, compare(seed, seed), compare(seed + 1, seed + 9), flush=True)
