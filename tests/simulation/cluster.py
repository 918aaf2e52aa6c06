"""A simulated cluster around the real membership machine: executors, agents, workers and a network, in virtual time.

Everything random comes from one seed. Messages of one channel keep their order, and some arrive twice; the last ones of
a process that dies may be lost. What is said across a partition arrives when it is over, as with TCP. Clocks differ in
speed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spark_elastic.membership import commands as c
from spark_elastic.membership import events as e
from spark_elastic.membership.reasons import LossCause, LossKind, reported
from spark_elastic.membership.topology import Place, StateVersion
from tests.simulation.checker import Checker
from tests.simulation.plan import Plan
from tests.simulation.training import SimWorker, SimWorld

MOST_MISFORTUNES = 25
"""Kills after decisions of the driver, with which a job may come to no end."""


@dataclass
class Executor:
    name: str
    host: str
    cores: int
    alive: bool = True
    draining: bool = False
    reachable: bool = True
    apart: bool = False
    """A partition lies between its host and all others."""
    reunited_at: float = float("-inf")
    kept: list[Callable[[], None]] = field(default_factory=list)
    """What arrives when the partition is over, on either side."""
    slots: set[int] = field(default_factory=set)


@dataclass
class SimAgent:
    id: int
    place: Place
    executor: Executor
    alive: bool = True
    worker: SimWorker | None = None


class Cluster:
    def __init__(self, machine: Any, plan: Plan, rng: random.Random) -> None:
        self.plan, self.rng, self.machine = plan, rng, machine
        self.now = 0.0
        self.checker = Checker(plan.settings, self)
        self.ended = False
        self.deaf_until = 0.0
        self.away_s = 0.0
        self._unheard: list[e.Event] = []
        self.crashes: list[tuple[int, tuple[int, int]]] = []
        """Members' processes that died while their agents lived, whose functions may have been called again since:
        in which round, and how far anybody was."""
        self.hosts_apart_until = 0.0
        self._loop_is_over = False
        self._misfortunes = 0
        self.outcome: c.FinishJob | c.FailJob | None = None
        self.workers: dict[int, SimWorker] = {}
        self.worlds: dict[int, SimWorld] = {}
        self.results: dict[int, tuple[int, int]] = {}  # worker -> (run, round) of what its agent holds
        self.events = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count(1)
        self._tick_at = float("inf")
        self._channels: dict[tuple[str, int], float] = {}
        self._sent: dict[tuple[str, int], int] = {}
        self._lost: dict[tuple[str, int], int] = {}
        """The number of the first message of a channel that is not lost."""
        self._speeds: dict[str, float] = {}
        self.executors: list[Executor] = []
        self.agents: dict[int, SimAgent] = {}
        self.running: dict[int, SimAgent | None] = {}  # launched slots
        self._pending: list[int] = []
        for host in range(plan.hosts):
            self._add_executor(f"host{host}")

    # --- time and network -------------------------------------------------------------------------

    def after(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._ids), action))

    def run(self) -> None:
        self._to_machine(e.JobStarted())
        for at, fault in self.plan.faults:
            self.after(at, lambda fault=fault: self.fault(fault))
        while self._queue and not self.ended:
            self.now, _, action = heapq.heappop(self._queue)
            if self.now > self.plan.limit_s:
                break
            action()
        self.checker.at_end(self)

    def speed_of(self, host: str) -> float:
        """Return how long a second of the host's clock lasts."""
        if host not in self._speeds:
            self._speeds[host] = self.rng.choice([1.0, 1.0, 0.9, 1.1, self.rng.uniform(0.8, 1.25)])
        return self._speeds[host]

    def _host_of(self, channel: tuple[str, int]) -> Executor | None:
        kind, number = channel
        agent = self.workers[number].agent if kind == "worker" else number if kind == "agent" else None
        return self.agents[agent].executor if agent is not None else None

    def tell_driver(self, channel: tuple[str, int], event: e.Event, delay: float | None = None) -> None:
        """Deliver an event in the order of its channel; some arrive a second time, a WorkerDone more often."""
        executor = self._host_of(channel)
        number = self._sent[channel] = self._sent.get(channel, 0) + 1
        if executor is not None and executor.apart:
            executor.kept.append(lambda: self._deliver(channel, number, event, delay))
        else:
            self._deliver(channel, number, event, delay)

    def lose_last_words(self, channel: tuple[str, int]) -> None:
        """Lose, now and then, what a process that has died said last: it was not read yet."""
        if self.rng.random() < 0.2:
            self._lost[channel] = self._sent.get(channel, 0) + 1

    def _deliver(self, channel: tuple[str, int], number: int, event: e.Event, delay: float | None) -> None:
        delay = self.rng.uniform(0.0005, 0.03) if delay is None else delay
        due = max(self.now + delay, self._channels.get(channel, 0.0))
        self._channels[channel] = due

        def arrive() -> None:
            if number >= self._lost.get(channel, 0):
                self._to_machine(event)

        self.after(due - self.now, arrive)
        again = 0.2 if isinstance(event, e.WorkerDone) else 0.02
        if channel[0] != "slot" and self.rng.random() < again:
            self.after(due - self.now + self.rng.uniform(0, 2), arrive)

    def _to_machine(self, event: e.Event) -> None:
        if self.ended:
            return
        if self.now < self.deaf_until:
            self._unheard.append(event)
            return
        self.events += 1
        self.checker.before(event)
        was = self.machine.phase
        commands = self.machine.handle(event, self.driver_now)
        self.checker.after(event, commands, self.driver_now, self.machine, was)
        for command in commands:
            self._carry_out(command)
        due = self.machine.next_deadline()
        if due is not None and due < self._tick_at:
            self._tick_at = due
            # a driver is not always on time, and sometimes it was stopped for a while
            late = 6.0 if self.rng.random() < 0.005 else self.rng.uniform(0, 0.01)
            self.after(max(0.0, due - self.driver_now) + late, self._tick)

    @property
    def driver_now(self) -> float:
        """Time without the driver's pauses, as the membership machine gets it."""
        return self.now - self.away_s

    def _driver_wakes(self, seconds: float) -> None:
        self.away_s += seconds
        self.deaf_until = 0.0
        unheard, self._unheard = self._unheard, []
        for event in (e.DriverPaused(seconds), *unheard):
            self._to_machine(event)

    def _tick(self) -> None:
        self._tick_at = float("inf")
        self._to_machine(e.Tick())

    # --- commands ---------------------------------------------------------------------------------

    def _carry_out(self, command: c.Command) -> None:
        if isinstance(command, c.FinishJob | c.FailJob):
            self.ended, self.outcome = True, command
        elif isinstance(command, c.LaunchSlot):
            self.running[command.slot] = None
            self._pending.append(command.slot)
            self.after(self.rng.uniform(0.05, 0.5), self._schedule)
        elif isinstance(command, c.WithdrawSlot):
            agent = self.running.get(command.slot)
            if agent is not None:
                self._reach(agent, 0.0, lambda: self.end_agent(agent, "withdrawn"))
            self._end_slot(command.slot, agent, "withdrawn")
        elif isinstance(command, c.StartWorker):
            agent = self.agents[command.agent]
            worker = SimWorker(self, command.worker, agent.id, agent.place)
            self.workers[worker.id] = worker
            self._reach(agent, self.rng.uniform(0.001, 0.02), lambda: self._start(agent, worker))
        elif isinstance(command, c.StopWorker):
            agent = self.agents[command.agent]
            self._reach(agent, self.rng.uniform(0.001, 0.02), lambda: self._stop(agent, command.worker))
        elif isinstance(command, c.DismissAgent):
            agent = self.agents[command.agent]
            self._reach(agent, self.rng.uniform(0.001, 0.05), lambda: self.end_agent(agent, "dismissed"))
        elif isinstance(command, c.PublishWorld):
            self._bad_luck([member.worker for member in command.world.members], 2.5)
            world = SimWorld(self, command.world)
            self.worlds[world.round] = world
            for member in command.world.members:
                self._tell_worker(member.worker, lambda w, world=world: w.on_world(world))
        elif isinstance(command, c.AdmitProvisionally):
            self._tell_worker(command.worker, lambda w: w.on_admitted(command.loop))
        elif isinstance(command, c.RerunFunction):
            self._bad_luck([command.worker], 1.5)
            self._tell_worker(command.worker, lambda w: w.on_run_again(command.run))
        elif isinstance(command, c.NotifyHostsUpdated):
            self._bad_luck(command.workers, 0.7)
            for worker in command.workers:
                self._tell_worker(worker, lambda w: w.on_notice(command.sequence))
        elif isinstance(command, c.CutPeers):
            self._bad_luck(command.workers, 0.1)
            for worker in command.workers:
                self._tell_worker(worker, lambda w: w.on_cut(command.round))

    def _bad_luck(self, workers: Sequence[int], within_s: float) -> None:
        if self.rng.random() < self.plan.unlucky and self._misfortunes < MOST_MISFORTUNES:
            self._misfortunes += 1
            victim = self.workers[self.rng.choice(list(workers))]
            self.after(self.rng.uniform(0, within_s), lambda: self.kill(victim, report=True))

    def loop_has_returned(self) -> None:
        if not self._loop_is_over:
            self._loop_is_over = True
            for at in self.plan.deaths_at_the_end:
                self.after(at, lambda: self.fault("kill worker"))
            if self.rng.random() < 0.2:
                self.after(self.rng.uniform(0.0, self.plan.end_s), lambda: self.fault("lose address"))

    def bad_luck_at_the_end(self, worker: SimWorker) -> None:
        """Perhaps kill another worker, or the agent that keeps the result, after one worker is done."""
        if self._misfortunes >= MOST_MISFORTUNES:
            return
        if self.rng.random() < self.plan.unlucky:
            self._misfortunes += 1
            self.after(self.rng.uniform(0, 0.5), lambda: self.fault("kill worker"))
        elif self.rng.random() < self.plan.unlucky:
            self.after(self.rng.uniform(0, 0.5), lambda: self.end_agent(self.agents[worker.agent], "killed"))

    def _tell_worker(self, worker_id: int, what: Callable[[SimWorker], None]) -> None:
        worker = self.workers[worker_id]
        executor = self.agents[worker.agent].executor
        if worker.alive and executor.apart:
            executor.kept.append(lambda: self._tell_worker(worker_id, what))
        elif worker.alive and executor.reachable:
            due = max(self.now + self.rng.uniform(0.0005, 0.02), self._channels.get(("to", worker_id), 0.0))
            self._channels[("to", worker_id)] = due
            self.after(due - self.now, lambda: worker.receive(what))

    def _reach(self, agent: SimAgent, delay: float, action: Callable[[], None]) -> None:
        """Have an agent do something, as soon as it hears of it; at once without a delay."""
        if agent.alive and agent.executor.apart:
            agent.executor.kept.append(lambda: self._reach(agent, delay, action))
        elif agent.alive and agent.executor.reachable and delay:
            self.after(delay, action)
        elif agent.alive and agent.executor.reachable:
            action()

    # --- executors, slots, agents -----------------------------------------------------------------

    def _add_executor(self, host: str) -> None:
        if not self.ended:
            self.executors.append(Executor(f"exec{next(self._ids)}", host, self.plan.cores))
            self._schedule()

    def _schedule(self) -> None:
        usable = [x for x in self.executors if x.alive and not x.draining and x.reachable and not x.apart]
        for slot in list(self._pending):
            free = [x for x in usable if len(x.slots) < x.cores]
            if not free:
                return
            executor = self.rng.choice(free)
            executor.slots.add(slot)
            self._pending.remove(slot)
            agent = SimAgent(next(self._ids), Place(executor.host, executor.name, slot), executor)
            self.after(self.rng.uniform(0.1, 1.0), lambda agent=agent: self._agent_starts(agent))

    def _agent_starts(self, agent: SimAgent) -> None:
        slot = agent.place.slot
        if not agent.executor.alive or slot not in agent.executor.slots:
            self._end_slot(slot, None, "executor lost before the task ran")
            return
        self.agents[agent.id] = agent
        self.running[slot] = agent
        self.checker.agent_started(agent.id, agent.place)
        self.tell_driver(("agent", agent.id), e.AgentJoined(agent.id, agent.place))
        self._agent_heartbeat(agent)

    def _agent_heartbeat(self, agent: SimAgent) -> None:
        if not agent.alive or self.ended:
            return
        if agent.executor.reachable:
            worker = agent.worker
            runs = worker is not None and worker.alive and (worker.busy or not worker.stopped)
            self.tell_driver(("agent", agent.id), e.AgentAlive(agent.id, worker.id if worker and runs else None))
        interval_s = self.plan.settings.heartbeat_interval_s * self.speed_of(agent.place.host)
        self.after(interval_s, lambda: self._agent_heartbeat(agent))

    def _start(self, agent: SimAgent, worker: SimWorker) -> None:
        if agent.alive:
            if agent.worker is not None:
                self.kill(agent.worker, report=True)
            agent.worker = worker
            worker.boot()

    def _stop(self, agent: SimAgent, worker_id: int) -> None:
        if agent.worker is not None and agent.worker.id == worker_id:
            self.kill(agent.worker, report=True)

    def kill(self, worker: SimWorker, *, report: bool, exit_code: int = -9) -> None:
        """End a process: its channel closes, and its agent, if it lives, reports the exit, in any order."""
        if not worker.alive:
            return
        agent = self.agents[worker.agent]
        if worker.world is not None and worker.state != "done" and agent.alive and exit_code != 0:
            furthest = max(w.version or StateVersion() for w in self.workers.values())
            self.crashes.append((worker.world.round, (furthest.loop, furthest.steps)))
            if worker.state == "training":
                self.checker.crashed(exit_code)
        worker.die()
        if not agent.executor.reachable:
            return
        if exit_code != 0:
            self.lose_last_words(("worker", worker.id))
        if worker.said_hello:
            late = self.rng.uniform(0.0005, 0.3) if self.plan.restarts else None  # its peers may see it before
            self.tell_driver(("worker", worker.id), e.WorkerLost(worker.id, reported("channel closed")), late)
        if report and agent.alive:
            cause = LossCause(LossKind.EXITED, code=exit_code)
            event = e.WorkerLost(worker.id, cause, "the end of its stderr")
            self.tell_driver(("agent", agent.id), event, self.rng.uniform(0.001, 0.2))

    def end_agent(self, agent: SimAgent, why: str, *, told: bool = True) -> None:
        """End an agent's process, and with it its worker and its task."""
        if not agent.alive:
            return
        agent.alive = False
        if agent.worker is not None:
            self.kill(agent.worker, report=False)
        if told and agent.executor.reachable:
            self.tell_driver(("agent", agent.id), e.AgentLost(agent.id, reported(why)), self.rng.uniform(0.001, 0.5))
            self._end_slot(agent.place.slot, agent, why)

    def _end_slot(self, slot: int, agent: SimAgent | None, why: str) -> None:
        if slot not in self.running or self.running[slot] is not agent:
            return
        del self.running[slot]
        if slot in self._pending:
            self._pending.remove(slot)
        for executor in self.executors:
            executor.slots.discard(slot)
        if agent is not None:
            agent.executor.slots.discard(slot)
        self.tell_driver(("slot", slot), e.SlotEnded(slot, reported(why)), self.rng.uniform(0.01, 1.0))
        self.after(0.1, self._schedule)

    # --- faults -----------------------------------------------------------------------------------

    def fault(self, kind: str) -> None:
        executors = [x for x in self.executors if x.alive and x.reachable and not x.apart]
        live = [w for w in self.workers.values() if w.alive and self.agents[w.agent].executor in executors]
        if kind == "pause driver":
            if self.now >= self.deaf_until:
                seconds = self.rng.choice([3.0, 15.0, 60.0])
                self.deaf_until = self.now + seconds
                self.after(seconds, lambda: self._driver_wakes(seconds))
        elif kind in ("kill worker", "stop worker", "busy worker", "hang worker", "kill agent"):
            if not live:
                return
            worker = self.rng.choice(live)
            if kind == "kill worker":
                self.kill(worker, report=True)
            elif kind == "stop worker":
                worker.stopped = True
                if self.rng.random() < 0.5:
                    self.after(self.rng.uniform(0.5, 30), worker.resume)
            elif kind == "busy worker":
                if not worker.stopped:
                    worker.stopped = worker.busy = True
                    self.after(self.rng.uniform(2, 30), worker.resume)
            elif kind == "hang worker":
                worker.hung = True
                # nobody but its user can tell a hang of the only member from work; they would stop it in the end
                self.after(3000.0, lambda: self.kill(worker, report=True))
            else:
                self.end_agent(self.agents[worker.agent], "channel closed")
        elif kind == "narrow hosts":
            hosts = {x.host: self.rng.randint(0, self.plan.cores) for x in executors}
            if sum(hosts.values()) < self.plan.settings.min_num_proc:
                return
            self.tell_driver(("discovery", 0), e.HostsObserved(hosts))
            self.after(self.rng.uniform(5, 60), lambda: self.tell_driver(("discovery", 0), e.HostsObserved(None)))
        elif kind == "lose address":
            if live:
                self.tell_driver(("agent", self.rng.choice(live).agent), e.AddressLost(self.rng.choice(live).id))
        elif kind == "partition":
            hosts = sorted({x.host for x in executors})
            behind = self.rng.sample(hosts, self.rng.randint(1, max(1, len(hosts) // 2))) if hosts else []
            for executor in executors:
                if executor.host in behind:
                    executor.apart = True
                    self.after(self.rng.choice([2.0, 8.0, 15.0, 40.0]), lambda x=executor: self._reunite(x))
        elif kind == "hosts apart":
            self.hosts_apart_until = self.now + self.rng.choice([2.0, 20.0, 20.0, 300.0])
        elif kind == "new executor":
            self._add_executor(f"host{self.rng.randint(0, self.plan.hosts)}")
        elif executors:
            executor = self.rng.choice(executors)
            back = self.rng.uniform(1, 40)
            if kind == "kill executor":
                self._lose_executor(executor)
            elif kind == "drain executor":
                executor.draining = True
                self.tell_driver(("spark", 0), e.ExecutorDecommissioned(executor.name))
                self.after(self.rng.uniform(5, 60), lambda: self._lose_executor(executor))
            elif kind == "cut off executor":
                executor.reachable = False
                self.after(self.rng.uniform(15, 60), lambda: self._lose_executor(executor))
            if self.rng.random() < self.plan.come_back:
                self.after(back, lambda: self._add_executor(executor.host))

    def is_heard(self, agent: SimAgent) -> bool:
        """Return False if what the agent's host has said lately may not have come to the driver."""
        executor = agent.executor
        return executor.reachable and not executor.apart and self.now > executor.reunited_at + 1.0

    def _reunite(self, executor: Executor) -> None:
        if not executor.apart:
            return
        executor.apart, executor.reunited_at = False, self.now
        kept, executor.kept = executor.kept, []
        for action in kept:
            action()
        self._schedule()

    def _lose_executor(self, executor: Executor) -> None:
        if not executor.alive:
            return
        if executor.apart:  # what was said there is gone with it
            executor.apart, executor.reachable = False, False
            executor.kept.clear()
        executor.alive = False
        why = "killed"
        agents = [agent for agent in self.agents.values() if agent.executor is executor and agent.alive]
        for agent in agents:
            self.end_agent(agent, why, told=executor.reachable and self.rng.random() < 0.9)
        for slot in sorted(executor.slots):  # Spark notices, whatever the network does
            agent = self.running.get(slot)
            if agent is not None and agent.executor is executor:
                self.after(self.rng.uniform(0.01, 1.5), lambda s=slot, a=agent: self._end_slot(s, a, why))
        if self.rng.random() < 0.8 or not executor.reachable:
            lost = e.ExecutorLost(executor.name, reported(why))
            self.tell_driver(("spark", 0), lost, self.rng.uniform(0.01, 1.0))
