"""WorkerRegistry: the record of the job's slots, agents and workers, their states, and the number of its worlds."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from spark_elastic.membership.reasons import LossCause
from spark_elastic.membership.states import WORKERS, WorkerState
from spark_elastic.membership.topology import AgentId, Place, SlotId, StateVersion, WorkerId

BOOTING, AT_INIT, ADMITTED = WorkerState.BOOTING, WorkerState.AT_INIT, WorkerState.ADMITTED
READY, TRAINING, DONE, GONE = WorkerState.READY, WorkerState.TRAINING, WorkerState.DONE, WorkerState.GONE


@dataclass(slots=True)
class Slot:
    """A place for one worker, kept over all its launches."""

    id: SlotId
    launched: bool = True  # its job is pending or running; False: it waits for its cooldown
    agent: Agent | None = None  # the agent of the current launch, while it is connected
    newest: AgentId = 0  # the newest agent that the slot ever had; older ones come too late
    joined: bool = False  # an agent of the current launch has joined
    refusals: int = 0  # launches in a row that the driver could not even submit
    excused: bool = False
    """The next end of the launch is no failure of the slot: it was counted already, or nothing failed."""


@dataclass(slots=True)
class Agent:
    """An agent that is connected to the driver."""

    id: AgentId
    place: Place
    worker: Worker | None = None  # never a worker that is GONE
    leaving: LossCause | None = None
    """Why its slot is not to be used any more; None: it may be used. Set by `WorkerRegistry.set_leaving`."""
    doomed: bool = False  # its executor is lost, and the agent is about to be removed
    retiring: bool = False  # Spark takes its executor away: dismissed as soon as it has no member


@dataclass(slots=True, eq=False)
class Worker:
    """A training process, from its start until it is GONE.

    While it is in the registry, `state` is changed by `WorkerRegistry.enter`; `loop`, `after_loop` and whether there is
    a `version` are changed within `WorkerRegistry.changing`, because workers are counted by them.
    """

    id: WorkerId
    agent: Agent = field(repr=False)
    state: WorkerState = WorkerState.BOOTING
    round: int = 0  # the last world that it was published in; 0: none
    rank: int | None = None  # its rank there
    version: StateVersion | None = None
    """The version of its state, as last reported; None: it holds no state, or none was reported yet."""
    heard_at: float = float("-inf")  # when its own last message came
    blocked_s: float | None = None
    """How long it had waited in a collective at its last heartbeat; None: it did not wait."""
    introduced: bool = False  # WorkerJoined was announced
    loop: int = 0  # the elastic loop in which it last waited for a world; 0: none yet
    after_loop: bool = False  # it runs the code after an elastic loop, as last reported
    run: int = 1  # the call of the function that counts; the end of an older one changes nothing
    run_again_in: int = 0  # the round that broke when it was last told to run again; 0: never
    plain: bool = False  # its function has returned and never entered an elastic loop
    exited: bool = False  # DONE, and its process is gone, so it cannot run again

    @property
    def place(self) -> Place:
        return self.agent.place


@dataclass(slots=True)
class Tally:
    """Counts of workers, so that no event has to look at all of them."""

    standing: int = 0  # workers that are TRAINING or READY: the candidates for the next world
    holding: int = 0  # candidates that hold a state
    leaving: int = 0  # candidates whose slots are not to be used any more
    leaving_holding: int = 0  # of these, the ones that hold a state
    after_loop: int = 0  # TRAINING workers that run the code after their loop
    waiting_in_loop: int = 0  # workers that are AT_INIT or READY, and have been in an elastic loop

    def can_leave(self, minimum: int) -> bool:
        """Return True if a running world can spare any of its leaving members now."""
        staying = self.standing - self.leaving
        if staying == self.standing or staying == 0 or self.standing <= minimum:
            return False
        return self.holding > self.leaving_holding or self.holding == 0


@dataclass(slots=True)
class WorkerRegistry:
    """The slots, agents and workers of a job, and the number of its worlds.

    The membership machine decides from it, and `ElasticJob.status()` reads it. Agents and workers that are gone are
    removed and only counted, so that the memory of a long job does not grow.
    """

    reset_limit: int | None = None  # worlds that may be built after the first; None: no limit
    round: int = 0  # number of the newest world; 0 before the first
    failed: int = 0  # workers that were lost or removed so far. Those that left gracefully are not counted
    slots: dict[SlotId, Slot] = field(default_factory=dict)
    agents: dict[AgentId, Agent] = field(default_factory=dict)
    workers: dict[WorkerId, Worker] = field(default_factory=dict)
    states: dict[WorkerState, dict[WorkerId, Worker]] = field(
        default_factory=lambda: {state: {} for state in WorkerState}
    )
    """The workers by state, in the order in which they entered it."""
    tally: Tally = field(default_factory=Tally)
    leaving: dict[WorkerId, Worker] = field(default_factory=dict)
    """The workers that are TRAINING or READY and whose slots are not to be used any more."""
    _by_host: dict[str, dict[AgentId, Agent]] = field(default_factory=dict)
    _by_executor: dict[str, dict[AgentId, Agent]] = field(default_factory=dict)
    _agents_leaving: dict[str, int] = field(default_factory=dict)  # by host

    @property
    def resets(self) -> int:
        """Worlds that were built after the first."""
        return max(0, self.round - 1)

    @property
    def ready(self) -> int:
        """Workers that wait for a world or are members of one."""
        return self.count(AT_INIT) + self.count(READY) + self.count(TRAINING)

    @property
    def succeeded(self) -> int:
        """Workers whose function has returned."""
        return self.count(DONE)

    def may_reset(self) -> bool:
        """Return True if one more world may be built."""
        return self.reset_limit is None or self.round <= self.reset_limit

    # --- agents -----------------------------------------------------------------------------------

    def add_agent(self, agent: Agent) -> None:
        """Add an agent that has joined, as the agent of its slot."""
        place = agent.place
        self.agents[agent.id] = agent
        self.slots[place.slot].agent = agent
        self._by_host.setdefault(place.host, {})[agent.id] = agent
        self._by_executor.setdefault(place.executor, {})[agent.id] = agent

    def remove_agent(self, agent: Agent) -> None:
        """Remove an agent that has no worker."""
        self.set_leaving(agent, None)
        place = agent.place
        del self.agents[agent.id]
        self.slots[place.slot].agent = None
        for index, name in ((self._by_host, place.host), (self._by_executor, place.executor)):
            del index[name][agent.id]
            if not index[name]:
                del index[name]

    def set_leaving(self, agent: Agent, cause: LossCause | None) -> None:
        """Take an agent's slot out of use, or (None) into use again."""
        change = (cause is not None) - (agent.leaving is not None)
        if change:
            host = agent.place.host
            self._agents_leaving[host] = self._agents_leaving.get(host, 0) + change
            if not self._agents_leaving[host]:
                del self._agents_leaving[host]
        if agent.worker is None:
            agent.leaving = cause
        else:
            with self.changing(agent.worker):
                agent.leaving = cause

    def hosts(self) -> list[str]:
        """Return the hosts that have agents, in the order of their first agents."""
        return list(self._by_host)

    def on_host(self, host: str) -> Collection[Agent]:
        """Return the agents of the host, oldest first."""
        return self._by_host.get(host, {}).values()

    def on_executor(self, executor: str) -> Collection[Agent]:
        """Return the agents of the executor, oldest first."""
        return self._by_executor.get(executor, {}).values()

    def leaving_on(self, host: str) -> int:
        """Count the agents of the host whose slots are not to be used any more."""
        return self._agents_leaving.get(host, 0)

    # --- workers ----------------------------------------------------------------------------------

    def add(self, worker: Worker) -> None:
        """Add a worker that is being started."""
        self.workers[worker.id] = worker
        self.states[worker.state][worker.id] = worker
        worker.agent.worker = worker

    def enter(self, worker: Worker, state: WorkerState) -> None:
        """Move the worker to another state. GONE removes it, and its agent has no worker then."""
        WORKERS.check(worker.state, state)
        self._count(worker, -1)
        del self.states[worker.state][worker.id]
        worker.state = state
        if state is WorkerState.GONE:
            del self.workers[worker.id]
            worker.agent.worker = None
        else:
            self.states[state][worker.id] = worker
            self._count(worker, 1)

    @contextmanager
    def changing(self, worker: Worker) -> Iterator[None]:
        """Change what the worker is counted by: `loop`, `after_loop`, or whether there is a `version`."""
        self._count(worker, -1)
        try:
            yield
        finally:
            self._count(worker, 1)

    def _count(self, worker: Worker, change: int) -> None:
        """Add the worker to the counts (change 1), or take it out of them (-1)."""
        state, tally = worker.state, self.tally
        if state is TRAINING or state is READY:
            tally.standing += change
            holds = worker.version is not None
            tally.holding += change * holds
            if worker.agent.leaving is not None:
                tally.leaving += change
                tally.leaving_holding += change * holds
                if change > 0:
                    self.leaving[worker.id] = worker
                else:
                    del self.leaving[worker.id]
            if worker.after_loop and state is TRAINING:
                tally.after_loop += change
        if worker.loop and (state is READY or state is AT_INIT):
            tally.waiting_in_loop += change

    def count(self, state: WorkerState) -> int:
        return len(self.states[state])

    def in_state(self, *states: WorkerState) -> Iterator[Worker]:
        """Yield the workers that are in one of the states."""
        for state in states:
            yield from self.states[state].values()
