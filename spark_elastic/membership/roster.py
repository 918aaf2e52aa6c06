"""Who is there: slots, agents and workers, and how they belong together."""

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
class Roster:
    """Only records of what is alive: whoever is gone is forgotten, so a long job does not grow.

    `states` lists the workers by their state, in the order in which they entered it.
    """

    slots: dict[SlotId, Slot] = field(default_factory=dict)
    agents: dict[AgentId, Agent] = field(default_factory=dict)
    workers: dict[WorkerId, Worker] = field(default_factory=dict)
    states: dict[WorkerState, dict[WorkerId, Worker]] = field(
        default_factory=lambda: {state: {} for state in WorkerState}
    )

    def add(self, worker: Worker) -> None:
        self.workers[worker.id] = worker
        self.states[worker.state][worker.id] = worker
        self.agents[worker.agent].worker = worker.id

    def enter(self, worker: Worker, state: WorkerState) -> None:
        """Move the worker to another state; GONE takes it off the roster and frees its agent."""
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
