"""WorkerRegistry: the record of the job's slots, agents and workers, their states, and the number of its worlds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from spark_elastic.membership.reasons import LossCause
from spark_elastic.membership.states import WORKERS, WorkerState
from spark_elastic.membership.topology import AgentId, Place, SlotId, StateVersion, WorkerId

BOOTING, AT_INIT, ADMITTED = WorkerState.BOOTING, WorkerState.AT_INIT, WorkerState.ADMITTED
READY, TRAINING, DONE, GONE = WorkerState.READY, WorkerState.TRAINING, WorkerState.DONE, WorkerState.GONE


@dataclass(slots=True)
class Slot:
    """A single-task Spark job that runs one worker, kept over all its launches."""

    id: SlotId
    launched: bool = True  # its job is pending or running; False: it waits for its cooldown
    agent: Agent | None = None  # the agent of the current launch, while it is connected
    newest: AgentId = 0  # the newest agent that the slot ever had; older ones come too late
    joined: bool = False  # an agent of the current launch has joined
    refusals: int = 0  # launches in a row that the driver could not even submit
    excused: bool = False  # the next end of the launch was counted as a failure already, or is none


@dataclass(slots=True)
class Agent:
    """An agent that is connected to the driver."""

    id: AgentId
    place: Place
    worker: Worker | None = None  # never a worker that is GONE
    leaving: LossCause | None = None  # why its slot is not to be used any more; None: it may be used
    doomed: bool = False  # its executor is lost, and the agent is about to be removed
    retiring: bool = False  # Spark takes its executor away: dismissed as soon as it has no member


@dataclass(slots=True, eq=False)
class Worker:
    """A training process, from its start until it is GONE. `WorkerRegistry.move` changes its `state`."""

    id: WorkerId
    agent: Agent = field(repr=False)
    state: WorkerState = WorkerState.BOOTING
    round: int = 0  # the last world that it was published in; 0: none
    rank: int | None = None  # its rank there
    version: StateVersion | None = None  # of its state, as last reported; None: it holds none, or reported none yet
    heard_at: float = float("-inf")  # when its own last message came
    blocked_s: float | None = None  # its wait in a collective at its last heartbeat; None: it did not wait
    loop: int = 0  # the elastic loop in which it last waited for a world; 0: none yet
    after_loop: bool = False  # it runs the code after an elastic loop, as last reported
    run: int = 1  # the call of the function that counts; the end of an older one changes nothing
    rerun_round: int = 0  # the round that broke when it last had to run again; 0: none
    plain: bool = False  # its function has returned and never entered an elastic loop
    raised: bool = False  # its function raised, and it is not known yet if a loss is the reason
    exited: bool = False  # DONE, and its process is gone, so it cannot run again

    @property
    def place(self) -> Place:
        return self.agent.place

    def is_current_at(self, furthest: StateVersion) -> bool:
        """Return True if it holds a state from which training can continue after `furthest`."""
        return self.version is not None and self.version.is_current_at(furthest)


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

    def may_reset(self) -> bool:
        """Return True if one more world may be built."""
        return self.reset_limit is None or self.round <= self.reset_limit

    def add(self, worker: Worker) -> None:
        """Add a worker that is being started."""
        self.workers[worker.id] = worker
        self.states[worker.state][worker.id] = worker
        worker.agent.worker = worker

    def move(self, worker: Worker, state: WorkerState) -> None:
        """Move the worker to another state. GONE removes it, and its agent has no worker then."""
        WORKERS.check(worker.state, state)
        del self.states[worker.state][worker.id]
        worker.state = state
        if state is WorkerState.GONE:
            del self.workers[worker.id]
            worker.agent.worker = None
        else:
            self.states[state][worker.id] = worker

    def count(self, *states: WorkerState) -> int:
        return sum(len(self.states[state]) for state in states)

    def in_state(self, *states: WorkerState) -> Iterator[Worker]:
        """Yield the workers that are in one of the states."""
        for state in states:
            yield from self.states[state].values()

    def after_loop(self) -> int:
        """Count the members of the world that run the code after their elastic loop."""
        return sum(worker.after_loop for worker in self.states[TRAINING].values())
