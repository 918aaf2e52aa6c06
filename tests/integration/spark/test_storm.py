"""Minutes of random kills, stops, joins and farewells; by hand: `pytest -m soak -s tests/integration/spark`.

STORM_SEED repeats a storm (as far as processes let themselves be repeated), STORM_SECONDS says how long it lasts.
"""

import os
import random
import signal
import time

import pytest

from spark_elastic import LocalLauncher
from spark_elastic.membership.timeline import WorldStarted
from tests.integration.clusters import standalone
from tests.integration.processes import GONE_S, assert_gone, children, our_processes
from tests.integration.spark.conftest import Jobs, assert_nothing_left, finished
from tests.leftovers import Before

pytestmark = [pytest.mark.soak, pytest.mark.cluster]
SECONDS = float(os.environ.get("STORM_SECONDS", "120"))
SEED = int(os.environ.get("STORM_SEED", str(time.time_ns() % 1_000_000)))
HEARTBEAT_TIMEOUT = 6
LEAST_HOSTS, MOST_HOSTS = 2, 4


class Storm:
    """Bursts of disasters that leave one member of each world alone, so that the state is never lost."""

    def __init__(self, job, diary, chance, cluster=None):
        self._job = job
        self._diary = diary
        self._chance = chance
        self._cluster = cluster
        self.done = []
        self._doomed = set()

    def rage(self, seconds):
        until = time.monotonic() + seconds
        round = 0
        while time.monotonic() < until:
            world = self._some_world(round)
            members = list(world.values())
            round = members[0]["round"]
            self._chance.shuffle(members)
            _spared, *victims = members
            for victim in victims[: self._chance.randint(0, len(victims))]:
                disaster = self._chance.choice(self._disasters())
                self._note(disaster.__name__.strip("_"), victim)
                if disaster != self._decommission:
                    self._doomed.add(victim["pid"])
                disaster(victim, _spared)
                time.sleep(self._chance.choice([0, 0, 0.01, 0.1, 0.5]))
            if self._cluster is not None and self._chance.random() < 0.2:
                self._newcomer()

    def _some_world(self, after):
        """Any world that trains and has not been struck, in a newer round; now and then the old one again."""
        until = time.monotonic() + 90
        while time.monotonic() < until:
            assert not self._job.done(), self._job.result()
            world = self._diary.newest()
            one = next(iter(world.values()), None)
            whole = one is not None and len(world) == one["size"]
            struck = any(entry["pid"] in self._doomed for entry in world.values())  # a stopped one may be in it
            if whole and not struck and (one["round"] > after or self._chance.random() < 0.01):
                return world
            time.sleep(0.01)
        raise AssertionError(f"no new world in 90 s after round {after}: {self._job.status()}")

    def _disasters(self):
        every = [self._kill_worker, self._kill_worker, self._kill_agent, self._stop_worker, self._terminate_worker]
        return (
            every if self._cluster is None else [*every, self._kill_executor, self._kill_executor, self._decommission]
        )

    def _kill_worker(self, victim, spared):
        _signal(victim["pid"], signal.SIGKILL)

    def _kill_agent(self, victim, spared):
        _signal(victim["agent"], signal.SIGKILL)

    def _stop_worker(self, victim, spared):
        _signal(victim["pid"], signal.SIGSTOP)

    def _terminate_worker(self, victim, spared):
        _signal(victim["pid"], signal.SIGTERM)

    def _kill_executor(self, victim, spared):
        for executor, pid in self._cluster.executors().items():
            if spared["pid"] not in children(pid) and victim["pid"] in children(pid):
                self._cluster.kill_executor(executor)

    def _decommission(self, victim, spared):
        hosts = self._living_hosts()
        if len(hosts) > LEAST_HOSTS:
            host = self._chance.choice(hosts)
            self._cluster.decommission(host)

    def _newcomer(self):
        if len(self._living_hosts()) < MOST_HOSTS:
            self._note("add_worker", {})
            self._cluster.add_worker()

    def _living_hosts(self):
        return [host for host, daemon in self._cluster._worker_hosts.items() if daemon.poll() is None]

    def _note(self, what, victim):
        self.done.append(what)
        print(
            f"storm: {what} rank {victim.get('rank')} of round {victim.get('round')} pid {victim.get('pid')}",
            flush=True,
        )


def _signal(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def weather(job, diary, chance, cluster=None):
    print(f"\nstorm of {SECONDS:g} s with seed {SEED}", flush=True)
    storm = Storm(job, diary, chance, cluster)
    storm.rage(SECONDS)
    results = finished(job, diary, timeout=180)
    rounds = sum(isinstance(record, WorldStarted) for record in job.events())
    print(f"storm: {len(storm.done)} disasters, {rounds} worlds, {results[0]['step']} steps", flush=True)


def test_a_storm_on_this_machine(tmp_path):
    before = Before()
    chance = random.Random(SEED)
    jobs = Jobs(None, tmp_path)
    job, diary = jobs.train(
        4,
        launcher=LocalLauncher(hosts=("127.0.0.1", "127.0.0.2")),
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
        training={"ballast": chance.choice([0, 300_000]), "commit_every": chance.choice([0, 1, 3])},
    )
    try:
        weather(job, diary, chance)
    finally:
        jobs.end()
    assert_gone(our_processes, GONE_S)
    before.assert_no_threads_left()


def test_a_storm_on_a_standalone_cluster(tmp_path):
    chance = random.Random(SEED)
    with standalone(workers=3, cores=1, decommission=True) as cluster:
        before = Before()
        jobs = Jobs(cluster, tmp_path)
        job, diary = jobs.train(
            2,
            max_num_proc=4,
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
            training={"ballast": chance.choice([0, 300_000]), "commit_every": chance.choice([0, 1, 3])},
        )
        try:
            weather(job, diary, chance, cluster)
        finally:
            jobs.end()
        assert_nothing_left(cluster, before)
