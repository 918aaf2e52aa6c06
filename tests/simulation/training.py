"""Simulated workers: the protocol from boot to done, with the failures of a ring of sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from spark_elastic.membership import events as e
from spark_elastic.membership.topology import Place, StateVersion, World

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster


COLLECTIVE_TIMEOUT_S = 300


class SimWorker:
    """One training process. `version` is what it says of its state, None: it has none; `history` is the truth.

    `history` is a number made of all that was ever done to the state: steps, turns (collectives after which something
    is changed without a step, such as a schedule or an epoch) and the beginnings of loops.
    """

    def __init__(self, cluster: Cluster, worker_id: int, agent: int, place: Place) -> None:
        self.cluster, self.id, self.agent, self.place = cluster, worker_id, agent, place
        self.alive = True
        self.stopped = False  # SIGSTOP: neither answers nor beats
        self.busy = False  # its interpreter's lock is held: as stopped, but its process runs
        self.resumed_at = float("-inf")
        self.hung = False  # beats, but the user's code never comes to a boundary
        self.said_hello = False
        self.state = "boot"  # boot, init, building, joining, training, done
        self.version: StateVersion | None = None
        self.history = 0
        self.loop = 0  # in which it stands; 0: in none yet
        self.after_loop = False
        self.blocked_since: float | None = None  # waits for a rank that has left the loop, or makes one step less
        self.alone = False  # does what comes after the loop, in no collective: nothing of a world reaches it
        self.collectives_left = 0  # after the loop
        self.run = 1
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
        if not self.alive or self.cluster.ended:
            return
        if not self.stopped:
            self._say_where()
        interval_s = self.cluster.plan.settings.heartbeat_interval_s * self.cluster.speed_of(self.place.host)
        self.cluster.after(interval_s, self._beat)

    def _say_where(self) -> None:
        plain = self.cluster.plan.plain
        blocked_s = None if self.blocked_since is None else self.cluster.now - self.blocked_since
        self.tell(e.WorkerAlive(self.id, None if plain else self.version, blocked_s, self.after_loop))

    def resume(self) -> None:
        """SIGCONT: what came meanwhile is handled now."""
        self.stopped = self.busy = False
        self.resumed_at = self.cluster.now
        kept, self._kept = self._kept, []
        for what in kept:
            self.receive(what)

    @property
    def moving(self) -> bool:
        executor = self.cluster.agents[self.agent].executor
        return self.alive and not self.stopped and not self.hung and executor.reachable and not executor.apart

    def die(self) -> None:
        self.alive = False
        if self.world is not None and self.state in ("building", "training"):
            self.world.damaged(self)

    def on_admitted(self, loop: int) -> None:
        if self.state == "joining" and self.loop >= loop:
            return  # where it was sent before
        assert self.state in ("init", "joining"), f"worker {self.id} was admitted in state {self.state}"
        self.loop = loop
        self.state = "building"
        self.later(0.3, 1.5, self._join)

    def on_world(self, world: SimWorld) -> None:
        assert self.state in ("init", "joining"), f"worker {self.id} got a world in state {self.state}"
        self.world = world
        self.seen_notices = self.notices
        if self.state == "init":
            self.loop = 1
            self.state = "building"
            self.later(0.3, 1.5, self._enter)
        else:
            self._enter()

    def _enter(self) -> None:
        """Connect with the others, now that the model is built."""
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
        self.tell(e.WorkerReady(self.id, round, self.version, loop=self.loop))

    def fail(self) -> None:
        """Recover from a collective that raised."""
        self.blocked_since = None
        if not self.alive or self.hung or self.alone:
            return
        if self.after_loop:
            self._call_again()
        elif self.cluster.plan.restarts:
            self.raise_error()
        elif self.cluster.plan.plain:
            self.state = "joining"
            self.tell(e.WorkerAbandoned(self.id, "HorovodInternalError"))
            self.later(0.001, 0.05, lambda: self.cluster.kill(self, report=True, exit_code=1))
        else:
            self.state = "joining"
            self.later(0.0, 0.05, self._join)

    def raise_error(self) -> None:
        """Let the function raise, which ends the process."""
        self.state = "joining"
        raised = e.WorkerRaised(self.id, "RuntimeError", "Connection closed by peer", "Traceback ...")
        if self.cluster.agents[self.agent].executor.reachable:
            self.cluster.tell_driver(("worker", self.id), raised, self.cluster.rng.uniform(0.0005, 0.2))
        self.later(0.001, 0.05, lambda: self.cluster.kill(self, report=True, exit_code=1))

    def on_sigterm(self) -> None:
        """Save, and end in one of the ways in which programs do."""
        how = self.cluster.rng.choice(["dies", "dies", "raises", "returns"])
        if self.hung or self.state not in ("building", "training"):
            return
        if how == "raises":
            self.raise_error()
        elif how == "returns" and self.state == "training":
            self.finish()
        else:
            self.state = "joining"
            self.cluster.kill(self, report=True, exit_code=-15)

    def on_cut(self, round: int) -> None:
        self.cut_round = max(self.cut_round, round)
        if self.world is not None and self.world.round == round and self.state == "training":
            self.world.broken = True
            self.fail()

    def on_run_again(self, run: int) -> None:
        assert (self.state, self.run) == ("done", run - 1), f"worker {self.id} in {self.state} is run again as {run}"
        self.run = run
        self._call_again()

    def _call_again(self) -> None:
        """Call the function from its start, up to the loop whose state it holds."""
        self.after_loop = False
        self.state = "building"
        self._say_where()
        self.later(0.3, 1.5, self._join)

    def begin_end(self) -> None:
        """The loop has returned."""
        self.cluster.loop_has_returned()
        self.after_loop = True
        self.collectives_left = self.cluster.plan.collectives_at_the_end
        self._say_where()
        self.go_on_alone()

    def go_on_alone(self) -> None:
        self.alone = True
        self.later(0.0, self.cluster.plan.end_s, self._done_alone)

    def _done_alone(self) -> None:
        if self.hung or self.state != "training":
            return
        self.alone = False
        assert self.world is not None
        if not self.collectives_left:
            self.finish()
        elif self.world.broken or self.cut_round >= self.world.round:
            self.fail()
        else:
            self.world.gather(self)

    def on_notice(self, sequence: int) -> None:
        assert sequence > self.notices, "hosts-updated sequence went back"
        self.notices = sequence
        if self.cluster.plan.restarts:
            self.later(0.0, 3.0, self.on_sigterm)

    def stop_at_boundary(self) -> None:
        self.state = "joining"
        self.later(0.0, 0.05, self._join)

    @property
    def trained(self) -> bool:
        return self.version is not None and self.version.trained

    def do(self, what: str) -> None:
        """Go on by one "step", "turn" or "loop"."""
        before = self.version or StateVersion()
        after = {"step": before.stepped(), "turn": before.marked(), "loop": StateVersion(before.loop + 1)}
        self.version = after[what]
        self.loop, self.after_loop = self.version.loop, False
        self.history = hash((self.history, what))

    def take_over(self, other: SimWorker) -> None:
        self.version, self.history = other.version or StateVersion(), other.history
        if self.version.loop < self.loop:  # what the loop before has come to is where this one begins
            self.version = StateVersion(self.loop)

    def finish(self) -> None:
        self.state = "done"
        self.after_loop = False
        self.cluster.results[self.id] = self.run, 0 if self.world is None else self.world.round
        self.tell(e.WorkerDone(self.id, has_loop=not self.cluster.plan.plain, run=self.run))
        self.cluster.bad_luck_at_the_end(self)
        if self.cluster.rng.random() < 0.2:
            self.later(0.01, 0.3, self._exit)

    def _exit(self) -> None:
        if self.state == "done":
            self.cluster.kill(self, report=True, exit_code=0)


class SimWorld:
    """The collectives of one round: lockstep steps, of which a failure completes some halves."""

    def __init__(self, cluster: Cluster, world: World) -> None:
        self.cluster, self.world, self.round = cluster, world, world.round
        self.members = [cluster.workers[member.worker] for member in world.members]
        self.here: set[int] = set()
        self.broken = False
        self.doing = ""  # what is in flight: "step", "turn" or "loop"
        self.synced = False
        self.gathered: set[int] = set()  # after the loop: who has come to the next collective
        self._hanging_s = 0
        came_from = {worker.state == "init" for worker in self.members}
        assert len(came_from) == 1, "some do what comes before the loop together with others that stand in it"
        loops = {worker.loop for worker in self.members if worker.state != "init"}
        assert len(loops) <= 1, f"members of the loops {loops} are in one world"

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
        if len(self.gathered) == len(self.members):
            self._gathered(lucky)
        elif self.synced:
            self._complete_for(lucky)
        elif len(self.here) == len(self.members) and self.world.sync:
            for worker in lucky:  # the broadcast had reached these
                if self._trains(worker):
                    worker.take_over(self.members[self.world.root])
        where = self.members.index(dead)
        beside = (self.members[where - 1], self.members[(where + 1) % len(self.members)])
        for neighbour in dict.fromkeys(beside):
            if neighbour.alive and neighbour.state == "training":
                neighbour.later(0.01, 0.03, lambda n=neighbour: self._error(n))

    def _trains(self, worker: SimWorker) -> bool:
        """Return True if a collective of this world can still complete for the worker."""
        return worker.moving and worker.state == "training" and worker.world is self

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
        if self.world.sync:
            for worker in self.members:
                worker.take_over(root)
        states = {(worker.version, worker.history) for worker in self.members}
        assert len(states) == 1, f"a world starts with different states: {states}"
        self.synced = True
        if not self.cluster.plan.plain:
            for worker in self.members:
                worker.tell(e.WorkerAlive(worker.id, worker.version, begun=self.round))
        self._next()

    def _network_is_down(self) -> bool:
        """Raise in some members, as if hosts could not reach one another while all of them reach the driver.

        Returns: whether it raised in any.
        """
        hosts = {worker.place.host for worker in self.members}
        if self.cluster.now >= self.cluster.hosts_apart_until or len(hosts) == 1:
            return False
        raised = False
        for index, worker in enumerate(self.members):
            if self._trains(worker) and (index == 0 or self.cluster.rng.random() < 0.5):
                worker.later(0.0, 0.2, lambda w=worker: self._error(w))
                raised = True
        return raised  # otherwise they wait for the one that does not move

    def _hang(self, again: Callable[[], None]) -> None:
        """Let the others wait for a member that does not take part, at most until the collective's own timeout."""
        self._hanging_s += 1
        if self._hanging_s < COLLECTIVE_TIMEOUT_S:
            self.cluster.after(1.0, again)
            return
        self.broken = True
        for worker in self.members:
            if self._trains(worker):
                worker.fail()

    def gather(self, worker: SimWorker) -> None:
        """The worker has come to a collective after the loop."""
        self.gathered.add(worker.id)
        if self.cluster.plan.unequal:
            worker.blocked_since = self.cluster.now
        if len(self.gathered) == len(self.members):
            self.cluster.after(self.cluster.rng.uniform(0.01, 0.3), self._gather)

    def _gather(self) -> None:
        if self.broken or self._network_is_down():
            return
        if not self._moving():
            self._hang(self._gather)
            return
        self._gathered(self.members)

    def _gathered(self, workers: list[SimWorker]) -> None:
        self.gathered.clear()
        for worker in workers:
            worker.blocked_since = None
            if self._trains(worker):
                worker.collectives_left -= 1
                worker.go_on_alone()

    def _next(self) -> None:
        version = self.members[0].version or StateVersion()
        plan = self.cluster.plan
        if not plan.plain and version.steps >= plan.steps and version.loop == plan.loops and not self.broken:
            for worker in self.members:  # a world that was built after the last step
                worker.begin_end()
        elif not self.broken and self._is_left_by_the_first(version):
            first, *others = self.members
            for worker in others:
                worker.blocked_since = self.cluster.now
            self._end(first)
        elif not self.broken:
            plan, rng = self.cluster.plan, self.cluster.rng
            at_the_end = version.steps >= plan.steps and version.loop < plan.loops
            self.doing = "loop" if at_the_end else "turn" if rng.random() < plan.turns else "step"
            for worker in self.members:
                worker.after_loop = at_the_end
            self.cluster.after(self.cluster.rng.uniform(0.1, 0.6), self._step)

    def _complete_for(self, workers: list[SimWorker]) -> None:
        """The collective in flight completes for these: they apply the step, the others stay one behind."""
        if self.doing:
            for worker in workers:
                if self._trains(worker):
                    worker.do(self.doing)

    def _poisoned(self) -> list[SimWorker]:
        """Return the workers that die in the step that is about to be applied: one, or two at once."""
        plan, rng = self.cluster.plan, self.cluster.rng
        if self.doing != "step" or (self.members[0].version or StateVersion()).steps + 1 != plan.poison_at:
            return []
        there = [worker for worker in self.members if plan.poison_host in (None, worker.place.host)]
        return rng.sample(there, min(len(there), rng.choice([1, 2])))

    def _step(self) -> None:
        if self.broken:
            return
        if self._network_is_down():
            return
        if not self._moving():
            self._hang(self._step)
            return
        stop = any(w.notices > w.seen_notices for w in self.members) and not self.cluster.plan.plain
        if victims := self._poisoned():
            self.doing = ""  # they die before the reduction
            for victim in victims:
                self.cluster.kill(victim, report=True, exit_code=self.cluster.plan.poison_exit)
            return
        self._complete_for(self.members)
        self.doing = ""
        plan = self.cluster.plan
        version = self.members[0].version or StateVersion()
        step, is_last = version.steps, version.loop == plan.loops
        if plan.raises_at is not None and step >= plan.raises_at:
            self.members[0].tell(e.WorkerRaised(self.members[0].id, "ValueError", "a bug", "Traceback ..."))
            self.cluster.kill(self.members[0], report=True, exit_code=1)
        elif step >= plan.steps and is_last:
            for worker in self.members:
                self._end(worker)
        elif stop and step % plan.commit_every == 0:
            for worker in self.members:
                worker.stop_at_boundary()
        else:
            self._next()

    def _is_left_by_the_first(self, version: StateVersion) -> bool:
        """Return True if only one step of the last loop is left, which rank 0 does not make."""
        plan = self.cluster.plan
        last = version.loop == plan.loops and version.steps == plan.steps - 1
        return plan.unequal and last and len(self.members) > 1

    def _end(self, worker: SimWorker) -> None:
        if self.cluster.plan.plain:
            worker.later(0.0, 2.0, lambda: self._finish(worker))
        else:
            worker.begin_end()

    def _finish(self, worker: SimWorker) -> None:
        if worker.state == "training" and worker.world is self:
            worker.finish()
