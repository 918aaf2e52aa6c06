"""Simulated workers: the protocol from boot to done, with the failures of a ring of sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from spark_elastic.core import events as e
from spark_elastic.core.topology import Place, World

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster


COLLECTIVE_TIMEOUT_S = 300


class SimWorker:
    """One training process. `progress` is the truth: steps applied to the state it holds; None: no state."""

    def __init__(self, cluster: Cluster, worker_id: int, agent: int, place: Place) -> None:
        self.cluster, self.id, self.agent, self.place = cluster, worker_id, agent, place
        self.alive = True
        self.stopped = False  # SIGSTOP: neither answers nor beats
        self.hung = False  # beats, but the user's code never comes to a boundary
        self.said_hello = False
        self.state = "boot"  # boot, init, building, joining, training, done
        self.progress: int | None = None
        self.world: SimWorld | None = None
        self.cut_round = 0
        self.notices = 0
        self.seen_notices = 0
        self._kept: list[Callable[[SimWorker], None]] = []

    def tell(self, event: e.Event) -> None:
        if self.alive and self.cluster.agents[self.agent].executor.reachable:
            self.cluster.tell_driver(("worker", self.id), event)

    def receive(self, what: Callable[[SimWorker], None]) -> None:
        if self.alive and self.stopped:
            self._kept.append(what)
        elif self.alive:
            what(self)

    def later(self, low: float, high: float, action: Callable[[], None]) -> None:
        def act() -> None:
            if self.alive and self.stopped:
                self._kept.append(lambda _: action())
            elif self.alive:
                action()

        self.cluster.after(self.cluster.rng.uniform(low, high), act)

    # --- life -------------------------------------------------------------------------------------

    def boot(self) -> None:
        if self.cluster.rng.random() < self.cluster.plan.boot_hang:
            return  # hangs before it says hello
        if self.cluster.rng.random() < self.cluster.plan.boot_crash:
            self.cluster.after(0.5, lambda: self.cluster.kill(self, report=True, exit_code=1))
        else:
            self.later(0.8, 3.0, self._hello)

    def _hello(self) -> None:
        self.said_hello = True
        self.state = "init"
        self._beat()
        if self.cluster.plan.no_init:
            self.later(0.0, 2.0, self.finish)
        else:
            self.tell(e.WorkerReady(self.id, 0, None, at_init=True))

    def _beat(self) -> None:
        if not self.alive or self.cluster.ended or self.state == "done":
            return
        if not self.stopped:
            plain = self.cluster.plan.plain
            self.tell(e.WorkerAlive(self.id, None if plain else self.progress))
        self.cluster.after(self.cluster.plan.settings.heartbeat_interval_s, self._beat)

    def resume(self) -> None:
        """SIGCONT: what came meanwhile is handled now."""
        self.stopped = False
        kept, self._kept = self._kept, []
        for what in kept:
            self.receive(what)

    @property
    def moving(self) -> bool:
        reachable = self.cluster.agents[self.agent].executor.reachable
        return self.alive and not self.stopped and not self.hung and reachable

    def die(self) -> None:
        self.alive = False
        if self.world is not None and self.state in ("building", "training"):
            self.world.damaged(self)

    def on_admitted(self) -> None:
        assert self.state == "init", f"worker {self.id} was admitted in state {self.state}"
        self.state = "building"
        self.later(0.3, 1.5, self._join)

    def on_world(self, world: SimWorld) -> None:
        assert self.state in ("init", "joining"), f"worker {self.id} got a world in state {self.state}"
        self.world = world
        self.seen_notices = self.notices
        if self.state == "init":
            self.state = "building"
            self.later(0.3, 1.5, self._enter)
        else:
            self._enter()

    def _enter(self) -> None:
        """The model is there; connect with the others."""
        assert self.world is not None
        if self.world.round <= self.cut_round or self.world.broken:
            self.fail()
        else:
            self.state = "training"
            self.world.arrived(self)

    def _join(self) -> None:
        self.state = "joining"
        if self.hung:
            return
        round = 0 if self.world is None else self.world.round
        self.tell(e.WorkerReady(self.id, round, self.progress))

    def fail(self) -> None:
        """A collective raised."""
        if not self.alive or self.hung:
            return
        if self.cluster.plan.plain:
            self.state = "joining"
            self.tell(e.WorkerAbandoned(self.id, "HorovodInternalError"))
            self.later(0.001, 0.05, lambda: self.cluster.kill(self, report=True, exit_code=1))
        else:
            self.state = "joining"
            self.later(0.0, 0.05, self._join)

    def on_cut(self, round: int) -> None:
        self.cut_round = max(self.cut_round, round)
        if self.world is not None and self.world.round == round and self.state == "training":
            self.world.broken = True
            self.fail()

    def on_notice(self, sequence: int) -> None:
        assert sequence > self.notices, "hosts-updated sequence went back"
        self.notices = sequence

    def stop_at_boundary(self) -> None:
        self.state = "joining"
        self.later(0.0, 0.05, self._join)

    def finish(self) -> None:
        self.state = "done"
        self.tell(e.WorkerDone(self.id, in_loop=not self.cluster.plan.plain))
        self.cluster.bad_luck_at_the_end(self)
        self.later(0.01, 0.3, lambda: self.cluster.kill(self, report=True, exit_code=0))


class SimWorld:
    """The collectives of one round: lockstep steps, of which a failure completes some halves."""

    def __init__(self, cluster: Cluster, world: World) -> None:
        self.cluster, self.world, self.round = cluster, world, world.round
        self.members = [cluster.workers[member.worker] for member in world.members]
        self.here: set[int] = set()
        self.broken = False
        self.stepping = False
        self.synced = False
        self._hanging_s = 0

    def arrived(self, worker: SimWorker) -> None:
        self.here.add(worker.id)
        if len(self.here) == len(self.members) and not self.broken:
            self.cluster.after(self.cluster.rng.uniform(0.01, 0.3), self._sync)

    def damaged(self, dead: SimWorker) -> None:
        """A member's sockets are closed. Its ring neighbours see it in milliseconds, the others not at all."""
        if self.broken:
            return
        self.broken = True
        rng = self.cluster.rng
        lucky = [w for w in self.members if rng.random() < 0.5]
        if self.synced:
            self._complete_for(lucky)
        elif len(self.here) == len(self.members) and self.world.sync:
            state = self.members[self.world.root].progress or 0
            for worker in lucky:  # the broadcast had reached these
                if worker.moving and worker.state == "training":
                    worker.progress = state
        where = self.members.index(dead)
        beside = (self.members[where - 1], self.members[(where + 1) % len(self.members)])
        for neighbour in dict.fromkeys(beside):
            if neighbour.alive and neighbour.state == "training":
                neighbour.later(0.01, 0.03, lambda n=neighbour: self._error(n))

    def _error(self, worker: SimWorker) -> None:
        if worker.world is self and worker.state == "training":
            worker.fail()

    def _moving(self) -> bool:
        return not self.broken and all(worker.moving for worker in self.members)

    def _sync(self) -> None:
        if self.broken:
            return
        if self._network_is_down():
            return
        if not self._moving():
            self._hang(self._sync)
            return
        root = self.members[self.world.root]
        state = root.progress or 0
        if self.world.sync:
            for worker in self.members:
                worker.progress = state
        else:
            assert len({w.progress for w in self.members}) == 1, "sync was skipped with different states"
        self.synced = True
        if not self.cluster.plan.plain:
            for worker in self.members:
                worker.tell(e.WorkerAlive(worker.id, worker.progress))
        self._next()

    def _network_is_down(self) -> bool:
        """Hosts that do not reach one another, while everything reaches the driver: some members see an error."""
        hosts = {worker.place.host for worker in self.members}
        if self.cluster.now >= self.cluster.hosts_apart_until or len(hosts) == 1:
            return False
        for index, worker in enumerate(self.members):
            if worker.moving and worker.state == "training" and (index == 0 or self.cluster.rng.random() < 0.5):
                worker.later(0.0, 0.2, lambda w=worker: self._error(w))
        return True

    def _hang(self, again: Callable[[], None]) -> None:
        """Somebody does not take part: the others wait, in the end until the collective's own timeout."""
        self._hanging_s += 1
        if self._hanging_s < COLLECTIVE_TIMEOUT_S:
            self.cluster.after(1.0, again)
            return
        self.broken = True
        for worker in self.members:
            if worker.moving and worker.state == "training":
                worker.fail()

    def _next(self) -> None:
        if not self.broken:
            self.stepping = True
            self.cluster.after(self.cluster.rng.uniform(0.1, 0.6), self._step)

    def _complete_for(self, workers: list[SimWorker]) -> None:
        """The reduction in flight completes for these: they apply the step, the others stay one behind."""
        if self.stepping:
            for worker in workers:
                if worker.moving and worker.state == "training":
                    worker.progress = (worker.progress or 0) + 1

    def _step(self) -> None:
        if self.broken:
            return
        if self._network_is_down():
            return
        if not self._moving():
            self._hang(self._step)
            return
        stop = any(w.notices > w.seen_notices for w in self.members) and not self.cluster.plan.plain
        self._complete_for(self.members)
        self.stepping = False
        plan = self.cluster.plan
        step = self.members[0].progress or 0
        if plan.raises_at is not None and step >= plan.raises_at:
            self.members[0].tell(e.WorkerRaised(self.members[0].id, "ValueError", "a bug", "Traceback ..."))
            self.cluster.kill(self.members[0], report=True, exit_code=1)
        elif step >= plan.steps:
            for worker in self.members:
                worker.later(0.0, 2.0 if plan.plain else 0.5, lambda w=worker: self._finish(w))
        elif stop and step % plan.commit_every == 0:
            for worker in self.members:
                worker.stop_at_boundary()
        else:
            self._next()

    def _finish(self, worker: SimWorker) -> None:
        if worker.state == "training" and worker.world is self:
            worker.finish()
