"""Where workers are and what a world is."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

# How far a worker's state is: more than its number of steps, because a state changes without one as well.


@dataclass(frozen=True, slots=True, order=True)
class StateVersion:
    """A point in a worker's training; versions are ordered, and the larger one is the more advanced.

    All workers go through the same points in the same order, so the most advanced has everything that the others have.
    None in place of a version: the worker holds no state.

    loop: number of the elastic loop within the user's function, 1 for the first. steps: optimizer steps applied in
    this loop; commits, if the state has no optimizer. marks: resume points (commits, checks for updated hosts, turns)
    since the last step, or since the loop began. A commit without a step may follow a schedule's step, a new epoch or
    a step that a gradient scaler skipped.

    Raises: ValueError: a number is out of range.
    """

    loop: int = 1
    steps: int = 0
    marks: int = 0

    def __post_init__(self) -> None:
        if self.loop < 1 or self.steps < 0 or self.marks < 0:
            raise ValueError(f"a version needs loop >= 1, steps >= 0 and marks >= 0, not {self}")

    def __str__(self) -> str:
        loop = "" if self.loop == 1 else f"loop {self.loop} "
        marks = "" if self.marks == 0 else f"+{self.marks}"
        return f"{loop}step {self.steps}{marks}"

    @property
    def trained(self) -> bool:
        """Whether any step was applied, in this loop or in one before."""
        return self.steps > 0 or self.loop > 1

    def stepped(self, steps: int = 1) -> StateVersion:
        """Return the version after that many steps."""
        return StateVersion(self.loop, self.steps + steps)

    def marked(self) -> StateVersion:
        """Return the version after one more resume point."""
        return StateVersion(self.loop, self.steps, self.marks + 1)

    def is_steps_after(self, other: StateVersion) -> bool:
        """Whether a step was applied since `other`, or a later loop was entered."""
        return (self.loop, self.steps) > (other.loop, other.steps)

    def is_current_at(self, furthest: StateVersion) -> bool:
        """Return True if it is in the loop of `furthest`, or at the end of the loop before if that has not begun."""
        return self.loop == furthest.loop or (self.loop + 1, 0) == (furthest.loop, furthest.steps)

    def steps_lost(self, furthest: StateVersion) -> int:
        """Count the steps that were applied on the way to `furthest` and are not part of this version."""
        if furthest.loop == self.loop:
            return max(0, furthest.steps - self.steps)
        return furthest.steps if furthest.loop > self.loop else 0


BEGINNING = StateVersion()


# The set of hosts that may be used, in the order in which they were first seen.


class HostUpdate(enum.IntFlag):
    """What an observation changed. MIXED is ADDED and REMOVED at once."""

    NO_UPDATE = 0
    REMOVED = 1
    ADDED = 2
    MIXED = 3


@dataclass(frozen=True, slots=True)
class HostSet:
    """Hosts with their slots. The order is kept over updates, so that rank 0 stays where it is."""

    slots: tuple[tuple[str, int], ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(host for host, _ in self.slots)

    @property
    def total(self) -> int:
        return sum(count for _, count in self.slots)

    def __str__(self) -> str:
        shown = [f"{host}:{count}" for host, count in self.slots[:8]]
        return ", ".join(shown + (["..."] if len(self.slots) > 8 else [])) or "none"

    def __contains__(self, host: str) -> bool:
        return any(name == host for name, _ in self.slots)

    def slots_of(self, host: str) -> int:
        """Slots of the host; 0 if it is not in the set."""
        return next((count for name, count in self.slots if name == host), 0)

    def updated(self, observed: Mapping[str, int]) -> tuple[HostSet, HostUpdate]:
        """The set after an observation, and what it changed. Hosts with 0 slots count as absent.

        Known hosts stay in their order, new ones follow in the order of `observed`.

        Raises: ValueError: if a number of slots is negative.
        """
        for host, count in observed.items():
            if count < 0:
                raise ValueError(f"host {host} was observed with {count} slots")
        kept = [(host, observed[host]) for host in self.hosts if observed.get(host, 0) > 0]
        new = [(host, count) for host, count in observed.items() if count > 0 and host not in self]
        result = HostUpdate.NO_UPDATE
        for host, before in self.slots:
            after = observed.get(host, 0)
            if after < before:
                result |= HostUpdate.REMOVED
            if after > before:
                result |= HostUpdate.ADDED
        if new:
            result |= HostUpdate.ADDED
        return HostSet((*kept, *new)), result


# What a task says of the slot that it occupies.


@dataclass(frozen=True, slots=True)
class SlotReport:
    """`addresses`: IPv4 addresses by interface name, loopback included."""

    host: str
    """The machine, by the address its peers reach it at."""
    executor: str
    """Spark's executor id; "driver" in local mode."""
    addresses: dict[str, str]
    cores: int
    """Cores that Spark gave to the task (spark.task.cpus)."""
    accelerators: tuple[str, ...]
    """Addresses of the GPUs that Spark gave to the task."""
    python: str


AgentId = int
"""One run of our code in one Spark task; never used twice in a job."""
WorkerId = int
"""One training process; a restart gets a new one, so a stale message cannot be mistaken for a current one."""
SlotId = int
"""A place for one worker: the number of one single-task Spark job, kept across its restarts."""
LaunchId = int
"""One start of a slot's agent; a relaunch gets a new one, so a late agent cannot be mistaken for the awaited one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent runs."""

    host: str
    """The machine, by the address its peers reach it at."""
    executor: str
    """Spark's executor id; "driver" in local mode, or the process id of a local agent."""
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
    """The agreed members of one round.

    `members` is in rank order, host by host. `root` is the rank of the most advanced member and `version` that of its
    state (None: nobody holds a state yet). `sync` says whether the root has to broadcast all of it: False when every
    member reports the same version; then the light part is brought and the tensors are compared.
    """

    round: int
    members: tuple[Member, ...]
    root: int
    version: StateVersion | None
    sync: bool

    @property
    def progress(self) -> int | None:
        """Optimizer steps in the state that this world starts from."""
        return None if self.version is None else self.version.steps

    @property
    def size(self) -> int:
        return len(self.members)

    @cached_property
    def workers(self) -> frozenset[WorkerId]:
        return frozenset(member.worker for member in self.members)

    def member(self, worker: WorkerId) -> Member:
        """Raises: KeyError: if the worker is not in this world."""
        for member in self.members:
            if member.worker == worker:
                return member
        raise KeyError(worker)
