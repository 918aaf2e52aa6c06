"""The slot scheduler: which slots are launched, which agents may be used, and which get a worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spark_elastic.membership.commands import Announce, Command, DismissAgent, LaunchSlot, StartWorker, WithdrawSlot
from spark_elastic.membership.deadlines import Timer
from spark_elastic.membership.failures import DEFAULT_PAUSES_S, Cooldown, CrashLoopDetector
from spark_elastic.membership.reasons import LossCause, LossKind, Wait, hosts_in_words
from spark_elastic.membership.registry import DONE, READY, TRAINING, Agent, Slot, Worker, WorkerRegistry
from spark_elastic.membership.timeline import HostExcluded, Record, WaitChanged
from spark_elastic.membership.topology import AgentId, Place, SlotId, WorkerId
from spark_elastic.settings import ElasticSettings

_MOST_CAUSES = 3  # the number of causes of failed launches that messages name
_EXCLUSION_IN_PAUSES = 10  # a host on which worlds crash is excluded for this many of the longest pauses


@dataclass(eq=False)
class MachineContext:
    """The values that `Membership`, `WorldLifecycle` and `SlotScheduler` share while an event is handled."""

    settings: ElasticSettings
    timers: list[Timer[Any]]  # of all three classes; only `Membership` handles those that are due
    silence: Timer[WorkerId]  # of each worker, from its first message until it is DONE or GONE
    boot_timer: Timer[WorkerId]  # of a worker that was started, or admitted, until it is ready
    exit_timer: Timer[WorkerId]  # of a worker whose process exited with 0, until its result has come
    waiting: WaitChanged | None = None  # what the job waits for, as announced; None: nothing
    world_began_at: float = 0.0  # when the newest world was published

    def __post_init__(self) -> None:
        #: The scheduler adds and removes agents and adds workers, the lifecycle moves workers from state to state, and
        #: `Membership` stores what workers report of themselves.
        self.registry = WorkerRegistry(self.settings.reset_limit)
        #: `Membership` records deaths and exits in it, the lifecycle the versions of states; both read it.
        self.crashes = CrashLoopDetector(self.settings.crash_limit)
        #: The answer to the present event, in order. All three classes append; only `Membership` empties it.
        self.commands: list[Command] = []

    def announce(self, *records: Record) -> None:
        """Add records of the timeline to the commands."""
        self.commands.extend(map(Announce, records))

    def announce_wait(self, wait: Wait, deadline: float | None, now: float) -> None:
        """Announce what is waited for, if that changed. Of large counts, only every change by a quarter is announced:
        each of many workers that wait for one another changes the count.
        """
        last = self.waiting
        if last is None or last.deadline != deadline or not wait.is_much_like(last.wait):
            self.waiting = WaitChanged(now, wait, deadline)
            self.announce(self.waiting)


class SlotScheduler:
    """Decides where processes run: keeps every slot launched and a worker on every usable agent.

    It knows nothing of worlds and calls neither `WorldLifecycle` nor `Membership`: where these have to react to a
    change, its methods return the agents concerned.
    """

    def __init__(self, context: MachineContext) -> None:
        self._context = context
        self._settings = context.settings
        self._registry = context.registry
        self._commands = context.commands
        registry, timers = context.registry, context.timers
        self._launch_timer = Timer[SlotId](timers, lambda slot, now: self.launch(registry.slots[slot]))
        self._fill_timer = Timer[AgentId](timers, lambda agent, now: self.fill(registry.agents[agent], now))
        # Spark usually ends the task of a dead agent; if it has not by then, the launch is withdrawn
        remains = LossCause(LossKind.TASK_REMAINS)
        self._end_timer = Timer[SlotId](
            timers, lambda slot, now: self.withdraw(slot, remains, now), context.settings.heartbeat_timeout_s
        )
        self._cooldown = Cooldown(context.settings.cooldown_range_s)
        self._allowed: dict[str, int] | None = None  # slots by host; None: no restriction
        self._decommissioned: set[str] = set()
        self._workers_started = 0
        self._failed_launches: dict[SlotId, LossCause] = {}  # slots whose last launch ended before an agent joined
        self._excluded: dict[str, LossCause] = {}  # by host

    def launch_all(self) -> None:
        """Launch every slot for the first time."""
        for slot in range(self._settings.max_num_proc):
            self._registry.slots[slot] = Slot(slot)
            self._commands.append(LaunchSlot(slot))

    def slot_ended(self, slot: Slot, cause: LossCause, submitted: bool, now: float) -> None:
        """Launch a slot again, when it has cooled down. Its agent, if there was one, was removed before."""
        slot.refusals = 0 if submitted else slot.refusals + 1
        if not slot.joined:
            self._failed_launches[slot.id] = cause
        self._end_timer.cancel(slot.id)
        if not slot.excused:
            slot.excused = True
            self._context.announce(*self._cooldown.count("slot", str(slot.id), now))
        slot.launched = False
        due = self._cooldown.until("slot", str(slot.id))
        if due <= now:
            self.launch(slot)
        else:
            self._launch_timer.set(slot.id, due)

    def causes_of_missing(self) -> tuple[LossCause, ...]:
        """Return why launches ended before an agent joined, the most frequent causes first."""
        causes = Counter(self._failed_launches.values()).most_common(_MOST_CAUSES)
        return tuple(cause for cause, _ in causes)

    def launch(self, slot: Slot) -> None:
        slot.launched, slot.joined, slot.excused = True, False, False
        self._commands.append(LaunchSlot(slot.id))

    def withdraw(self, slot: SlotId, cause: LossCause, now: float) -> None:
        """End a launch that is of no use any more. The command is repeated until the launch has ended."""
        self._commands.append(WithdrawSlot(slot, cause))
        self._end_timer.start(slot, now)

    def join(self, agent_id: AgentId, place: Place, now: float) -> Agent | None:
        """Add an agent. Returns None if it was dismissed instead."""
        slot = self._registry.slots.get(place.slot)
        if slot is None or not slot.launched:
            self._commands.append(DismissAgent(agent_id, LossCause(LossKind.NOT_LAUNCHED, name=str(place.slot))))
            return None
        slot.newest = agent_id
        slot.joined, slot.refusals = True, 0
        self._failed_launches.pop(slot.id, None)
        agent = slot.agent = self._registry.agents[agent_id] = Agent(agent_id, place)
        if place.executor in self._decommissioned:
            # counts against the slot alone; without a pause, Spark could start tasks on this executor without end
            self._context.announce(*self._cooldown.count("slot", str(slot.id), now))
            self.dismiss(agent, LossCause(LossKind.DECOMMISSIONED, name=place.executor), now)
            return None
        self._end_timer.cancel(slot.id)
        return agent

    def remove(self, agent: Agent, now: float) -> None:
        """Remove a lost agent, whose worker was removed before."""
        self._fill_timer.cancel(agent.id)
        del self._registry.agents[agent.id]
        self._registry.slots[agent.place.slot].agent = None
        self._end_timer.start(agent.place.slot, now)

    def dismiss(self, agent: Agent, cause: LossCause, now: float) -> None:
        """Dismiss an agent that has no worker. Its slot is launched again when its task has ended."""
        self._commands.append(DismissAgent(agent.id, cause))
        self._registry.slots[agent.place.slot].excused = True
        self.remove(agent, now)

    def refill(self, agent: Agent, now: float) -> None:
        """Start the next worker on an agent that has lost its worker, or dismiss the agent if it retires."""
        if agent.retiring:
            assert agent.leaving is not None
            self.dismiss(agent, agent.leaving, now)
        else:
            self.fill(agent, now)

    def fill(self, agent: Agent, now: float) -> None:
        """Start a worker on the agent: now, or when its slot, executor and host have cooled down."""
        if agent.worker is not None or agent.leaving or agent.doomed:
            return
        due = self._cooldown.ready_at(agent.place)
        if due > now:
            self._fill_timer.set(agent.id, due)
            return
        self._fill_timer.cancel(agent.id)
        self._workers_started += 1
        self._registry.slots[agent.place.slot].excused = False
        worker = Worker(self._workers_started, agent)
        self._registry.add(worker)
        self._context.boot_timer.start(worker.id, now)
        self._commands.append(StartWorker(agent.id, worker.id))

    def count_failure(self, agent: Agent, now: float) -> None:
        """Count a failure of the agent's slot, executor and host. The loss of an agent and its worker counts as one."""
        slot = self._registry.slots[agent.place.slot]
        if slot.excused or agent.retiring:
            return
        slot.excused = True
        self._context.announce(*self._cooldown.failed(agent.place, now))

    def observe_hosts(self, hosts: Mapping[str, int] | None) -> bool:
        """Store what a host discovery allows. Returns True if that is a change."""
        before = self._allowed
        self._allowed = None if hosts is None else {host: slots for host, slots in hosts.items() if slots}
        return self._allowed != before

    def decommission(self, executor: str) -> list[Agent]:
        """Retire an executor. Returns its agents that were not retiring yet."""
        self._decommissioned.add(executor)
        retired = [agent for agent in self._on_executor(executor) if not agent.retiring]
        for agent in retired:
            agent.retiring = True
            agent.leaving = LossCause(LossKind.DECOMMISSIONED, name=executor)
            self._registry.slots[agent.place.slot].excused = True
            self._fill_timer.cancel(agent.id)
        return retired

    def executor_lost(self, executor: str) -> list[Agent]:
        """Mark the agents on a lost executor, so that no worker starts there, and return them for removal."""
        agents = self._on_executor(executor)
        for agent in agents:
            agent.doomed = True
        self._decommissioned.discard(executor)
        return agents

    def _on_executor(self, executor: str) -> list[Agent]:
        return [agent for agent in self._registry.agents.values() if agent.place.executor == executor]

    def can_do_without(self, host: str) -> bool:
        """Return True if the host is in use and enough agents are on other hosts."""
        usable = [agent for agent in self._registry.agents.values() if not (agent.leaving or agent.doomed)]
        others = sum(1 for agent in usable if agent.place.host != host)
        return host not in self._excluded and others >= self._settings.min_num_proc

    def exclude(self, host: str, worlds: int, now: float) -> float:
        """Use only other hosts because consecutive worlds crashed on this one. Returns until when."""
        longest_s = (self._settings.cooldown_range_s or DEFAULT_PAUSES_S)[1]
        until = now + _EXCLUSION_IN_PAUSES * longest_s
        self._excluded[host] = LossCause(LossKind.HOST_EXCLUDED, name=host, count=worlds)
        self._context.announce(HostExcluded(now, host, worlds, until))
        return until

    def end_exclusion(self, host: str) -> None:
        self._excluded.pop(host, None)

    def review(self, host: str | None = None) -> list[Agent]:
        """Compare the agents (of one host) with what is allowed. Returns those whose `leaving` changed."""
        by_host: dict[str, list[Agent]] = {}
        for agent in self._registry.agents.values():
            if host in (None, agent.place.host) and not (agent.retiring or agent.doomed):
                by_host.setdefault(agent.place.host, []).append(agent)
        changed: list[Agent] = []
        for name, agents in by_host.items():
            excluded = self._excluded.get(name)
            limit = len(agents) if self._allowed is None else self._allowed.get(name, 0)
            too_many = LossCause(LossKind.HOST_FULL, name=name, count=limit)
            if not limit:
                too_many = LossCause(LossKind.HOST_NOT_ALLOWED, name=name, detail=hosts_in_words(self._allowed or {}))
            for position, agent in enumerate(sorted(agents, key=_claim)):
                cause = excluded or (None if position < limit else too_many)
                if (agent.leaving is None) != (cause is None):
                    agent.leaving = cause
                    changed.append(agent)
        return changed


def _claim(agent: Agent) -> tuple[bool, float, bool, AgentId]:
    """Return the sort key for a host's slots: members by rank, then agents with a worker, then the oldest."""
    worker = agent.worker
    member = worker is not None and worker.state in (TRAINING, READY, DONE)
    rank = worker.rank if worker is not None and worker.rank is not None else float("inf")
    return not member, rank, worker is None, agent.id
