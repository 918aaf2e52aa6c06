"""The invariants, checked after every event against separate records of events, commands and the true state.

It reads nothing of the machine but its phase, its world and its next deadline; the counts of its registry are compared
with what the registry holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spark_elastic import errors
from spark_elastic.membership import commands as c
from spark_elastic.membership import events as e
from spark_elastic.membership import timeline as t
from spark_elastic.membership.reasons import LossKind, WaitKind
from spark_elastic.membership.states import Phase
from spark_elastic.membership.topology import BEGINNING, Place, StateVersion, World
from spark_elastic.settings import ElasticSettings
from tests.simulation.world_checks import check_failure, check_ranks, check_state, require

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster


EACH_EVENT_UP_TO = 400
"""The most workers with which what concerns all of them is checked after every event."""
SOME_EVENTS = 100
"""With more workers, it is checked after one event of so many."""


class Checker:
    def __init__(self, settings: ElasticSettings, cluster: Cluster) -> None:
        self.settings, self.cluster = settings, cluster
        self.places: dict[int, Place] = {}  # agents that exist
        self.joined: dict[int, Place] = {}  # agents the machine knows
        self.ever_joined: set[int] = set()
        self.on_agent: dict[int, int] = {}  # worker -> agent
        self.gone: set[int] = set()  # workers the machine knows to be gone, or had killed
        self.done: dict[int, bool] = {}  # -> has_loop
        self.ended: set[int] = set()  # of those, the processes that the machine knows to have ended
        self.run: dict[int, int] = {}  # worker -> the run whose result counts; 1 where there was one only
        self.again_in: dict[int, int] = {}  # worker -> the round whose end had it run again last
        self.after_loop: dict[int, bool] = {}  # as last reported
        self.in_loop: dict[int, int] = {}  # worker that waits -> the loop it stands in
        self.stands: dict[int, tuple[bool, StateVersion | None]] = {}  # worker that waits -> (at_init, version)
        self.admitted: set[int] = set()
        self.last_round: dict[int, int] = {}
        self.world: World | None = None
        self.notified_round = 0
        self.sequence = 0
        self.exited_well: set[int] = set()
        self.began_at = 0.0  # when the newest world was published
        self.raised: set[int] = set()  # members whose exceptions wait until it is known if a loss is the reason
        self.cut_round = 0
        self.tried_in = 0  # the newest round whose end had the agents try their connections
        self.started_at: dict[int, float] = {}
        self.showed_state = False
        self.stalled: set[int] = set()  # rounds in which workers waited for one that had left their collectives
        self.furthest = BEGINNING  # the most advanced version that any event reported
        self.decommissioned: set[str] = set()
        self.hosts: dict[str, int] | None = None
        self.own_crashes: list[tuple[int, tuple[int, int]]] = []
        self.excluded: dict[str, float] = {}  # host -> until when it is left alone
        self.slot_failed_at: dict[int, float] = {}
        self.counted: set[int] = set()  # slots whose failure was announced since something was started there
        self.broken_since: float | None = None
        self.shaken = False  # something that breaks a world was part of the event
        self.waiting: t.WaitChanged | None = None
        self.stats: dict[str, int] = {}

    def crashed(self, exit_code: int) -> None:
        """Require that the job is given up after the allowed number of crashes."""
        limit = self.settings.crash_limit
        if limit is None or exit_code == -9:
            return
        if self.cluster.plan.restarts and self.cluster.driver_now - self.began_at >= self.settings.stall_timeout_s:
            self.own_crashes.clear()  # it reports no steps, and a world that lasts has made some
        self.own_crashes.append(self.cluster.crashes[-1])
        row = {round for round, at in self.own_crashes if at == self.own_crashes[-1][1]}
        most = limit * (self.cluster.plan.hosts + 1) + 2
        require(len(row) <= most, f"{len(row)} worlds crashed at the same step")

    def agent_started(self, agent: int, place: Place) -> None:
        self.places[agent] = place

    # --- what the event says ----------------------------------------------------------------------

    def before(self, event: e.Event) -> None:
        self.shaken = False
        self.started_at.pop(getattr(event, "worker", -1), None) if not isinstance(event, e.WorkerAlive) else None
        if isinstance(event, e.AgentJoined):
            if event.agent in self.ever_joined:
                return
            self.ever_joined.add(event.agent)
            older = [a for a, place in self.joined.items() if place.slot == event.place.slot]
            for agent in older:
                self._agent_gone(agent)
            self.joined[event.agent] = event.place
        elif isinstance(event, e.AgentLost):
            self._agent_gone(event.agent)
        elif isinstance(event, e.SlotEnded):
            for agent in [a for a, place in self.joined.items() if place.slot == event.slot]:
                self._agent_gone(agent)
        elif isinstance(event, e.ExecutorLost):
            for agent in [a for a, place in self.joined.items() if place.executor == event.executor]:
                self._agent_gone(agent)
        elif isinstance(event, e.WorkerLost):
            if event.worker in self.done:
                self.ended.add(event.worker)
            if event.worker in self.raised:
                pass  # its exit follows
            elif event.worker not in self.done and event.exit_code in ((0, 1) if self.cluster.plan.restarts else (0,)):
                self.exited_well.add(event.worker)  # a Done may be on its way, or it is a loss a little later
            elif event.worker not in self.done:
                self._worker_gone(event.worker)
        elif isinstance(event, e.WorkerAbandoned):
            if self._is_live(event.worker) and event.worker not in self.done:
                self.gone.add(event.worker)
                self.stands.pop(event.worker, None)
                self.shaken = True
        elif isinstance(event, e.WorkerRaised) and self.cluster.plan.restarts:
            self.raised |= {event.worker} if self._is_live(event.worker) else set()
        elif isinstance(event, e.WorkerReady):
            self._ready(event)
        elif isinstance(event, e.WorkerAlive):
            self.after_loop[event.worker] = event.after_loop
            if (event.blocked_s or 0.0) >= self.settings.stall_timeout_s and self._is_live(event.worker):
                self._blocked()
            if event.version is not None and self._is_live(event.worker) and event.worker not in self.done:
                self.furthest = max(self.furthest, event.version)
                self.showed_state = True
        elif isinstance(event, e.WorkerDone):
            current = event.run == self.run.get(event.worker, 1)
            if self._is_live(event.worker) and event.worker not in self.stands and current:
                self.done.setdefault(event.worker, event.has_loop)
        elif isinstance(event, e.ExecutorDecommissioned):
            self.decommissioned.add(event.executor)
        elif isinstance(event, e.AddressLost):
            self.shaken = self.shaken or self._needs_its_address(event.worker)
        elif isinstance(event, e.HostsObserved):
            self.hosts = None if event.hosts is None else dict(event.hosts)

    def _ready(self, event: e.WorkerReady) -> None:
        worker = event.worker
        if not self._is_live(worker) or event.round != self.last_round.get(worker, 0) or worker in self.done:
            return
        if event.at_init and (worker in self.admitted or worker in self.stands):
            return
        if worker in self.admitted and event.loop <= self.in_loop.get(worker, 0):
            return
        if worker in self.stands and not self.stands[worker][0]:
            return
        if event.version is not None:
            self.furthest = max(self.furthest, event.version)
            self.showed_state = True
        self.stands[worker] = (event.at_init, event.version)
        self.after_loop[worker] = False
        if not event.at_init:
            self.in_loop[worker] = event.loop
        if event.round > 0 and self.notified_round != event.round:
            self.shaken = True

    def _blocked(self) -> None:
        """Count the worlds that break because a rank has left the collectives of the others: two, and no more."""
        self.shaken = True
        assert self.world is not None
        self.stalled.add(self.world.round)
        require(len(self.stalled) <= 2, f"the ranks make unequal steps, and that is tried again after {self.stalled}")

    def _is_live(self, worker: int) -> bool:
        return worker in self.on_agent and worker not in self.gone

    def _worker_gone(self, worker: int) -> None:
        if not self._is_live(worker):
            return
        self.gone.add(worker)
        self.stands.pop(worker, None)
        if self.world is not None and worker in self.world.workers:
            self.shaken = True

    def _agent_gone(self, agent: int) -> None:
        if agent not in self.joined:
            return
        del self.joined[agent]
        for worker in [w for w, a in self.on_agent.items() if a == agent and w not in self.gone]:
            self.gone.add(worker)
            self.started_at.pop(worker, None)
            self.done.pop(worker, None)
            self.stands.pop(worker, None)
            self.shaken = True

    # --- what the machine made of it --------------------------------------------------------------

    def _needs_its_address(self, worker: int) -> bool:
        """Return whether others connect to the worker: it trains in a world of several, none of which has finished."""
        members = self._members()
        if self.world is None or self.world.size == 1 or worker not in members or worker in self.stands:
            return False
        return not self._everdone() and not any(self.after_loop.get(member) for member in members)

    def after(self, event: e.Event, commands: Sequence[c.Command], now: float, machine: Any, was: Phase) -> None:
        at_once = isinstance(event, e.WorkerRaised) and not self.cluster.plan.restarts
        if at_once and self._is_live(event.worker) and event.worker not in self.done:
            failed = any(isinstance(x, c.FailJob) and isinstance(x.error, errors.UserFunctionError) for x in commands)
            require(failed, "a bug in the user's function did not fail the job at once")
        for command in commands:
            name = type(command).__name__
            self.stats[name] = self.stats.get(name, 0) + 1
            getattr(self, f"_on_{name}")(command, event, now)
        if machine.phase in (Phase.FINISHED, Phase.FAILED):
            require(machine.next_deadline() is None, "an ended job has a deadline")
            require(machine.handle(e.Tick(), now) == [], "an ended job is not silent")
            return
        if isinstance(event, e.AddressLost) and was is Phase.RUNNING and self._needs_its_address(event.worker):
            require(machine.phase is not Phase.RUNNING, "nobody reaches a member, and its world goes on")
        kind = None if self.waiting is None else self.waiting.wait.kind
        if machine.phase is Phase.WAITING and kind is WaitKind.RETRY and self.world is not None:
            require(self.tried_in == self.world.round, "worlds break, and no connection is tried")
        due = machine.next_deadline()
        require(due is not None, f"{machine.phase} waits without a deadline")
        if isinstance(event, e.Tick):
            for worker, started in self.started_at.items():
                limit_s = self.settings.start_timeout_s + 10
                require(now < started + limit_s, f"worker {worker} boots for {now - started:.0f} s")
            require(due > now, f"the deadline {due} is past after a Tick at {now}")
        if machine.phase in (Phase.STARTING, Phase.WAITING, Phase.INTERRUPTED, Phase.BROKEN):
            require(self.waiting is not None, f"{machine.phase} does not say what it waits for")
        # each of these looks at all workers: with a thousand of them, not after every event
        if len(self.on_agent) <= EACH_EVENT_UP_TO or self.cluster.events % SOME_EVENTS == 0:
            self._check_progress_is_made(machine)

    def _check_progress_is_made(self, machine: Any) -> None:
        """Require that the machine does not wait for something that has happened."""
        members = self._members()
        training = [w for w in members if w not in self.stands and w not in self.done]
        if machine.phase is not Phase.BROKEN:
            self.broken_since = None
        elif self.broken_since is None:
            self.broken_since = self.cluster.driver_now
        else:
            limit_s = self.settings.stall_timeout_s + 10
            if any(self.after_loop.get(worker) for worker in training):
                self.broken_since = self.cluster.driver_now  # as long as it lives
            waited_s = self.cluster.driver_now - self.broken_since
            require(waited_s < limit_s, "the survivors wait for one that does not come")
        if machine.phase in (Phase.BROKEN, Phase.WAITING):
            assert self.world is not None
            blocked = [worker for worker in training if self.again_in.get(worker) != self.world.round]
            require(self.cut_round == self.world.round or not blocked, "the survivors of a broken world are not cut")
        kind = None if self.waiting is None else self.waiting.wait.kind
        if machine.phase is Phase.WAITING and kind not in (WaitKind.RETRY, WaitKind.CAUSE):
            standing = sum(1 for at_init, _ in self.stands.values() if not at_init) + len(self._everdone())
            require(standing < self.settings.min_num_proc, f"{standing} workers stand and wait")
        if machine.phase in (Phase.RUNNING, Phase.INTERRUPTED, Phase.BROKEN, Phase.WAITING) and self.showed_state:
            require(not any(at_init for at_init, _ in self.stands.values()), "a newcomer is kept in init()")
        if machine.phase is Phase.BROKEN:
            require(bool(training) or kind is WaitKind.CAUSE, "all survivors wait, and no world replaces it")
        if machine.phase is Phase.RUNNING and self.world is not None:
            require(bool(training), "all members are done, and the job is not finished")
            newcomer = any(not at_init and w not in self.world.workers for w, (at_init, _) in self.stands.items())
            limited = self.settings.reset_limit is not None and self.world.round > self.settings.reset_limit
            between = any(self.after_loop.get(worker) for worker in training)
            if newcomer and not limited and not between and self.showed_state:
                require(bool(self._everdone()), "a newcomer is ignored")

    def _everdone(self) -> set[int]:
        return {w for w in self.done if w not in self.gone and self.last_round.get(w, 0) > 0}

    def _members(self) -> list[int]:
        return [] if self.world is None else [m.worker for m in self.world.members if m.worker not in self.gone]

    # --- one check a command ----------------------------------------------------------------------

    def _on_LaunchSlot(self, command: c.LaunchSlot, event: e.Event, now: float) -> None:
        slot = command.slot
        require(0 <= slot < self.settings.max_num_proc, f"slot {slot} is out of range")
        require(slot not in self.cluster.running, f"slot {slot} was launched twice")
        self.counted.discard(slot)
        self._not_too_early(slot, now)

    def _on_WithdrawSlot(self, command: c.WithdrawSlot, event: e.Event, now: float) -> None:
        allowed = isinstance(event, (e.Tick, e.AgentLost))
        require(allowed, "slots are withdrawn after deadlines and with lost agents only")
        if isinstance(event, e.AgentLost):
            held = [agent for agent, place in self.joined.items() if place.slot == command.slot]
            require(not held, f"slot {command.slot} is withdrawn from its living agent {held}")

    def _on_StartWorker(self, command: c.StartWorker, event: e.Event, now: float) -> None:
        require(command.agent in self.joined, f"agent {command.agent} is not there")
        require(command.worker not in self.on_agent, f"worker id {command.worker} was used before")
        busy = [w for w, a in self.on_agent.items() if a == command.agent and w not in self.gone]
        require(not busy, f"agent {command.agent} already has worker {busy}")
        place = self.joined[command.agent]
        require(place.executor not in self.decommissioned, "a worker starts on a decommissioned executor")
        require(now >= self.excluded.get(place.host, now), f"a worker starts on {place.host}, where all of them crash")
        if self.hosts is not None:
            members = self._members()  # those that have to leave stay until their world can spare them
            started = [(w, self.places[a]) for w, a in self.on_agent.items() if self.places[a].host == place.host]
            staying = [w for w, its in started if its.executor not in self.decommissioned]
            used = sum(1 for w in staying if w not in self.gone and w not in members)
            require(used < self.hosts.get(place.host, 0), f"{place.host} has {used} workers already")
        self._not_too_early(place.slot, now)
        self.started_at[command.worker] = now
        self.counted.discard(place.slot)
        self.on_agent[command.worker] = command.agent

    def _not_too_early(self, slot: int, now: float) -> None:
        if self.settings.cooldown_range_s is not None and slot in self.slot_failed_at:
            require(now >= self.slot_failed_at[slot] - 1e-9, f"slot {slot} is used before its cooldown ends")

    def _on_StopWorker(self, command: c.StopWorker, event: e.Event, now: float) -> None:
        require(self.on_agent.get(command.worker) == command.agent, "the worker is not that agent's")
        if command.cause.kind in (LossKind.SILENT, LossKind.UNRESPONSIVE):
            worker = self.cluster.workers[command.worker]
            reachable = self.cluster.is_heard(self.cluster.agents[worker.agent])
            silent = worker.stopped or not worker.alive or not reachable or worker.resumed_at > self.cluster.now - 10
            require(silent and not worker.busy, f"worker {command.worker} was not silent: {command.cause}")
        if command.cause.kind is LossKind.NOT_BACK:
            at_its_end = self.after_loop.get(command.worker, False)
            require(not at_its_end, f"worker {command.worker} does what comes after the loop, and is not waited for")
        if command.cause.kind is LossKind.BLOCKED_OTHERS and not self.after_loop.get(command.worker, False):
            assert self.world is not None
            self.stalled.discard(self.world.round)  # the others wait for this one
        if command.worker not in self.gone:
            self.shaken = True
        self.gone.add(command.worker)
        self.started_at.pop(command.worker, None)
        self.done.pop(command.worker, None)
        self.stands.pop(command.worker, None)

    def _on_DismissAgent(self, command: c.DismissAgent, event: e.Event, now: float) -> None:
        if command.cause.kind is LossKind.SILENT:
            agent = self.cluster.agents[command.agent]
            require(not (agent.alive and self.cluster.is_heard(agent)), f"agent {command.agent} was not silent")
        if command.agent in self.joined:
            workers = [w for w, a in self.on_agent.items() if a == command.agent and w not in self.gone]
            if not isinstance(event, e.Tick | e.ExecutorLost | e.AgentJoined):
                spare = all(w not in self._members() or w in self.stands for w in workers)
                require(spare, f"agent {command.agent} was dismissed under a training member")
            self._agent_gone(command.agent)

    def _on_AdmitProvisionally(self, command: c.AdmitProvisionally, event: e.Event, now: float) -> None:
        at_init, _ = self.stands.get(command.worker, (False, None))
        behind = self.in_loop.get(command.worker, 1) < command.loop
        in_loop = any(not waits for waits, _ in self.stands.values())
        require(at_init or behind, "only a worker in init(), or in an earlier loop, can be let out of it")
        require(command.loop == max(self.furthest.loop, 1), "a worker is sent to another loop than the job's")
        require(self.showed_state or in_loop, "a worker is let out of init() before anybody stands in the loop")
        require(0 <= command.rank < command.size <= self.settings.max_num_proc, f"impossible position {command}")
        del self.stands[command.worker]
        self.admitted.add(command.worker)

    def _on_TryConnections(self, command: c.TryConnections, event: e.Event, now: float) -> None:
        assert self.world is not None
        self.tried_in = self.world.round

    def _on_RerunFunction(self, command: c.RerunFunction, event: e.Event, now: float) -> None:
        worker = command.worker
        require(self.done.pop(worker, False), f"worker {worker} is run again, and was not done")
        require(worker not in self.ended, f"worker {worker} is run again although its process has ended")
        require(command.run == self.run.get(worker, 1) + 1, "the runs are not consecutive")
        self.run[worker] = command.run
        self.after_loop[worker] = False
        assert self.world is not None
        self.again_in[worker] = self.world.round

    def _on_NotifyHostsUpdated(self, command: c.NotifyHostsUpdated, event: e.Event, now: float) -> None:
        assert self.world is not None
        require(command.sequence > self.sequence, "the hosts-updated sequence does not grow")
        self.sequence = command.sequence
        require(self.notified_round < self.world.round, "a world is notified twice")
        self.notified_round = self.world.round
        expected = {w for w in self._members() if w not in self.done}
        require(set(command.workers) == expected, f"notified {command.workers}, training {sorted(expected)}")
        newcomer = any(self.cluster.plan.restarts or not at_init for at_init, _ in self.stands.values())
        leaving = any(self._is_leaving(w) for w in self._members())
        require(newcomer or leaving, "a world is interrupted for nobody")

    def _is_leaving(self, worker: int) -> bool:
        place = self.places[self.on_agent[worker]]
        return place.executor in self.decommissioned or self.hosts is not None or place.host in self.excluded

    def _on_CutPeers(self, command: c.CutPeers, event: e.Event, now: float) -> None:
        assert self.world is not None
        require(command.round == self.world.round, "a round that is over is cut")
        late = isinstance(event, e.Tick) and self.notified_round == self.world.round
        require(self.shaken or late, "a healthy world is cut")
        self.cut_round = command.round
        expected = {w for w in self._members() if w not in self.stands and w not in self.done}
        require(expected <= set(command.workers), f"cut {command.workers}, training {sorted(expected)}")

    def _on_PublishWorld(self, command: c.PublishWorld, event: e.Event, now: float) -> None:
        world, settings = command.world, self.settings
        previous = self.world
        require(world.round == (1 if previous is None else previous.round + 1), "rounds are not consecutive")
        if settings.reset_limit is not None:
            require(world.round - 1 <= settings.reset_limit, "more worlds than reset_limit allows")
        workers = [member.worker for member in world.members]
        require(len(set(workers)) == len(workers), "a worker has two ranks")
        finished = sum(1 for w in self._everdone() if w not in workers)
        require(len(workers) + finished >= settings.min_num_proc, f"{len(workers)} workers are below the minimum")
        require(len(workers) <= settings.max_num_proc, "more workers than the maximum")
        for worker in workers:
            require(self._is_live(worker), f"worker {worker} is in the world and gone")
            require(worker in self.stands, f"worker {worker} is in a world it does not wait for")
        for worker in self._members():
            accounted = worker in self.stands or worker in self.done or worker in self.admitted  # to a later loop
            require(accounted, f"worker {worker} still trains in round {world.round - 1}")
        if self.cluster.plan.restarts:
            require(not any(self.last_round.get(worker) for worker in workers), "a process is in two worlds")
        check_ranks(self, world, previous)
        check_state(self, world)
        for worker in workers:
            at_init, _ = self.stands.pop(worker)
            require(not at_init or world.version is None, "training waits for a worker that has no model yet")
            self.last_round[worker] = world.round
            self.admitted.discard(worker)
        self.world, self.began_at = world, now
        self.waiting = None

    def _on_FinishJob(self, command: c.FinishJob, event: e.Event, now: float) -> None:
        members = self._members()
        if self.world is not None:
            require(all(w in self.done for w in members), "the job finishes under a training member")
            require(set(command.workers) == self._everdone(), "results of the wrong workers")
            if self.cluster.plan.plain:
                require(set(command.workers) == self.world.workers, "a plain function did not run in one world")
            for worker in command.workers:
                newest = self.run.get(worker, 1), self.last_round.get(worker, 0)
                held = self.cluster.results.get(worker)
                require(held == newest, f"the result of worker {worker} is that of (run, round) {held}, not {newest}")
            require(set(command.workers) == self.world.workers, "a member of the last world has no result")
            order = [w for w in command.workers if w in self.world.workers]
            require(order == [m for m in members if m in order], "results are not in rank order")
            if not self.cluster.plan.plain:
                for worker in command.workers:
                    reached = self.cluster.workers[worker].version or BEGINNING
                    plan = self.cluster.plan
                    require(
                        (reached.loop, reached.steps) >= (plan.loops, plan.steps),
                        "the job finishes before its last step",
                    )
        require(bool(command.workers), "a job without results is finished")

    def _on_FailJob(self, command: c.FailJob, event: e.Event, now: float) -> None:
        check_failure(self, command.error)

    def _on_Announce(self, command: c.Announce, event: e.Event, now: float) -> None:
        record = command.record
        if isinstance(record, t.WorkerLeft) and record.worker in self.exited_well:
            self._worker_gone(record.worker)
        if isinstance(record, t.WorldBroken) and self.cluster.plan.restarts:
            explained = getattr(event, "exit_code", None) != 1
            require(explained, "an exit breaks the world, although what was raised may be on its way")
            asked = self.notified_round == record.round and isinstance(
                event, e.WorkerDone | e.WorkerRaised | e.WorkerLost
            )
            require(not asked, "a member that ends as it was asked to ends those that still save")
        if isinstance(record, t.HostExcluded):
            self.excluded[record.host] = record.until
            require(self.cluster.crashes != [], f"{record.host} is left alone for nothing")
        if isinstance(record, t.WaitChanged):
            require(record.deadline is not None and record.deadline > now, f"{record.reason!r} has no deadline ahead")
            require(self.waiting != record, "the same reason is announced twice")
            self.waiting = record
        elif isinstance(record, t.CooldownStarted) and record.kind == "slot":
            assert self.settings.cooldown_range_s is not None
            slot = int(record.name)
            require(slot not in self.counted, f"slot {slot} failed twice since something was started there")
            self.counted.add(slot)
            low, high = self.settings.cooldown_range_s
            expected = min(high, low * 2 ** (record.failures - 1))
            require(abs(record.until - now - expected) < 1e-6, f"cooldown of {record.until - now} s")
            self.slot_failed_at[slot] = record.until

    def at_end(self, cluster: Cluster) -> None:
        require(cluster.outcome is not None, f"the job neither finished nor failed by {cluster.now:.0f} s")
