from __future__ import annotations

import pytest

from spark_elastic.membership.launcher import LaunchEnd
from spark_elastic.membership.states import AgentOutcome
from spark_elastic.spark.slot_queue import QueuedLauncher, SlotQueue


class Cluster:
    """`capacity` slots; launches get one in the order of their arrival."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.pending: list[tuple[FakeLauncher, int]] = []
        self.running: list[tuple[FakeLauncher, int]] = []

    def settle(self) -> None:
        while self.pending and len(self.running) < self.capacity:
            self.running.append(self.pending.pop(0))


class FakeLauncher:
    def __init__(self, cluster: Cluster, on_ended) -> None:
        self.cluster, self.on_ended = cluster, on_ended
        self.launches: dict[int, int] = {}  # of each slot, so far
        self.present: set[int] = set()

    def launch(self, slot: int) -> None:
        self.launches[slot] = self.launches.get(slot, 0) + 1
        self.cluster.pending.append((self, slot))

    def agent_present(self, slot: int, present: bool) -> None:
        (self.present.add if present else self.present.discard)(slot)

    def admit(self, slot: int, launch: int) -> bool:
        return launch == self.launches[slot]

    def withdraw(self, slot: int, why: str) -> None:
        self.end(slot, why)

    def close(self, deadline_s: float) -> None:
        for launcher, slot in [*self.cluster.pending, *self.cluster.running]:
            if launcher is self:
                self.end(slot, "the job is over")

    def end(self, slot: int, why: str, outcome: AgentOutcome | None = None) -> None:
        for queue in (self.cluster.pending, self.cluster.running):
            if (self, slot) in queue:
                queue.remove((self, slot))
        self.on_ended(LaunchEnd(slot, why, outcome))


class Job:
    def __init__(self, cluster: Cluster, queue: SlotQueue, name: str, need: int, most: int) -> None:
        self.cluster, self.ended = cluster, []
        self._seen: frozenset[int] = frozenset()

        def build(on_ended):
            self.inner = FakeLauncher(cluster, on_ended)
            return self.inner

        self.launcher = QueuedLauncher(queue, name, need, build, lambda end: self.ended.append((end.slot, end.cause)))
        for slot in range(most):
            self.launcher.launch(slot)

    @property
    def running(self) -> frozenset[int]:
        return frozenset(slot for launcher, slot in self.cluster.running if launcher is self.inner)

    def sees_its_agents(self) -> None:
        for slot in self._seen ^ self.running:
            self.launcher.agent_present(slot, slot in self.running)
        self._seen = self.running


def settle(cluster: Cluster, *jobs: Job) -> None:
    for _ in range(5):
        cluster.settle()
        for job in jobs:
            job.sees_its_agents()


@pytest.fixture
def queue():
    return SlotQueue()


def test_job_that_has_launched_nothing_blocks_no_other(queue):
    cluster = Cluster(4)
    Job(cluster, queue, "cannot be placed yet", need=8, most=0)
    job = Job(cluster, queue, "b", need=2, most=2)
    settle(cluster, job)
    assert len(job.running) == 2


def test_launches_beyond_the_minimum_without_an_agent_are_taken_back_for_another_job(queue):
    cluster = Cluster(4)
    a = Job(cluster, queue, "a", need=2, most=6)
    settle(cluster, a)
    assert len(cluster.pending) == 2
    b = Job(cluster, queue, "b", need=1, most=1)
    settle(cluster, a, b)
    assert [launcher is b.inner for launcher, _ in cluster.pending] == [True]
    a.inner.end(3, "its executor was lost")
    settle(cluster, a, b)
    assert len(b.running) == 1  # not one of a's extras
    b.launcher.close(5.0)
    settle(cluster, a)
    assert len(a.running) == 4  # with one that had been held back


def test_agent_of_a_launch_that_was_taken_back_is_not_admitted(queue):
    cluster = Cluster(2)
    a = Job(cluster, queue, "a", need=1, most=2)
    b = Job(cluster, queue, "b", need=1, most=1)
    assert not a.launcher.admit(1, 1)
    settle(cluster, a, b)
    b.launcher.close(5.0)
    assert a.inner.launches[1] == 2
    assert not a.launcher.admit(1, 1)
    assert a.launcher.admit(1, 2)


def test_slot_whose_agent_was_admitted_is_not_taken_back(queue):
    cluster = Cluster(2)
    a = Job(cluster, queue, "a", need=1, most=2)
    assert a.launcher.admit(1, 1)
    Job(cluster, queue, "b", need=1, most=1)
    assert a.launcher.admit(1, 1)
    assert not a.launcher.admit(0, 1)


def test_job_that_trained_and_fell_short_takes_the_slots_of_one_that_has_not_begun(queue):
    cluster = Cluster(4)
    a, b = Job(cluster, queue, "a", 3, 3), Job(cluster, queue, "b", 3, 3)
    settle(cluster, a, b)
    cluster.capacity = 3  # an executor goes, and with it one of a's slots
    a.inner.end(0, "its executor was lost")
    settle(cluster, a, b)
    assert b.running == frozenset()
    a.launcher.launch(0)  # after its cooldown
    settle(cluster, a, b)
    assert len(a.running) == 3
    assert a.ended == [(0, "its executor was lost")]
    assert b.ended == []


def test_held_slot_that_is_withdrawn_ends_with_its_reason(queue):
    cluster = Cluster(2)
    Job(cluster, queue, "a", 2, 2)
    b = Job(cluster, queue, "b", 2, 2)
    b.launcher.withdraw(1, "not allowed by the discovery")
    assert b.ended == [(1, "not allowed by the discovery")]
    b.launcher.launch(1)
    with pytest.raises(ValueError, match="slot 1 is still running"):
        b.launcher.launch(1)


def test_random_arrivals_losses_and_ends_never_deadlock():
    """Whatever happens, as long as the cluster could hold some job's minimum, one job holds its own."""
    import random

    for seed in range(300):
        dice = random.Random(seed)
        cluster, queue = Cluster(dice.randint(2, 6)), SlotQueue()
        jobs: list[Job] = []
        for step in range(30):
            kind = dice.random()
            if kind < 0.25 and len(jobs) < 4:
                need = dice.randint(1, cluster.capacity)
                jobs.append(Job(cluster, queue, f"j{step}", need, need + dice.randint(0, 3)))
            elif kind < 0.4 and jobs:
                jobs.pop(dice.randrange(len(jobs))).launcher.close(5.0)
            elif kind < 0.7 and cluster.running:
                launcher, slot = dice.choice(cluster.running)
                launcher.end(slot, "lost")
                owner = next(job for job in jobs if job.inner is launcher)
                owner.sees_its_agents()
                owner.launcher.launch(slot)
            else:
                cluster.settle()
                for job in jobs:
                    job.sees_its_agents()
        settle(cluster, *jobs)
        if jobs:
            assert any(len(job.running) >= job.launcher.need for job in jobs), seed
        for job in jobs:
            job.launcher.close(5.0)
        assert (cluster.running, cluster.pending, queue._jobs) == ([], [], [])
