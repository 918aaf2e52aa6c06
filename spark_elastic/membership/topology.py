"""The values that describe a job: state versions, hosts and slots, members and worlds."""

from __future__ import annotations

from collections.abc import KeysView
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True, order=True)
class StateVersion:
    """A position in a worker's training. Of two versions, the larger one is the more advanced.

    All workers go through the same positions in the same order, so the most advanced one has applied all steps of the
    others. None in place of a version: the worker holds no state. A number of steps alone is not enough, because a
    state also changes without a step: with a schedule's step, a new epoch, or a step that a gradient scaler skipped.

    Raises:
        ValueError: if a number is out of range.
    """

    loop: int = 1  # number of the elastic loop within the user's function; 1 is the first
    steps: int = 0  # optimizer steps applied in this loop; commits and checks, if the state has no optimizer
    marks: int = 0  # commits, checks for updated hosts and turns since the last step, or since the loop began

    def __post_init__(self) -> None:
        if self.loop < 1 or self.steps < 0 or self.marks < 0:
            raise ValueError(f"a version needs loop >= 1, steps >= 0 and marks >= 0; got {self!r}")

    def __str__(self) -> str:
        loop = "" if self.loop == 1 else f"loop {self.loop} "
        marks = "" if self.marks == 0 else f"+{self.marks}"
        return f"{loop}step {self.steps}{marks}"

    @property
    def trained(self) -> bool:
        """True if any step was applied, in this loop or in one before."""
        return self.steps > 0 or self.loop > 1

    def stepped(self, steps: int = 1) -> StateVersion:
        """Return the version after a number of further steps."""
        return StateVersion(self.loop, self.steps + steps)

    def marked(self) -> StateVersion:
        """Return the version after one more mark."""
        return StateVersion(self.loop, self.steps, self.marks + 1)

    def is_steps_after(self, other: StateVersion) -> bool:
        """Return True if a step was applied since `other`, or a later loop was entered."""
        return (self.loop, self.steps) > (other.loop, other.steps)

    def is_current_at(self, furthest: StateVersion) -> bool:
        """Return True if it is in the loop of `furthest`, or in the loop before and `furthest` has no step yet."""
        return self.loop == furthest.loop or (self.loop + 1, 0) == (furthest.loop, furthest.steps)

    def steps_lost(self, furthest: StateVersion) -> int:
        """Count the steps that `furthest` has and this version does not, and that have to be computed again."""
        if furthest.loop == self.loop:
            return max(0, furthest.steps - self.steps)
        return furthest.steps if furthest.loop > self.loop else 0


BEGINNING = StateVersion()


@dataclass(frozen=True, slots=True)
class SlotReport:
    """The report of a task about the slot that it occupies."""

    host: str  # the machine, by the address its peers reach it at
    executor: str  # Spark's executor id; "driver" in local mode
    addresses: dict[str, tuple[str, ...]]  # by interface name, loopback included; see wire.interfaces
    cores: int  # cores that Spark gave to the task (spark.task.cpus)
    accelerators: tuple[str, ...]  # addresses of the GPUs that Spark gave to the task


@dataclass(frozen=True, slots=True)
class Reach:
    """The addresses of the driver that one task has tried."""

    host: str
    reached: tuple[str, ...]
    failed: dict[str, str]  # by address, why the task could not connect to it


AgentId = int  # one run of our code in one Spark task; never used twice in a job
WorkerId = int  # one training process; a restart gets a new one, so no stale message is taken for a current one
SlotId = int  # the number of one single-task Spark job, which runs one worker; kept across its restarts
LaunchId = int  # one start of a slot's agent; a relaunch gets a new one, so no late agent is taken for the awaited one


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent runs."""

    host: str  # the machine, by the address its peers reach it at
    executor: str  # Spark's executor id; "driver" in local mode, or the process id of a local agent
    slot: SlotId


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of a world, with the position it has there."""

    worker: WorkerId
    place: Place
    rank: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclass(frozen=True)
class World:
    """The agreed members of one round, and the state that they start from."""

    round: int
    members: tuple[Member, ...]  # in rank order, host by host
    root: int  # the rank of the most advanced member
    version: StateVersion | None  # the version of its state; None: no member holds a state yet
    sync: bool
    """True: the root has to broadcast its whole state. False: all members report the same version, so the root
    broadcasts only scalars, and the members compare their tensors."""

    @property
    def progress(self) -> int | None:
        """Optimizer steps in the state that this world starts from; None: there is no state yet."""
        return None if self.version is None else self.version.steps

    @property
    def size(self) -> int:
        return len(self.members)

    @cached_property
    def _by_worker(self) -> dict[WorkerId, Member]:
        return {member.worker: member for member in self.members}

    @property
    def workers(self) -> KeysView[WorkerId]:
        return self._by_worker.keys()

    def member(self, worker: WorkerId) -> Member:
        """Return the worker as a member, with its position. Raise KeyError if it is not in this world."""
        return self._by_worker[worker]
