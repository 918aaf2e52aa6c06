"""The membership timeline: typed records of what happened to the world, in words and numbers.

`at` is in the machine's own seconds; the driver turns it into wall-clock time for people.
"""

from __future__ import annotations

from dataclasses import dataclass

from spark_elastic.core.topology import Place, WorkerId


@dataclass(frozen=True, slots=True)
class Record:
    at: float


@dataclass(frozen=True, slots=True)
class WorkerJoined(Record):
    """A worker is ready to train and waits for a world."""

    worker: WorkerId
    place: Place


@dataclass(frozen=True, slots=True)
class WorkerLeft(Record):
    """A worker is gone: killed, lost, removed or drained."""

    worker: WorkerId
    place: Place
    rank: int | None
    why: str
    graceful: bool


@dataclass(frozen=True, slots=True)
class WorldStarted(Record):
    """A world was published. `pause_s`: since the one before was broken or interrupted; None for the first."""

    round: int
    size: int
    root: int
    progress: int | None
    sync: bool
    pause_s: float | None
    why: str


@dataclass(frozen=True, slots=True)
class WorldBroken(Record):
    """A member was lost: the survivors were told to cut and come to the next round."""

    round: int
    size: int
    why: str


@dataclass(frozen=True, slots=True)
class PlaceCooledDown(Record):
    """A slot, executor or host failed and is left alone until `until`."""

    kind: str
    name: str
    failures: int
    until: float


@dataclass(frozen=True, slots=True)
class Waiting(Record):
    """What the job waits for, and for how long at most; logged when it changes."""

    reason: str
    deadline: float | None


@dataclass(frozen=True, slots=True)
class JobEnded(Record):
    """Finished or failed."""

    outcome: str
    why: str
