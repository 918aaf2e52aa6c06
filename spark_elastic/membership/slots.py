"""Which slots are launched and which agents get a worker: places, their cooldown, and what may be used of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from spark_elastic.membership.backoff import Cooldown, CoolingDown
from spark_elastic.membership.commands import Announce, Command, DismissAgent, LaunchSlot, StartWorker, WithdrawSlot
from spark_elastic.membership.deadlines import Timers
from spark_elastic.membership.registry import Agent, Slot, Worker, WorkerRegistry
from spark_elastic.membership.states import WorkerState
from spark_elastic.membership.timeline import HostExcluded, PlaceCooledDown
from spark_elastic.membership.topology import AgentId, HostSet, HostUpdate, Place, SlotId
from spark_elastic.settings import ElasticSettings

TimerKey = tuple[str, int]

_REASONS_TOLD = 3
LONGEST_PAUSES_S = (0.5, 60.0)
_EXCLUSION_IN_PAUSES = 10
"""A host on which one world after another crashed rests for so many of the longest pauses."""


class Places:
    """Keeps every slot launched and every usable agent busy. Writes its commands to `out`; knows nothing of worlds."""

    def __init__(
        self, settings: ElasticSettings, roster: WorkerRegistry, timers: Timers[TimerKey], out: list[Command]
    ) -> None:
        self._settings = settings
        self._roster = roster
        self._timers = timers
        self._out = out
        self._cooldown = Cooldown(settings.cooldown_range_s)
        self._allowed: HostSet | None = None  # None: no restriction
        self._decommissioned: set[str] = set()
        self._workers_started = 0
        self._reasons: dict[SlotId, str] = {}  # why the last launch of a slot ended without an agent
        self._excluded: dict[str, str] = {}  # host -> why nothing starts on it for now
        self._exclusions: list[str] = []  # all there ever were
        self.leaving: set[AgentId] = set()
        """The agents whose place is not to be used any more."""

    # --- slots ------------------------------------------------------------------------------------

    def launch_all(self) -> None:
        for slot in range(self._settings.max_num_proc):
            self._roster.slots[slot] = Slot(slot)
            self._out.append(LaunchSlot(slot))

    def slot_ended(self, slot: Slot, why: str, submitted: bool, now: float) -> None:
        """The slot's launch is over and its agent, if there was one, is off the registry."""
        if not slot.joined:
            self._reasons[slot.id] = why
        slot.refusals = 0 if submitted else slot.refusals + 1
        self._timers.cancel(("end", slot.id))
        if not slot.excused:
            slot.excused = True
            self._announce(self._cooldown.slot_failed(slot.id, now), now)
        slot.launched = False
        due = self._cooldown.slot_ready_at(slot.id)
        if due <= now:
            self.launch(slot)
        else:
            self._timers.set(("launch", slot.id), due)

    def why_missing(self) -> str:
        """Why launches ended before an agent joined, the most frequent reasons first; empty: none did."""
        if not self._reasons:
            return ""
        reasons = Counter(self._reasons.values()).most_common(_REASONS_TOLD)
        return "launches ended before their agent joined: " + "; ".join(reason for reason, _ in reasons)

    def refused(self) -> str:
        """Why no slot can be launched, if each was refused twice and nobody is there; empty: one may be."""
        if self._roster.agents or len(self._reasons) < len(self._roster.slots):
            return ""
        refused = all(self._roster.slots[slot].refusals > 1 for slot in self._reasons)
        return next(iter(self._reasons.values())) if refused else ""

    def launch(self, slot: Slot) -> None:
        slot.launched = True
        slot.joined = False
        slot.excused = False
        self._out.append(LaunchSlot(slot.id))

    def withdraw(self, slot: SlotId, why: str, now: float) -> None:
        """End a launch that is of no use any more; asked for again until its end is seen."""
        self._out.append(WithdrawSlot(slot, why))
        self._timers.set(("end", slot), now + self._settings.heartbeat_timeout_s)

    # --- agents -----------------------------------------------------------------------------------

    def join(self, agent_id: AgentId, place: Place, now: float) -> Agent | None:
        """Take the agent in. None: it was sent away."""
        slot = self._roster.slots.get(place.slot)
        if slot is None or not slot.launched:
            self._out.append(DismissAgent(agent_id, f"slot {place.slot} is not launched"))
            return None
        slot.newest = agent_id
        slot.joined = True
        self._reasons.pop(slot.id, None)
        agent = Agent(agent_id, place)
        self._roster.agents[agent_id] = agent
        slot.agent = agent_id
        if place.executor in self._decommissioned:
            # counts against the slot alone: without a pause, a scheduler that insists would make this a busy loop
            self._announce(self._cooldown.slot_failed(slot.id, now), now)
            self.dismiss(agent, f"executor {place.executor} is being decommissioned", now)
            return None
        self._timers.cancel(("end", slot.id))
        return agent

    def forget(self, agent: Agent, now: float) -> None:
        """The agent is lost; its worker is off the registry already."""
        self._timers.cancel(("fill", agent.id))
        del self._roster.agents[agent.id]
        self.leaving.discard(agent.id)
        slot = self._roster.slots[agent.place.slot]
        slot.agent = None
        # Spark ends the task of a dead agent by itself; where it does not notice, we do
        self._timers.set(("end", slot.id), now + self._settings.heartbeat_timeout_s)

    def dismiss(self, agent: Agent, why: str, now: float) -> None:
        """Send an agent without a worker home. Its slot is launched again when its task has ended."""
        self._out.append(DismissAgent(agent.id, why))
        self._roster.slots[agent.place.slot].excused = True
        self.forget(agent, now)

    def fill(self, agent: Agent, now: float) -> None:
        """Start a worker on the agent: now, or when its place has cooled down."""
        if agent.worker is not None or agent.leaving or agent.doomed:
            return
        due = self._cooldown.ready_at(agent.place)
        if due > now:
            self._timers.set(("fill", agent.id), due)
            return
        self._timers.cancel(("fill", agent.id))
        self._workers_started += 1
        self._roster.slots[agent.place.slot].excused = False
        worker = Worker(self._workers_started, agent.id, agent.place)
        self._roster.add(worker)
        self._timers.set(("boot", worker.id), now + self._settings.start_timeout_s)
        self._out.append(StartWorker(agent.id, worker.id))

    def failed(self, agent: Agent, now: float) -> None:
        """Count a failure of the agent's place, once for all that happens to one worker and its agent."""
        slot = self._roster.slots[agent.place.slot]
        if slot.excused or agent.retiring:
            return
        slot.excused = True
        self._announce(self._cooldown.failed(agent.place, now), now)

    def cooling_until(self, agent: Agent) -> float:
        """When the agent's place may be used; a time in the past if it may be now."""
        return self._cooldown.ready_at(agent.place)

    # --- what may be used -------------------------------------------------------------------------

    def observe(self, hosts: Mapping[str, int] | None) -> bool:
        """Note what a host discovery allows. Returns: whether that is a change."""
        if hosts is None:
            changed = self._allowed is not None
            self._allowed = None
            return changed
        before = self._allowed
        self._allowed, update = (before or HostSet()).updated(hosts)
        return before is None or update is not HostUpdate.NO_UPDATE

    def decommission(self, executor: str) -> list[Agent]:
        """The executor is to be left. Returns: its agents for which this is news."""
        self._decommissioned.add(executor)
        news = [agent for agent in self._roster.on_executor(executor) if not agent.retiring]
        for agent in news:
            agent.retiring = True
            agent.leaving = f"executor {executor} is being decommissioned"
            self.leaving.add(agent.id)
            self._roster.slots[agent.place.slot].excused = True
            self._timers.cancel(("fill", agent.id))
        return news

    def executor_gone(self, executor: str) -> list[Agent]:
        """The executor is lost: nothing starts on it any more. Returns: its agents, which are now to be given up."""
        agents = self._roster.on_executor(executor)
        for agent in agents:
            agent.doomed = True
        self._decommissioned.discard(executor)
        return agents

    def can_do_without(self, host: str) -> bool:
        """Whether enough agents are on other hosts."""
        usable = [agent for agent in self._roster.agents.values() if not (agent.leaving or agent.doomed)]
        others = sum(1 for agent in usable if agent.place.host != host)
        return host not in self._excluded and others >= self._settings.min_num_proc

    def exclude(self, host: str, why: str, now: float) -> None:
        """Use other hosts for a while."""
        range_s = self._settings.cooldown_range_s or LONGEST_PAUSES_S
        until = now + _EXCLUSION_IN_PAUSES * range_s[1]
        self._excluded[host] = f"host {host} is left alone: {why}"
        self._timers.set(("exclusion", len(self._exclusions)), until)
        self._exclusions.append(host)
        self._out.append(Announce(HostExcluded(now, host, why, until)))

    def readmit(self, number: int) -> None:
        self._excluded.pop(self._exclusions[number], None)

    def review(self, host: str | None = None) -> list[Agent]:
        """Compare agents (of one host) with what is allowed. Returns: those whose `leaving` changed."""
        if self._allowed is None:
            if not self._excluded and not self.leaving:
                return []
            agents = [agent for agent in self._roster.agents.values() if not (agent.retiring or agent.doomed)]
            return [agent for agent in agents if self._set_leaving(agent, self._excluded.get(agent.place.host, ""))]
        by_host: dict[str, list[Agent]] = {}
        for agent in self._roster.agents.values():
            if not agent.doomed and (host is None or agent.place.host == host):
                by_host.setdefault(agent.place.host, []).append(agent)
        return [agent for name, agents in by_host.items() for agent in self._review_host(name, agents)]

    def _review_host(self, host: str, agents: list[Agent]) -> list[Agent]:
        assert self._allowed is not None
        limit = self._allowed.slots_of(host)
        why = (
            f"host {host} may use {limit} slots"
            if limit
            else f"host {host} is not among the hosts to use ({self._allowed})"
        )
        usable = sorted((agent for agent in agents if not agent.retiring), key=self._claim)
        changed: list[Agent] = []
        for position, agent in enumerate(usable):
            leaving = self._excluded.get(host) or ("" if position < limit else why)
            if self._set_leaving(agent, leaving):
                changed.append(agent)
        return changed

    def _set_leaving(self, agent: Agent, why: str) -> bool:
        """Returns: whether that is a change."""
        changed = bool(agent.leaving) != bool(why)
        if changed:
            agent.leaving = why
            (self.leaving.add if why else self.leaving.discard)(agent.id)
        return changed

    def _claim(self, agent: Agent) -> tuple[bool, float, bool, AgentId]:
        """Members keep their slots first, by rank; then agents that have a worker; then the oldest."""
        worker = self._roster.worker_of(agent)
        member = worker is not None and worker.state in (WorkerState.TRAINING, WorkerState.READY, WorkerState.DONE)
        rank = worker.rank if worker is not None and worker.rank is not None else float("inf")
        return not member, rank, worker is None, agent.id

    def _announce(self, cooling: list[CoolingDown], now: float) -> None:
        self._out.extend(
            Announce(PlaceCooledDown(now, each.kind, each.name, each.failures, each.until)) for each in cooling
        )
