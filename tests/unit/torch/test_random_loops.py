"""Random loops on several ranks: replicas stay equal, and each loss returns to a mark or a commit."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import spark_elastic.torch as hvd
from spark_elastic.elastic.state import ElasticState
from tests.simulation import wide_loops
from tests.simulation.user_loops import RATE, failing
from tests.unit.world_link import link
from tests.unit.worlds import WorldDriver

RANKS = 3


class CuttingDriver(WorldDriver):
    """Cuts a world of which a member wants to leave, as the real driver does."""

    args: tuple[Any, ...] = ()

    def _ready(self, peer: Any, *rest: Any) -> None:
        if not self._broken and any(member is peer for member in self._members()):
            self._broken = True
            for member in self._members():
                if member is not peer:
                    self._send(member, "cut", self.world.round, f"worker {peer.worker} has left")
        super()._ready(peer, *rest)


class Observer:
    """Compares the state of each world with the marks and commits that its members had when the world before broke."""

    def __init__(self, seed: int, how: object) -> None:
        self.seed, self.how = seed, how
        self.digest: Callable[[], str] | None = None
        self.newest: dict[str, str] = {}
        self.at_failure: dict[str, str] | None = None
        self.losses = {"mark": 0, "commit": 0}

    def __call__(self, digest: Callable[[], str]) -> Callable[[], None]:
        self.digest = digest
        self.note("commit")
        return self.entered

    def note(self, what: str) -> None:
        if self.digest is not None:
            self.newest[what] = self.digest()

    def entered(self) -> None:
        assert self.digest is not None
        states = hvd.allgather_object((self.digest(), self.at_failure))
        self.at_failure = None
        assert len({state for state, _ in states}) == 1, f"seed {self.seed}: replicas differ: {states}"
        before = [newest for _, newest in states if newest is not None]
        if before and len(before) == len(states):
            found = [what for newest in before for what, digest in newest.items() if digest == states[0][0]]
            assert found, f"seed {self.seed}: neither a mark nor a commit: {states}, {self.how}"
            self.losses["commit" if "commit" in found else "mark"] += 1


def observed(monkeypatch: Any, observer: Observer) -> None:
    """Report marks, commits and failures of states to the observer."""
    mark, save, recover = ElasticState._set_mark, ElasticState.save, ElasticState._recover

    def noted_mark(self: Any, committed: bool = False) -> None:
        mark(self, committed)
        observer.note("mark")

    def noted_save(self: Any) -> None:
        save(self)
        observer.note("commit")

    def noted_recover(self: Any, error: Any) -> None:
        observer.at_failure = dict(observer.newest)
        recover(self, error)

    monkeypatch.setattr(ElasticState, "_set_mark", noted_mark)
    monkeypatch.setattr(ElasticState, "save", noted_save)
    monkeypatch.setattr(ElasticState, "_recover", noted_recover)


def train(first: int, last: int) -> list[tuple[dict[str, Any], dict[str, int]]]:
    out = []
    for seed in range(first, last + 1):
        observer = Observer(seed, wide_loops.loop_of(seed))
        with pytest.MonkeyPatch.context() as patched:
            observed(patched, observer)
            drawn = f"{seed} {link().worker}"
            with failing(drawn, RATE / RANKS), wide_loops.checks_failing(drawn, RATE / RANKS):
                out.append((wide_loops.train(seed, observer), observer.losses))
    return out


def undisturbed(first: int, last: int) -> list[dict[str, Any]]:
    return [wide_loops.train(seed) for seed in range(first, last + 1)]


def check(seed: int, outcome: dict[str, Any], expected: dict[str, Any]) -> None:
    how = wide_loops.loop_of(seed)
    if how.sampler:  # rank 0 has seen other rows, in fewer batches
        outcome, expected = {"rows": outcome["rows"]}, {"rows": expected["rows"]}
    assert outcome == expected, f"seed {seed}: {how}"


def compare(
    first: int,
    last: int,
    train: Callable[..., Any] = train,
    undisturbed: Callable[..., Any] = undisturbed,
    check: Callable[[int, Any, Any], None] = check,
    ranks: int = RANKS,
    kind: type[CuttingDriver] = CuttingDriver,
) -> Counter[str]:
    """Run the loops of these seeds; return how many losses were recovered from a mark that is no commit, how many from
    a commit, and how many workers died.
    """
    with WorldDriver() as driver:
        driver.start(undisturbed, first, last)
        (calm,) = driver.results(1)
    with kind(start_with=ranks) as driver:
        driver.args = (train, first, last)
        started = driver.start(*driver.args, count=ranks)
        stormy = driver.results(ranks)
        total = Counter(deaths=sum(worker not in driver.done for worker in started))
    for seed, expected in enumerate(calm, first):
        for outcomes in stormy:
            outcome, losses = outcomes[seed - first]
            check(seed, outcome, expected)
        total.update(losses)
    return total


def test_each_loss_returns_to_a_mark_or_a_commit():
    losses = compare(1, 8)
    assert losses["mark"] > 0
    assert losses["commit"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(4))
def test_many_random_loops_return_to_a_mark_or_a_commit(part):
    """FIRST_SEED: the first of 80 seeds."""
    first = int(os.environ.get("FIRST_SEED", "1000")) + 20 * part
    print(first, compare(first, first + 19), flush=True)
