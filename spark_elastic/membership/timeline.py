"""The membership timeline: typed records of what happened to the world, in words and numbers.

`at` is in the machine's own seconds; the driver turns it into wall-clock time for people.
"""

from __future__ import annotations

from dataclasses import dataclass

from spark_elastic.membership.topology import Place, WorkerId


@dataclass(frozen=True, slots=True)
class Record:
    at: float


@dataclass(frozen=True, slots=True)
class WorkerJoined(Record):
    """A worker is ready to train and waits for a world."""

    worker: WorkerId
    place: Place

    def __str__(self) -> str:
        return f"worker {self.worker} is ready on {self.place.host} (executor {self.place.executor})"


@dataclass(frozen=True, slots=True)
class WorkerLeft(Record):
    """A worker is gone: killed, lost, removed or drained."""

    worker: WorkerId
    place: Place
    rank: int | None
    why: str
    graceful: bool

    def __str__(self) -> str:
        who = f"worker {self.worker}" if self.rank is None else f"rank {self.rank}"
        how = "left" if self.graceful else "is lost"
        return f"{who} on {self.place.host} (executor {self.place.executor}) {how}: {self.why}"


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

    def __str__(self) -> str:
        state = "" if self.progress is None else f" at step {self.progress}"
        pause = "" if self.pause_s is None else f" after a pause of {self.pause_s * 1000:.0f} ms"
        return f"round {self.round}: {self.size} workers{state}{pause} ({self.why})"


@dataclass(frozen=True, slots=True)
class WorldBroken(Record):
    """A member was lost: the survivors were told to cut and come to the next round."""

    round: int
    size: int
    why: str

    def __str__(self) -> str:
        return f"round {self.round} of {self.size} workers is broken: {self.why}"


@dataclass(frozen=True, slots=True)
class PlaceCooledDown(Record):
    """A slot, executor or host failed and is left alone until `until`."""

    kind: str
    name: str
    failures: int
    until: float

    def __str__(self) -> str:
        times = "once" if self.failures == 1 else f"{self.failures} times"
        return f"{self.kind} {self.name} failed {times} and rests for {self.until - self.at:.1f} s"


@dataclass(frozen=True, slots=True)
class HostExcluded(Record):
    """One world after another crashed on the host; other hosts are used until `until`."""

    host: str
    why: str
    until: float

    def __str__(self) -> str:
        return f"host {self.host} is left alone for {self.until - self.at:.0f} s: {self.why}"


@dataclass(frozen=True, slots=True)
class Waiting(Record):
    """What the job waits for, and for how long at most; logged when it changes."""

    reason: str
    deadline: float | None

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class DriverStoodStill(Record):
    """The driver heard nobody for a while, and nobody was given up for it."""

    seconds: float

    def __str__(self) -> str:
        return f"the driver stood still for {self.seconds:.1f} s; its workers trained on"


@dataclass(frozen=True, slots=True)
class JobEnded(Record):
    """Finished or failed."""

    outcome: str
    why: str

    def __str__(self) -> str:
        # an error of the user's function ends with its whole traceback, which whoever catches the error gets to see
        return f"the job {self.outcome}: {self.why.partition(chr(10))[0]}"
