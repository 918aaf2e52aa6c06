"""WorkerRegistry: the record of the job's slots, agents and workers, their states, and the worlds built so far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from spark_elastic.membership.states import WORKERS, WorkerState
from spark_elastic.membership.topology import AgentId, Place, SlotId, StateVersion, WorkerId


@dataclass(slots=True)
class Slot:
    id: SlotId
    launched: bool = True  # its job is pending or running; otherwise it waits for its cooldown
    agent: AgentId | None = None  # the agent of the current launch, while it is there
    newest: AgentId = 0  # the newest agent it ever had; older ones come too late
    joined: bool = False  # an agent of this launch has come
    refusals: int = 0  # launches in a row that the driver could not even submit
    excused: bool = False  # whatever ends this launch next was counted already, or is nobody's fault


@dataclass(slots=True)
class Agent:
    id: AgentId
    place: Place
    worker: WorkerId | None = None  # never one that is GONE
    leaving: str = ""  # why its place is not to be used any more; empty: it may be used
    doomed: bool = False  # its executor is lost, and it is about to be given up
    retiring: bool = False  # Spark takes its executor away: dismissed as soon as it has no member


@dataclass(slots=True)
class Worker:
    id: WorkerId
    agent: AgentId
    place: Place
    state: WorkerState = WorkerState.BOOTING
    round: int = 0  # the last world it was published in; 0: none
    rank: int | None = None  # its rank there
    version: StateVersion | None = None  # of its state, as last reported; None: holds no state, or not known yet
    heard_at: float = float("-inf")  # when it last said something itself
    blocked_s: float | None = None  # how long it had waited in a collective when last heard; None: it did not
    introduced: bool = False  # WorkerJoined was announced
    loop: int = 0  # the elastic loop that it last stood in and waited for a world; 0: none yet
    after_loop: bool = False  # does what its function does after a loop, as last reported
    run: int = 1  # the call of the function that counts; an older one's end changes nothing
    run_again_in: int = 0  # the round that broke when it was last told to run again; 0: never
    exited: bool = False  # DONE: its process is gone, so it cannot run again


@dataclass(slots=True)
class WorkerRegistry:
    """The slots, agents and workers of a job, and the number of its worlds.

    The membership machine decides by it; `ElasticJob.status()` and the reset limit read it. Agents and workers that are
    gone are removed, and only counted, so that a long job does not grow.
    """

    reset_limit: int | None = None
    """Worlds that may be built after the first; None: no limit."""
    round: int = 0
    """Number of the newest world; 0 before the first."""
    failed: int = 0
    """Workers that were lost or removed so far. Those that left gracefully are not counted."""
    slots: dict[SlotId, Slot] = field(default_factory=dict)
    agents: dict[AgentId, Agent] = field(default_factory=dict)
    workers: dict[WorkerId, Worker] = field(default_factory=dict)
    states: dict[WorkerState, dict[WorkerId, Worker]] = field(
        default_factory=lambda: {state: {} for state in WorkerState}
    )

    @property
    def resets(self) -> int:
        """Worlds that were built after the first."""
        return max(0, self.round - 1)

    @property
    def ready(self) -> int:
        """Workers that wait for a world or are members of one."""
        return sum(self.count(state) for state in (WorkerState.AT_INIT, WorkerState.READY, WorkerState.TRAINING))

    @property
    def succeeded(self) -> int:
        """Workers whose function has returned."""
        return self.count(WorkerState.DONE)

    def may_reset(self) -> bool:
        """Return True if one more world may be built."""
        return self.reset_limit is None or self.round <= self.reset_limit

    def add(self, worker: Worker) -> None:
        self.workers[worker.id] = worker
        self.states[worker.state][worker.id] = worker
        self.agents[worker.agent].worker = worker.id

    def enter(self, worker: Worker, state: WorkerState) -> None:
        """Move the worker to another state; GONE removes it and frees its agent."""
        WORKERS.check(worker.state, state)
        del self.states[worker.state][worker.id]
        worker.state = state
        if state is WorkerState.GONE:
            del self.workers[worker.id]
            self.agents[worker.agent].worker = None
        else:
            self.states[state][worker.id] = worker

    def count(self, state: WorkerState) -> int:
        return len(self.states[state])

    def worker_of(self, agent: Agent) -> Worker | None:
        return None if agent.worker is None else self.workers[agent.worker]

    def on_host(self, host: str) -> list[Agent]:
        return [agent for agent in self.agents.values() if agent.place.host == host]

    def on_executor(self, executor: str) -> list[Agent]:
        return [agent for agent in self.agents.values() if agent.place.executor == executor]

    def in_state(self, *states: WorkerState) -> Iterator[Worker]:
        for state in states:
            yield from self.states[state].values()
