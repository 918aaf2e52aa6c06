"""Where workers are and what a world is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from spark_elastic.core.version import StateVersion

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
